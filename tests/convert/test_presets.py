"""Presets and memories: the sizes they give, and their bytes."""

from __future__ import annotations

import pytest
import torch

from hf_rfa.convert import ConversionOptions, convert
from hf_rfa.convert.checkpoint.base_model import rfa_layers
from hf_rfa.convert.checkpoint.source import open_checkpoint
from hf_rfa.convert.presets import with_preset
from hf_rfa.errors import InputError
from hf_rfa.inference import cache_num_bytes
from tests.convert.conftest import load
from tests.families import save_softmax_model


def chosen(folder, trained=None, **options):
    """Return what options come to: feature map, D, gate, and window, sinks and slots."""
    found = with_preset(open_checkpoint(folder), ConversionOptions(**options), trained)
    return found.feature_map, found.num_features, found.gate, (found.window_size, found.num_sinks, found.num_slots)


EXACT = ("none", None, False, (31, 4, 28))
MIXED = ("positive", 64, False, (14, 4, 14))
FITTED = ("summary", 8, False, (31, 4, 24))


@pytest.mark.parametrize(
    ("family", "trained", "options", "expected"),
    [
        ("llama", "features", {}, ("exponential", None, True, (0, 0, 0))),
        ("gpt2", "features", {"window_size": 4}, ("exponential", None, False, (4, 0, 0))),
        ("bart", "features", {"layers": []}, ("exponential", None, False, (0, 0, 0))),
        ("gpt2", "model", {}, ("exponential", 64, False, (14, 4, 14))),
        ("llama", "model", {}, EXACT),
        ("llama", "features", {"preset": "mixed"}, ("exponential", 64, False, (14, 4, 14))),
        ("llama", None, {"preset": "mixed", "calibrate_on": "text.txt"}, FITTED),
        ("llama", None, {"preset": "mixed", "feature_map": "positive"}, MIXED),
        ("gpt2", None, {"feature_map": "elu"}, ("elu", None, False, (14, 4, 14))),
        ("gpt2", None, {"window_size": 0}, ("positive", 64, False, (0, 0, 0))),
        ("llama", None, {"window_size": 9, "num_sinks": 0}, ("none", None, False, (9, 0, 28))),
    ],
)
def test_a_preset_gives_what_is_not_named(family, trained, options, expected, checkpoints):
    """What the presets are without an option, cards say: `tests/finetune/test_cards.py`."""
    assert chosen(checkpoints[family], trained, **options) == expected


@pytest.mark.parametrize(("trained", "expected"), [(None, []), ("features", "all"), ("model", "all")])
def test_cross_attention_is_converted_by_default_where_training_follows(trained, expected, checkpoints):
    for family in ("bart", "marian"):
        checkpoint = open_checkpoint(checkpoints[family])
        assert with_preset(checkpoint, ConversionOptions(), trained).cross_layers == expected
        if trained != "features":
            assert with_preset(checkpoint, ConversionOptions(preset="exact"), trained).cross_layers == []
        assert with_preset(checkpoint, ConversionOptions(cross_layers=[1]), trained).cross_layers == [1]
    assert with_preset(open_checkpoint(checkpoints["gpt2"]), ConversionOptions(), trained).cross_layers is None


def test_a_map_that_is_fitted_to_a_text_needs_a_long_one(checkpoints, tmp_path):
    with pytest.raises(InputError, match="feature_map=summary is fitted to a text, and there is none"):
        convert(checkpoints["llama"], tmp_path / "out", preset="mixed")
    (tmp_path / "text.txt").write_text("a few words " * 60)
    with pytest.raises(
        InputError, match=r"two blocks or more, longer than 59 tokens that are kept, and there are \d of \d+\."
    ):
        convert(checkpoints["llama"], tmp_path / "out", preset="mixed", calibrate_on=tmp_path / "text.txt")
    assert not (tmp_path / "out").exists()


def test_a_family_has_a_memory_of_its_own(tmp_path):
    save_softmax_model("whisper", tmp_path)
    assert chosen(tmp_path) == ("none", None, False, (42, 4, 39))


# A memory


