"""Every decoder is converted: what is kept, calibrated, extended and refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoConfig

from hf_rfa import FAMILIES, InputError
from hf_rfa.convert import convert
from hf_rfa.families import has_rotary_positions
from hf_rfa.inference import cache_num_bytes
from tests.conftest import leftovers, refused
from tests.convert.conftest import load
from tests.decoders import LENGTH, NAMES, WITH_SINKS, case, every_decoder, rfa_indices, saved
from tests.families import logits, relative_error, tokens
from tests.tiny_models import tiny_config

# What is refused


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("deepseek_v3", {}, {}, "model_type 'deepseek_v3', which cannot be converted. docs/models.md lists"),
    ("gemma2", {"attn_logit_softcapping": 50.0}, {}, "attn_logit_softcapping=50.0"),
    ("mistral", {"sliding_window": 8}, {}, "no layer of .* attends to all tokens.*sliding_attention.*nothing to conve"),
    ("gemma3_text", {}, {"layers": [0]}, r"layers to convert must be indices among .*, got \[0\]"),
    ("gpt_oss", {}, {"preset": "rfa"}, "learned sinks.*window_size"),
    ("llama", {}, {"window_size": 129}, "window_size must be from 0 to 128"),
]


@pytest.mark.parametrize(("name", "fields", "options", "message"), REFUSED)
def test_what_cannot_be_converted_is_refused_before_anything_is_written(name, fields, options, message, tmp_path):
    saved(name, tmp_path / "parent", **fields)
    assert "\n" not in refused(message, tmp_path / "parent", tmp_path, **options)
    assert leftovers(tmp_path) == ["parent"]


# Conversion


@every_decoder
def test_conversion(name, tmp_path):
    """On random tokens: every weight is kept, calibration helps, a layer that is not named stays, the report is right."""
    folder = saved(name, tmp_path / "parent")
    options: dict[str, Any] = {"window_size": 4} if name in WITH_SINKS else {}
    whole = FAMILIES[name].rfa_config.from_base(AutoConfig.from_pretrained(folder), **options)
    possible = [index for index in range(whole.num_hidden_layers) if whole.is_rfa("causal", index)]
    options["layers"] = possible[1:] or possible
    report = convert(folder, tmp_path / "out", preset="rfa", num_features=16, gate=True, **options)
    softmax, model = (load(path) for path in (folder, tmp_path / "out"))
    before, after = softmax.state_dict(), model.state_dict()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    converted_layers = rfa_indices(model)
    assert converted_layers == options["layers"]
    assert report.layers == {"causal": (len(converted_layers), model.config.num_hidden_layers)}
    assert report.feature_map == "positive"
    assert report.feature_dims == {"causal": 16}
    assert report.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    added = [parameter for key, parameter in model.named_parameters() if key not in before]
    assert report.added_parameters == sum(parameter.numel() for parameter in added)
    assert report.max_logit_difference == 0
    assert len(report.gains) == len(converted_layers)
    assert all(gain.after < gain.before for gain in report.gains)
    for length, found in report.cache_bytes.items():
        caches = (each(tokens(1, length), use_cache=True).past_key_values for each in (model, softmax))
        assert found == tuple(map(cache_num_bytes, caches))
    assert torch.isfinite(logits(model, tokens(2, LENGTH))).all()
    assert leftovers(tmp_path) == ["out", "parent"]


@torch.no_grad()
@pytest.mark.parametrize("name", ["mistral", "qwen2"])
def test_a_sliding_window_that_hides_nothing_is_converted(name, tmp_path):
    """Phi-3 and Phi-4-mini have windows of 262,144 and 131,072 positions."""
    fields: dict[str, Any] = {"sliding_window": 200, "max_position_embeddings": 128}
    fields |= {"use_sliding_window": True, "max_window_layers": 1} if name == "qwen2" else {}
    folder = saved(name, tmp_path / "parent", **fields)
    report = convert(folder, tmp_path / "out", window_size=128, num_sinks=0, num_slots=0)
    softmax, model = (load(path) for path in (folder, tmp_path / "out"))
    assert report.layers["causal"][0] == model.config.num_hidden_layers
    ids = tokens(2, LENGTH)
    assert_close(model(ids, use_cache=False).logits, softmax(ids, use_cache=False).logits, atol=1e-4, rtol=1e-4)
    assert report.cache_bytes[128][1] == cache_num_bytes(softmax(tokens(1, 128), use_cache=True).past_key_values)


# Rotary positions


ROTARY = [name for name in NAMES if has_rotary_positions(tiny_config(name))]
#: Rotations or scales that depend on the position or on the length of the text.
SEES_POSITIONS = ("beam", "hunyuan_v1_dense", "hunyuan_v1_moe", "ministral3")
every_rotary_decoder = pytest.mark.parametrize("name", [case(name) for name in ROTARY])


@torch.no_grad()
@every_rotary_decoder
def test_a_shift_of_all_positions_changes_no_more_than_the_features_error(name, tmp_path):
    """The softmax model sees differences of positions alone; random features of rotated queries and keys see more.

    Calibrated at positions from anywhere, they are as near to softmax attention at the last positions as at the first ones: a
    shift by 1,000 changes the logits by 0.85 to 1.3 times what the features change them by, in these models.
    """
    options = {"window_size": 2} if name in WITH_SINKS else {}
    folder = saved(name, tmp_path / "parent", max_position_embeddings=2048)
    convert(folder, tmp_path / "out", preset="rfa", num_features=256, **options)
    softmax, model = (load(path) for path in (folder, tmp_path / "out"))
    ids, positions = tokens(2, LENGTH), torch.arange(LENGTH)[None]
    (exact, exact_moved), (found, moved) = (
        [each(ids, position_ids=positions + shift, use_cache=False).logits for shift in (0, 1000)]
        for each in (softmax, model)
    )
    if torch.equal(exact_moved, exact):
        assert softmax.config.position_embedding_type != "rope"
        pytest.skip(f"the model of {name} sees no positions")
    if relative_error(exact_moved, exact) > 1e-4:
        assert name in SEES_POSITIONS
        pytest.skip(f"the softmax model of {name} sees more of positions than their differences")
    assert name not in SEES_POSITIONS
    error = relative_error(found, exact)
    assert relative_error(moved, exact) < 1.5 * error
    assert 0 < relative_error(moved, found) < 1.6 * error


@torch.no_grad()
@every_rotary_decoder
def test_more_positions_scale_the_rotations(name, tmp_path):
    options = {"window_size": 2} if name in WITH_SINKS else {}
    folder = saved(name, tmp_path / "parent")
    softmax = AutoConfig.from_pretrained(folder)
    kinds = [softmax.rope_parameters] if "rope_type" in softmax.rope_parameters else softmax.rope_parameters.values()
    if name in ("phi3", "phimoe") or {each["rope_type"] for each in kinds if each} - {"default", "yarn"}:
        with pytest.raises(InputError, match=r"rotations are scaled already|do not take rotations"):
            convert(folder, tmp_path / "out", preset="rfa", num_features=8, max_positions=512, **options)
        return
    report = convert(folder, tmp_path / "out", preset="rfa", num_features=8, max_positions=512, **options)
    assert any("512 positions by YaRN" in note for note in report.notes)
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.max_position_embeddings == 512
    rotations = config.rope_parameters
    rotations = rotations if "rope_type" in rotations else rotations["full_attention"]
    if rotations is not None:  # else layers that attend to all tokens have no positions
        assert rotations["rope_type"] == "yarn"
        assert rotations["original_max_position_embeddings"] * rotations["factor"] == 512
    model = load(tmp_path / "out")
    assert torch.isfinite(logits(model, tokens(1, 500))).all()
