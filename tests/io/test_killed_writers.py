"""What writes checkpoints, killed at any point: there is the old folder, the new one, or none, and the next run succeeds."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from hf_rfa.io.atomic_io import folder_beside, new_folder, remove_leftovers
from tests.conftest import leftovers

#: Processes that start from one in which everything has been imported.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["hf_rfa.io.atomic_io", "tests.io.test_killed_writers"])

FILES = {"config.json": 1, "model.safetensors": 2, "sub/README.md": 3}


def write_whole(destination: Path, mark: str) -> None:
    with new_folder(destination) as folder:
        (folder / "sub").mkdir()
        for name, size in FILES.items():
            (folder / name).write_text(mark * size)


def write(destination: Path, mark: str, steps: int | None) -> None:
    """Write a small folder, and kill the process at the given one of the steps that change a disk."""
    changing = ("open", "os.", "shutil.", "tempfile.")
    left = steps

    def audit(event: str, arguments: tuple) -> None:
        nonlocal left
        if left is not None and event.startswith(changing):
            left -= 1
            if left < 0:
                left = None
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)
    write_whole(destination, mark)
    left = None


def content(folder: Path) -> dict[str, str]:
    return {name: (folder / name).read_text() for name in FILES}


def in_a_process(function, *args) -> int:
    process = processes.Process(target=function, args=args)
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


@pytest.mark.parametrize("old", [True, False])
def test_a_writer_killed_at_every_step(old, tmp_path):
    """The old folder or the new one is there, whole, or the old one is put aside."""
    whole = {mark: {name: mark * size for name, size in FILES.items()} for mark in "on"}
    states = set()
    for steps in range(200):
        parent = tmp_path / str(steps)
        destination = parent / "out"
        if old:
            write_whole(destination, "o")
        status = in_a_process(write, destination, "n", steps)
        assert status in (0, -signal.SIGKILL)
        if destination.exists():
            (mark,) = (mark for mark, files in whole.items() if content(destination) == files)
            states.add(mark)
        else:
            states.add("absent")
            aside = list(parent.glob(".out.*.old/folder"))
            assert not old or content(aside[0]) == whole["o"]
        write_whole(destination, "n")
        assert content(destination) == whole["n"]
        assert [name for name in leftovers(parent) if name.endswith(".partial")] == []
        if status == 0:
            break
    assert status == 0
    assert states == {"n", "absent", *(["o"] if old else [])}


def test_leftovers_of_others_stay(tmp_path):
    """Of a process that still runs, of other destinations, and of other names."""
    gone = processes.Process(target=time.sleep, args=(0,))
    gone.start()
    gone.join()
    mine = tmp_path / f".out.{gone.pid}.abc.partial"
    others = [f".out.{os.getppid()}.abc.partial", f".out.b.{gone.pid}.abc.partial", ".out.partial", f"out.{gone.pid}"]
    for name in (mine.name, *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    write_whole(tmp_path / "out", "n")
    assert leftovers(tmp_path) == sorted(["out", *others])


def convert_and_distill(destination: Path, die: bool) -> None:
    """As ``hf-rfa convert --transfer-steps``: a folder for intermediate results, and in it others that are written whole."""
    with folder_beside(destination) as folder:
        write_whole(folder / "out", "o")
        remove_leftovers(destination)
        assert content(folder / "out")
        if die:
            os.kill(os.getpid(), signal.SIGKILL)
        write_whole(destination, "n")
        assert content(folder / "out")


def test_intermediate_folders_stay_until_the_result_is_there(tmp_path):
    destination = tmp_path / "out"
    assert in_a_process(convert_and_distill, destination, True) == -signal.SIGKILL
    assert len(leftovers(tmp_path)) == 1
    assert in_a_process(convert_and_distill, destination, False) == 0
    assert leftovers(tmp_path) == ["out"]