@pytest.mark.parametrize("preset", ["exact", "mixed", "rfa"])
@pytest.mark.parametrize(
    ("family", "memory", "dtype"), [("gpt2", 20, "auto"), ("llama", 64, "bfloat16"), ("bart", 41, "auto")]
)
def test_a_memory_is_spent_to_less_than_a_token_and_never_exceeded(
    family, memory, dtype, preset, checkpoints, tmp_path
):
    """By the tensors that a cache holds."""
    feature_map = "positive" if family == "llama" and preset == "mixed" else None
    options = {"preset": preset, "memory": memory, "dtype": dtype, "feature_map": feature_map}
    convert(checkpoints[family], tmp_path / "out", **options)
    precision = torch.float32 if dtype == "auto" else torch.bfloat16
    model, softmax = (load(path, dtype=precision) for path in (tmp_path / "out", checkpoints[family]))
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
    sizes = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    save_softmax_model("llama", tmp_path, **sizes)
    assert chosen(tmp_path, memory=64) == EXACT
    assert chosen(tmp_path, preset="mixed", memory=66, feature_map="positive") == MIXED
    assert chosen(tmp_path, preset="mixed", memory=64, calibrate_on="text.txt") == ("summary", 8, False, (18, 4, 29))
    assert chosen(tmp_path, preset="rfa", memory=66) == ("positive", 129, False, (0, 0, 0))


# Retrieval heads by rule

SMOLLM2 = {"hidden_size": 36, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
PAIRS = [[0, 1], [3, 2]]
QWEN = {"hidden_size": 28, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("shape", "options", "heads", "far", "sizes"),
    [
        (SMOLLM2, {"memory": 64}, 12, (16, 137), (16, 4, 24)),
        (SMOLLM2, {"memory": 128}, 8, (26, 442), (26, 4, 58)),
        (SMOLLM2, {"memory": 64, "retrieval_heads": 8, "retrieval_slots": 0}, 8, (232, 0), (16, 4, 22)),
        (SMOLLM2, {"memory": 64, "retrieval_slots": 40}, 12, (113, 40), (16, 4, 24)),
        (SMOLLM2, {"memory": 64, "retrieval_heads": 12, "retrieval_slots": 200}, 12, (1, 200), (14, 4, 19)),
        (SMOLLM2, {"memory": 64, "retrieval_heads": PAIRS, "retrieval_window": 60}, PAIRS, (60, 0), (19, 4, 35)),
        (SMOLLM2, {"memory": 64, "retrieval_heads": PAIRS, "calibrate_on": None}, PAIRS, (941, 0), (21, 4, 17)),
        (SMOLLM2, {"memory": 64, "retrieval_heads": 0}, 0, (0, 0), (20, 4, 35)),
        (SMOLLM2, {"memory": 64, "layers": [0, 1, 2]}, 1, (16, 169), (16, 4, 23)),
        (SMOLLM2, {"memory": 64, "calibrate_on": None}, 0, (0, 0), (31, 4, 28)),
        (SMOLLM2, {"memory": 8}, 12, (3, 14), (3, 2, 1)),
        (QWEN, {"memory": 64}, 6, (16, 148), (16, 4, 24)),
        (SMOLLM2 | {"num_key_value_heads": 1}, {"memory": 64}, 0, (0, 0), (20, 4, 35)),
    ],
    ids=str,
)
def test_a_third_of_a_memory_is_of_retrieval_heads_where_there_is_a_text(shape, options, heads, far, sizes, tmp_path):
    """Bytes of all heads together never exceed the memory, and less than a token a head is left.

    `tests/docs/test_results_page.py` has the sizes that the pages state.
    """
    shape = {**shape, "head_dim": 64, "max_position_embeddings": 2048}
    save_softmax_model("llama", tmp_path, **shape)
    given = ConversionOptions(**{"calibrate_on": "text.txt", **options})
    found = with_preset(open_checkpoint(tmp_path), given)
    assert (found.retrieval_heads or 0) == heads
    assert (found.retrieval_window or 0, found.retrieval_slots or 0) == far
    assert (found.window_size, found.num_sinks, found.num_slots) == sizes
    layers = 3 if "layers" in options else shape["num_hidden_layers"]
    count = layers * shape["num_key_value_heads"]
    chosen = len(heads) if isinstance(heads, list) else heads
    tokens = chosen * (sum(far) + sizes[1]) + (count - chosen) * sum(sizes)
    tokens += 4 * (count - chosen) * (found.feature_map == "summary")  # 8 rows of 65 numbers
    assert 0 <= options["memory"] * count * 512 / 520 - tokens < count + chosen
