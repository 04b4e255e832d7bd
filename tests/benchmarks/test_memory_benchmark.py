"""``benchmarks.memory`` on a tiny model: its rows are perplexities, and a run goes on where it stopped."""

from __future__ import annotations

import json
import math
import sys
from statistics import fmean

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks import memory
from benchmarks.memory_checkpoints import options_of
from hf_rfa.convert import convert
from hf_rfa.errors import InputError
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
    assert (tmp_path / "out" / "memory.png").stat().st_size > 10_000
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

    monkeypatch.setattr(memory, "score", lambda *args: pytest.fail("measured again"))
    memory.main()
    assert json.loads((tmp_path / "out" / "memory.json").read_text()) == rows


def test_rows_are_made_trained_and_measured(tmp_path, monkeypatch):
    save_softmax_model("gpt2", tmp_path / "model", config={"initializer_range": 0.5})
    text = tmp_path / "text.txt"
    text.write_text("w4 w9 w31 w7 w52 w9 w4 w18 w40 w9 w33 w25 " * 60)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("end_to_end: {steps: 30, batch_size: 4, block_length: 16, learning_rate: 0.001, kl_weight: 1.0}")
    options = [tmp_path / "model", text, "--train", text, "--rows", "4+2", "3+2+2", "--recipe", recipe]
    options += ["--tokens", 200, "--contexts", 40, "--output", tmp_path / "out", "--seed", 3]
    monkeypatch.setattr(sys, "argv", ["memory", *map(str, options)])
    memory.main()
    rows = json.loads((tmp_path / "out" / "memory.json").read_text())
    row_of = {(row["kind"], row["name"]): row for row in rows}
    assert ("softmax", "softmax") in row_of
    for kind, name in (("window and sinks", "4+2"), ("converted", "3+2+2")):
        assert row_of[kind, name]["perplexity"] != row_of[f"{kind}, trained", f"{name} trained"]["perplexity"]
        report = json.loads((tmp_path / "out" / "checkpoints" / f"{name} trained" / "distillation.json").read_text())
        assert report["recipe"]["seed"] == 3
        losses = [entry["loss"] for entry in report["stages"][0]["log"] if "loss" in entry]
        assert len(losses) == 30
        assert fmean(losses[-8:]) < 0.8 * fmean(losses[:8])  # the divergence from the teacher
    assert AutoConfig.from_pretrained(tmp_path / "out" / "checkpoints" / "3+2+2").feature_seed == 3
    assert row_of["converted", "3+2+2"]["worth"] > row_of["window and sinks", "4+2"]["worth"]

    recipe.write_text(recipe.read_text().replace("kl_weight", "repeating_share: 0.25, kl_weight"))
    with pytest.raises(InputError, match=r"4\+2 trained was trained with repeating_share 0.0, and 0.25 is asked for"):
        memory.main()


def test_rows_of_models_have_a_kind_and_one_control_of_each_size(tmp_path):
    save_softmax_model("gpt2", tmp_path / "model")
    parent = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    heads = {"num_slots": 0, "retrieval_heads": [[0, 1], [1, 0]], "retrieval_window": 9}
    for name, options in {"a": {"num_slots": 6}, "b": {"num_slots": 7}, "c": {"num_slots": 6}, "heads": heads}.items():
        convert(tmp_path / "model", tmp_path / name, preset="exact", window_size=5, num_sinks=1, **options)

    def kinds(*names: str, controls: tuple[int, ...] = ()) -> list[tuple[str, str]]:
        rows = memory.models(parent, [tmp_path / name for name in names], 96, set(controls))
        return [(name, kind) for kind, name, *_ in rows]

    def sizes_of_controls(*known: int) -> list[int]:
        names = [name for name, kind in kinds("a", "b", "c", controls=known) if kind == memory.CONTROL]
        return [int(name.removesuffix(f"+{memory.SINKS}")) + memory.SINKS for name in names]

    smaller, larger = sizes_of_controls()
    assert larger == smaller + 1
    assert sizes_of_controls(larger) == []
    assert sizes_of_controls(smaller) == [larger]
    assert {("a", memory.CONVERTED), ("heads", memory.RETRIEVAL)} < set(kinds("a", "heads"))


def test_the_best_row_of_a_kind_and_size_is_drawn():
    figures = [("a", 63.4, 20.0, 8), ("a", 64.0, 19.0, 8), ("a", 255.0, 12.0, 8), ("b", 65.0, 30.0, 8)]
    figures.append(("a", 64.0, 5.0, 9))
    rows = [dict(zip(("kind", "worth", "perplexity", "context"), row, strict=True)) for row in figures]
    rows.append({"kind": memory.SOFTMAX, "worth": None, "perplexity": 10.0, "context": 8})
    assert memory.best_rows(rows, 8) == {"a": {64: rows[1], 256: rows[2]}, "b": {64: rows[3]}}


WINDOW = {"preset": "exact", "window_size": 60, "num_sinks": 4, "num_slots": 0}
RETRIEVAL = {"retrieval_heads": 3, "retrieval_window": 50}


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ("64", {"memory": 64}),
        ("60+4", WINDOW),
        ("60+4+9", WINDOW | {"num_slots": 9}),
        ("60+4r3x50", WINDOW | RETRIEVAL),
        ("60+4+9r3x50", WINDOW | RETRIEVAL | {"num_slots": 9}),
    ],
)
def test_rows_name_options(row, options):
    assert options_of(row) == options


@pytest.mark.parametrize("row", ["w4", "1+2+3+4", "", "64r3x5", "60+4r3", "60+4r3x0", "60+4r3x5g2"])
def test_rows_that_name_nothing_are_refused(row):
    with pytest.raises(InputError, match="a row is a memory in tokens such as 64"):
        options_of(row)
