"""``benchmarks.long_generation`` on tiny models: its figures against a loop, and that a run goes on where it stopped."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import long_generation
from hf_rfa.convert import convert
from tests.families import save_softmax_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generation")
    save_softmax_model("gpt2", folder / "model", config={"initializer_range": 0.5})
    (folder / "text.txt").write_text(" ".join(f"w{4 + (7 * n * n + n) % 53}" for n in range(200)))
    for window in (6, 9):
        convert(
            folder / "model", folder / f"window-{window}", preset="exact", window_size=window, num_sinks=1, num_slots=0
        )
    return folder


def test_what_is_written_is_scored_by_stretches(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    ids = torch.randint(4, 60, (2, 5 + 23))
    found = long_generation.parent_nats(model, ids, 5, 7)
    expected = []
    with torch.no_grad():
        for first in (5, 12, 19):
            seen = ids[:, max(0, first - 7) : first + 7]
            nats = -model(seen).logits.double().log_softmax(-1)
            each = [
                nats[:, place - 1].gather(1, seen[:, place, None]) for place in range(seen.shape[1] - 7, seen.shape[1])
            ]
            expected.append(float(torch.stack(each).mean()))
    assert found == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_a_text_is_read_on_as_one_forward_would(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "window-6").eval()
    before, last, texts = torch.randint(4, 60, (2, 18)).split((7, 1, 10), 1)
    cache = model(before, use_cache=True).past_key_values
    found = long_generation.read_on(model, cache, last, texts)
    nats = -model(torch.cat([before, last, texts], 1)).logits.double().log_softmax(-1)
    assert found == pytest.approx(float(nats[:, 8:-1].gather(2, texts[:, 1:, None]).mean()), rel=1e-5)


def test_checkpoints_are_compared_and_not_done_twice(folder, tmp_path, monkeypatch, capsys):
    sizes = ["--rows", "3", "--prompt-tokens", "6", "--new-tokens", "40", "--stretch", "10"]
    words = [folder / "model", folder / "text.txt", *sizes, "--output", tmp_path, "--checkpoints", folder / "window-6"]
    monkeypatch.setattr(sys, "argv", ["long_generation", *map(str, words)])
    long_generation.main()
    first = json.loads((tmp_path / "generation.json").read_text())
    assert [row["name"] for row in first] == ["window-6"]
    assert len(first[0]["nats"]) == len(first[0]["again"]) == 4
    assert first[0]["worth"] == pytest.approx(7 * (16 + 2) / 16)  # with what says where each is

    monkeypatch.setattr(sys, "argv", [*sys.argv, str(folder / "window-9")])
    monkeypatch.setenv("COLUMNS", "20")  # lines of a Markdown table are not broken
    long_generation.main()
    rows = json.loads((tmp_path / "generation.json").read_text())
    assert rows[0] == first[0]
    assert [row["name"] for row in rows] == ["window-6", "window-9"]
    assert (tmp_path / "generation.png").stat().st_size > 10_000
    out = capsys.readouterr().out
    assert "| window-9 | 11.2" in out
    assert long_generation.table(rows) in out

    monkeypatch.setattr(sys, "argv", [*sys.argv[:-1], str(folder / "window-6"), "--rows", "30"])
    with pytest.raises(SystemExit):
        long_generation.main()
    assert "30 prompts and texts of 16 tokens are needed" in capsys.readouterr().err
