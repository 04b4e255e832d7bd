"""Distillation: what is trained, on which loss, and that it can be interrupted and resumed."""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import fmean

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from hf_rfa.convert import InputError
from hf_rfa.convert.card import UNTRAINED
from hf_rfa.finetune.data import text_blocks
from hf_rfa.finetune.distill import HELD_OUT, distill
from hf_rfa.finetune.recipe import Recipe, Stage
from hf_rfa.finetune.trainers import AttentionTransferTrainer, LogitDistillationTrainer, train_stage, transfer_losses
from hf_rfa.inference import load_model
from hf_rfa.io.text_io import read_documents, tokenize
from hf_rfa.models.feature_maps import FEATURE_MAPS
from hf_rfa.models.projected_feature_maps import ProjectedFeatureMap
from hf_rfa_cli import convert as cli_convert
from hf_rfa_cli import main as cli
from tests.conftest import leftovers, save_tiny_tokenizer, words
from tests.families import has_encoder, is_own, make, softmax_model
from tests.training import assert_same, interrupted, weights

RECIPE = """
transfer: {steps: 30, batch_size: 4, block_length: 16, learning_rate: 0.02}
end_to_end: {steps: 6, batch_size: 4, block_length: 16, learning_rate: 0.001, rfa_learning_rate: 0.001, kl_weight: 0.5}
seed: 3
"""


UNLIKE_BLOCKS = Recipe(Stage(steps=1, block_length=75), Stage(steps=1, block_length=96))


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    """Softmax models with tokenizers, RFA models with their weights, texts and a recipe."""
    folder = tmp_path_factory.mktemp("distill")
    for family, options in (("gpt2", {"gate": True}), ("bart", {"softmax_encoder_layers": []})):
        save_pair(folder, family, feature_map="exponential", num_features=16, **options)
    make("gpt2", {"feature_map": "elu"}).save_pretrained(folder / "elu")
    save_tiny_tokenizer(folder / "elu")
    (folder / "text.txt").write_text(words(700))
    (folder / "short.txt").write_text(words(40))
    (folder / "long.txt").write_text(words(1000))
    (folder / "sources.txt").write_text("".join(words(3 + n % 7, n) + "\n" for n in range(40)))
    (folder / "targets.txt").write_text("".join(words(2 + n % 5, 3 * n) + "\n" for n in range(40)))
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def save_pair(folder: Path, family: str, **options) -> None:
    """Save a softmax model as FAMILY, and an RFA model with its weights as FAMILY-rfa."""
    model = make(family, options)
    for name, each in ((f"{family}-rfa", model), (family, softmax_model(model, family))):
        each.save_pretrained(folder / name)
        save_tiny_tokenizer(folder / name)


def run(material, tmp_path, model="gpt2", **options):
    options = {"data": material / "text.txt", "recipe": material / "recipe.yaml", "teacher": material / model} | options
    return distill(options.pop("checkpoint", material / f"{model}-rfa"), tmp_path / "out", **options)


def pairs_of(material) -> dict[str, Path]:
    return {"data": material / "sources.txt", "references": material / "targets.txt"}


def recipe_of(material, *, transfer=None, end_to_end=None, **settings) -> Recipe:
    """Return the recipe of ``material`` with other settings in both stages."""
    recipe = Recipe.load(material / "recipe.yaml").with_steps(transfer=transfer, end_to_end=end_to_end)
    return replace(recipe, **{name: replace(stage, **settings) for name, stage in recipe.stages().items()})


def blocks_of(material, length: int) -> torch.Tensor:
    """Return the blocks of the text that trains."""
    tokenizer = AutoTokenizer.from_pretrained(material / "gpt2")
    return text_blocks(tokenize(tokenizer, read_documents(material / "text.txt")), length)["input_ids"][:]


def gained(report) -> bool:
    return sum(map(sum, report.divergence_after.values())) < sum(map(sum, report.divergence_before.values()))


