"""`benchmarks.experiments`: rows that differ in their attention alone, measured as by hand, and tables of the page."""

from __future__ import annotations

import gzip
import json
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.experiments import __main__ as experiments
from benchmarks.experiments import experiment, images, language, listops, reviews, rows, speech
from hf_rfa.errors import InputError
from hf_rfa.evaluation import perplexity
from hf_rfa.evaluation.memory import cache_memory
from hf_rfa.finetune.recipe import load_settings
from hf_rfa.io.text_io import read_documents, tokenize
from hf_rfa_cli import main as cli
from tests.conftest import ROOT, save_tiny_tokenizer, words
from tests.families import make_gpt2, save_softmax_model

TINY = {"config_overrides": json.dumps({"n_layer": 1, "n_embd": 16, "n_head": 2, "num_features": 8})}
TINY |= {"per_device_train_batch_size": "8", "max_steps": "4", "warmup_steps": "1", "use_cpu": "true"}
ROWS = ["--row", "softmax", "--row", "RFA-Gaussian", "--seeds", "3"]


def run(folder: Path, *words: str, **settings: str) -> dict:
    """Run the experiment on images with a tiny model in a folder; return its results."""
    options = [word for key, value in {**TINY, **settings}.items() for word in (f"--{key.replace('_', '-')}", value)]
    folders = ["--work", str(folder / "work"), "--output", str(folder / "out")]
    with patch.object(sys, "argv", ["experiments", "images", "--small", *folders, *options, *words]):
        experiments.main()
    return json.loads((folder / "out" / "images.json").read_text())


def finetune(command: list[str], **options: Any) -> SimpleNamespace:
    """Run a command of ``python -m hf_rfa_cli`` in this process, where everything is imported."""
    with patch.object(sys, "argv", command[2:]), pytest.raises(SystemExit) as end:
        cli.main()
    return SimpleNamespace(returncode=end.value.code)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    with patch.object(rows.subprocess, "run", finetune):
        run(folder, *ROWS)
    return folder


@pytest.fixture
def results_alone(trained, tmp_path) -> Path:
    """A folder with the results of a run, and without its checkpoints."""
    (tmp_path / "out").mkdir()
    shutil.copy(trained / "out" / "images.json", tmp_path / "out")
    return tmp_path


def test_rows_are_trained_and_measured(trained):
    results = json.loads((trained / "out" / "images.json").read_text())
    assert list(results["rows"]) == ["softmax", "RFA-Gaussian"]
    assert results["settings"]["train"].startswith("train.jsonl, sha256 ")  # and not the path of one machine
    assert str(trained) not in json.dumps(results)
    for row, (run_of_row,) in results["rows"].items():
        config = json.loads((trained / "work" / f"{row}, seed 3" / "config.json").read_text())
        assert config["model_type"] == ("gpt2" if row == "softmax" else "rfa_gpt2")
        assert (config["n_embd"], config.get("feature_seed")) == (16, None if row == "softmax" else 3)
        assert run_of_row["seed"] == 3
        assert run_of_row["tokens"] == 4 * 8 * 66  # "^", 64 pixels, the end


def test_results_of_other_settings_attention_and_data_are_refused(results_alone, monkeypatch):
    before = (results_alone / "out" / "images.json").read_bytes()
    with pytest.raises(InputError, match="max_steps 4, this run has 3"):
        run(results_alone, *ROWS, max_steps="3")
    other = {"RFA-Gaussian": {"feature_map": "gaussian", "gate": False}}
    match = r"has a row RFA-Gaussian with attention .*'unit_norm': True"
    with patch.dict(rows.ROWS, other), pytest.raises(InputError, match=match):
        run(results_alone, *ROWS)
    train, held_out = images.digits()
    monkeypatch.setattr(images, "digits", lambda: (train[1:], held_out))
    with pytest.raises(InputError, match=r"images\.json was made with train 'train\.jsonl, sha256 "):
        run(results_alone, *ROWS)
    assert (results_alone / "out" / "images.json").read_bytes() == before


def test_bits_are_those_of_single_pixels(trained):
    folder = trained / "work" / "RFA-Gaussian, seed 3"
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total, few = 0.0, images.digits()[1][:2]
    for image in few:
        text = "^" + "".join("abcdefghijklmnopq"[level] for level in image)
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
        with torch.no_grad():
            for pixel in range(1, 65):
                logits = model(ids[None, :pixel]).logits[0, -1].double()
                total -= float(logits.log_softmax(-1)[ids[pixel]]) / math.log(2)
    with patch.object(images, "digits", lambda: (None, few)):
        assert images.measure(folder, {})["bits"] == pytest.approx(total / few.size, rel=1e-5)


