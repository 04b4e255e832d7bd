"""Destinations that hold no checkpoint are kept: pipes, links, and folders around a source."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, DynamicCache

from hf_rfa import InputError
from hf_rfa.convert import convert
from hf_rfa.evaluation.cards import check_recordable
from hf_rfa.inference import save_cache
from hf_rfa.io.atomic_io import check_file, new_file, new_folder
from hf_rfa.models.cache_names import cache_argument
from tests.conftest import DEMO_MODEL, DEMO_TEXT, tiny_parent_config


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


@pytest.mark.parametrize("name", ["speed.json", "speed-decoding.png"])
def test_bench_replaces_files_alone_and_says_so_before_it_starts(name, tmp_path, monkeypatch, refused_command):
    monkeypatch.setattr("hf_rfa.bench.pair", None)  # nothing is made, or timed
    os.mkfifo(tmp_path / name)
    before = untouched(tmp_path)
    assert f"{name} exists and is not a file" in refused_command("bench", "--output", tmp_path / "speed")
    assert "cannot write to" in refused_command("bench", "--output", tmp_path / "nowhere" / "speed")
    assert untouched(tmp_path) == before


@pytest.mark.parametrize("name", ["evaluation.json", "README.md"])
def test_evaluate_replaces_files_alone(name, tiny_parent, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    shutil.copyfile(tiny_parent / "config.json", checkpoint / "config.json")
    os.mkfifo(checkpoint / name)
    with pytest.raises(InputError, match=f"{name} exists and is not a file"):
        check_recordable(str(checkpoint))


def test_the_folder_around_a_source_is_kept(tiny_parent, tmp_path):
    """--overwrite would remove the source with it."""
    shutil.copytree(tiny_parent, tmp_path / "run" / "last")
    shutil.copyfile(tiny_parent / "config.json", tmp_path / "run" / "config.json")
    with pytest.raises(InputError, match=r"the source, .*last, is inside .*run"):
        convert(tmp_path / "run" / "last", tmp_path / "run", overwrite=True)
    assert (tmp_path / "run" / "last" / "model.safetensors").is_file()