def test_transfer_trains_feature_maps_and_gates_and_nothing_else(material, tmp_path):
    report = run(material, tmp_path, end_to_end_steps=0)
    assert set(report.divergence_before) == {"transformer.h.0.attn", "transformer.h.1.attn"}
    for name, before in report.divergence_before.items():
        assert fmean(report.divergence_after[name]) < 0.8 * fmean(before), name
    old, new = weights(material / "gpt2-rfa"), weights(tmp_path / "out")
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert all(is_own(name) for name in changed)
    assert {name.rsplit(".", 1)[-1] for name in changed} >= {"projection", "key_projection", "norm_weight", "sigma"}
    assert any(".gate." in name for name in changed)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.isfinite(model(torch.ones(1, 4, dtype=torch.long)).logits).all()
    saved = json.loads((tmp_path / "out" / "distillation.json").read_text())
    assert saved["recipe"]["transfer"]["steps"] == 30
    assert saved["divergence_after"] == {name: list(heads) for name, heads in report.divergence_after.items()}
    assert [entry["step"] for entry in saved["stages"][0]["log"] if "loss" in entry] == list(range(1, 31))
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert report.command in card.content
    assert UNTRAINED not in card.content
    assert leftovers(tmp_path) == ["out"]


@pytest.mark.parametrize("name", ["transfer", "end_to_end"])
def test_a_stage_leaves_the_models_settings_as_they_were(name, pair, tmp_path):
    """Gradients of frozen parameters, the cache, and the teacher's mode."""
    model, teacher = pair
    parameters = list(torch.nn.ModuleList(pair).parameters())
    for number, parameter in enumerate(parameters):
        parameter.requires_grad_(number % 3 > 0)
    teacher.train()
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(4, 61, (2, 8))]
    train_stage(name, model, teacher, data, Stage(steps=1, batch_size=2), tmp_path)
    assert [parameter.requires_grad for parameter in parameters] == [n % 3 > 0 for n in range(len(parameters))]
    assert (teacher.training, model.training, model.config.use_cache) == (True, False, True)


@pytest.mark.parametrize(
    "feature_map", sorted(name for name, cls in FEATURE_MAPS.items() if issubclass(cls, ProjectedFeatureMap))
)
def test_every_trainable_map_learns(feature_map, tmp_path):
    config = {"trainable_projection": feature_map in ("positive", "arccos", "gaussian"), "num_features": 16}
    config |= {"unit_norm": True} if feature_map in ("gaussian", "arccos") else {}
    model = make("gpt2", {"feature_map": feature_map, **config})
    teacher = softmax_model(model, "gpt2")
    ids = torch.randint(4, 61, (8, 16))
    data = [{"input_ids": row, "labels": row} for row in ids]

    def divergence() -> float:
        return sum(float(heads.sum()) for _, heads in transfer_losses(model, teacher, {"input_ids": ids}))

    before = divergence()
    train_stage("transfer", model, teacher, data, Stage(steps=12, batch_size=8, learning_rate=0.02), tmp_path)
    assert divergence() < before


def test_the_window_and_the_features_of_the_tokens_before_it_learn_together(material, tmp_path):
    save_pair(tmp_path, "gpt2", feature_map="exponential", num_features=16, window_size=3, gate=True)
    (tmp_path / "gpt2-rfa").rename(tmp_path / "rfa")
    report = run(material, tmp_path, checkpoint=tmp_path / "rfa", transfer_steps=8, end_to_end_steps=2)
    assert gained(report)
    assert list(report.perplexities) == ["teacher", "converted", "attention transfer", "end to end"]
    model, tokenizer = load_model(str(tmp_path / "out"))
    length = report.recipe.transfer.block_length
    held_out = text_blocks(tokenize(tokenizer, read_documents(material / "text.txt")), length)[-8:]
    loss = model(**held_out).loss.detach()
    assert math.log(report.perplexities["end to end"]) == pytest.approx(float(loss), rel=1e-5)
    old, new = weights(tmp_path / "rfa"), weights(tmp_path / "out")
    still = [name for name in old if "feature_map" not in name and torch.equal(old[name], new[name])]
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("rfa", "out"))
    assert after == before
    assert not still, "after the first stage, which leaves the other weights alone, the second trains them"
    with pytest.raises(InputError, match=r"no longer has the weights of .*--transfer-steps 0"):
        run(material, tmp_path / "more", checkpoint=tmp_path / "out")


