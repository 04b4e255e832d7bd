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
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
)

from benchmarks.experiments import __main__ as experiments
from benchmarks.experiments import experiment, images, language, listops, rows, speech, translation
from hf_rfa.errors import InputError
from hf_rfa.evaluation import perplexity
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


def test_finished_rows_are_taken_from_the_results_alone(results_alone, monkeypatch, capsys):
    before = json.loads((results_alone / "out" / "images.json").read_text())
    monkeypatch.setattr(rows.subprocess, "run", lambda *args, **options: pytest.fail("trained again"))
    assert run(results_alone, *ROWS) == before
    assert "RFA-Gaussian, seed 3: taken from" in capsys.readouterr().out


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


def test_rows_have_random_features_in_one_kind_of_attention_alone(tmp_path):
    recipe = load_settings("multi30k", small=True)
    layers = recipe["config_overrides"]["decoder_layers"]
    assert set(rows.ALONE) < set(translation.EXPERIMENT.rows)
    for row in translation.EXPERIMENT.rows:
        settings = translation.settings(row, recipe, tmp_path, 0)
        if row not in rows.ALONE:
            assert settings == rows.settings_of(row, recipe)
            continue
        config = AutoConfig.for_model(settings["model_type"], **settings["config_overrides"])
        kinds = [[config.is_rfa(kind, layer) for layer in range(layers)] for kind in ("causal", "cross", "encoder")]
        expected = (row.endswith("in causal attention"), row.endswith("in cross attention"), False)
        assert kinds == [[converted] * layers for converted in expected]
        assert (config.feature_map, config.unit_norm, config.gate) == ("gaussian", True, False)


def test_a_table_has_means_spreads_and_chance():
    runs = [{"values": {"bits": bits}, "parameters": 2_000_000, "tokens": 3_000_000} for bits in (1.0, 2.0)]
    table = experiment.table(images.EXPERIMENT, {"rows": {"elu": runs}, "chance": {"bits": 4.0}})
    assert "| elu | 1.500 ± 0.707 | | 2.00 M | 3.00 M | 2 |" in table
    assert "| chance | 4.000 | | | | |" in table


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


def test_speech_is_timed_by_length():
    tiny = {name: 2 if name.endswith("heads") else 1 if name.endswith("layers") else 16 for name in speech.SHAPE}
    tiny |= {"vocab_size": 61, "num_mel_bins": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    tiny |= {"decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None}
    times = speech.measure(2, 1, **tiny)
    assert [(time["seconds"], time["row"]) for time in times] == [(2, row) for row in speech.COMPARED]
    assert all(time["reading_ms"] > 0 and time["step_ms"] > 0 for time in times)
    assert f"| 2 | {times[0]['reading_ms']:,.0f} | {times[0]['step_ms']:.1f} |" in speech.table(times)


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


def test_translations_are_scored_on_captions_of_their_own(tmp_path):
    save_softmax_model("bart", tmp_path / "model")
    sentences = [words(3 + row, 5 * row) for row in range(3)]
    for name in ("train", "val", translation.TEST):
        for which in translation.LANGUAGES:
            with gzip.open(tmp_path / f"{name}.{which}.gz", "wt") as file:
                file.write("\n".join(sentences))
    options = translation.prepare(tmp_path, tmp_path)
    assert Path(options["evaluate_references"]).name == "val.de.gz"
    assert set(translation.measure(tmp_path / "model", options)) == {"bleu_1", "bleu_4"}
    (tmp_path / "val.de.gz").unlink()
    with pytest.raises(InputError, match=r"there is no file .*val\.de\.gz"):
        translation.prepare(tmp_path, tmp_path)


PAGE = ROOT / "benchmarks" / "results" / "experiments.md"


@pytest.mark.parametrize("path", sorted(PAGE.with_suffix("").rglob("*.json")), ids=lambda path: path.stem)
def test_the_page_has_the_tables_of_the_results(path):
    results = json.loads(path.read_text())
    if path.stem == "speech":
        table = speech.table(results["rows"])
    else:
        table = experiment.table(experiments.EXPERIMENTS[path.stem], results)
    assert table in PAGE.read_text()
