"""The command line, run as a user runs it."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from hf_rfa import __version__
from hf_rfa.convert.options import ConversionOptions
from hf_rfa_cli import train
from tests.conftest import DEMO_MODEL, DEMO_TEXT, save_tiny_tokenizer
from tests.families import make_gpt2

SCRIPT = Path(sys.executable).parent / "hf-rfa"


def run(*arguments, check=True) -> subprocess.CompletedProcess:
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    command = [str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=check, env=environment)


def test_convert_prints_its_table(tiny_parent, tmp_path):
    result = run("convert", tiny_parent, tmp_path / "rfa", "--max-positions", "200", "--preset", "exact")
    assert (tmp_path / "rfa" / "README.md").is_file()
    for words in ("attention layers converted", "2 of 2", "state per sequence", "cache at 200 tokens"):
        assert words in result.stdout
    assert "Traceback" not in result.stderr
    assert "Warning" not in result.stderr


def test_generate_streams_and_reports(tmp_path, run_cli, capsys):
    make_gpt2("slots-gate").save_pretrained(tmp_path)
    save_tiny_tokenizer(tmp_path)

    def generate(*options: object) -> tuple[str, str]:
        assert run_cli("generate", tmp_path, "--prompt", "w5 w6", "--max-new-tokens", 12, *options) == 0
        return capsys.readouterr()

    text, report = generate("--ignore-eos")
    assert text.startswith("w5 w6")
    assert re.search(r"12 tokens in [\d.]+ s \([\d.]+ tokens/s\), cache [\d,]+ bytes", " ".join(report.split()))
    assert generate("--num-beams", 2)[0].startswith("w5 w6")
    sampled = [generate("--sample", "--seed", seed)[0] for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_prompts_come_from_options_a_file_and_stdin(run_cli, tmp_path, monkeypatch, capsys):
    lines = ["The whale", "It was the ship"]
    (tmp_path / "prompts.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    shown = []
    both = ("--prompt", lines[0], "--prompt", lines[1])
    for options in (both, ("--prompt-file", "prompts.txt"), ("--prompt-file", "-")):
        stdin = io.TextIOWrapper(io.BytesIO("\r\n".join(["\ufeffThe whale", *lines[1:]]).encode()))
        monkeypatch.setattr(sys, "stdin", stdin)
        common = ("--max-new-tokens", 5, "--batch-size", 2, "--prompt", "He said")
        assert run_cli("generate", DEMO_MODEL, *common, *options) == 0
        shown.append(capsys.readouterr().out)
    places = [shown[0].index(text) for text in ("He said", *lines)]
    assert places == sorted(places)
    assert shown[0] == shown[1] == shown[2]


def test_answers_are_printed_as_they_are(run_cli, capsys):
    """Tabs and control characters too, of one prompt and of several."""
    prompts = ["name\tage\tcity", "one\x0ctwo\x1b[0m [b]x[/b]"]
    for asked in (prompts[:1], prompts[1:], prompts):
        words = [word for prompt in asked for word in ("--prompt", prompt)]
        assert run_cli("generate", DEMO_MODEL, *words, "--max-new-tokens", 1) == 0
        out = capsys.readouterr().out
        assert all(prompt in out for prompt in asked)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["convert", "./nothing", "out"], "there is no folder ./nothing"),
        (["convert", DEMO_MODEL, "out", "--layers", "a"], "'--layers': it must be all, none, or indices and ranges"),
        (["evaluate", DEMO_MODEL, "missing.txt"], "there is no text file missing.txt"),
        (["evaluate", DEMO_MODEL, DEMO_TEXT, "--context-length", "1"], "'--context-length'"),
        (["evaluate", DEMO_MODEL], "Missing argument 'data'"),
        (["distill", "a", "--teacher", "b", "--data", "missing.txt"], "there is no text file missing.txt"),
        (["distill", "a", "--teacher", "b", "--data", DEMO_TEXT, "--transfer-steps", "-1"], "'--transfer-steps'"),
        (
            ["convert", DEMO_MODEL, "out", "--retrieval-heads", "1."],
            "'--retrieval-heads': it must be a number of heads",
        ),
        (["bench", "--output", "no/where"], "cannot write to"),
        (["export", DEMO_MODEL, "out", "--to", "executorch", "--int8"], "(--int8, --for) are of --to onnx"),
        (["convrt"], "No such command 'convrt'. Did you mean 'convert'? See hf-rfa --help."),
        (["convert", DEMO_MODEL, "out", "--nothing"], "No such option: --nothing See hf-rfa convert --help."),
        (["generate", DEMO_MODEL, "--prompt", "x", "--sample", "--temperature", "0"], "a number above 0, got 0.0"),
        (["generate", DEMO_MODEL, "--prompt", "x", "--seed", 2**32], "'--seed'"),
        (["generate", DEMO_MODEL, "--prompt", "x", "--dtype", "int4"], "'--dtype'"),
        (["generate", DEMO_MODEL], "pass --prompt, --prompt-file or --audio"),
        (["generate", DEMO_MODEL, "--prompt", "x", "--compile", "--num-beams", "2"], "--compile is not for beams"),
        (["generate", DEMO_MODEL, "--prompt", ""], "prompt 1 of 1 is empty"),
        (["generate", DEMO_MODEL, "--prompt", "a", "--prompt", "caf\udce9"], "prompt 2 of 2 is not UTF-8 text"),
        (["generate", DEMO_MODEL, "--prompt", "a", "--chat", "--system", "\udce9"], "--system is not UTF-8 text"),
        (["generate", DEMO_MODEL, "--prompt", "x", "--temperature", "0.5"], "pass --sample"),
        (["generate", DEMO_MODEL, "--prompt", "x", "--max-new-tokens", "5000"], "--max-positions"),
    ],
)
def test_bad_input_is_one_line_and_status_1(arguments, words, run_cli, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_cli(*arguments) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("error:") == 1
    assert error.endswith("\n")
    assert error.partition("error:")[2].count("\n") == 1
    assert "Loading weights" not in error or "--max-positions" in words  # how long a prompt is, its tokenizer knows
    assert list(tmp_path.iterdir()) == []


def test_the_installed_command_is_the_light_one():
    (found,) = entry_points(group="console_scripts", name="hf-rfa")
    assert found.value == "hf_rfa_cli.main:main"
    assert "from hf_rfa_cli.main import main" in SCRIPT.read_text()


def test_version_and_help(run_cli, capsys):
    def said(*words: object) -> str:
        assert run_cli(*words) == 0
        return capsys.readouterr().out

    assert run("--version").stdout.split() == ["hf-rfa", __version__]
    assert said("-h") == said("--help") == said()
    for command in ("convert", "distill", "evaluate", "recall", "generate", "bench"):
        shown = said(command, "-h")
        assert "--help" in shown
        assert "bool" not in shown


@pytest.mark.parametrize(
    "words", [["--output", "new"], ["--output=new"], ["--output_dir", "new"], ["--output-dir=new"]]
)
def test_the_output_has_one_name_and_transformers_own(words):
    given = ["--model", "old/", "--task", "clm", "--train", "t.txt", "--bf16", "false", "--resume"]
    values = train.finetune_values([*given, *words])
    assert (values["output_dir"], values["resume"], values["bf16"]) == ("new", True, False)
    assert train.finetune_values(given)["output_dir"] == "old-finetuned"


def test_a_few_tokens_are_scored_with_a_warning(run_cli, tmp_path, capsys):
    (tmp_path / "few.txt").write_text("He said")
    for text, few in ((tmp_path / "few.txt", True), (DEMO_TEXT, False)):
        assert run_cli("evaluate", DEMO_MODEL, text, "--max-tokens", 1100) == 0
        shown = capsys.readouterr()
        counted = re.search(r"([\d,]+) of [\d,]+ tokens counted", " ".join(shown.out.split()))[1]
        assert (f"warning: {counted} tokens were scored" in " ".join(shown.err.split())) == few


def test_help_says_a_thing_in_two_sentences_at_most():
    for field in dataclasses.fields(ConversionOptions):
        text = field.metadata["help"]
        assert len(text) < 240, field.name
        assert len(re.findall(r"\.(?: |$)", text)) <= 2, field.name


def test_the_help_of_convert_fits_on_two_screens(run_cli, capsys, monkeypatch):
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 120)
    assert run_cli("convert", "--help") == 0
    shown = capsys.readouterr().out
    assert shown.count("\n") <= 100
    assert len(set(re.findall(r"(?m)^│ +(--[a-z-]+)", shown))) <= 20
    assert "docs/guide.md lists the fields" in " ".join(shown.split())