@pytest.mark.parametrize("lengths", [(32, 16), (16, 17)])
def test_no_stage_learns_what_is_held_out_when_its_blocks_have_another_length(lengths, material, tmp_path, monkeypatch):
    learned: list[list[int]] = []

    def recorded(name, model, teacher, data, *args, **options):
        learned.append(data["input_ids"][:].flatten().tolist())
        return train_stage(name, model, teacher, data, *args, **options)

    monkeypatch.setattr("hf_rfa.finetune.distill.train_stage", recorded)
    recipe = recipe_of(material, transfer=1, end_to_end=1)
    stages = zip(recipe.stages().items(), lengths, strict=True)
    recipe = replace(recipe, **{name: replace(stage, block_length=length) for (name, stage), length in stages})
    run(material, tmp_path, recipe=recipe)
    before = blocks_of(material, lengths[0])[:-HELD_OUT].flatten().tolist()
    for tokens, length in zip(learned, lengths, strict=True):
        assert tokens == before[: len(before) // length * length], "all whole blocks before what is held out"


@pytest.mark.parametrize("family", ["gpt2", "bart"])
def test_dropout_is_off_unless_asked_for(family, tmp_path):
    model = make(family, **({"resid_pdrop": 0.5} if not has_encoder(family) else {"dropout": 0.5}))
    teacher = softmax_model(model, family)
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(4, 61, (2, 9))]
    batch = {name: torch.stack([row[name] for row in data]) for name in data[0]}
    expected = float(model.eval()(**batch).loss.detach())
    for dropout in (False, True):
        stage = Stage(steps=1, batch_size=2, dropout=dropout, kl_weight=0.0)
        result = train_stage("end_to_end", copy.deepcopy(model), teacher, data, stage, tmp_path / str(dropout))
        assert (result.log[0]["loss"] == pytest.approx(expected, rel=1e-3)) is not dropout


@pytest.mark.parametrize("family", ["gpt2", "bart"])
def test_lora_is_trained_merged_and_resumed(family, material, tmp_path, monkeypatch):
    pytest.importorskip("peft")
    options = {"model": family, "recipe": recipe_of(material, transfer=0, lora_rank=2)}
    options |= pairs_of(material) if family == "bart" else {}
    run(material, tmp_path, **options)
    before, after = weights(material / f"{family}-rfa"), weights(tmp_path / "out")
    assert set(after) == set(before), "LoRA is merged and gone"
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    projections = [name for name in changed if name.endswith("weight") and not is_own(name)]
    assert projections
    for name in projections:
        difference = after[name] - before[name]
        assert int(torch.linalg.matrix_rank(difference, rtol=1e-3)) <= 2, name
    assert not [name for name in changed if "wte" in name or "shared" in name or "ln_" in name or "layer_norm" in name]
    shutil.rmtree(tmp_path / "out")
    with interrupted(monkeypatch, LogitDistillationTrainer, "compute_loss", after=4):
        run(material, tmp_path, **options)
    run(material, tmp_path, resume=True, **options)
    again = weights(tmp_path / "out")
    assert all(torch.equal(again[name], after[name]) for name in after)


def test_a_distillation_ends_by_the_clock(material, tmp_path, monkeypatch):
    """Both stages together, whatever steps are left; learning rates have fallen by then."""
    clock = count(step=2.0)  # every look takes two seconds
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    report = run(material, tmp_path, transfer_steps=1000, end_to_end_steps=1000, max_minutes=1.0)
    assert [1 <= stage.steps < 40 for stage in report.stages] == [True, True]
    assert "--max-minutes 1.0" in report.command
    rates = [entry["learning_rate"] for entry in report.stages[0].log if "learning_rate" in entry]
    assert rates[-1] < 0.1 * report.recipe.transfer.learning_rate
    with pytest.raises(InputError, match="max_minutes must be a number above 0, got 0"):
        run(material, tmp_path, max_minutes=0, overwrite=True)


