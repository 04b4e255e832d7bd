"""Fine-tuning: its figures, parameter groups, what is kept, and that an interrupted run goes on to the same result."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from hf_rfa.convert import InputError
from hf_rfa.finetune import tasks
from hf_rfa.finetune.data import load_data
from hf_rfa.finetune.param_groups import PARAMETER_KINDS, parameter_groups, parameter_kinds
from hf_rfa.finetune.trainers import GroupedTrainer
from hf_rfa.inference import load_model
from hf_rfa_cli import main as cli
from hf_rfa_cli.options import UsageError
from tests.conftest import ROOT, leftovers, save_tiny_tokenizer, words
from tests.families import WITHOUT_END, is_own, make
from tests.training import assert_same, interrupted, run, weights, write_rows

RATES = ("feature_map_rate", "sigma_rate", "gate_rate", "projection_rate", "rest_rate")
ANSWERS = {"task": "seq2seq", "model": "bart-rfa", "predict_with_generate": True}


@pytest.fixture(scope="module", autouse=True)
def _files(material) -> None:
    """Write files that are refused, and the rows in another form."""
    load_data(str(material / "rows.jsonl")).to_csv(material / "rows.csv")
    (material / "empty.jsonl").write_text("")
    (material / "broken.jsonl").write_text('{"text": "w5"}\n{"text": \n')
    (material / "other.csv").write_text("text,label\nw5 w6,c\n")
    (material / "short.txt").write_text("w5 w6")
    row = {"text": "w5", "label": "a", "source": "w6", "target": None}
    write_rows(material / "null.jsonl", [row, {**row, "text": None, "label": None}])
    write_rows(material / "prompts.jsonl", [{"prompt": words(40), "text": "w5"}])
    write_rows(material / "prompted.jsonl", [{**row, "prompt": "w7"}] * 20)


def test_blocks_may_be_longer_than_the_positions_of_a_model_without_end(material, tmp_path):
    make("llama", WITHOUT_END).save_pretrained(tmp_path / "llama")
    save_tiny_tokenizer(tmp_path / "llama")
    metrics = run(material, tmp_path, model=tmp_path / "llama", train="text.txt", block_length=200, steps=2)
    assert metrics["train_loss"] > 0
    assert load_model(str(tmp_path / "out"))[0].config.max_position_embeddings == 96


def test_a_text_trains(material, tmp_path):
    metrics = run(material, tmp_path, train="text.txt", evaluate="text.txt", steps=3)
    assert metrics["eval_perplexity"] == pytest.approx(torch.tensor(metrics["eval_loss"]).exp().item(), rel=1e-4)
    assert leftovers(tmp_path) == ["out"]
    saved = json.loads((tmp_path / "out" / "finetuning.json").read_text())
    assert saved["metrics"] == metrics
    model, _ = load_model(str(tmp_path / "out"))
    assert model.config.use_cache, "what training turns off is on again"


def test_the_accuracy_of_a_classifier_is_that_of_its_labels(material, tmp_path):
    metrics = run(material, tmp_path, task="classify", evaluate="rows.csv", steps=3)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert model.config.id2label == {0: "a", 1: "b"}
    data = [json.loads(line) for line in (material / "rows.jsonl").read_text().splitlines()]
    tokenizer = load_model(str(material / "gpt2-rfa"))[1]
    right = 0
    for row in data:
        logits = model(**tokenizer(row["text"], return_tensors="pt", truncation=True, max_length=16)).logits
        right += model.config.id2label[int(logits.argmax())] == row["label"]
    assert metrics["eval_accuracy"] == pytest.approx(right / len(data))


@pytest.mark.parametrize("name", ["gpt2-rfa", "bart-rfa", "without gates"])
def test_kinds_have_their_own_rates(name, material):
    rates = {kind: 10.0**-n for n, kind in enumerate(PARAMETER_KINDS)}
    model = make("gpt2") if name == "without gates" else load_model(str(material / name))[0]
    kinds = parameter_kinds(model)
    groups = parameter_groups(model, rates, weight_decay=0.1)
    group_of = {id(parameter): group for group in groups for parameter in group["params"]}
    for each, parameter in model.named_parameters():
        group, of_rfa = group_of.pop(id(parameter)), kinds[each] in ("feature_maps", "sigma", "gates")
        assert group["lr"] == rates[kinds[each]], each
        assert group["weight_decay"] == (0.0 if of_rfa else 0.1), each
        assert of_rfa == is_own(each)
    assert not group_of
    assert ("gates" in kinds.values()) == (name != "without gates")
    only = parameter_groups(model, {**rates, "projections": 0.0, "rest": 0.0})
    assert {group["lr"] for group in only} <= {rates[kind] for kind in ("feature_maps", "sigma", "gates")}


def test_a_rate_of_0_freezes_a_kind(material, tmp_path):
    frozen = {f"{kind}_rate": 0.0 for kind in ("projection", "feature_map", "sigma", "gate")}
    run(material, tmp_path, steps=2, **frozen)
    before, after = weights(material / "gpt2-rfa"), weights(tmp_path / "out")
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    kinds = parameter_kinds(load_model(str(material / "gpt2-rfa"))[0])
    assert {kinds[name] for name in changed} == {"rest"}
    assert not [name for name in changed if ".attn." in name]
    assert {f"transformer.h.0.mlp.{name}.weight" for name in ("c_fc", "c_proj")} <= changed


def test_an_interrupted_run_goes_on_to_the_same_weights(material, tmp_path, monkeypatch):
    options = {"steps": 8, "save_steps": 2, "gradient_accumulation_steps": 2}
    (tmp_path / "whole").mkdir()
    run(material, tmp_path / "whole", **options)
    with interrupted(monkeypatch, GroupedTrainer, "training_step", after=2 * 5):
        run(material, tmp_path, **options)
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="holds an interrupted run"):
        run(material, tmp_path, **options)
    with pytest.raises(InputError, match="had other settings: learning_rate"):
        run(material, tmp_path, resume=True, learning_rate=0.5, **options)
    run(material, tmp_path, resume=True, **options)
    assert_same(weights(tmp_path / "out"), weights(tmp_path / "whole" / "out"), atol=1e-7, rtol=1e-6)


def test_the_checkpoint_keeps_its_cache_and_its_way_to_generate(material, tmp_path):
    """The Trainer turns the cache off, and fills generation's settings in with defaults when it scores answers."""
    model, tokenizer = load_model(str(material / "bart-rfa"))
    model.config.use_cache = False
    model.generation_config.num_beams = 3
    for folder in (tmp_path / "model", tmp_path / "kept"):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    write_rows(tmp_path / "few.jsonl", [{"source": words(4), "target": words(3)}] * 4)
    options = {"evaluate": tmp_path / "few.jsonl", "predict_with_generate": True, "generation_num_beams": 1}
    run(material, tmp_path, tmp_path / "model", "seq2seq", steps=1, **options)
    before, after = (json.loads((tmp_path / name / "generation_config.json").read_text()) for name in ("kept", "out"))
    for settings in (before, after):
        if isinstance(settings["eos_token_id"], int):  # up to transformers 5.17 the Trainer makes a list of one
            settings["eos_token_id"] = [settings["eos_token_id"]]
    assert after == before
    trained = load_model(str(tmp_path / "out"))[0]
    assert not trained.config.use_cache


