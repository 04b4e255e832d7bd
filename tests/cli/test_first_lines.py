"""Commands say at once what they do, and take the threads that are free."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from hf_rfa_cli import threads as threads_module
from hf_rfa_cli.threads import take_threads
from tests.conftest import DEMO_MODEL, DEMO_TEXT

#: Runs commands each of which ends as soon as anything looks for torch, and writes what they have said by then.
WITHOUT_TORCH = """
import contextlib, io, json, sys

class Guard:
    def find_spec(self, name, *rest):
        if name == "torch":
            raise SystemExit(77)

sys.meta_path.insert(0, Guard())
from hf_rfa_cli.main import main

found = []
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            main()
        except SystemExit as end:
            loaded = sorted({"torch", "transformers", "numpy", "hf_rfa"} & set(sys.modules))
            found.append([end.code, out.getvalue(), errors.getvalue(), loaded])
print(json.dumps(found))
"""
#: Commands that run nothing.
NOTHING = (["--help"], [], ["convert", "-h"], ["generate", "m", "--top-k", "-1"], ["--version"], ["convrt"])


def test_the_first_line_comes_before_torch_is_imported(tmp_path):
    """It takes seconds, as transformers does; what runs nothing loads nothing."""
    (tmp_path / "module.py").write_text("import torch")
    lines = [
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
    ]
    commands = [*NOTHING, *([*map(str, command)] for command, _ in lines)]
    words = [sys.executable, "-c", WITHOUT_TORCH, json.dumps(commands)]
    found = json.loads(subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=True).stdout)
    for command, (status, *_, loaded) in zip(NOTHING, found, strict=False):
        assert (status != 77, loaded) == (True, []), command
    for (command, line), (status, out, errors, _) in zip(lines, found[len(NOTHING) :], strict=True):
        assert (status, out) == (77, ""), command
        first, *others = errors.splitlines()
        assert first == f"{line} …"
        assert all(other.startswith("other programs keep the cores busy: ") for other in others)


@pytest.mark.parametrize(("busy", "variable", "threads"), [(0.0, None, None), (25.0, None, "3"), (60.0, "2", "2")])
def test_threads_are_as_many_as_cores_are_free(busy, variable, threads, monkeypatch):
    """Of four; a number that the environment names stays, if as many are free."""
    monkeypatch.setattr(threads_module, "NAMED", [])
    monkeypatch.setattr("psutil.cpu_percent", lambda interval: busy)
    monkeypatch.setattr("psutil.cpu_count", lambda: 4)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(4))
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setenv("OMP_NUM_THREADS", variable or "1")  # so that it is put back
    if variable is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    note = take_threads()
    assert (note is not None) == (threads not in (None, variable))
    assert os.environ.get("OMP_NUM_THREADS") == threads


def test_threads_may_be_asked_for(run_cli, monkeypatch):
    monkeypatch.setattr(threads_module, "NAMED", [])
    before = torch.get_num_threads()
    try:
        assert run_cli("generate", DEMO_MODEL, "--prompt", "x", "--max-new-tokens", 1, "--threads", before + 1) == 0
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
        os.environ.pop("OMP_NUM_THREADS")
