"""Reported memory is the memory that caches take, in reports, cards and benchmarks, RFA and softmax."""

from __future__ import annotations

import json
import re

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, GPT2LMHeadModel

from hf_rfa import bench
from hf_rfa.bench.models import cache_at, step_inputs
from hf_rfa.convert import convert
from hf_rfa.evaluation.memory import cache_memory
from hf_rfa.inference import cache_num_bytes
from tests.conftest import tiny_parent_config
from tests.families import base_config, has_encoder, save_softmax_model


@torch.no_grad()
def taken(model, length: int) -> int:
    """Return the bytes of a cache that has seen so many tokens, and as long a source."""
    ids = torch.randint(4, 60, (1, length))
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
    [
        ("gpt2", 15, {}, [15]),
        ("gpt2", 96, {"layers": [1], "num_features": 8}, [96]),
        ("gpt2", 96, {"max_positions": 1500}, [1024, 1500]),
        ("bart", 96, {}, [96]),
        ("bart", 96, {"cross_layers": "all"}, [96]),
    ],
)
def test_reports_and_cards_say_how_much_less_or_more(family, positions, options, lengths, tmp_path):
    """At texts that the model can read, against a softmax model with as many positions."""
    parent = tmp_path / "parent"
    save_softmax_model(family, parent, **({"n_positions": positions} if family == "gpt2" else {}))
    report = convert(parent, tmp_path / "out", **options)
    auto_class = AutoModelForCausalLM if not has_encoder(family) else AutoModelForSeq2SeqLM
    model = auto_class.from_pretrained(tmp_path / "out")
    if lengths[-1] > positions:
        softmax = GPT2LMHeadModel(tiny_parent_config(n_positions=lengths[-1]))
    else:
        softmax = auto_class.from_pretrained(parent)
    sizes = {length: (taken(model, length), taken(softmax, length)) for length in lengths}
    assert report.cache_bytes == sizes
    card = ModelCard.load(tmp_path / "out" / "README.md").content
    assert json.loads((tmp_path / "out" / "conversion.json").read_text())["cache_bytes"]
    rows = dict(report.rows())
    assert sum("cache at" in what for what in rows) == len(lengths)
    for length, (own, theirs) in sizes.items():
        (said,) = (value for what, value in rows.items() if f"cache at {length:,} tokens" in what)
        assert said in card
        found = re.search(r"\(([\d.]+) × (less|more)\)", said)
        if found is None:
            assert "(as much)" in said
            assert own == pytest.approx(theirs, rel=0.05)
        else:
            assert (found[2] == "less") == (own < theirs)
            assert float(found[1]) == pytest.approx(max(own / theirs, theirs / own), abs=0.05)
    grows = taken(model, lengths[-1]) > taken(model, lengths[-1] // 2)
    assert ("the same time and memory at any length." in " ".join(card.split())) != grows
    if family == "bart" and not options:
        (said,) = (value for what, value in rows.items() if what == "cache of softmax cross attention")
        token = 3 * 2 * 24 * 4  # layers, keys and values, width, bytes
        assert said == f"{token} B a token of the source, at any length of output"
        assert (report.source_bytes, report.grows) == (token, False)
