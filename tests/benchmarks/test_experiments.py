"""`benchmarks.experiments`: rows that differ in their attention alone, measured as by hand, and runs that go on."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from matplotlib.image import imread
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    ByT5Tokenizer,
)

from benchmarks.experiments import __main__ as experiments
from benchmarks.experiments import experiment, gate, images, language, listops, rows, speech, translation
from hf_rfa.convert.base_model import rfa_layers
from hf_rfa.errors import InputError
from hf_rfa.evaluation import perplexity
from hf_rfa.evaluation.generation_scores import evaluate_generation
from hf_rfa.finetune.recipe import load_settings
from hf_rfa.io.text_io import read_documents, tokenize
from hf_rfa.models.attention import Gate
from tests.conftest import ROOT, save_tiny_tokenizer
from tests.families import make_gpt2, save_softmax_model

TINY = {"config_overrides": json.dumps({"n_layer": 1, "n_embd": 16, "n_head": 2, "num_features": 8})}
TINY |= {
    "per_device_train_batch_size": "8",
    "max_steps": "4",
    "warmup_steps": "1",
    "save_steps": "2",
    "use_cpu": "true",
}


def words(folder: Path, name: str = "images", **options: str) -> list[str]:
    given = [word for name, value in {**TINY, **options}.items() for word in (f"--{name.replace('_', '-')}", value)]
    return [name, "--small", "--work", str(folder / "work"), "--output", str(folder / "out"), *given]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    chosen = ["--row", "softmax", "--row", "RFA-Gaussian", "--seeds", "3"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "TIMES", 1)
        patch.setattr(sys, "argv", ["experiments", *words(folder), *chosen])
        experiments.main()
    return folder


def test_rows_are_trained_and_measured(ran, monkeypatch, capsys):
    whole = json.loads((ran / "out" / "images.json").read_text())
    assert list(whole["rows"]) == ["softmax", "RFA-Gaussian"]
    assert whole["settings"]["train"].startswith("train.jsonl, sha256 ")  # and not the path of one machine
    assert str(ran) not in json.dumps(whole)
    for row, runs in whole["rows"].items():
        assert [each["seed"] for each in runs] == [3]
        config = json.loads((ran / "work" / f"{row}, seed 3" / "config.json").read_text())
        assert config["model_type"] == ("gpt2" if row == "softmax" else "rfa_gpt2")
        assert config["n_embd"] == 16
        assert config.get("feature_seed") == (None if row == "softmax" else 3)
        assert all(each["cpu_hours"] > 0 and each["peak_bytes"] > 1e8 for each in runs)
        assert all(each["tokens"] == 4 * 8 * 66 for each in runs)  # "^", 64 pixels, the end
        assert whole["side_by_side"][row]["images_per_second"] > 0
    for name in ("images.png", "images-drawn.png"):
        assert imread(ran / "out" / name)[..., :3].std() > 0.05

    monkeypatch.setattr(images, "TIMES", 1)
    monkeypatch.setattr(sys, "argv", ["experiments", *words(ran), "--row", "softmax", "--seeds", "4"])
    experiments.main()
    found = json.loads((ran / "out" / "images.json").read_text())["rows"]
    first, second = found["softmax"]
    assert (first, second["seed"]) == (whole["rows"]["softmax"][0], 4)  # not trained again
    assert first["values"]["bits"] != second["values"]["bits"]
    assert found["RFA-Gaussian"] == whole["rows"]["RFA-Gaussian"]


def elsewhere(ran: Path, folder: Path) -> Path:
    """Return a folder with the results of a run, and without its checkpoints."""
    (folder / "out").mkdir()
    (folder / "out" / "images.json").write_bytes((ran / "out" / "images.json").read_bytes())
    return folder


def test_finished_rows_are_taken_from_the_results_alone(ran, tmp_path, monkeypatch, capsys):
    folder = elsewhere(ran, tmp_path)
    before = json.loads((folder / "out" / "images.json").read_text())
    chosen = ["--row", "softmax", "--row", "RFA-Gaussian", "--seeds", "3"]
    with monkeypatch.context() as patch:
        patch.setattr(rows.subprocess, "Popen", lambda *given, **options: pytest.fail("trained again"))
        patch.setattr(sys, "argv", ["experiments", *words(folder), *chosen])
        experiments.main()
    assert json.loads((folder / "out" / "images.json").read_text()) == before
    bits = before["rows"]["RFA-Gaussian"][0]["values"]["bits"]
    assert f"| RFA-Gaussian | {bits:.3f} |" in capsys.readouterr().out
    assert imread(folder / "out" / "images.png")[..., :3].std() > 0.05

    monkeypatch.setattr(images, "TIMES", 1)
    monkeypatch.setattr(sys, "argv", ["experiments", *words(folder), *chosen, "--row", "elu"])
    experiments.main()
    after = json.loads((folder / "out" / "images.json").read_text())
    assert list(after["rows"]) == ["softmax", "RFA-Gaussian", "elu"]
    assert after["side_by_side"]["elu"]["measured_with"] == ["elu"]
    assert after["side_by_side"]["softmax"] == before["side_by_side"]["softmax"]
    told = " ".join(capsys.readouterr().out.split())
    assert "softmax: there is no checkpoint" in told
    assert "images per second is of an earlier run" in told


@pytest.mark.parametrize(
    ("option", "named"), [({"max_steps": "3"}, "max_steps 4, this run has 3"), ({"processes": "2"}, "processes 1")]
)
def test_results_of_other_settings_are_refused(ran, tmp_path, monkeypatch, option, named):
    folder = elsewhere(ran, tmp_path)
    before = (folder / "out" / "images.json").read_bytes()
    monkeypatch.setattr(sys, "argv", ["experiments", *words(folder, **option), "--row", "elu", "--seeds", "3"])
    with pytest.raises(InputError, match=named):
        experiments.main()
    assert (folder / "out" / "images.json").read_bytes() == before


def test_rows_that_changed_and_other_data_are_refused(ran, tmp_path, monkeypatch):
    folder = elsewhere(ran, tmp_path)
    chosen = ["--row", "softmax", "--seeds", "3"]
    monkeypatch.setattr(sys, "argv", ["experiments", *words(folder), *chosen])
    with monkeypatch.context() as patch:
        patch.setitem(rows.ROWS, "RFA-Gaussian", {"feature_map": "gaussian", "gate": False})
        with pytest.raises(InputError, match=r"has a row RFA-Gaussian with attention .*'unit_norm': True"):
            experiments.main()
    train, held_out = images.digits()
    monkeypatch.setattr(images, "digits", lambda: (train[1:], held_out))
    with pytest.raises(InputError, match=r"images\.json was made with train 'train\.jsonl, sha256 "):
        experiments.main()


def test_a_checkpoint_of_other_settings_is_refused(ran, monkeypatch):
    settings = rows.settings_of("softmax", load_settings("digits", small=True))
    monkeypatch.setattr(rows.subprocess, "Popen", lambda *given, **options: pytest.fail("trained"))
    with pytest.raises(InputError, match=r"softmax, seed 3 was trained with .* Pass another --work"):
        rows.train(settings, ran / "work" / "softmax, seed 3")


def test_what_another_command_is_training_is_refused(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.setattr(sys, "argv", ["experiments", *words(tmp_path), "--row", "softmax", "--seeds", "3"])
    monkeypatch.setattr(experiment, "train", lambda *given, **options: pytest.fail("trained beside it"))
    match = "another command is training .*softmax, seed 3. Wait"
    with FileLock(tmp_path / "work" / ".softmax, seed 3.lock"), pytest.raises(InputError, match=match):
        experiments.main()
    with pytest.raises(pytest.fail.Exception, match="trained beside it"):
        experiments.main()


def test_results_are_written_after_every_row(tmp_path, monkeypatch):
    """The second row is never measured, as if the machine were lost."""
    measure = images.EXPERIMENT.measure

    def first_alone(folder, options):
        if "softmax" not in folder.name:
            raise KeyboardInterrupt
        return measure(folder, options)

    broken = replace(images.EXPERIMENT, measure=first_alone)
    monkeypatch.setitem(experiments.EXPERIMENTS, "images", broken)
    chosen = ["--row", "softmax", "--row", "elu", "--seeds", "0"]
    monkeypatch.setattr(sys, "argv", ["experiments", *words(tmp_path), *chosen])
    with pytest.raises(KeyboardInterrupt):
        experiments.main()
    whole = json.loads((tmp_path / "out" / "images.json").read_text())
    assert {row: [run["seed"] for run in runs] for row, runs in whole["rows"].items()} == {"softmax": [0]}
    assert whole["rows"]["softmax"][0]["values"]["bits"] > 0
    assert imread(tmp_path / "out" / "images.png")[..., :3].std() > 0.05


def test_bits_are_those_of_single_pixels(ran):
    folder = ran / "work" / "RFA-Gaussian, seed 3"
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total, few = 0.0, images.digits()[1][:4]
    for image in few:
        text = "^" + "".join("abcdefghijklmnopq"[level] for level in image)
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
        with torch.no_grad():
            for pixel in range(1, 65):
                logits = model(ids[None, :pixel]).logits[0, -1].double()
                total -= float(logits.log_softmax(-1)[ids[pixel]]) / math.log(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "digits", lambda: (None, few))
        assert images.measure(folder, {})["bits"] == pytest.approx(total / few.size, rel=1e-5)


def test_drawn_images_keep_what_is_given(ran):
    folder = ran / "work" / "softmax, seed 3"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    above = torch.from_numpy(images.digits()[1][:3, :32])
    drawn = images.draw_images(model, tokenizer, above=above, seed=0)
    assert drawn.shape == (3, 64)
    assert torch.equal(drawn[:, :32], above)
    assert 0 <= int(drawn.min()) <= int(drawn.max()) < images.LEVELS
    assert not torch.equal(drawn[:, 32:], images.draw_images(model, tokenizer, above=above, seed=1)[:, 32:])


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
    assert {name: value for name, value in gaussian.items() if name not in ("config_overrides", "model_type")} == {
        name: value for name, value in softmax.items() if name not in ("config_overrides", "model_type")
    }


def test_rows_have_random_features_in_one_kind_of_attention_alone(tmp_path):
    recipe = load_settings("multi30k", small=True)
    layers = recipe["config_overrides"]["decoder_layers"]
    assert set(rows.ALONE) < set(translation.EXPERIMENT.rows)
    for row in translation.EXPERIMENT.rows:
        found = translation.settings(row, recipe, tmp_path, 0)
        if row not in rows.ALONE:
            assert found == rows.settings_of(row, recipe)
            continue
        config = AutoConfig.for_model(found["model_type"], **found["config_overrides"])
        kinds = [[config.is_rfa(kind, layer) for layer in range(layers)] for kind in ("causal", "cross", "encoder")]
        expected = (row.endswith("in causal attention"), row.endswith("in cross attention"), False)
        assert kinds == [[each] * layers for each in expected]
        assert (config.feature_map, config.unit_norm, config.gate) == ("gaussian", True, False)


def test_a_table_has_means_spreads_and_chance():
    size = {"parameters": 2_000_000, "tokens": 3_000_000}
    runs = [{"values": {"bits": each}, "cpu_hours": 0.5, **size} for each in (1.0, 2.0)]
    whole = {"rows": {"elu": runs}, "side_by_side": {"elu": {"images_per_second": 7}}, "chance": {"bits": 4.0}}
    told = experiment.table(images.EXPERIMENT, whole)
    assert "| elu | 1.500 ± 0.707 |  | 7.0 | 2.00 M | 3.00 M | 30.0 ± 0.0 | 2 |" in told
    assert "| chance | 4.000 |  |  | | | | |" in told


def test_a_fixed_gate_has_its_time_scale_and_keeps_it(tmp_path, monkeypatch):
    overrides = json.dumps({"n_layer": 1, "n_embd": 16, "n_head": 2, "num_features": 8})
    monkeypatch.setattr(gate, "TRAINED_ON", 40)
    given = words(tmp_path, "copying", config_overrides=overrides, learning_rate="0.1")
    monkeypatch.setattr(sys, "argv", ["experiments", *given, "--row", "gate of 16 tokens", "--seeds", "5"])
    experiments.main()
    folder = tmp_path / "work" / "gate of 16 tokens, seed 5"
    before, after = (
        load_file(tmp_path / "work" / name / "model.safetensors") for name in (f"{folder.name}, new", folder.name)
    )
    gates = [name for name in after if ".gate." in name]
    assert len(gates) == 2
    assert all(torch.equal(before[name], after[name]) for name in gates)
    changed = [name for name in after if not torch.equal(before[name], after[name])]
    assert len(changed) > len(after) / 2
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.feature_seed == 5
    (layer,) = [module for module in model.modules() if isinstance(module, Gate)]
    _, forgotten = layer(torch.randn(2, 5, 16))
    torch.testing.assert_close(1.0 / forgotten, torch.full_like(forgotten, 16.0))
    values = json.loads((tmp_path / "out" / "copying.json").read_text())["rows"]["gate of 16 tokens"][0]["values"]
    assert set(values) == {f"copied_{length}" for length in gate.LENGTHS}
    assert imread(tmp_path / "out" / "gate.png")[..., :3].std() > 0.05


def test_values_of_expressions_are_counted_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr(listops, "HELD_OUT", 30)
    monkeypatch.setattr(listops, "BATCH", 7)
    labels = {str(label): index for index, label in enumerate(reversed(range(10)))}
    ids = {"vocab_size": 259, "pad_token_id": 0, "eos_token_id": 1}
    config = AutoConfig.for_model(
        "rfa_llama", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, **ids
    )
    config.label2id, config.id2label = labels, {index: label for label, index in labels.items()}
    config.initializer_range = 1.0
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.save_pretrained(tmp_path / "model")
    ByT5Tokenizer(extra_ids=0).save_pretrained(tmp_path / "model")
    found = listops.measure(tmp_path / "model", {})
    for name, lengths in (("right", listops.LENGTHS), ("right_twice", listops.TWICE)):
        right = 0
        for row in listops.held_out(lengths):
            assert lengths[0] <= len(row["text"]) <= lengths[1]
            answer = model(torch.tensor([[*(3 + byte for byte in row["text"].encode()), 1]])).logits.argmax()
            right += 9 - int(answer) == row["label"]
        assert found[name] == right / 30
    commonest = listops.chance({})
    assert 0.1 <= commonest["right"] < 0.5
    monkeypatch.setattr(listops, "TRAINED_ON", 500)
    options = listops.prepare(None, tmp_path)
    texts = {
        name: {json.loads(line)["text"] for line in Path(path).read_text().splitlines()}
        for name, path in options.items()
    }
    assert len(texts["train"]) > 400
    assert not texts["train"] & texts["evaluate"]


def test_speech_is_timed_by_length(tmp_path):
    tiny = {name: 2 if name.endswith("heads") else 1 if name.endswith("layers") else 16 for name in speech.SHAPE}
    tiny |= {"vocab_size": 61, "num_mel_bins": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    tiny |= {"decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None}
    for row, count in (("softmax", 0), ("RFA-Gaussian", 3), ("elu", 3)):
        model = speech.model_of(row, 1, **tiny)
        assert len(rfa_layers(model)) == count
        assert model.config.max_source_positions == 50
    found = [each for seconds in (1, 2) for each in speech.measure(seconds, 1, **tiny)]
    assert [(each["seconds"], each["row"]) for each in found] == [(n, row) for n in (1, 2) for row in speech.COMPARED]
    assert all(each["reading_ms"] > 0 and each["step_ms"] > 0 for each in found)
    assert f"| 2 | {found[3]['reading_ms']:,.0f} | {found[3]['step_ms']:.1f} |" in speech.table(found)
    speech.draw(found, tmp_path / "speech.png")
    assert imread(tmp_path / "speech.png")[..., :3].std() > 0.05


def start(folder: Path, **options: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "benchmarks.experiments", *words(folder, **options), "--row", "RFA-Gaussian"]
    return subprocess.Popen([*command, "--seeds", "0"], start_new_session=True, stdout=subprocess.DEVNULL)


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_weights(tmp_path):
    settings = {"max_steps": "300", "save_steps": "40"}
    assert start(tmp_path / "whole", **settings).wait() == 0
    killed = start(tmp_path / "killed", **settings)
    training = tmp_path / "killed" / "work" / ".RFA-Gaussian, seed 0.training"
    while not (training / "checkpoint-40" / "trainer_state.json").exists():
        assert killed.poll() is None
        time.sleep(0.05)
    os.kill(killed.pid, signal.SIGKILL)  # which ends the training too
    killed.wait()
    time.sleep(1.0)
    before = sorted(path.name for path in training.iterdir())
    time.sleep(2.0)
    assert sorted(path.name for path in training.iterdir()) == before
    assert start(tmp_path / "killed", **settings).wait() == 0
    found, expected = (
        load_file(tmp_path / name / "work" / "RFA-Gaussian, seed 0" / "model.safetensors")
        for name in ("killed", "whole")
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert json.loads((tmp_path / "killed" / "out" / "images.json").read_text())["rows"]["RFA-Gaussian"][0]["resumed"]


def test_language_is_measured_past_the_length_of_the_training(tmp_path, monkeypatch):
    model = make_gpt2({"num_features": 8})
    model.save_pretrained(tmp_path / "model")
    save_tiny_tokenizer(tmp_path / "model")
    for name in language.FILES.values():
        with gzip.open(tmp_path / name, "wt") as file:
            file.write(
                "".join(
                    json.dumps({"text": " ".join(f"w{4 + n * n % 53}" for n in range(start, start + 90))}) + "\n"
                    for start in range(9)
                )
            )
    options = {"block_length": 48, "tokenizer": str(tmp_path / "model"), **language.prepare(tmp_path, tmp_path)}
    found = language.measure(tmp_path / "model", options)
    ids = tokenize(AutoTokenizer.from_pretrained(tmp_path / "model"), read_documents(tmp_path / "valid.jsonl.gz"))
    for times in (1, 2, 4):
        expected = perplexity(model, ids, context_length=48 * times, carry_state=times > 1)
        assert found[f"perplexity_{times}"] == pytest.approx(expected.perplexity, rel=1e-6)
    frequencies = torch.bincount(ids).double() / len(ids)
    entropy = -(frequencies * frequencies.clamp_min(1e-30).log()).sum()
    assert language.chance(options)["perplexity"] == pytest.approx(math.exp(entropy))

    save_softmax_model("gpt2", tmp_path / "softmax")
    assert list(language.measure(tmp_path / "softmax", options)) == ["perplexity_1"]
    with pytest.raises(InputError, match="there is no file"):
        language.prepare(tmp_path / "elsewhere", tmp_path)


def test_translations_are_scored_greedily_and_with_beams(tmp_path):
    save_softmax_model("bart", tmp_path / "model")
    rows = [" ".join(f"w{4 + (n * n + 5 * row) % 53}" for n in range(3 + row)) for row in range(6)]
    for name in ("train", "val", translation.TEST):
        for which in translation.LANGUAGES:
            with gzip.open(tmp_path / f"{name}.{which}.gz", "wt") as file:
                file.write("\n".join(rows))
    options = translation.prepare(tmp_path, tmp_path)
    assert Path(options["evaluate_references"]).name == "val.de.gz"
    found = translation.measure(tmp_path / "model", options)
    model, tokenizer = (each.from_pretrained(tmp_path / "model") for each in (AutoModelForSeq2SeqLM, AutoTokenizer))
    for beams in (1, 4):
        expected = evaluate_generation(
            model.eval(), tokenizer, rows, rows, task="translation", num_beams=beams, max_new_tokens=60
        )
        assert found[f"bleu_{beams}"] == pytest.approx(expected.scores["sacreBLEU"])
    (tmp_path / "val.de.gz").unlink()
    with pytest.raises(InputError, match=r"there is no file .*val\.de\.gz"):
        translation.prepare(tmp_path, tmp_path)


@pytest.mark.slow
def test_two_processes_train_a_row_together(tmp_path):
    """A step has the rows of both: half as many steps make an epoch."""
    epochs = {}
    for processes in ("1", "2"):
        assert start(tmp_path / processes, processes=processes).wait() == 0
        folder = tmp_path / processes
        (run,) = json.loads((folder / "out" / "images.json").read_text())["rows"]["RFA-Gaussian"]
        assert run["values"]["bits"] > 0
        epochs[processes] = run["metrics"]["epoch"]
    assert epochs["2"] == pytest.approx(2 * epochs["1"], rel=0.1)


def test_gates_are_drawn_as_far_as_they_were_run(tmp_path):
    run = {"seed": 0, "values": {value: 0.1 * index for index, value in enumerate(gate.COPIED)}}
    whole = {"chance": {"copied": 0.1}, "side_by_side": {}, "rows": {"RFA-Gaussian": [run]}}
    pictures = []
    for row in ("RFA-Gaussian", "gate of 4 tokens", "RFA-Gate-Gaussian"):
        whole["rows"][row] = [run]
        (tmp_path / "copying.json").write_text(json.dumps(whole))
        gate.draw_gates(tmp_path)
        pictures.append(imread(tmp_path / "gate.png"))
    assert all((one != other).any() for one, other in itertools.pairwise(pictures))


def test_a_value_of_zero_is_drawn_and_one_that_is_missing_is_not(tmp_path):
    """A translation that learned nothing has a BLEU of 0; images a second may not have been measured yet."""
    widths = []
    for second in ({}, {"bleu_4": 0.0}):
        runs = [{"seed": 0, "values": {"bleu_1": 0.0, **second}}]
        translation.draw({"chance": {}, "side_by_side": {}, "rows": {"elu": runs}}, tmp_path / "drawn.png")
        widths.append(imread(tmp_path / "drawn.png").shape[1])
    assert widths[0] < 0.7 * widths[1]


PAGE = ROOT / "docs" / "experiments.md"
#: Results of an experiment by its own model, and in folders below by others.
RESULTS = [f"{name}.json" for name in sorted(experiments.EXPERIMENTS)]
RESULTS += sorted(str(path.relative_to(PAGE.with_suffix(""))) for path in PAGE.with_suffix("").glob("*/*.json"))


@pytest.mark.parametrize("name", RESULTS)
def test_the_page_has_the_tables_of_the_results(name):
    path, page = PAGE.with_suffix("") / name, PAGE.read_text()
    if not path.is_file():
        assert f"`{path.stem}`" in page.partition("## Not run")[2]
        return
    whole = json.loads(path.read_text())
    assert experiment.table(experiments.EXPERIMENTS[path.stem], whole) in page
    assert f"](experiments/{name.replace('.json', '.png')})" in page
