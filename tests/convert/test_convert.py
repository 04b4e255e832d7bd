"""Conversion: it keeps every weight and repeats itself. What it refuses is in test_convert_refusals."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import transformers
import typer
from huggingface_hub import ModelCard
from huggingface_hub.errors import RevisionNotFoundError
from torch.nn.functional import interpolate
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPT2LMHeadModel

from hf_rfa import FEATURE_MAPS
from hf_rfa.convert import ConversionOptions, convert
from hf_rfa.inference import cache_num_bytes
from hf_rfa_cli.main import app
from tests.conftest import ROOT, copy_of, leftovers, refused, save_tiny_tokenizer
from tests.convert.conftest import fields, load, tensors
from tests.families import base_config, has_encoder, is_own

CONVERTED = [("gpt2", name) for name in sorted(FEATURE_MAPS)]
CONVERTED += [("bart", "positive"), ("bart", "gaussian"), ("marian", "elu")]


@pytest.mark.parametrize(("family", "name"), CONVERTED)
def test_every_feature_map_converts_and_keeps_every_weight(family, name, checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_rfa.convert.calibrate.importance.STEPS", 4)
    options = {} if not has_encoder(family) else {"cross_layers": "all", "encoder_layers": "all"}
    options |= {"preset": "exact", "num_slots": 0} if name == "none" else {"preset": "rfa", "gate": True}
    if FEATURE_MAPS[name].needs_text:
        text = tmp_path / "text.txt"
        text.write_text("to be or not to be " * 600)
        options = {"preset": "mixed", "window_size": 3, "num_slots": 2, "calibrate_on": text, "force": True}
    report = convert(checkpoints[family], tmp_path / "out", feature_map=name, **options)
    parent, result = (tensors(folder) for folder in (checkpoints[family], tmp_path / "out"))
    for key, tensor in parent.items():
        assert torch.equal(result[key], tensor), key
    added = set(result) - set(parent)
    assert bool(added) == (name != "none")
    assert all(re.search(r"\.feature_map\.|\.(self_)?attn\.(gate|importance)\.", key) for key in added)
    assert report.max_logit_difference == 0
    model = load(tmp_path / "out")
    assert report.num_parameters == sum(p.numel() for p in model.parameters())
    ids = torch.full((1, 4), 5)
    inputs = {} if not has_encoder(family) else {"decoder_input_ids": ids}
    assert report.memory.fixed == cache_num_bytes(model(ids, **inputs).past_key_values)
    layers = {"causal": (3, 3), "cross": (3, 3), "encoder": (2, 2)}
    assert report.layers == (layers if has_encoder(family) else {"causal": (2, 2)})
    assert leftovers(tmp_path) == ["out", *(["text.txt"] if "calibrate_on" in options else [])]


def test_the_parents_dropout_does_not_act(tiny_parent, tmp_path):
    """Neither in its own answers nor in the queries and keys that calibration sees."""
    parent, found = GPT2LMHeadModel.from_pretrained(tiny_parent), []
    for rate in (0.0, 0.4):
        parent.config.update({"resid_pdrop": rate, "embd_pdrop": rate, "attn_pdrop": rate})
        parent.save_pretrained(tmp_path / f"parent-{rate}")
        convert(tmp_path / f"parent-{rate}", tmp_path / f"out-{rate}")
        report = json.loads((tmp_path / f"out-{rate}" / "conversion.json").read_text())
        weights = (tmp_path / f"out-{rate}" / "model.safetensors").read_bytes()
        found.append((report["gains"], weights))
    assert found[1] == found[0]


@pytest.mark.parametrize(("family", "count"), [("gpt2", 97), ("gpt2", 500), ("bart", 200), ("marian", 200)])
def test_positions_are_extended(family, count, checkpoints, tmp_path):
    """Learned tables are stretched by linear interpolation, from the first to the last position; sinusoids continued."""
    convert(checkpoints[family], tmp_path / "out", max_positions=count)
    model, parent = load(tmp_path / "out"), load(checkpoints[family])
    assert model.config.max_position_embeddings == count
    if not has_encoder(family):
        tables = [(model.transformer.wpe, parent.transformer.wpe)]
    else:
        sides = [(model.get_encoder(), parent.get_encoder()), (model.get_decoder(), parent.get_decoder())]
        tables = [(mine.embed_positions, theirs.embed_positions) for mine, theirs in sides]
    for new, old in ((mine.weight.detach(), theirs.weight.detach()) for mine, theirs in tables):
        if family == "marian":
            assert torch.equal(new[:96], old)
            assert new.shape[0] == count
        else:
            offset = 2 if family == "bart" else 0  # rows before position 0
            assert torch.equal(new[:offset], old[:offset])
            stretched = interpolate(old[offset:].T[None], size=count, mode="linear", align_corners=True)[0].T
            torch.testing.assert_close(new[offset:], stretched)
    ids = torch.randint(4, 61, (1, count))
    with torch.no_grad():
        inputs = {} if not has_encoder(family) else {"decoder_input_ids": ids}
        assert torch.isfinite(model(ids, **inputs).logits).all()
    if not has_encoder(family):
        output = model.generate(ids[:, : count - 20], max_new_tokens=20, eos_token_id=None, pad_token_id=0)
        assert output.shape[1] == count


@pytest.mark.parametrize(
    ("name", "auto_class"),
    [("BartForSequenceClassification", AutoModelForSequenceClassification), ("BartForCausalLM", AutoModelForCausalLM)],
)
def test_other_heads(name, auto_class, text, tmp_path):
    getattr(transformers, name)(base_config("bart", num_labels=4)).save_pretrained(tmp_path / "parent")
    save_tiny_tokenizer(tmp_path / "parent")
    # a window would hold all of its short lines
    report = convert(tmp_path / "parent", tmp_path / "out", calibrate_on=text, preset="rfa", cross_layers="all")
    model = auto_class.from_pretrained(tmp_path / "out")
    assert type(model).__name__ == f"RFA{name}"
    assert model.config.num_labels == 4
    assert all(gain.after < gain.before for gain in report.gains)
    if name == "BartForCausalLM":
        assert report.layers == {"causal": (3, 3), "cross": (3, 3)}
        assert len(report.gains) == 3, "nothing reaches cross attention"
        assert not report.perplexities.own_outputs
    else:
        assert report.perplexities is None


MANY = {"preset": "rfa", "feature_map": "gaussian", "num_features": 9, "gate": True, "layers": [0], "seed": 5}
MANY |= {"max_positions": 128, "config": {"unit_norm": True, "chunk_size": 9}, "dtype": "float16"}
EACH_KIND = {"layers": [1], "cross_layers": [0, 2], "encoder_layers": [1], "window_size": 2}
EACH_KIND |= {"config": {"unit_norm": True}, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("family", "options", "converted"),
    [
        ("llama", {"window_size": 9, "retrieval_heads": 2, "retrieval_window": 20}, {"causal": [0, 1, 2]}),
        ("gpt2", MANY, {"causal": [0]}),
        ("bart", {"layers": [], "cross_layers": "all"}, {"causal": [], "cross": [0, 1, 2], "encoder": []}),
        ("bart", {}, {"causal": [0, 1, 2], "cross": [], "encoder": []}),
        ("bart", EACH_KIND, {"causal": [1], "cross": [0, 2], "encoder": [1]}),
    ],
)
def test_the_command_on_the_card_gives_the_same_checkpoint(family, options, converted, checkpoints, tmp_path, run_cli):
    """And the checkpoint says which attention is converted, and has its own tensors in float32, all else as asked for."""
    report = convert(checkpoints[family], tmp_path / "a", **options)
    assert {kind: found for kind, (found, _) in report.layers.items()} == {k: len(v) for k, v in converted.items()}
    model = load(tmp_path / "a")
    config = fields(tmp_path / "a")
    assert options.get("config", {}).items() <= config.items()
    dtype = getattr(torch, options.get("dtype", "float32"))
    assert model.dtype == dtype
    for key, tensor in tensors(tmp_path / "a").items():
        assert tensor.dtype == (torch.float32 if is_own(key) else dtype), key
    for name, kind in model.config.SOFTMAX_LAYERS.items():
        count = model.config.num_layers_for(kind)
        kept = [index for index in range(count) if index not in converted[kind]]
        assert config[name] == kept
        noted = any(note.startswith(f"The {kind} attention of layer") and "is softmax" in note for note in report.notes)
        assert noted == (kept != [] and kind != "encoder")
    command = report.command.replace(str(tmp_path / "a"), str(tmp_path / "b"))
    assert command.startswith("hf-rfa convert ")
    assert run_cli(*shlex.split(command)[1:]) == 0
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_command_line_has_every_option():
    """Names, defaults and help are those of `ConversionOptions`: an option, or a field of --config, which the guide lists."""
    parameters = {each.name: each for each in typer.main.get_command(app).commands["convert"].params}
    listed = re.findall(r"(?m)^\| (`.*?) \|", (ROOT / "docs" / "guide.md").read_text())
    for field in dataclasses.fields(ConversionOptions):
        if field.metadata["flag"] is None:
            assert field.name not in parameters
            assert any(f"`{field.name}`" in names for names in listed)
        else:
            shown = parameters[field.name]
            assert (shown.help, shown.default) == (field.metadata["help"], field.default)


# Shared checkpoints


COMMITS = {None: "1" * 40, "v2": "2" * 40}


@pytest.fixture
def hub(checkpoints, tmp_path, monkeypatch) -> Path:
    """The current directory, beside a hub cache with a model gpt2, in two revisions."""
    repository = tmp_path / "hub" / "models--gpt2"
    (repository / "refs").mkdir(parents=True)
    for revision, commit in COMMITS.items():
        copy_of(checkpoints["gpt2"], repository / "snapshots" / commit)
        (repository / "refs" / (revision or "main")).write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.mark.parametrize("revision", COMMITS)
def test_a_hub_name_works_offline_from_the_cache(revision, hub):
    report = convert("gpt2", "out", num_features=8, revision=revision)
    assert ("--config revision=v2" in report.command) == (revision == "v2")
    assert json.loads((hub / "out" / "conversion.json").read_text())["source_revision"] == COMMITS[revision]
    card = ModelCard.load(hub / "out" / "README.md")
    assert card.data.base_model == "gpt2"
    assert f"https://huggingface.co/gpt2/tree/{COMMITS[revision]}" in card.content
    assert f"commit is `{COMMITS[revision]}`" in card.content


def test_what_the_hub_does_not_have_is_refused(hub, monkeypatch):
    for words in ("hub could not be reached", "HF_HUB_OFFLINE", "hf download distilgpt2"):
        refused(words, "distilgpt2", hub)
    refused("in the revision v3.*hf download gpt2 --revision v3", "gpt2", hub, revision="v3")
    missing = Mock(side_effect=RevisionNotFoundError("no such", response=Mock()))
    monkeypatch.setattr("hf_rfa.convert.checkpoint.source.snapshot_download", missing)
    refused("has no revision v3. Pass a branch, a tag or a commit", "gpt2", hub, revision="v3")
