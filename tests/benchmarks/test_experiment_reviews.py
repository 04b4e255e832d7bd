"""`benchmarks.experiments.reviews`: what the rows start from, and accuracy counted by hand."""

from __future__ import annotations

import gzip
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.experiments import language, reviews
from hf_rfa.evaluation.memory import cache_memory
from hf_rfa.finetune.recipe import load_settings
from tests.conftest import words
from tests.families import save_softmax_model


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> tuple[list[dict], dict]:
    """A tiny GPT-2, and 60 reviews of 90 tokens or more: the reviews, and a recipe's settings."""
    folder = tmp_path_factory.mktemp("reviews")
    save_softmax_model("gpt2", folder / "base")
    rows = [{"text": words(90 + row, 7 * row), "label": row % 2} for row in range(60)]
    for name in language.FILES.values():
        with gzip.open(folder / name, "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    options = {"model": str(folder / "base"), **reviews.prepare(folder, folder)}
    return rows, load_settings("reviews", small=True) | options


def test_reviews_start_from_the_same_model_and_are_counted_one_by_one(material, tmp_path, monkeypatch):
    rows, recipe = material
    monkeypatch.setattr(reviews, "TRANSFER_STEPS", 2)
    settings = {kind: reviews.settings(f"{kind}, 128", recipe, tmp_path / "work", 0) for kind in reviews.KINDS}
    assert all(of_kind["block_length"] == 128 for of_kind in settings.values())
    models = {kind: AutoModelForCausalLM.from_pretrained(of_kind["model"]) for kind, of_kind in settings.items()}
    parameters = {kind: dict(model.named_parameters()) for kind, model in models.items()}
    assert "sigma_rate" not in settings[reviews.SOFTMAX]
    assert parameters[reviews.SOFTMAX]["transformer.wpe.weight"].shape[0] == 128  # of 96
    softmax_memory = cache_memory(models[reviews.SOFTMAX])
    for kind in {*reviews.KINDS} - {reviews.SOFTMAX}:
        for name, tensor in parameters[reviews.SOFTMAX].items():
            assert torch.equal(tensor, parameters[kind][name])
        assert models[kind].config.model_type == "rfa_gpt2"
    for kind in reviews.CONVERSIONS:
        memory = cache_memory(models[kind]).worth(softmax_memory, 1024)
        assert memory == pytest.approx(64, rel=0.13), "or 72: heads are 8 wide"
        assert ("sigma_rate" in settings[kind]) == any("sigma" in name for name in parameters[kind])

    folder = tmp_path / "trained"
    tokenizer = AutoTokenizer.from_pretrained(settings[reviews.CONVERTED]["model"])
    padding = {"pad_token_id": tokenizer.pad_token_id}  # as fine-tuning sets it
    model = AutoModelForSequenceClassification.from_pretrained(settings[reviews.CONVERTED]["model"], **padding).eval()
    tokenizer.save_pretrained(folder)
    (folder / "finetuning.json").write_text(json.dumps({"settings": {"block_length": 100}}))
    model.config.id2label = {0: "0", 1: "1"}
    model.save_pretrained(folder)
    cut = {"truncation": True, "max_length": 100}
    answers = [int(model(torch.tensor([tokenizer(row["text"], **cut)["input_ids"]])).logits.argmax()) for row in rows]
    right = sum(answer == row["label"] for answer, row in zip(answers, rows, strict=True))
    assert reviews.measure(folder, recipe)["right"] == right / len(rows)
    assert reviews.chance(recipe) == {"right": 0.5}


@pytest.mark.parametrize(
    ("context", "accelerator", "pieces"),
    [(256, False, (8, 1)), (300, False, (2, 4)), (4096, True, (4, 2))],
)
def test_long_reviews_are_trained_in_pieces_of_a_step(context, accelerator, pieces, material, tmp_path, monkeypatch):
    monkeypatch.setattr(reviews, "find_device", lambda name: torch.device("cuda" if accelerator else "cpu"))
    settings = reviews.settings(f"{reviews.SOFTMAX}, {context}", material[1], tmp_path / "work", 0)
    assert (settings["per_device_train_batch_size"], settings["gradient_accumulation_steps"]) == pieces