def endless(folder: Path, material: Path, **generation) -> Path:
    """Save a model that answers w5 for ever."""
    model, tokenizer = load_model(str(material / "bart-rfa"))
    with torch.no_grad():
        model.final_logits_bias[:, 5] = 1e4
    model.generation_config.update(**generation)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("generation", "training", "expected"),
    [
        ({}, {}, 24),  # as many as a target may have, though transformers would stop at 20
        ({}, {"block_length": 96}, 95),  # the positions, one of them the start token's
        ({"max_length": 31}, {}, 30),  # of the checkpoint, which counts the start token
        ({"max_new_tokens": 30}, {"generation_max_length": 26}, 25),
    ],
)
def test_answers_that_are_scored_are_as_long_as_they_need_to_be(
    generation, training, expected, material, tmp_path, monkeypatch
):
    answers, bleu = [], tasks._bleu

    def watched(predictions, labels, tokenizer):
        answers.extend(predictions)
        return bleu(predictions, labels, tokenizer)

    monkeypatch.setattr(tasks, "_bleu", watched)
    rows = [{"source": words(4, n), "target": words(3, n)} for n in range(4)]
    write_rows(tmp_path / "few.jsonl", rows)
    options = {"steps": 1, "learning_rate": 1e-9, "block_length": 24, "predict_with_generate": True, **training}
    folder = endless(tmp_path / "model", material, **generation)
    run(material, tmp_path, folder, "seq2seq", evaluate=tmp_path / "few.jsonl", **options)
    assert [answer.tolist().count(5) for answer in answers] == [expected] * 4


