"""`benchmarks.gpu`: what fails is recorded, what is missing is run, and all cases run in their dry form."""

from __future__ import annotations

import json
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch

from benchmarks.gpu.parity import judged
from benchmarks.gpu.trial import FAILED, LEFT_OUT, Case, failures, run
from tests.conftest import ROOT


def fails():
    raise MemoryError("64 GiB\n  are not there")


def figures_of(results):
    return {
        name: {key: value for key, value in figures.items() if key != "seconds"}
        for name, figures in results["part"]["case"].items()
    }


def test_what_fails_is_recorded_and_what_was_left_out_is_run():
    calls = {name: Mock(return_value={"ms": 2.0}) for name in ("done", "failed", "left out", "new")}
    results, save = (
        {"part": {"case": {"done": {"ms": 1.0}, "failed": {FAILED: "why"}, "left out": {LEFT_OUT: ""}}}},
        Mock(),
    )
    cases_of_call = [Case("part", "case", name, call) for name, call in calls.items()]
    run([*cases_of_call, Case("part", "case", "fails", fails)], results, 60, save)
    reason = "MemoryError: 64 GiB are not there"
    expected = {"done": {"ms": 1.0}, "failed": {FAILED: "why"}, "left out": {"ms": 2.0}, "new": {"ms": 2.0}}
    assert figures_of(results) == {**expected, "fails": {FAILED: reason}}
    assert failures(results) == [("part, case, failed", "why"), ("part, case, fails", reason)]
    assert [call.call_count for call in calls.values()] == [0, 0, 1, 1]
    assert save.call_count == 3


@pytest.mark.parametrize(("wrong", "names"), [(0.0, []), (1e-3, ["output", "value's gradient"]), (float("nan"), None)])
def test_a_case_fails_if_an_error_is_over_the_limit(wrong, names):
    query, key, value = torch.randn(3, 1, 2, 5, 4)

    def attend(query, key, value):
        return torch.softmax(query @ key.mT, -1) @ value * (1 + wrong * (value.dtype == torch.float32))

    reason = judged(attend, attend, [query, key, value]).get(FAILED, "")
    assert bool(reason) == (wrong != 0)
    assert all(name in reason for name in names or [])


@pytest.mark.slow
def test_all_cases_run_dry_and_are_not_run_again(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry", "--output", str(tmp_path)]
    late = subprocess.run([*command, "--deadline", "0"], cwd=ROOT, check=True, capture_output=True, text=True)
    assert "left out" in late.stdout
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    first = json.loads((tmp_path / "gpu.json").read_text())
    assert list(first) == ["about", "parity", "training", "attention", "generation", "conversion"]
    assert "left out" not in json.dumps(first)
    again = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert json.loads((tmp_path / "gpu.json").read_text()) == first
    assert "conversion" in again.stdout  # shown, not run
