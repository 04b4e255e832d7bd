"""``benchmarks.memory`` on a tiny model: its rows are perplexities, and a run goes on where it stopped."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from statistics import fmean

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks import memory
from benchmarks.memory_checkpoints import options_of
from hf_rfa.convert import convert
from hf_rfa.errors import InputError
from hf_rfa.evaluation.recall import window_and_sinks
from tests.families import save_softmax_model


def test_rows_are_perplexities_and_are_not_measured_twice(tmp_path, monkeypatch, capsys):
    save_softmax_model("gpt2", tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{4 + (7 * n * n + n // 9) % 53}" for n in range(480)))
    convert(tmp_path / "model", tmp_path / "rfa", search=True, memory=12, calibrate_on=text)
    words = [tmp_path / "model", text, "--checkpoints", tmp_path / "rfa", "--tokens", 200, "--contexts", 40, 50]
    monkeypatch.setattr(sys, "argv", ["memory", *map(str, words), "--output", str(tmp_path / "out")])
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
    words = [tmp_path / "model", text, "--train", text, "--rows", "4+2", "3+2+2", "--recipe", recipe]
    words += ["--tokens", 200, "--contexts", 40, "--output", tmp_path / "out", "--seed", 3]
    monkeypatch.setattr(sys, "argv", ["memory", *map(str, words)])
    memory.main()
    rows = json.loads((tmp_path / "out" / "memory.json").read_text())
    found = {(row["kind"], row["name"]): row for row in rows}
    assert found.keys() >= {
        ("softmax", "softmax"),
        ("window and sinks", "4+2"),
        ("window and sinks, trained", "4+2 trained"),
        ("converted", "3+2+2"),
        ("converted, trained", "3+2+2 trained"),
    }
    for kind, name in (("window and sinks", "4+2"), ("converted", "3+2+2")):
        assert found[kind, name]["perplexity"] != found[memory.TRAINED[kind], f"{name} trained"]["perplexity"]
        report = json.loads((tmp_path / "out" / "checkpoints" / f"{name} trained" / "distillation.json").read_text())
        assert report["recipe"]["seed"] == 3
        losses = [entry["loss"] for entry in report["stages"][0]["log"] if "loss" in entry]
        assert len(losses) == 30
        assert fmean(losses[-8:]) < 0.8 * fmean(losses[:8])  # the divergence from the teacher
    assert AutoConfig.from_pretrained(tmp_path / "out" / "checkpoints" / "3+2+2").feature_seed == 3
    assert found["converted", "3+2+2"]["worth"] > found["window and sinks", "4+2"]["worth"]

    recipe.write_text(recipe.read_text().replace("kl_weight", "repeating_share: 0.25, kl_weight"))
    with pytest.raises(InputError, match=r"4\+2 trained was trained with repeating_share 0.0, and 0.25 is asked for"):
        memory.main()


def test_a_recipe_that_the_model_is_too_short_for_is_refused_first(tmp_path, monkeypatch):
    save_softmax_model("gpt2", tmp_path / "model")
    (tmp_path / "text.txt").write_text(" ".join(f"w{4 + n * n % 53}" for n in range(360)))
    words = [tmp_path / "model", tmp_path / "text.txt", "--train", tmp_path / "text.txt", "--rows", "4+2"]
    words += [
        "--recipe",
        Path(memory.__file__).parent / "recipes" / "memory-repeating.yaml",
        "--tokens",
        200,
        "--output",
        tmp_path / "out",
    ]
    monkeypatch.setattr(sys, "argv", ["memory", *map(str, words)])
    with pytest.raises(InputError, match=r"end_to_end.block_length is 2048, but the models have \d+ positions"):
        memory.main()
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_a_control_of_the_same_size_is_enough(tmp_path):
    save_softmax_model("gpt2", tmp_path / "model")
    parent = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    checkpoints = []
    for name, slots in (("a", 6), ("b", 7), ("c", 6)):
        options = {"preset": "exact", "window_size": 5, "num_sinks": 1, "num_slots": slots}
        convert(tmp_path / "model", tmp_path / name, **options)
        checkpoints.append(tmp_path / name)

    def controls(*known: int) -> list[str]:
        found = memory.models(parent, checkpoints, 96, set(known))
        return [name for kind, name, *_ in found if kind == memory.CONTROL]

    sizes = [int(name.split("+")[0]) + memory.SINKS for name in controls()]
    assert len(sizes) == 2
    assert sizes[1] == sizes[0] + 1
    assert controls(sizes[1]) == []
    assert controls(sizes[0]) == [f"{sizes[1] - memory.SINKS}+{memory.SINKS}"]


def test_rows_with_retrieval_heads_are_a_kind_of_their_own(tmp_path):
    save_softmax_model("gpt2", tmp_path / "model")
    parent = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    plain = {"preset": "exact", "window_size": 5, "num_sinks": 1, "num_slots": 3}
    heads = {"retrieval_heads": [[0, 1], [1, 0]], "retrieval_window": 9}
    kinds = {memory.CONVERTED: {}, memory.RETRIEVAL: heads}
    for kind, options in kinds.items():
        convert(tmp_path / "model", tmp_path / kind, **plain, **options)
    found = memory.models(parent, [tmp_path / each for each in kinds], 96, set())
    assert {name: kind for kind, name, *_ in found if kind not in (memory.SOFTMAX, memory.CONTROL)} == (
        {kind: kind for kind in kinds}
    )


def test_the_best_row_of_a_kind_and_size_is_drawn():
    figures = [
        ("a", 63.4, 20.0, 8),
        ("a", 64.0, 19.0, 8),
        ("a", 255.0, 12.0, 8),
        ("b", 65.0, 30.0, 8),
        ("a", 64.0, 5.0, 9),
    ]
    rows = [dict(zip(("kind", "worth", "perplexity", "context"), row, strict=True)) for row in figures]
    rows.append({"kind": memory.SOFTMAX, "worth": None, "perplexity": 10.0, "context": 8})
    assert memory.best_rows(rows, 8) == {"a": {64: rows[1], 256: rows[2]}, "b": {64: rows[3]}}


def test_rows_name_options():
    assert options_of("64") == {"memory": 64, "search": True}
    plain = {"preset": "exact", "window_size": 60, "num_sinks": 4, "num_slots": 0}
    assert options_of("60+4") == plain
    assert options_of("60+4+9") == plain | {"num_slots": 9}
    heads = {"retrieval_heads": 3, "retrieval_window": 50}
    assert options_of("60+4r3x50") == plain | heads
    assert options_of("60+4+9r3x50") == plain | heads | {"num_slots": 9}


@pytest.mark.parametrize("row", ["w4", "1+2+3+4", "", "64r3x5", "60+4r3", "60+4r3x0", "60+4r3x5g2"])
def test_rows_that_name_nothing_are_refused(row):
    with pytest.raises(InputError, match="a row is a memory in tokens such as 64"):
        options_of(row)
