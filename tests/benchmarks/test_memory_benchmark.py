"""``benchmarks.memory`` on a tiny model: its rows are perplexities, and a run goes on where it stopped."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import memory
from hf_rfa.convert import convert
from hf_rfa.evaluation.recall import window_and_sinks
from tests.conftest import words
from tests.families import save_softmax_model


def test_rows_are_perplexities_and_are_not_measured_twice(tmp_path, monkeypatch, capsys):
    save_softmax_model("gpt2", tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text(words(480))
    convert(tmp_path / "model", tmp_path / "rfa", memory=12, calibrate_on=text)
    options = [tmp_path / "model", text, "--checkpoints", tmp_path / "rfa", "--tokens", 200, "--contexts", 40, 50]
    monkeypatch.setattr(sys, "argv", ["memory", *map(str, options), "--output", str(tmp_path / "out")])
    monkeypatch.setenv("COLUMNS", "20")  # lines of a Markdown table are not broken
    memory.main()
    rows = json.loads((tmp_path / "out" / "memory.json").read_text())
    assert [row["kind"] for row in rows] == ["softmax"] * 2 + ["converted"] * 2 + ["window and sinks"] * 2
    out = capsys.readouterr().out
    assert "| softmax | all | " in out
    assert memory.table(rows) in out

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = torch.tensor([*tokenizer(text.read_text())["input_ids"], tokenizer.eos_token_id][:200]).view(-1, 40)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    size = round(rows[2]["worth"])  # of the converted checkpoint
    assert rows[4]["worth"] == size in (11, 12)
    with window_and_sinks(model, size - 4, 4), torch.no_grad():
        loss = torch.stack([model(row[None], labels=row[None]).loss for row in ids]).mean()
    expected = {row["name"]: row["perplexity"] for row in rows if row["context"] == 40}
    assert expected[f"{size - 4}+4"] == pytest.approx(math.exp(loss), rel=1e-5)

    monkeypatch.setattr(memory, "perplexity", lambda *args, **options: pytest.fail("measured again"))
    memory.main()
    assert json.loads((tmp_path / "out" / "memory.json").read_text()) == rows
