"""Commands say at once what they do, and bars what really runs."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from hf_rfa.convert import convert, pipeline
from hf_rfa.convert.checkpoint.base_model import rfa_layers
from hf_rfa_cli import threads as threads_module
from hf_rfa_cli.threads import take_threads
from tests.conftest import DEMO_MODEL, DEMO_TEXT, words
from tests.families import save_softmax_model

#: Runs a command that ends as soon as anything looks for torch.
WITHOUT_TORCH = """
import sys

class Guard:
    def find_spec(self, name, *rest):
        if name == "torch":
            raise SystemExit(77)

sys.meta_path.insert(0, Guard())
from hf_rfa_cli.main import main
main()
"""


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["convert", "a", "b"], "converting a to b"),
        (["convert", "a", "b", "--transfer-steps", "2", "--data", DEMO_TEXT], "converting a to b"),
        (["convert", "a", "b", "--import", "module.py"], "importing module.py"),
        (["distill", "a", "--teacher", "b", "--data", DEMO_TEXT], "distilling a from b"),
        (["finetune", "--model", "a", "--task", "clm", "--train", "b"], "preparing the fine-tuning"),
        (["finetune", "--help"], "listing the options"),
        (["evaluate", "a", DEMO_TEXT], f"evaluating a on {DEMO_TEXT}"),
        (["recall", "a", DEMO_TEXT], "measuring the recall of a"),
        (["generate", "a", "--prompt", "x"], "loading a"),
        (["bench", "--model", "a", "--task", "prefill"], "timing a (prefill)"),
    ],
)
def test_the_first_line_comes_before_torch_is_imported(command, line, tmp_path):
    (tmp_path / "module.py").write_text("import torch")
    words = [sys.executable, "-c", WITHOUT_TORCH, *map(str, command)]
    run = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert run.returncode == 77, run.stderr
    first, *others = run.stderr.splitlines()
    assert first == f"{line} …"
    assert all(other.startswith("other programs keep the cores busy: ") for other in others)
    assert run.stdout == ""


@pytest.mark.parametrize(
    ("busy", "usable", "variable", "threads"),
    [
        (0.0, 4, None, None),
        (25.0, 4, None, 3),
        (100.0, 4, None, 1),
        (60.0, 4, "2", None),
        (100.0, 4, "2,1", 1),
        (0.0, 4, "1", None),
    ],
)
def test_threads_are_as_many_as_cores_are_free(busy, usable, variable, threads, monkeypatch):
    monkeypatch.setattr(threads_module, "NAMED", [])
    monkeypatch.setattr("psutil.cpu_percent", lambda interval: busy)
    monkeypatch.setattr("psutil.cpu_count", lambda: usable)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(usable))
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # so that it is put back
    monkeypatch.delenv("OMP_NUM_THREADS")
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    note = take_threads()
    assert (note is not None) == (threads is not None)
    assert os.environ.get("OMP_NUM_THREADS") == (variable if threads is None else str(threads))
    if note is not None:
        assert f": {threads} of {min(usable, int((variable or '9')[0]))} threads" in note
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "0")
        assert take_threads() is None
    threads_module.name_threads(usable)
    assert take_threads() is None, "a number that was named is changed"
    assert os.environ["OMP_NUM_THREADS"] == str(usable)


def test_threads_may_be_asked_for(run_cli, monkeypatch):
    monkeypatch.setattr(threads_module, "NAMED", [])
    before = torch.get_num_threads()
    try:
        assert run_cli("generate", DEMO_MODEL, "--prompt", "x", "--max-new-tokens", 1, "--threads", before + 1) == 0
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
        os.environ.pop("OMP_NUM_THREADS")


def test_of_several_processes_one_says_it(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    words = [sys.executable, "-c", WITHOUT_TORCH, "finetune", "--model", "a"]
    assert subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False).stderr == ""


def test_bars_name_what_is_scored(tmp_path, monkeypatch):
    steps: list[str] = []
    scored = []
    score_labels = pipeline.score_labels

    def score(model: Any, batches: Any) -> Any:
        scored.append((steps[-1], bool(rfa_layers(model))))
        return score_labels(model, batches)

    monkeypatch.setattr(pipeline, "score_labels", score)
    save_softmax_model("gpt2", tmp_path / "gpt2")
    (tmp_path / "text.txt").write_text(words(600))
    convert(
        tmp_path / "gpt2",
        tmp_path / "out",
        num_features=8,
        calibrate_on=tmp_path / "text.txt",
        progress=lambda step, total: steps.append(step) if step else None,
    )
    names = ["scoring before calibration", "scoring the base model", "scoring the result"]
    assert scored == list(zip(names, [True, False, True], strict=True))
    assert steps == [
        *("checking the checkpoint", "loading the weights", names[0], "calibrating", names[1], names[2]),
        *("writing", "checking the result"),
    ]
