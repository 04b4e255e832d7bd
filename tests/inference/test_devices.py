"""Models on another device than the CPU: `tests/on_another_device.py`, in a process whose torch has one."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from hf_rfa.errors import InputError
from hf_rfa.inference.loading import find_device
from tests.conftest import ROOT


def test_all_results_are_those_of_the_cpu():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/on_another_device.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    assert re.search(r"(?m)^\d+ passed(, \d+ warnings?)? in ", done.stdout), "and none was skipped"


def test_devices_by_name(monkeypatch):
    assert find_device("cpu") == torch.device("cpu")
    for name in ("cuda:99", "nowhere", "meta"):
        with pytest.raises(InputError, match=r"Pass cpu, cuda, or auto\."):
            find_device(name)
    for name, found in ((None, "cpu"), ("mps", "cpu"), ("cpu", "cpu")):
        there = None if name is None else torch.device(name)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available, there=there: there)
        assert find_device("auto") == torch.device(found)


@pytest.mark.parametrize(
    "words",
    [
        "convert none out --config device=nowhere",
        "generate none --prompt w --device nowhere",
        f"evaluate none {__file__} --device nowhere",
        "bench --task prefill --device nowhere",
    ],
)
def test_a_device_that_is_not_there_is_refused_first(words, refused_command):
    assert "cannot compute on the device 'nowhere'" in refused_command(*words.split())
