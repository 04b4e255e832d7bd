"""The command line, run as a user runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_rfa import cli, cli_convert

from .conftest import DEMO_MODEL, DEMO_TEXT

SCRIPT = Path(sys.executable).parent / "hf-rfa"


def run(*arguments, check=True) -> subprocess.CompletedProcess:
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    command = [str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=check, env=environment)


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess]:
    folder = tmp_path_factory.mktemp("cli") / "rfa"
    return folder, run("convert", DEMO_MODEL, folder, "--max-positions", "2048", "--num-features", "32")


def test_convert_prints_its_table(converted):
    folder, result = converted
    assert (folder / "README.md").is_file()
    for words in ("attention layers converted", "4 of 4", "state per sequence", "softmax cache at 8,192 tokens"):
        assert words in result.stdout
    assert "Traceback" not in result.stderr
    assert "Warning" not in result.stderr


def test_evaluate_states_its_protocol(converted):
    result = run("evaluate", converted[0], DEMO_TEXT, "--context", "256", "--max-tokens", "2000")
    assert float(re.search(r"perplexity ([\d.]+)", result.stdout).group(1)) < 250
    assert "disjoint windows of 256 tokens" in result.stdout
    assert "1,992 of 2,000 tokens counted" in result.stdout


def test_generate_streams_and_reports(converted):
    result = run("generate", converted[0], "--prompt", "Call me", "--max-new-tokens", "12", "--ignore-eos")
    assert result.stdout.startswith("Call me")
    assert re.search(r"12 tokens in [\d.]+ s \([\d.]+ tokens/s\), cache [\d,]+ bytes", result.stderr)
    sampled = [
        run("generate", converted[0], "--prompt", "Call", "--max-new-tokens", "9", "--sample", "--seed", seed).stdout
        for seed in ("1", "1", "2")
    ]
    assert sampled[0] == sampled[1] != sampled[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["convert", "./nothing", "out"], "there is no folder ./nothing"),
        (["convert", DEMO_MODEL, "out", "--layers", "a"], "--layers takes all, none, or indices and ranges"),
        (["convert", DEMO_MODEL, "out", "--layers", "9"], "indices from 0 to 3"),
        (["convert", DEMO_MODEL, "out", "--feature-map", "nope"], "feature_map='nope' is unknown"),
        (["evaluate", DEMO_MODEL, "missing.txt"], "there is no text file missing.txt"),
        (["generate", DEMO_MODEL, "--prompt", "x", "--temperature", "0.5"], "pass --sample"),
        (["generate", DEMO_MODEL, "--prompt", "x", "--max-new-tokens", "5000"], "--max-positions"),
    ],
)
def test_bad_input_is_one_line_and_status_1(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["hf-rfa", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    error = capsys.readouterr().err
    assert end.value.code == 1
    assert words in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_finetune_lists_its_options(monkeypatch, capsys):
    """transformers' parser prints them, not typer's."""
    monkeypatch.setattr(sys, "argv", ["hf-rfa", "finetune", "--help"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0
    options = capsys.readouterr().out
    for name in ("--block_length", "--feature_map_rate", "--learning_rate", "--recipe"):
        assert name in options


def test_layers_are_read_as_indices_and_ranges():
    assert cli_convert._layers("--layers", "0,2,4-7") == [0, 2, 4, 5, 6, 7]
    assert [cli_convert._layers("--layers", text) for text in (None, "all", "none")] == [None, "all", []]


@pytest.mark.parametrize(
    ("options", "feature_map", "gate"),
    [
        ([], "positive", False),
        (["--gate"], "positive", True),
        (["--distill-steps", "3"], "exponential", True),
        (["--distill-steps", "3", "--no-gate"], "exponential", False),
        (["--distill-steps", "3", "--layers", "none"], "exponential", False),
        (["--distill-steps", "3", "--window", "4"], "exponential", False),
        (["--distill-steps", "3", "--window", "4", "--gate"], "exponential", True),
        (["--distill-steps", "3", "--feature-map", "elu"], "elu", True),
    ],
)
def test_defaults_depend_on_whether_there_is_training(options, feature_map, gate, tmp_path, monkeypatch):
    """Feature map and gate that docs/quality.md found best without training, and with it."""
    chosen = {}

    def stop(source, destination, **given):
        chosen.update(given)
        raise SystemExit(0)

    monkeypatch.setattr(cli_convert, "_convert", stop)
    data = ["--data", str(DEMO_TEXT)] if "--distill-steps" in options else []
    monkeypatch.setattr(sys, "argv", ["hf-rfa", "convert", "parent", str(tmp_path / "out"), *options, *data])
    with pytest.raises(SystemExit):
        cli.main()
    assert (chosen["feature_map"], chosen["gate"]) == (feature_map, gate)
