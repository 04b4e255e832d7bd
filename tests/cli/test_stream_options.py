"""``hf-rfa generate`` on texts of any length: read, kept in a file, gone on from."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_rfa.io import text_io
from tests.conftest import DEMO_MODEL, save_tiny_tokenizer, words
from tests.families import WITHOUT_END, make

TEXT = words(400)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("streams") / "llama-rfa"
    make("llama", WITHOUT_END).save_pretrained(folder)
    save_tiny_tokenizer(folder)
    return folder


@pytest.fixture
def generate(model, run_cli, tmp_path, monkeypatch, capsys) -> Callable[..., tuple[str, str]]:
    """The command in a folder with book.txt: it returns what it writes, and its report on one line."""
    (tmp_path / "book.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)

    def run(*options: object, status: int = 0, checkpoint: Path = model) -> tuple[str, str]:
        assert run_cli("generate", checkpoint, "--ignore-eos", *options) == status
        out, err = capsys.readouterr()
        return out.strip(), " ".join(err.split())

    return run


def test_a_text_past_the_positions_is_continued(generate, monkeypatch):
    text, report = generate("--stream-from", "book.txt", "--max-new-tokens", 8)
    assert len(text.split()) == 8
    assert re.search(r"400 tokens read in [\d.]+ s \([\d.,]+ tokens/s\)", report)
    assert re.search(r"8 tokens written in .* cache [\d,]+ bytes after 408 tokens, process [\d,]+ bytes", report)
    assert "reading book.txt" in report
    assert "100%" in report
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    assert generate("--stream-from", "-", "--max-new-tokens", 8)[0] == text


def test_a_kept_text_goes_on_as_if_nothing_had_happened(generate):
    expected = generate("--stream-from", "book.txt", "--prompt", "w5 w6", "--max-new-tokens", 9)[0]
    assert expected.startswith("w5 w6 ")
    read, report = generate("--stream-from", "book.txt", "--max-new-tokens", 0, "--save-cache", "book.cache")
    assert read == ""
    assert report.endswith("kept in book.cache: go on with --load-cache book.cache")
    for _ in range(2):  # the file stays as it is
        assert generate("--load-cache", "book.cache", "--prompt", "w5 w6", "--max-new-tokens", 9)[0] == expected
    parts = [generate("--load-cache", "book.cache", "--prompt", "w5 w6", "--max-new-tokens", 4, "--save-cache", "x")[0]]
    parts.append(generate("--load-cache", "x", "--max-new-tokens", 5)[0])
    assert " ".join(parts) == expected
    drawn = [
        generate("--load-cache", "book.cache", "--max-new-tokens", 9, "--sample", "--seed", seed)[0]
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def interrupt_after(monkeypatch, characters: int) -> None:
    """Have Ctrl-C come while a text is waited for."""

    def stream_text(path: Path | None, **options: object):
        yield TEXT[:characters]
        raise KeyboardInterrupt

    monkeypatch.setattr(text_io, "stream_text", stream_text)


@pytest.mark.parametrize("cut", [100, 10_000])
def test_an_interrupted_text_goes_on_where_it_stopped(cut, generate, monkeypatch):
    expected = generate("--stream-from", "book.txt", "--max-new-tokens", 9)[0]
    monkeypatch.setattr("hf_rfa.inference.streams.CUT_CHARACTERS", cut)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 951)
        text, report = generate("--stream-from", "book.txt", status=130)
        assert text == ""
        assert "interrupted after" in report
        assert report.endswith("which are lost: --save-cache FILE keeps them")
        report = generate("--stream-from", "book.txt", "--save-cache", "some.cache", status=130)[1]
        assert f"go on with --load-cache some.cache --stream-from {Path('book.txt').resolve()}" in report
    text, report = generate("--load-cache", "some.cache", "--stream-from", "book.txt", "--max-new-tokens", 9)
    assert text == expected
    assert "going on in" in report
    assert "after 951 characters" in report
    # Another text follows what was taken of the one before.
    Path("rest.txt").write_text(TEXT[951:])
    assert TEXT[951] == " "
    text = generate("--load-cache", "some.cache", "--stream-from", "rest.txt", "--max-new-tokens", 9)[0]
    assert text == expected


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--stream-from", "nothing.txt"], "there is no text file nothing.txt"),
        (["--load-cache", "nothing"], "there is no file nothing."),
        (["--stream-from", "book.txt", "--prompt", "x", "--prompt", "y"], "--stream-from is for one text: pass one"),
        (["--stream-from", "book.txt", "--chat"], "--chat does not go with --stream-from"),
        (["--stream-from", "book.txt", "--audio", "a.wav"], "has no effect with --audio"),
        (["--stream-from", "book.jsonl"], "--stream-from reads plain text"),
        (["--stream-from", "book.txt", "--max-new-tokens", "0"], "pass --save-cache FILE"),
        (["--load-cache", "book.txt"], "cannot read a cache from book.txt"),
    ],
)
def test_options_that_do_not_go_together(options, said, generate):
    Path("book.jsonl").write_text("{}")
    assert said in generate(*options, status=1)[1]


def test_models_that_end_or_have_an_encoder_say_so(generate, refused_command, checkpoints):
    Path("long.txt").write_text("He said no. " * 1000)
    _, report = generate("--stream-from", "long.txt", "--max-new-tokens", 3, checkpoint=DEMO_MODEL)
    assert "positions end at 1024. Wherever they do, it reads its last 256 tokens again" in report
    said = refused_command("generate", checkpoints["bart"], "--stream-from", "long.txt")
    assert "a decoder that stands alone" in said
    generate("--stream-from", "book.txt", "--max-new-tokens", 0, "--save-cache", "book.cache")
    said = refused_command("generate", DEMO_MODEL, "--load-cache", "book.cache", "--prompt", "w")
    assert "book.cache holds 3 layers of self attention, and the model has 4" in said
