"""`benchmarks.gpu`: what fails is recorded and counted, and all parts run in their dry form."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from functools import partial

import pytest
import torch
from transformers import DynamicCache

from benchmarks.gpu.decoding import difference
from benchmarks.gpu.parity import judged
from benchmarks.gpu.trial import FAILED, attempt, failures
from hf_rfa.models.cache_names import cache_argument
from tests.conftest import ROOT
from tests.families import make, tokens


def test_what_fails_is_recorded_with_its_reason_and_found_wherever_it_is():
    def fails():
        raise MemoryError("64 GiB\n  are not there")

    results = {"part": {"case": attempt(fails), "other": attempt(lambda: {"ms": 1.0}), "rows": [attempt(fails)]}}
    assert results["part"]["other"] == {"ms": 1.0}
    reason = "MemoryError: 64 GiB are not there"
    assert failures(results) == [("part case", reason), ("part rows 0", reason)]


def test_a_case_fails_if_an_error_is_over_the_limit():
    assert FAILED not in judged({"output": 3e-7}, 1e-6)
    verdict = judged({"output": 1e-7, "gradient": 0.5}, 1e-5)
    assert verdict[FAILED] == "over 1e-05: gradient 5.0e-01"
    assert FAILED in judged({"output": float("inf")}, 1e-5)  # not a number


@torch.no_grad()
def test_a_step_on_a_state_that_another_writes_to_is_found():
    """What a graph does whose state's memory has gone to another tensor."""
    model, ids = make("llama", "positive"), tokens(2, 9)
    cache = DynamicCache(config=model.config)
    model(ids, **cache_argument(cache))
    inputs = {"input_ids": ids[:, :1].clone()}
    another = copy.deepcopy(cache)
    for step_cache, errors in ((another, False), (cache, True)):
        checked = copy.deepcopy(cache) if step_cache is another else cache
        step = partial(model, **inputs, **cache_argument(step_cache))
        assert (difference(lambda step=step: step().logits, model, inputs, checked) > 1e-3) == errors


@pytest.mark.slow
def test_all_parts_run_dry_and_are_not_run_again(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry", "--output", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    first = json.loads((tmp_path / "gpu.json").read_text())
    assert (tmp_path / "attention.png").is_file()
    assert set(first) == {"about", "parity", "attention", "graphs", "decoding", "conversion"}
    assert len(first["parity"]) > 20
    again = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert json.loads((tmp_path / "gpu.json").read_text()) == first
    assert "conversion: " in again.stdout  # shown, not run