@pytest.mark.slow
def test_a_compiled_stage_learns_the_same(pair, tmp_path):
    model, teacher = pair
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(4, 61, (8, 12))]
    results, models = [], []
    for compiled in (False, True):
        models.append(copy.deepcopy(model))
        stage = Stage(steps=4, batch_size=2, learning_rate=1e-2, compiled=compiled)
        torch._dynamo.utils.counters.clear()
        results.append(train_stage("end_to_end", models[-1], teacher, data, stage, tmp_path / str(compiled)))
        assert bool(torch._dynamo.utils.counters["stats"]["unique_graphs"]) == compiled
    assert results[0].log[0]["loss"] == pytest.approx(results[1].log[0]["loss"], rel=1e-4)
    for ours, theirs in zip(*(each.parameters() for each in models), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    assert any(
        not torch.equal(ours, before) for ours, before in zip(models[1].parameters(), model.parameters(), strict=True)
    )


def test_the_precision_of_a_stage_is_that_of_no_other(pair, tmp_path):
    model, teacher = pair
    seen = []
    for network in pair:
        network.transformer.h[0].mlp.c_fc.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(4, 61, (4, 8))]
    precisions = {True: torch.bfloat16, False: torch.float32}
    for number, bf16 in enumerate((True, False, True)):
        stage = Stage(steps=1, batch_size=2, bf16=bf16)
        train_stage("end_to_end", model, teacher, data, stage, tmp_path / str(number))
        assert seen == [precisions[bf16]] * 2
        seen.clear()


def test_a_run_interrupted_in_each_stage_resumes_to_the_same_weights(material, tmp_path, monkeypatch):
    steps = {"transfer_steps": 10, "end_to_end_steps": 5}
    (tmp_path / "whole").mkdir()
    run(material, tmp_path / "whole", **steps)
    with interrupted(monkeypatch, AttentionTransferTrainer, "compute_loss", after=7):
        run(material, tmp_path, **steps)
    assert leftovers(tmp_path) == [".out.training", "whole"]
    with pytest.raises(InputError, match=r"holds an interrupted run. Pass --resume"):
        run(material, tmp_path, **steps)
    with pytest.raises(InputError, match="had other settings: recipe"):
        run(material, tmp_path, transfer_steps=10, end_to_end_steps=6, resume=True)
    with interrupted(monkeypatch, LogitDistillationTrainer, "compute_loss", after=3):
        run(material, tmp_path, **steps, resume=True)
    run(material, tmp_path, **steps, resume=True)
    assert_same(weights(tmp_path / "out"), weights(tmp_path / "whole" / "out"), atol=1e-6, rtol=1e-5)
    assert leftovers(tmp_path) == ["out", "whole"]


