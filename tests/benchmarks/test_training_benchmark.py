"""``benchmarks.training`` on a tiny model: each row is a training of its own, measured as by hand."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import training
from hf_rfa.convert import convert
from hf_rfa.errors import InputError
from hf_rfa.finetune.recipe import Recipe
from tests.conftest import leftovers, words
from tests.families import save_softmax_model


def test_settings_are_compared_from_one_checkpoint(tmp_path, monkeypatch, capsys):
    save_softmax_model("gpt2", tmp_path / "model", config={"initializer_range": 0.5})
    text = tmp_path / "text.txt"
    text.write_text(words(720))
    convert(tmp_path / "model", tmp_path / "rfa", preset="exact", window_size=3, num_sinks=2, num_slots=0)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("end_to_end: {steps: 4, batch_size: 4, block_length: 16, learning_rate: 0.001, kl_weight: 1.0}")
    options = [tmp_path / "rfa", text, "--teacher", tmp_path / "model", "--train", text, "--recipe", recipe]
    options += ["--tokens", 200, "--contexts", 40, "--output", tmp_path / "out", "--seeds", 0, 1]
    monkeypatch.setattr(sys, "argv", ["training", *map(str, options), "--try", "", "learning_rate=1e-9", "steps=2"])
    training.main()
    rows = json.loads((tmp_path / "out" / "training.json").read_text())
    trained = [name for name in ("the recipe as it is", "learning_rate=1e-9", "steps=2") for _ in "01"]
    assert [row["name"] for row in rows] == ["softmax", "untrained", *trained]
    perplexities = {(row["name"], row.get("seed")): row["perplexity"]["40"] for row in rows}
    untrained = perplexities["untrained", None]
    assert perplexities["learning_rate=1e-9", 0] == pytest.approx(untrained, rel=1e-4)
    assert abs(perplexities["the recipe as it is", 0] - untrained) > 1e-3 * untrained
    assert perplexities["the recipe as it is", 0] != perplexities["the recipe as it is", 1]
    assert (rows[-1]["recipe"]["steps"], rows[-1]["recipe"]["kl_weight"]) == (2, 1.0)
    assert leftovers(tmp_path / "out") == ["training.json"]

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = torch.tensor([*tokenizer(text.read_text())["input_ids"], tokenizer.eos_token_id][:200]).view(-1, 40)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "rfa").eval()
    with torch.no_grad():
        assert untrained == pytest.approx(math.exp(model(ids, labels=ids).loss), rel=1e-5)

    out = capsys.readouterr().out
    assert training.table(rows, [40]) in out
    monkeypatch.setattr(training, "measure", lambda *args: pytest.fail("measured again"))
    training.main()


@pytest.mark.parametrize("words", ["learning_rate", "rate=3", "kl_weight=2", "steps=a"])
def test_wrong_settings_are_refused(words):
    with pytest.raises(InputError):
        training.recipe_of(Recipe(), words, 0)


def test_rows_of_several_seeds_have_a_mean_and_a_spread():
    row = {"checkpoint": "a", "name": "b", "repeated_right": 0.5, "repeated_nats": 1.0, "seconds": 60}
    rows = [{**row, "perplexity": {"40": perplexity}} for perplexity in (3.0, 5.0)]
    assert "| a | b | 4.00 (3.00 to 5.00) | 50.0 (1.00) | 1.0 |" in training.table(rows, [40])
