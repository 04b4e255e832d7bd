"""Presets and memories: the sizes they give, their bytes, and the options that they exclude."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaConfig

from hf_rfa.convert import ConversionOptions, convert
from hf_rfa.convert.base_model import rfa_layers
from hf_rfa.convert.checkpoint import open_checkpoint
from hf_rfa.convert.presets import with_preset
from hf_rfa.inference import cache_num_bytes
from tests.conftest import leftovers, refused
from tests.families import save_softmax_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of tiny softmax checkpoints, by family."""
    folder = tmp_path_factory.mktemp("presets")
    for family in ("gpt2", "llama", "bart"):
        save_softmax_model(family, folder / family)
    return {family: folder / family for family in ("gpt2", "llama", "bart")}


def chosen(folder, trained=None, **options):
    """Return what options come to: feature map, D, gate, and window, sinks and slots."""
    found = with_preset(open_checkpoint(folder), ConversionOptions(**options), trained)
    return found.feature_map, found.num_features, found.gate, (found.window_size, found.num_sinks, found.num_slots)


EXACT = ("none", None, False, (31, 4, 28))
MIXED = ("positive", 64, False, (14, 4, 14))
RFA = ("positive", None, False, (0, 0, 0))
TRAINED = ("exponential", None, True, (0, 0, 0))


@pytest.mark.parametrize(
    ("family", "trained", "options", "expected"),
    [
        ("gpt2", None, {}, MIXED),
        ("bart", None, {}, MIXED),
        ("llama", None, {}, EXACT),
        ("gpt2", None, {"preset": "exact"}, EXACT),
        ("llama", None, {"preset": "mixed"}, MIXED),
        ("llama", None, {"preset": "rfa"}, RFA),
        ("llama", "features", {}, TRAINED),
        ("gpt2", "features", {"gate": False}, ("exponential", None, False, (0, 0, 0))),
        ("gpt2", "features", {"window_size": 4}, ("exponential", None, False, (4, 0, 0))),
        ("gpt2", "features", {"window_size": 4, "gate": True}, ("exponential", None, True, (4, 0, 0))),
        ("bart", "features", {"layers": []}, ("exponential", None, False, (0, 0, 0))),
        ("gpt2", "features", {"preset": "mixed"}, ("exponential", 64, False, (14, 4, 14))),
        ("gpt2", "model", {}, ("exponential", 64, False, (14, 4, 14))),
        ("llama", "model", {}, EXACT),
        ("gpt2", "model", {"preset": "rfa", "feature_map": "elu"}, ("elu", None, True, (0, 0, 0))),
        ("gpt2", None, {"feature_map": "elu"}, ("elu", None, False, (14, 4, 14))),
        ("gpt2", None, {"num_features": 8, "gate": True}, ("positive", 8, True, (14, 4, 14))),
        ("gpt2", None, {"window_size": 9}, ("positive", 64, False, (9, 4, 14))),
        ("gpt2", None, {"window_size": 0}, ("positive", 64, False, (0, 0, 0))),
        ("llama", None, {"window_size": 9, "num_sinks": 0}, ("none", None, False, (9, 0, 28))),
        ("bart", None, {"layers": []}, RFA),
    ],
)
def test_a_preset_gives_what_is_not_named(family, trained, options, expected, folders):
    assert chosen(folders[family], trained, **options) == expected


def test_few_positions_limit_the_tokens(tmp_path):
    save_softmax_model("gpt2", tmp_path / "gpt2", n_positions=15)
    assert chosen(tmp_path / "gpt2") == ("positive", 64, False, (14, 4, 14))
    assert chosen(tmp_path / "gpt2", preset="exact") == ("none", None, False, (15, 4, 15))


# A memory


@pytest.mark.parametrize("preset", ["exact", "mixed", "rfa"])
@pytest.mark.parametrize(
    ("family", "memory", "dtype"), [("gpt2", 20, "auto"), ("llama", 64, "bfloat16"), ("bart", 41, "auto")]
)
def test_a_memory_is_spent_to_less_than_a_token_and_never_exceeded(family, memory, dtype, preset, folders, tmp_path):
    """By the tensors that a cache holds."""
    options = {"cross_layers": []} if family == "bart" else {}
    convert(folders[family], tmp_path / "out", preset=preset, memory=memory, dtype=dtype, **options)
    auto = AutoModelForSeq2SeqLM if family == "bart" else AutoModelForCausalLM
    precision = torch.float32 if dtype == "auto" else torch.bfloat16
    paths = tmp_path / "out", folders[family]
    model, softmax = (auto.from_pretrained(path, dtype=precision) for path in paths)
    ids = torch.full((1, 4), 5)
    inputs = {"decoder_input_ids": ids} if family == "bart" else {}
    with torch.no_grad():
        caches = [each(ids, **inputs).past_key_values for each in (model, softmax)]
    caches = [getattr(cache, "self_attention_cache", cache) for cache in caches]
    state, four_tokens = map(cache_num_bytes, caches)
    token, layers = four_tokens / 4, len(rfa_layers(model))
    layout = next(iter(rfa_layers(model).values())).memory_layouts(model.dtype)[0]
    least = layout.bytes_per_place() if layout.places else layout.num_bytes() / layout.state_rows
    assert state <= memory * token
    assert state > memory * token - layers * least
    assert (layout.places > 0, layout.state_rows > 0) == (preset != "rfa", preset != "exact")
    assert layout.sinks == (4 if layout.places else 0)
    if preset == "mixed":
        assert 2 * layout.state_rows * layout.heads * (layout.head_dim + 1) * 4 <= memory * token / layers
        assert 0 <= layout.window - layout.slots <= 1
    if preset == "exact":
        assert 0 <= layout.slots + layout.sinks - layout.window <= 1


