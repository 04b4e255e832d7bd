"""What writes checkpoints, killed at any point: the old folder is there, the new one, or none. What is none stays."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, DynamicCache

from hf_rfa import InputError
from hf_rfa.convert import convert
from hf_rfa.inference import save_cache
from hf_rfa.io.atomic_io import check_file, folder_beside, new_file, new_folder, remove_leftovers
from hf_rfa.models.cache_names import cache_argument
from tests.conftest import DEMO_MODEL, DEMO_TEXT, leftovers, tiny_parent_config

# Python 3.12 says so of a process with threads: in those here nothing but files is touched.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

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
    """Run a function in a process that begins as this one; return the process's exit code."""
    process = os.fork()
    if process == 0:
        try:
            function(*args)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


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
    gone = subprocess.Popen(["true"])
    gone.wait()
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


# Destinations that hold no checkpoint are kept: pipes, links, and folders around a source


def untouched(folder: Path) -> dict[str, int]:
    """Return the kinds of files in a folder, by name."""
    return {path.name: stat.S_IFMT(path.lstat().st_mode) for path in folder.iterdir()}


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
@pytest.mark.parametrize(
    "command",
    [
        ["convert", "{parent}", "{out}"],
        ["convert", "{parent}", "{out}", "--data", "{text}", "--transfer-steps", "1"],
        ["distill", "{parent}", "--teacher", "{parent}", "--data", "{text}", "--output", "{out}"],
        ["finetune", "--model", "{model}", "--task", "clm", "--train", "{text}", "--output", "{out}"],
    ],
    ids=["convert", "convert and distill", "distill", "finetune"],
)
def test_commands_refuse_a_destination_that_is_no_folder(command, overwrite, tiny_parent, tmp_path, refused_command):
    os.mkfifo(tmp_path / "out")
    places = {"parent": tiny_parent, "model": DEMO_MODEL, "text": DEMO_TEXT, "out": tmp_path / "out"}
    before = untouched(tmp_path)
    said = refused_command(*(word.format(**places) for word in command), *overwrite)
    assert "out exists and is not a folder" in said
    assert untouched(tmp_path) == before


def test_files_that_appear_during_the_work_are_kept(tmp_path):
    with pytest.raises(InputError, match="exists and is not a folder"), new_folder(tmp_path / "out"):
        os.mkfifo(tmp_path / "out")
    before = untouched(tmp_path)
    assert list(before.values()) == [stat.S_IFIFO]
    with pytest.raises(InputError, match="exists and is not a file"), new_file(tmp_path / "out"):
        pass
    assert untouched(tmp_path) == before


@pytest.mark.parametrize("there", [True, False])
def test_links_are_refused_for_folders_and_followed_for_files(there, tiny_parent, tmp_path):
    """A link to a folder would be exchanged with a folder that is moved away from under it."""
    (tmp_path / "place").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "place" / "target")
    if there:
        shutil.copytree(tiny_parent, tmp_path / "place" / "target")
    with pytest.raises(InputError, match="out is a link"):
        convert(tiny_parent, tmp_path / "out", overwrite=True)
    with pytest.raises(InputError, match="out is a link"), new_folder(tmp_path / "out"):
        pass
    assert untouched(tmp_path / "place") == ({"target": stat.S_IFDIR} if there else {})

    (tmp_path / "file").symlink_to(tmp_path / "place" / "text")
    if there:
        (tmp_path / "place" / "text").write_text("before")
    check_file(tmp_path / "file")
    with new_file(tmp_path / "file") as file:
        file.write("after")
    assert (tmp_path / "file").is_symlink()
    assert (tmp_path / "place" / "text").read_text() == "after"


def test_a_cache_replaces_files_alone_and_is_written_where_a_link_leads(tmp_path):
    """Through a link to a pipe as well, such as a standard output."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    (tmp_path / "good").symlink_to(tmp_path / "cache")
    model = AutoModelForCausalLM.from_config(tiny_parent_config())
    cache = DynamicCache(config=model.config)
    model(model.dummy_inputs["input_ids"], **cache_argument(cache))
    before = untouched(tmp_path)
    for name in ("pipe", "folder", "link"):
        with pytest.raises(InputError, match="exists and is not a file"):
            save_cache(cache, tmp_path / name)
    assert untouched(tmp_path) == before
    for _ in range(2):
        save_cache(cache, tmp_path / "good")
        assert untouched(tmp_path) == before | {"cache": stat.S_IFREG}


def test_the_folder_around_a_source_is_kept(tiny_parent, tmp_path):
    """--overwrite would remove the source with it."""
    shutil.copytree(tiny_parent, tmp_path / "run" / "last")
    shutil.copyfile(tiny_parent / "config.json", tmp_path / "run" / "config.json")
    with pytest.raises(InputError, match=r"the source, .*last, is inside .*run"):
        convert(tmp_path / "run" / "last", tmp_path / "run", overwrite=True)
    assert (tmp_path / "run" / "last" / "model.safetensors").is_file()
