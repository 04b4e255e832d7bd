"""`benchmarks.gpu`: what fails or comes too late is recorded, what is missing is run, and all cases run in their dry form."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console

from benchmarks.gpu import trial
from benchmarks.gpu.__main__ import cases
from benchmarks.gpu.models import SOFTMAX
from benchmarks.gpu.parity import judged
from benchmarks.gpu.tables import TARGETS, Target, show
from benchmarks.gpu.trial import FAILED, LEFT_OUT, Case, Setting, failures, run
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


def test_what_has_no_time_left_is_left_out_and_what_does_not_end_is_interrupted(monkeypatch):
    results, late = {}, Mock()

    def hangs():
        while True:
            time.sleep(0.01)

    monkeypatch.setattr(trial, "LEAST_SECONDS", 0.01)
    start = time.monotonic()
    run([Case("part", "case", "hangs", hangs), Case("part", "case", "late", late)], results, 0.2, Mock())
    assert time.monotonic() - start < 5
    assert figures_of(results) == {"hangs": {LEFT_OUT: "the deadline"}, "late": {LEFT_OUT: "the deadline"}}
    assert not failures(results)
    late.assert_not_called()


def test_nothing_is_run_on_a_broken_device(monkeypatch):
    results, next_one = {}, Mock()
    monkeypatch.setattr(trial, "free_memory", Mock(side_effect=RuntimeError("an illegal memory access")))
    run([Case("part", "case", "breaks", fails), Case("part", "case", "next", next_one)], results, 60, Mock())
    assert LEFT_OUT in figures_of(results)["next"]
    next_one.assert_not_called()


@pytest.mark.parametrize(("wrong", "names"), [(0.0, []), (1e-3, ["output", "value's gradient"]), (float("nan"), None)])
def test_a_case_fails_if_an_error_is_over_the_limit(wrong, names):
    query, key, value = torch.randn(3, 1, 2, 5, 4)

    def attend(query, key, value):
        return torch.softmax(query @ key.mT, -1) @ value * (1 + wrong * (value.dtype == torch.float32))

    reason = judged(attend, attend, [query, key, value]).get(FAILED, "")
    assert bool(reason) == (wrong != 0)
    assert all(name in reason for name in names or [])


def test_targets_are_of_the_same_conditions(capsys):
    eight = {"softmax": {"s": 0.25}, "RFA": {"s": 0.3}}
    results = {"training": {"8": eight, "9": {"RFA": {FAILED: "why"}, "softmax": {"s": 1}}}}
    met = Target("training", "8", "s", most=1.3, is_ratio=True).row(results)
    assert met[1:] == ("0.3", "0.25", "1.20 ×", "≤ 1.3 ×, met")
    assert Target("training", "8", "s", least=0.5).row(results)[-1] == "≥ 0.5, missed"
    assert Target("training", "9", "s", most=2).row(results)[1:] == ("", "1", "", "≤ 2")
    show(results, Console(width=140))
    assert "RFA (failed)" in capsys.readouterr().out


def test_every_target_is_of_cases():
    setting = Setting(dry=False, device=torch.device("cpu"))
    names = [(case.part, case.conditions, case.contestant) for case in cases(setting)]
    assert len(set(names)) == len(names)
    for target in TARGETS:
        for contestant in (target.contestant, *([SOFTMAX] if target.is_ratio else [])):
            assert (target.part, target.conditions, contestant) in names


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
