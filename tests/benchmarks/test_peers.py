"""Eviction methods of kvpress, fed as the benchmark feeds them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.peers.__main__ import METHODS, Task, check_control, measure
from benchmarks.peers.environment import python_with_kvpress
from hf_rfa.errors import InputError
from hf_rfa.evaluation.recall import window_and_sinks
from hf_rfa.evaluation.recall.probes import blocks, score_tokens

BUDGET = 40  # LagKV with less than 4 + 2 * 16 tokens is a window with sinks
SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2}
CONFIG = LlamaConfig(vocab_size=61, intermediate_size=64, initializer_range=0.2, **SIZES)


def test_a_control_that_is_no_window_with_sinks_stops_everything():
    row = {"budget": 64, "task": "perplexity 1,024", "figure": 30.5}
    with pytest.raises(InputError, match=r"30.500 with 64 tokens, and a window of 60 with 4 sinks 29.950"):
        check_control(row, {(64, "perplexity 1,024"): 29.95})
    check_control(row, {(64, "perplexity 1,024"): 30.51, (128, "perplexity 1,024"): 26.0})


@pytest.mark.slow
def test_every_method_keeps_to_the_budget_and_the_control_is_a_window_with_sinks(tmp_path: Path):
    """In the folder that the environment variable HF_RFA_KVPRESS names, or one that pip installs kvpress into."""
    try:
        python = python_with_kvpress(Path(os.environ.get("HF_RFA_KVPRESS", tmp_path / "environment")))
    except InputError as error:
        pytest.skip(str(error))
    model = LlamaForCausalLM(CONFIG).eval()
    model.save_pretrained(tmp_path / "model")
    task = Task("perplexity 60", blocks(torch.randint(61, (120,)), 60, 2))
    advanced: list[int] = []
    rows = {
        method: measure(
            python, tmp_path / "model", task, method=method, budget=BUDGET, advance=lambda: advanced.append(1)
        )
        for method in METHODS
    }
    assert len(advanced) == 59 * len(METHODS)
    cache = BUDGET * 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, their width, float32
    for method in (METHODS[0], "TOVA", "LagKV", "KeyDiff", "Knorm"):
        assert rows[method]["bytes"] == cache
    for method in ("H2O", "SnapKV"):  # what they hold besides
        assert cache < rows[method]["bytes"] < 8 * cache
    with window_and_sinks(model, BUDGET - 4, 4):
        expected = task.figure(score_tokens(model, task.rows))
    assert rows[METHODS[0]]["figure"] == pytest.approx(expected, rel=1e-5)
    assert len({round(row["figure"], 6) for row in rows.values()}) == len(METHODS), "two methods keep the same"