def test_the_command_trains_in_bfloat16_as_documented(material, tmp_path, monkeypatch, capsys):
    """The line of docs/training.md, where there is a GPU or none."""
    (tmp_path / "reviews.csv").write_text("review,stars\nw5 w6,1\nw7,2\nw8 w9,1\n")
    shutil.copytree(material / "gpt2-rfa", tmp_path / "gpt2-rfa")
    page = (ROOT / "docs" / "training.md").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith("hf-rfa finetune") and line.endswith("--bf16"))
    monkeypatch.chdir(tmp_path)
    cli.app([*line.split()[1:], "--max_steps", "1", "--report_to", "none"], standalone_mode=False)
    assert "train_loss" in capsys.readouterr().out
    assert AutoModelForSequenceClassification.from_pretrained("gpt2-rfa-finetuned").config.label2id == {"1": 0, "2": 1}


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (["--bf16", "--fp16"], "At most one of fp16 and bf16"),
        (["--fp16", "--use_cpu"], "--fp16 needs an accelerator.*--bf16"),
        (["--eval_strategy", "steps", "--eval_steps", "1"], "--eval-strategy needs --evaluate"),
    ],
)
def test_training_arguments_that_cannot_be_used_are_refused(given, match, material, tmp_path):
    paths = {"model": material / "gpt2-rfa", "train": material / "rows.jsonl", "output": tmp_path / "out"}
    words = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
    with pytest.raises((InputError, UsageError), match=match):
        cli.app(["finetune", "--task", "clm", *words, *given], standalone_mode=False)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"task": "translate"}, "task must be one of clm, seq2seq, classify, got 'translate'"),
        ({"train": "none.jsonl"}, "there is no file .*none.jsonl"),
        ({"train": "empty.jsonl"}, "empty.jsonl is empty"),
        ({"train": "broken.jsonl"}, "broken.jsonl, line 2: not a JSON object"),
        ({"text_column": "body"}, "has no column 'body'. It has: text, label, source, target"),
        ({"task": "classify", "evaluate": "other.csv"}, "label 'c' is not among those of the training data: a, b"),
        ({"task": "seq2seq"}, "cannot load a model for seq2seq"),
        ({"gate_rate": -1.0}, "learning rate of gates must be a number of at least 0, got -1.0"),
        ({"streaming": True, "steps": -1}, "--streaming needs --max-steps"),
        ({"steps": 0}, "--max-steps 0 and --num-train-epochs 3 train nothing"),
        (dict.fromkeys(RATES, 0.0), "the learning rates leave nothing to train"),
        ({"train": "short.txt"}, "does not fill a single block of 16 tokens"),
        ({"train": "null.jsonl"}, "null.jsonl, row 2: column 'text' is null, not text"),
        ({"train": "prompts.jsonl", "prompt_column": "prompt"}, "prompts.jsonl has nothing to learn in any row"),
        ({**ANSWERS, "generation_max_length": 97}, "--generation-max-length is 97, but this model has 96 positions"),
        ({"resume": True}, "there is no interrupted run to resume"),
    ],
)
def test_bad_input(options, match, material, tmp_path):
    if "prompt_column" in options:
        options = {"train": "prompted.jsonl", **options}
    with pytest.raises(InputError, match=match):
        run(material, tmp_path, **options)
    assert leftovers(tmp_path) == []
