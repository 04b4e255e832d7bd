"""Conversions killed at any point: there is the old checkpoint, the new one, or none, and the next run succeeds."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from hf_rfa.convert import convert
from hf_rfa.io.atomic_io import folder_beside, new_folder, remove_leftovers
from hf_rfa_cli.main import main
from tests.conftest import leftovers

#: Processes that start from one in which everything has been imported.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["hf_rfa_cli.main", "hf_rfa.convert", "tests.convert.test_killed_conversions"])

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
    found = set()
    for steps in range(200):
        parent = tmp_path / str(steps)
        destination = parent / "out"
        if old:
            write_whole(destination, "o")
        status = in_a_process(write, destination, "n", steps)
        assert status in (0, -signal.SIGKILL)
        if destination.exists():
            (mark,) = (mark for mark, files in whole.items() if content(destination) == files)
            found.add(mark)
        else:
            found.add("absent")
            aside = list(parent.glob(".out.*.old/folder"))
            assert not old or content(aside[0]) == whole["o"]
        write_whole(destination, "n")
        assert content(destination) == whole["n"]
        assert [name for name in leftovers(parent) if name.endswith(".partial")] == []
        if status == 0:
            break
    assert status == 0
    assert found == {"n", "absent", *(["o"] if old else [])}


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


def run_command(*arguments: str) -> None:
    sys.argv = ["hf-rfa", *arguments]
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (to the end of the process)
    main()


@pytest.mark.slow
def test_conversions_killed_at_random_points(tiny_parent, tmp_path):
    """With an old result and without one, each 20 times."""
    options = ["convert", str(tiny_parent)]
    takes = 0.0
    for name in ("first", "timed"):  # the first one waits for the imports
        start = time.perf_counter()
        assert in_a_process(run_command, *options, str(tmp_path / name), "--seed", "1") == 0
        takes = time.perf_counter() - start
    chance = random.Random(0)
    found = {"old": 0, "new": 0, "absent": 0}
    for number in range(40):
        folder = tmp_path / str(number)
        destination, with_old = folder / "out", number % 2 == 0
        if with_old:
            shutil.copytree(tmp_path / "first", destination)
        process = processes.Process(
            target=run_command, args=(*options, str(destination), "--seed", "2", "--gate", "--overwrite")
        )
        process.start()
        time.sleep(chance.uniform(0, 1.3 * takes))
        process.kill()
        process.join()
        if destination.exists():
            fields = json.loads((destination / "config.json").read_text())
            state = {1: "old", 2: "new"}[fields["feature_seed"]]
            assert fields["gate"] == (state == "new")
            assert (destination / "conversion.json").is_file()
            _, info = AutoModelForCausalLM.from_pretrained(destination, output_loading_info=True)
            assert not any(info.values())
        else:
            state = "absent"
            aside = list(folder.glob(".out.*.old/folder/conversion.json"))
            assert not with_old or len(aside) == 1
        found[state] += 1
        convert(tiny_parent, destination, seed=3, overwrite=True)
        assert json.loads((destination / "config.json").read_text())["feature_seed"] == 3
        assert leftovers(folder) == ["out"]
    print(found)  # noqa: T201
    assert all(found.values())
