"""Memory of models whose layers are of several kinds: sliding and recurrent ones have caches of one size, and are counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from hf_rfa.bench.models import cache_at, step_inputs
from hf_rfa.convert import convert
from hf_rfa.evaluation.memory import cache_memory
from hf_rfa.inference import cache_num_bytes, generate_text, load_model
from tests.conftest import save_tiny_tokenizer, words
from tests.decoders import parent, saved

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
        assert report.cache_bytes[length][0] == cache_num_bytes(
            model(torch.full((1, length), 5), use_cache=True).past_key_values
        )
    per_token = (bytes_after(softmax, positions) - bytes_after(softmax, positions, others)) / positions
    assert report.state_tokens == pytest.approx(report.memory.fixed / per_token)


def test_a_softmax_layer_beside_sliding_ones_grows(tmp_path):
    fields = {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 8}
    source = saved("gemma3_text", tmp_path / "source", num_hidden_layers=3, **fields)
    report = convert(source, tmp_path / "out", layers=[2], **EXACT)
    assert report.grows
    assert dict(report.rows())["state per sequence"].endswith("and the softmax layers' growing cache")
    assert "The causal attention of layer 0 is softmax: its cache grows with the sequence." in report.notes


@pytest.mark.parametrize("name", list(OTHERS))
def test_the_recall_suite_and_a_benchmark_count_them(name):
    """Nothing grows without end in layers that keep a window, or a state."""
    model = parent(name, **OTHERS[name][1])
    memory = cache_memory(model)
    assert memory.fixed == 0
    for tokens in (3, 7, 20, 60):
        assert memory.after(tokens) == bytes_after(model, tokens)
    full = [index for index, each in enumerate(model.config.layer_types) if each == "full_attention"]
    assert memory.per_token == bytes_after(model, 10, full) // 10
    assert cache_num_bytes(cache_at(model, step_inputs(model, 1, 30), 30)) == bytes_after(model, 30)


def test_generation_counts_them(tmp_path):
    folder: Path = saved("lfm2", tmp_path / "source", vocab_size=61)
    save_tiny_tokenizer(folder)
    model, tokenizer = load_model(str(folder))
    found = generate_text(model, tokenizer, words(5), max_new_tokens=4, ignore_eos=True)
    assert found.cache_bytes == bytes_after(model, found.prompt_tokens + 3)
