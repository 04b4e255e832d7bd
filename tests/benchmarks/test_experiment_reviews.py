"""`benchmarks.experiments.reviews`: what the rows start from, also after an interruption, and accuracy counted by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.experiments import language, reviews
from hf_rfa.evaluation.recall.memory import cache_memory
from hf_rfa.finetune.recipe import load_settings
from hf_rfa.finetune.trainers import AttentionTransferTrainer
from tests.families import save_softmax_model
from tests.training import assert_same, interrupted, weights


def material(folder: Path) -> tuple[list[dict], dict]:
    """Write a tiny GPT-2 and 60 reviews of 90 tokens or more; return the reviews, and a recipe's settings."""
    save_softmax_model("gpt2", folder / "base")
    rows = [
        {"text": " ".join(f"w{4 + (n * n + 7 * row) % 53}" for n in range(90 + row)), "label": row % 2}
        for row in range(60)
    ]
    for name in language.FILES.values():
        with gzip.open(folder / name, "wt") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
    options = {"model": str(folder / "base"), **reviews.prepare(folder, folder)}
    return rows, load_settings("reviews", small=True) | options


def test_reviews_start_from_the_same_model_and_are_counted_one_by_one(tmp_path):
    rows, recipe = material(tmp_path)
    found = {
        kind: reviews.settings(f"{kind}, 128", recipe, tmp_path / "work", 0)
        for kind in reviews.COLORS
        if kind != reviews.TRANSFERRED
    }
    assert all(each["block_length"] == 128 for each in found.values())
    assert "sigma_rate" not in found[reviews.SOFTMAX]
    models = {kind: AutoModelForCausalLM.from_pretrained(each["model"]) for kind, each in found.items()}
    kept = {kind: dict(model.named_parameters()) for kind, model in models.items()}
    assert kept[reviews.SOFTMAX]["transformer.wpe.weight"].shape[0] == 128  # of 96
    own = cache_memory(models[reviews.SOFTMAX])
    for kind in reviews.CONVERSIONS:
        for name, tensor in kept[reviews.SOFTMAX].items():
            assert torch.equal(tensor, kept[kind][name])
        assert models[kind].config.model_type == "rfa_gpt2"
        assert cache_memory(models[kind]).worth(own, 1024) == pytest.approx(64, rel=0.13), "or 72: heads are 8 wide"
        assert ("sigma_rate" in found[kind]) == any("sigma" in name for name in kept[kind])

    folder = tmp_path / "trained"
    tokenizer = AutoTokenizer.from_pretrained(found[reviews.CONVERTED]["model"])
    padding = {"pad_token_id": tokenizer.pad_token_id}  # as fine-tuning sets it
    model = AutoModelForSequenceClassification.from_pretrained(found[reviews.CONVERTED]["model"], **padding).eval()
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
    [(256, False, (8, 1)), (300, False, (2, 4)), (1024, False, (2, 4)), (4096, False, (1, 8)), (4096, True, (4, 2))],
)
def test_long_reviews_are_trained_in_pieces_of_a_step(context, accelerator, pieces, tmp_path, monkeypatch):
    _, recipe = material(tmp_path)
    monkeypatch.setattr(reviews, "find_device", lambda name: torch.device("cuda" if accelerator else "cpu"))
    found = reviews.settings(f"{reviews.SOFTMAX}, {context}", recipe, tmp_path / "work", 0)
    assert (found["per_device_train_batch_size"], found["gradient_accumulation_steps"]) == pieces


def test_an_interrupted_transfer_goes_on_to_the_same_weights(tmp_path, monkeypatch):
    _, recipe = material(tmp_path)
    monkeypatch.setattr(reviews, "TRANSFER_STEPS", 10)
    row = f"{reviews.TRANSFERRED}, 96"
    whole = reviews.settings(row, recipe, tmp_path / "whole", 1)["model"]
    with interrupted(monkeypatch, AttentionTransferTrainer, "compute_loss", after=7):
        reviews.settings(row, recipe, tmp_path / "stopped", 1)
    step, taken = AttentionTransferTrainer.training_step, []
    with monkeypatch.context() as patch:
        patch.setattr(reviews, "convert", None)  # which is done
        patch.setattr(AttentionTransferTrainer, "training_step", lambda *given: taken.append(given) or step(*given))
        stopped = reviews.settings(row, recipe, tmp_path / "stopped", 1)["model"]
    assert len(taken) == 10 - 6, "of 10 steps, checkpoints at every second, stopped in the eighth"
    found, first = weights(Path(stopped)), weights(Path(f"{whole}, untrained"))
    assert any(not torch.equal(tensor, first[name]) for name, tensor in found.items())
    assert_same(found, weights(Path(whole)), atol=1e-6, rtol=1e-5)
