"""Reported memory is the memory that caches take, in reports, cards and benchmarks, RFA and softmax."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from hf_rfa import bench
from hf_rfa.bench.models import cache_at, step_inputs
from hf_rfa.convert import convert
from hf_rfa.evaluation.memory import cache_memory
from hf_rfa.inference import cache_num_bytes
from tests.decoders import saved
from tests.families import FAMILIES, base_config, has_encoder, save_softmax_model


@torch.no_grad()
def taken(model, length: int) -> int:
    """Return the bytes of a cache that has seen so many tokens, and as long a source."""
    ids = torch.full((1, length), 5)
    inputs = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    return cache_num_bytes(model(ids, **inputs, use_cache=True).past_key_values)


GPT2 = [{}, {"feature_map": "gaussian", "gate": True}, {"window_size": 4}, {"softmax_layers": [1]}]
HYBRIDS = [
    *(("gpt2", each) for each in GPT2),
    ("gpt2", {"window_size": 4, "num_slots": 3, "retrieval_heads": [[0, 1], [1, 0]], "retrieval_window": 6}),
    ("gpt2", {"retrieval_heads": [[0, 1]], "retrieval_window": 8}),
    ("bart", {}),
    ("bart", {"softmax_layers": [0, 2], "window_size": 3}),
    ("marian", {"softmax_layers": [0], "softmax_cross_layers": [0, 1, 2]}),
    ("marian", {"feature_map": "gaussian", "softmax_layers": [0, 1, 2]}),
]


@pytest.mark.parametrize(("family", "options"), HYBRIDS)
def test_the_bytes_of_a_cache_are_those_that_it_takes_and_that_a_benchmark_times(family, options):
    softmax, rfa = bench.pair(base_config(family), 40, **options)
    for model in (softmax, rfa):
        cache = cache_at(model, step_inputs(model, 1, 30), 30)
        assert cache.get_seq_length() == 30
        assert cache_num_bytes(cache) == taken(model, 30)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        softmax, rfa = softmax.to(dtype), rfa.to(dtype)
        for length in (1, 7, 40):
            for model in (softmax, rfa):
                assert cache_memory(model).after(length) == taken(model, length)


@pytest.mark.parametrize(
    ("family", "positions", "options", "lengths"),
    [("gpt2", 15, {}, [15]), ("gpt2", 96, {"max_positions": 1500}, [1024, 1500]), ("bart", 96, {}, [96])],
)
def test_reports_and_cards_say_how_much_less_or_more(family, positions, options, lengths, tmp_path):
    """At texts that the model can read, against a softmax model with as many positions."""
    sizes = {FAMILIES[family].positions_field: positions}
    save_softmax_model(family, tmp_path / "parent", **sizes)
    report = convert(tmp_path / "parent", tmp_path / "out", **options)
    auto_class = AutoModelForCausalLM if not has_encoder(family) else AutoModelForSeq2SeqLM
    model = auto_class.from_pretrained(tmp_path / "out")
    softmax = auto_class.from_config(base_config(family, **{FAMILIES[family].positions_field: lengths[-1]}))
    assert report.cache_bytes == {length: (taken(model, length), taken(softmax, length)) for length in lengths}
    card, rows = ModelCard.load(tmp_path / "out" / "README.md").content, dict(report.rows())
    for length, (own, theirs) in report.cache_bytes.items():
        (said,) = (value for what, value in rows.items() if f"cache at {length:,} tokens" in what)
        assert said in card
        found = re.search(r"\(([\d.]+) × (less|more)\)", said)
        assert (found[2] == "less") == (own < theirs)
        assert float(found[1]) == pytest.approx(max(own / theirs, theirs / own), abs=0.05)
    if family == "bart":
        token = 3 * 2 * 24 * 4  # layers, keys and values, width, bytes
        assert rows["cache of softmax cross attention"] == f"{token} B a token of the source, at any length of output"
        assert (report.source_bytes, report.grows) == (token, False)


# Layers of several kinds: sliding and recurrent ones have caches of one size, and are counted

#: A window over recent tokens alone, so that nothing is calibrated.
EXACT: dict[str, Any] = {"preset": "exact", "window_size": 4, "num_sinks": 1, "num_slots": 0}
#: By family: what its other layers are called, and its configuration.
OTHERS = {
    "gemma3_text": ("sliding layers", {"sliding_window": 8}),
    "lfm2": ("recurrent layers", {}),
    "qwen3_next": ("recurrent layers", {}),
}


def tensors_of(layer: Any) -> list[torch.Tensor]:
    """Return every tensor that an object holds, also in its dictionaries, but for counters."""
    found = [
        each for value in vars(layer).values() for each in (value.values() if isinstance(value, dict) else [value])
    ]
    return [each for each in found if isinstance(each, torch.Tensor) and each.ndim > 1]


@torch.no_grad()
def bytes_after(model: Any, tokens: int, indices: list[int] | None = None) -> int:
    """Return what transformers' cache takes, of some layers or of all, counted without hf_rfa."""
    layers = model(torch.full((1, tokens), 5), use_cache=True).past_key_values.layers
    return sum(tensor.nbytes for index in indices or range(len(layers)) for tensor in tensors_of(layers[index]))


@pytest.mark.parametrize("name", list(OTHERS))
def test_a_report_says_what_each_kind_of_layer_takes(name, tmp_path):
    what, fields = OTHERS[name]
    source = saved(name, tmp_path / "source", **fields)
    report = convert(source, tmp_path / "out", **EXACT)
    model, softmax = (AutoModelForCausalLM.from_pretrained(each).eval() for each in (tmp_path / "out", source))
    others = [index for index in range(model.config.num_hidden_layers) if not model.config.is_rfa("causal", index)]
    assert others
    assert not report.grows
    rows, positions = dict(report.rows()), model.config.max_position_embeddings
    assert rows["state per sequence"].endswith("at any length")
    kept = {"sliding layers": report.memory.sliding_after(positions), "recurrent layers": report.memory.recurrent}
    assert kept == dict.fromkeys(kept, 0) | {what: bytes_after(softmax, positions, others)}
    assert rows[f"cache of the {what}"].endswith(", at any length")
    card = " ".join(ModelCard.load(tmp_path / "out" / "README.md").content.split())
    assert "the same time and memory at any length" in card
    for length in report.cache_bytes:
        assert report.cache_bytes[length][1] == bytes_after(softmax, length)
        assert report.cache_bytes[length][0] == taken(model, length)
    per_token = (bytes_after(softmax, positions) - bytes_after(softmax, positions, others)) / positions
    assert report.state_tokens == pytest.approx(report.memory.fixed / per_token)