def test_sixteen_bit_checkpoints_keep_their_dtype(material, tmp_path):
    model = make("gpt2", {"feature_map": "exponential"})
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data if is_own(name) else parameter.data.bfloat16()
    model.config.dtype = torch.bfloat16
    model.save_pretrained(tmp_path / "rfa")
    save_tiny_tokenizer(tmp_path / "rfa")
    run(material, tmp_path, checkpoint=tmp_path / "rfa", transfer_steps=3, end_to_end_steps=0)
    tensors = weights(tmp_path / "out")
    assert tensors["transformer.h.0.attn.c_attn.weight"].dtype == torch.bfloat16
    projection = tensors["transformer.h.0.attn.feature_map.key_projection"]
    assert projection.dtype == torch.float32
    assert not torch.equal(projection.bfloat16().float(), projection), "nor is it rounded"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_a_model_with_an_encoder_learns_every_kind_of_attention(material, tmp_path):
    report = run(material, tmp_path, "bart", transfer_steps=12, end_to_end_steps=2, **pairs_of(material))
    assert len(report.divergence_before) == 8
    for kind in ("encoder.layers.self_attn", "decoder.layers.self_attn", "decoder.layers.encoder_attn"):
        names = [name for name in report.divergence_before if kind in re.sub(r"\.\d+\.", ".", name)]
        assert names
        before, after = (
            fmean(v for name in names for v in part[name])
            for part in (report.divergence_before, report.divergence_after)
        )
        assert after < before, kind
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert model.generate(torch.full((1, 4), 5), num_beams=2, max_new_tokens=4, eos_token_id=None).shape == (1, 5)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"teacher": "gpt2-rfa"}, "the teacher .* is an RFA checkpoint"),
        ({"checkpoint": "gpt2"}, "is a gpt2 model, not an RFA checkpoint. Convert it first"),
        ({"checkpoint": "elu"}, "nothing that attention transfer could train: feature_map='elu'"),
        ({"data": "short.txt"}, "the data gives 2 items for transfer; more than 8 are needed"),
        ({"recipe": UNLIKE_BLOCKS}, "no block of 96 tokens for end_to_end before the 8 that are held out: more text"),
        ({"references": "targets.txt"}, "references belong to a model with an encoder"),
        ({"transfer_steps": 0, "end_to_end_steps": 0}, "no stage of the recipe has any steps"),
        ({"resume": True}, "there is no interrupted run to resume"),
    ],
)
def test_bad_input(options, match, material, tmp_path):
    files = ("teacher", "checkpoint", "data", "references")
    options = {name: material / value if name in files else value for name, value in options.items()}
    with pytest.raises(InputError, match=match):
        run(material, tmp_path, **options)
    assert leftovers(tmp_path) == []


def test_several_processes_are_refused(material, tmp_path, monkeypatch):
    """Each would train alone, and all would write the same folder."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="2 processes were started, but distillation runs in one"):
        run(material, tmp_path)
    assert leftovers(tmp_path) == []


def test_a_diverging_run_says_so(material, tmp_path, monkeypatch, run_cli, capsys):
    def diverge(self, model, inputs, **options):
        return next(p for p in model.parameters() if p.requires_grad).sum() * float("nan")

    monkeypatch.setattr(AttentionTransferTrainer, "compute_loss", diverge)
    with pytest.raises(FloatingPointError, match=r"the loss is nan\. Lower the learning rate"):
        run(material, tmp_path, end_to_end_steps=0)
    assert not (tmp_path / "out").exists()
    shutil.rmtree(tmp_path / ".out.training")
    words = ["--teacher", material / "gpt2", "--data", material / "text.txt", "--recipe", material / "recipe.yaml"]
    assert run_cli("distill", material / "gpt2-rfa", *words, "--output", tmp_path / "out") == 1
    assert "error: attention transfer: the loss is nan. Lower" in capsys.readouterr().err


def test_conversion_and_transfer_in_one_command(material, tmp_path, monkeypatch, run_cli, capsys):
    command = ["convert", str(material / "gpt2"), str(tmp_path / "out"), "--transfer-steps", "4"]
    run_cli(*command)
    assert "pass one of these and --data, or neither" in " ".join(capsys.readouterr().err.split())
    assert leftovers(tmp_path) == []
    command += ["--data", str(material / "long.txt")]
    with monkeypatch.context() as patch:  # an interrupted training is seen before anything is converted
        (tmp_path / ".out.training").mkdir()
        patch.setattr(cli_convert, "_convert", lambda *args, **options: pytest.fail("converted first"))
        run_cli(*command)
        assert "Pass --resume to continue it" in " ".join(capsys.readouterr().err.split())
        (tmp_path / ".out.training").rmdir()
    ends = (SystemExit, KeyboardInterrupt)
    with interrupted(monkeypatch, AttentionTransferTrainer, "compute_loss", after=2, ends=ends):
        monkeypatch.setattr("sys.argv", ["hf-rfa", *command])
        cli.main()
    assert leftovers(tmp_path) == [".out.training"]
    assert run_cli(*command, "--resume") == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.feature_map == "exponential"
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.content.count(" ".join(["hf-rfa", *command])) == 2, "what makes it again, from start to end"
    assert (tmp_path / "out" / "distillation.json").is_file()
    assert leftovers(tmp_path) == ["out"]
