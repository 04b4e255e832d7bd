"""Model cards describe their weights after each kind of training, and load them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from transformers import GPT2ForSequenceClassification

from hf_rfa import RFABartForConditionalGeneration, RFAGPT2ForSequenceClassification, RFAGPT2LMHeadModel
from hf_rfa.convert import convert
from hf_rfa.convert.card import UNTRAINED
from hf_rfa.evaluation.cards import record_result
from hf_rfa.finetune.distill import distill
from hf_rfa.finetune.recipe import Recipe, Stage
from tests.conftest import copy_of
from tests.training import run

RECIPE = Recipe(
    transfer=Stage(steps=2, block_length=16, batch_size=2, learning_rate=0.03),
    end_to_end=Stage(steps=3, block_length=16, batch_size=2, learning_rate=0.002, rfa_learning_rate=0.004),
)


def card_of(folder: Path, cls: type, monkeypatch) -> ModelCard:
    """Return a card, which names its own folder, loads the model there both ways, and shows pictures that are there."""
    card = ModelCard.load(folder / "README.md")
    assert card.text.strip().startswith(f"# {folder.name}\n")
    with monkeypatch.context() as patch:
        patch.chdir(folder.parent)
        (code,) = re.findall(r"(?ms)^```python\n(.*?)^```$", card.text)
        names: dict = {}
        exec(code, names)
        assert type(names["model"]) is cls
        others = re.findall(r"`(Auto\w+\.from_pretrained\(.*trust_remote_code=True\))`", card.text)
        assert len(others) == cls.__name__.startswith("RFA"), "a softmax model has no code of its own"
        assert all(type(eval(other, names)) is cls for other in others)
    assert all((folder / name).is_file() for name in re.findall(r"!\[.*?\]\((.*?)\)", card.text))
    assert (card.data.license, card.data["license_name"], card.data["license_link"]) == ("other", "tiny", "LICENSE.md")
    return card


def test_the_card_of_a_conversion(material, monkeypatch):
    card = card_of(material / "gpt2-rfa", RFAGPT2LMHeadModel, monkeypatch)
    assert UNTRAINED in card.text
    assert (card.data.language, card.data.base_model) == (["en"], None), "a folder is no name on the hub"


SLOTS = "Every converted layer keeps, per head: 4 sinks, 31 recent and 28 important tokens; no random features."
MIXED = "4 sinks, 14 recent and 14 important tokens; 64 random features (positive)"
HEADS = {"retrieval_heads": [[0, 1], [1, 0]], "retrieval_window": 50}


@pytest.mark.parametrize(
    ("family", "options", "kept"),
    [
        ("llama", {}, SLOTS),
        ("llama", {"preset": "mixed", "feature_map": "positive"}, f"{MIXED}. Features sum up"),
        ("gpt2", {"preset": "exact", "num_slots": 0, "num_sinks": 0}, ": 31 recent tokens; no random features."),
        ("gpt2", {"preset": "rfa", "gate": True}, "128 random features (positive, gated), no exact tokens."),
        ("gpt2", {"preset": "rfa", "feature_map": "elu", "window_size": 9}, ": 9 recent tokens; 8 features (elu)."),
        ("gpt2", HEADS, f"{MIXED}; in retrieval heads, 2 in all, 4 sinks and 50 recent tokens."),
        ("bart", {"cross_layers": "all"}, f"causal: {MIXED}; cross: 256 random features (positive). Features"),
    ],
    ids=str,
)
def test_the_card_says_what_is_kept(family, options, kept, checkpoints, tmp_path):
    report = convert(checkpoints[family], tmp_path / "out", **options)
    card = ModelCard.load(tmp_path / "out" / "README.md")
    text = " ".join(card.text.split())
    assert kept in text
    assert f"| every layer keeps, per head | {report.keeps} |" in card.text
    features = "no random features" not in kept
    assert ("random-feature-attention" in card.data.tags) == features
    assert ("Hao Peng" in text) == ("Peng et al. 2021" in text) == features
    assert ("Attention Sinks" in text) == ("sinks" in report.keeps)
    costs = card.text.partition("## What it costs\n")[2].partition("\n## ")[0]
    assert f"{report.state_tokens:,.0f} tokens of the base model's cache" in costs
    assert "**Recall**" in costs
    assert ("is forgotten." in costs) == ("no random features" in kept)
    assert "**Quality**" not in costs, "there was no text to measure on"
    assert ("the same time and memory at any length." in text) == (report.source_bytes == 0)


@pytest.mark.parametrize(
    ("model", "task", "cls", "hub_task"),
    [
        ("gpt2-rfa", "classify", RFAGPT2ForSequenceClassification, "text-classification"),
        ("bart-rfa", "seq2seq", RFABartForConditionalGeneration, "translation"),
    ],
)
def test_the_card_of_a_fine_tuned_model(model, task, cls, hub_task, material, tmp_path, monkeypatch):
    model = copy_of(material / model, tmp_path / model)
    record_result(model, task="perplexity", data="seen.txt", scores={"perplexity": 7.77}, protocol="once")
    options = {"learning_rate": 0.005, "feature_map_rate": 0.0, "evaluate": "rows.jsonl"}
    metrics = run(material, tmp_path, model, task, steps=3, **options)
    card = card_of(tmp_path / "out", cls, monkeypatch)
    assert card.data.pipeline_tag == hub_task
    assert UNTRAINED not in card.text
    assert "untouched" not in card.text
    assert re.search(r"\*\*Training\*\*: fine-tuned on rows\.jsonl \(.*, 3 steps\)", card.text)
    for row in ("| steps | 3 |", "| learning rate | 0.005, feature maps frozen |", "| rows per step | 4 |"):
        assert row in card.text
    assert f"| eval_loss | {metrics['eval_loss']:.4f} |" in card.text
    assert "hf-rfa convert" in card.text, "how it was converted"
    assert "7.77" not in card.content, "a figure of other weights"
    assert card.data.eval_results is None


def test_the_card_of_a_distilled_and_then_fine_tuned_model(material, tmp_path, monkeypatch):
    options = {"teacher": material / "gpt2", "data": material / "text.txt", "recipe": RECIPE}
    distill(material / "gpt2-rfa", tmp_path / "moved", **options, end_to_end_steps=0)
    text = card_of(tmp_path / "moved", RFAGPT2LMHeadModel, monkeypatch).text
    assert UNTRAINED not in text
    assert re.search(
        r"distilled on text\.txt: feature maps and gates learned .* 2 steps.*All other weights were left", text
    )
    assert re.search(r"attention transfer, 2 steps .*learning rate 0\.03", text)
    assert "end to end" not in text
    distill(tmp_path / "moved", tmp_path / "distilled", **options, transfer_steps=0)
    run(material, tmp_path, tmp_path / "distilled", steps=1)
    run(material, tmp_path / "again", tmp_path / "out", steps=2)
    text = card_of(tmp_path / "again" / "out", RFAGPT2LMHeadModel, monkeypatch).text
    (summary,) = re.findall(r"(?m)^\*\*Training\*\*: .*$", text)
    assert re.search(
        "attention transfer.*Then distilled .*end to end, 3 steps.*, 1 steps.*Then fine-tuned.*, 2 steps", summary
    )
    assert re.search(r"end to end, 3 steps .*learning rate 0\.002, of feature maps and gates 0\.004", text)
    assert text.count("## How it was fine-tuned") == 2


def test_the_cards_of_softmax_and_new_models(material, tmp_path, monkeypatch):
    run(material, tmp_path, "gpt2", "classify", steps=1)
    card = card_of(tmp_path / "out", GPT2ForSequenceClassification, monkeypatch)
    assert "made from gpt2" in card.text
    assert "The parent" not in card.text
    assert "hf_rfa" not in card.text
    new = {
        "model_type": "rfa_gpt2",
        "tokenizer": str(material / "gpt2"),
        "config_overrides": {"n_layer": 1, "n_embd": 12},
    }
    run(material, tmp_path / "new", None, steps=1, **new)
    card = ModelCard.load(tmp_path / "new" / "out" / "README.md")
    assert "trained from scratch on rows.jsonl" in card.text
    assert "hf-rfa convert" not in card.text
    assert not (tmp_path / "new" / "out" / "conversion.json").exists()