def test_the_sizes_without_a_memory_are_those_of_64_tokens_of_heads_of_64(tmp_path):
    """In float32; beside features of 66."""
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=128,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        dtype="float32",
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert chosen(tmp_path, memory=64) == EXACT
    assert chosen(tmp_path, preset="mixed", memory=66) == MIXED
    assert chosen(tmp_path, preset="rfa", memory=66) == ("positive", 129, False, (0, 0, 0))


@pytest.mark.parametrize(
    ("family", "options", "expected"),
    [
        ("llama", {"window_size": 9}, ("none", None, False, (9, 4, 41))),
        ("llama", {"num_slots": 9}, ("none", None, False, (41, 4, 9))),
        ("llama", {"num_sinks": 0}, ("none", None, False, (27, 0, 27))),
        ("gpt2", {"num_features": 16}, ("positive", 16, False, (22, 4, 22))),
        ("gpt2", {"window_size": 9, "num_slots": 9}, ("positive", 69, False, (9, 4, 9))),
        ("gpt2", {"window_size": 0}, ("positive", 113, False, (0, 0, 0))),
        ("gpt2", {"feature_map": "elu"}, ("elu", None, False, (24, 4, 24))),
        ("gpt2", {"feature_map": "gaussian", "preset": "rfa"}, ("gaussian", 56, False, (0, 0, 0))),
    ],
)
def test_a_memory_gives_the_sizes_that_are_not_named(family, options, expected, folders):
    assert chosen(folders[family], memory=64, **options) == expected


# What has no effect, or does not go together


EXCLUDED = [
    ("llama", {"num_features": 8}, "num_features=8 has no effect with preset=exact.*mixed.*rfa"),
    ("llama", {"gate": True}, "gate=True has no effect with preset=exact"),
    ("llama", {"feature_map": "positive"}, "feature_map='positive' has no effect with preset=exact"),
    ("llama", {"config": {"unit_norm": True}}, "config={'unit_norm': True} has no effect with preset=exact"),
    (
        "llama",
        {"trained": "features", "preset": "exact"},
        "preset=exact has no features, which attention transfer trains",
    ),
    ("gpt2", {"feature_map": "none"}, "leaves preset=mixed no features. Pass preset exact"),
    ("gpt2", {"preset": "half"}, "preset must be one of exact, mixed, rfa, got 'half'"),
    ("gpt2", {"preset": "rfa", "memory": 64, "num_features": 8}, "memory=64 has no effect.*num_features"),
    ("llama", {"memory": 64, "window_size": 8, "num_slots": 4}, "memory=64 has no effect"),
    ("gpt2", {"preset": "rfa", "memory": 64, "feature_map": "elu"}, "memory=64 has no effect"),
    ("llama", {"memory": 64, "window_size": 61}, "memory=64 has no room for what preset=exact keeps"),
    ("gpt2", {"memory": 8}, "memory=8 has no room for what preset=mixed keeps"),
    ("gpt2", {"memory": 7}, "memory must be at least 8, got 7"),
    ("gpt2", {"memory": 97}, "memory=97 is more than the positions"),
    ("gpt2", {"memory": 64, "preset": "rfa", "feature_map": "nope"}, "^feature_map='nope' is unknown"),
    ("bart", {"preset": "exact"}, "cross attention needs them.*--cross-layers none"),
    ("bart", {"layers": [], "preset": "mixed"}, "preset=mixed is of causal attention, and none is converted"),
    ("bart", {"layers": [], "memory": 64}, "memory=64 is of causal attention"),
    ("bart", {"layers": [], "num_features": 8}, "num_features=8 is of causal attention"),
    (
        "bart",
        {"cross_layers": [], "num_cross_features": 8},
        "num_cross_features=8 is of cross attention.*name cross_layers",
    ),
    ("bart", {"num_encoder_features": 8}, "num_encoder_features=8 is of encoder attention.*name encoder_layers"),
    ("llama", {"layers": []}, "no layer is left to convert"),
    (
        "gpt2",
        {"config": {"unitnorm": True}},
        "config names 'unitnorm', which is none of the fields unit_norm, trainable_projection",
    ),
    ("gpt2", {"config": {"window_size": 3}}, "config names 'window_size', which is none of"),
    ("gpt2", {"config": {"unit_norm": 3}}, "unit_norm.*bool.*int"),
    ("gpt2", {"force": True}, r"force=True has no effect: nothing is measured without a text \(--calibrate\)"),
]


@pytest.mark.parametrize(("family", "options", "message"), EXCLUDED, ids=str)
def test_what_has_no_effect_is_refused(family, options, message, folders, tmp_path):
    refused(message, folders[family], tmp_path, **options)


def test_fields_of_the_configuration(folders, tmp_path, run_cli, capsys):
    options = ConversionOptions(preset="rfa", config={"trainable_projection": True, "chunk_size": 9})
    report = convert(folders["gpt2"], tmp_path / "a", options)
    config = AutoConfig.from_pretrained(tmp_path / "a")
    assert (config.trainable_projection, config.chunk_size) == (True, 9)
    words = [
        "--preset",
        "rfa",
        "--config",
        "trainable_projection=true",
        "--config",
        "chunk_size=9",
    ]
    assert report.command.split()[4:] == words
    assert run_cli("convert", folders["gpt2"], tmp_path / "b", *words) == 0
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    capsys.readouterr()
    assert run_cli("convert", folders["gpt2"], tmp_path / "c", "--config", "unit_norm") == 1
    assert (
        "'--config': it takes a field and its value such as unit_norm=true, got 'unit_norm'" in capsys.readouterr().err
    )
    assert leftovers(tmp_path) == ["a", "b"]