def test_held_out_images_are_not_trained_on():
    train, held_out = images.digits()
    assert (len(train), len(held_out)) == (1437, 360)
    both = np.unique(np.concatenate([train, held_out]), axis=0)
    assert len(both) == 1797  # no image stands in both
    assert 1.0 < images.chance({})["bits"] < math.log2(images.LEVELS)


def test_rows_change_attention_alone():
    recipe = load_settings("wmt14", small=True)
    softmax, gaussian, elu = (rows.settings_of(row, recipe) for row in ("softmax", "RFA-Gaussian", "elu"))
    assert softmax["model_type"] == "bart"
    assert not rows.RFA_FIELDS & softmax["config_overrides"].keys()
    for name, value in softmax["config_overrides"].items():
        assert gaussian["config_overrides"][name] == elu["config_overrides"][name] == value
    assert elu["config_overrides"]["num_cross_features"] is None
    assert {**gaussian, "config_overrides": 0, "model_type": 0} == {**softmax, "config_overrides": 0, "model_type": 0}


def test_expressions_to_train_on_are_not_held_out(tmp_path, monkeypatch):
    monkeypatch.setattr(listops, "HELD_OUT", 200)
    monkeypatch.setattr(listops, "TRAINED_ON", 500)
    files = listops.prepare(None, tmp_path)
    train, evaluate = (
        {json.loads(line)["text"] for line in Path(files[name]).read_text().splitlines()}
        for name in ("train", "evaluate")
    )
    assert len(train) > 400
    assert not train & evaluate
    assert 0.1 <= listops.chance({})["right"] < 0.5


def test_language_is_measured_past_the_length_of_the_training(tmp_path, monkeypatch):
    model = make_gpt2({"num_features": 8})
    model.save_pretrained(tmp_path / "model")
    save_tiny_tokenizer(tmp_path / "model")
    for name in language.FILES.values():
        with gzip.open(tmp_path / name, "wt") as file:
            file.writelines(json.dumps({"text": words(90, start)}) + "\n" for start in range(9))
    options = {"block_length": 48, "tokenizer": str(tmp_path / "model"), **language.prepare(tmp_path, tmp_path)}
    values = language.measure(tmp_path / "model", options)
    ids = tokenize(AutoTokenizer.from_pretrained(tmp_path / "model"), read_documents(tmp_path / "valid.jsonl.gz"))
    for times in (1, 2, 4):
        expected = perplexity(model, ids, context_length=48 * times, carry_state=times > 1)
        assert values[f"perplexity_{times}"] == pytest.approx(expected.perplexity, rel=1e-6)
    frequencies = torch.bincount(ids).double() / len(ids)
    entropy = -(frequencies * frequencies.clamp_min(1e-30).log()).sum()
    assert language.chance(options)["perplexity"] == pytest.approx(math.exp(entropy))

    save_softmax_model("gpt2", tmp_path / "softmax")
    assert list(language.measure(tmp_path / "softmax", options)) == ["perplexity_1"]
    with pytest.raises(InputError, match="there is no file"):
        language.prepare(tmp_path / "elsewhere", tmp_path)


@pytest.fixture(scope="module")
def reviewed(tmp_path_factory) -> tuple[list[dict], dict]:
    """A tiny GPT-2, and 60 reviews of 90 tokens or more: the reviews, and a recipe's settings."""
    folder = tmp_path_factory.mktemp("reviews")
    save_softmax_model("gpt2", folder / "base")
    rows = [{"text": words(90 + row, 7 * row), "label": row % 2} for row in range(60)]
    for name in language.FILES.values():
        with gzip.open(folder / name, "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    options = {"model": str(folder / "base"), **reviews.prepare(folder, folder)}
    return rows, load_settings("reviews", small=True) | options


def test_reviews_start_from_the_same_model_and_are_counted_one_by_one(reviewed, tmp_path, monkeypatch):
    texts, recipe = reviewed
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
    answers = [int(model(torch.tensor([tokenizer(row["text"], **cut)["input_ids"]])).logits.argmax()) for row in texts]
    right = sum(answer == row["label"] for answer, row in zip(answers, texts, strict=True))
    assert reviews.measure(folder, recipe)["right"] == right / len(texts)
    assert reviews.chance(recipe) == {"right": 0.5}


PAGE = ROOT / "benchmarks" / "results" / "experiments.md"


@pytest.mark.parametrize("path", sorted(PAGE.with_suffix("").rglob("*.json")), ids=lambda path: path.stem)
def test_the_page_has_the_tables_of_the_results(path):
    results = json.loads(path.read_text())
    if path.stem == "speech":
        table = speech.table(results["rows"])
    else:
        table = experiment.table(experiments.EXPERIMENTS[path.stem], results)
    assert table in PAGE.read_text()
