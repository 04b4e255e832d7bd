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
from hf_rfa.recall import window_and_sinks

from .families import save_softmax_model


def test_rows_are_perplexities_and_are_not_measured_twice(tmp_path, monkeypatch, capsys):
    save_softmax_model("gpt2", tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and the dog ate the cat . " * 40)
    convert(tmp_path / "model", tmp_path / "rfa", memory=12, calibrate_on=text)
    words = [tmp_path / "model", text, tmp_path / "rfa", "--tokens", 200, "--contexts", 40, 50]
    monkeypatch.setattr(sys, "argv", ["memory", *map(str, words), "--output", str(tmp_path / "out")])
    memory.main()
    rows = json.loads((tmp_path / "out" / "memory.json").read_text())
    assert [row["kind"] for row in rows] == ["softmax"] * 2 + ["converted"] * 2 + ["window and sinks"] * 2
    assert (tmp_path / "out" / "memory.png").stat().st_size > 10_000
    assert "| softmax | all | " in capsys.readouterr().out

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = torch.tensor([*tokenizer(text.read_text())["input_ids"], tokenizer.eos_token_id][:200]).view(-1, 40)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    with window_and_sinks(model, 8, 4), torch.no_grad():
        loss = torch.stack([model(row[None], labels=row[None]).loss for row in ids]).mean()
    expected = {row["name"]: row["perplexity"] for row in rows if row["context"] == 40}
    assert expected["window 8 + 4 sinks"] == pytest.approx(math.exp(loss), rel=1e-5)

    monkeypatch.setattr(memory, "score", lambda *args: pytest.fail("measured again"))
    memory.main()
    assert json.loads((tmp_path / "out" / "memory.json").read_text()) == rows
