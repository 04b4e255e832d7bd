"""Results beside a checkpoint: evaluation.json and the model card."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import BartForConditionalGeneration, GPT2LMHeadModel

from hf_rfa import cli
from hf_rfa.convert import convert

from .conftest import save_tiny_tokenizer, tiny_parent_config, tiny_seq2seq_config


def hf_rfa(monkeypatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["hf-rfa", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


def test_results_are_recorded_beside_the_weights(tmp_path, monkeypatch, capsys):
    torch.manual_seed(0)
    GPT2LMHeadModel(tiny_parent_config(eos_token_id=2)).save_pretrained(tmp_path / "gpt2")
    save_tiny_tokenizer(tmp_path / "gpt2")
    model = tmp_path / "model"
    convert(tmp_path / "gpt2", model, num_features=8, window=4)
    before = ModelCard.load(model / "README.md").text
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(" ".join(f"w{4 + (n * n + len(name)) % 50}" for n in range(90)) + name)
    assert hf_rfa(monkeypatch, "evaluate", model, tmp_path / "a.txt", "--context", 16) == 0
    assert not (model / "evaluation.json").exists()
    for text, context, branch in (("a", 16, "both"), ("b", 16, "both"), ("a", 32, "both"), ("a", 16, "linear")):
        options = ["--context", context, "--branch", branch, "--record"]
        assert hf_rfa(monkeypatch, "evaluate", model, tmp_path / f"{text}.txt", *options) == 0
    results = json.loads((model / "evaluation.json").read_text())
    assert [each["data"] for each in results] == ["a.txt", "b.txt", "a.txt", "a.txt"]
    printed = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("perplexity")]
    assert [f"{each['scores']['perplexity']:.2f}" for each in results] == printed[1:]
    assert results[3]["protocol"].endswith("linear branch alone")
    card = ModelCard.load(model / "README.md")
    assert sorted(each.metric_value for each in card.data.eval_results) == sorted(
        round(each["scores"]["perplexity"], 4) for each in results
    )
    assert before.strip() in card.text
    assert hf_rfa(monkeypatch, "evaluate", model, tmp_path / "b.txt", "--context", 16, "--record") == 0
    again = ModelCard.load(model / "README.md")
    assert len(again.data.eval_results) == 4
    assert again.text.count("## Evaluation") == 1
    assert again.text.count("| b.txt | perplexity |") == 1
    assert before.strip() in again.text


def test_translations_are_recorded_too(tmp_path, monkeypatch):
    torch.manual_seed(0)
    BartForConditionalGeneration(tiny_seq2seq_config("bart")).save_pretrained(tmp_path / "bart")
    save_tiny_tokenizer(tmp_path / "bart")
    (tmp_path / "a.en").write_text("w5 w6\nw7 w8\n")
    (tmp_path / "a.de").write_text("w9 w6\nw7\n")
    options = ["--references", tmp_path / "a.de", "--task", "translation", "--max-new-tokens", 4, "--record"]
    assert hf_rfa(monkeypatch, "evaluate", tmp_path / "bart", tmp_path / "a.en", *options) == 0
    (result,) = json.loads((tmp_path / "bart" / "evaluation.json").read_text())
    card = ModelCard.load(tmp_path / "bart" / "README.md")
    (found,) = card.data.eval_results
    assert (found.task_type, found.metric_name) == ("translation", next(iter(result["scores"])))
    row = next(line for line in card.text.splitlines() if line.startswith("| a.en"))
    assert row.count("|") == 5


def test_a_name_on_the_hub_takes_no_record(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("w5 w6")
    assert hf_rfa(monkeypatch, "evaluate", "someone/model", tmp_path / "a.txt", "--record") == 1
    assert "is not a folder with a checkpoint" in capsys.readouterr().err
