"""What conversion refuses or fails at: a clear error, and nothing half-written."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import GPT2LMHeadModel

from hf_rfa.convert import InputError, convert, pipeline
from hf_rfa.convert.report import Perplexities, check_perplexity
from hf_rfa.io import atomic_io
from tests.conftest import DEMO_MODEL, DEMO_TEXT, copy_of, leftovers, refused
from tests.families import make


def test_missing_sources(tmp_path):
    refused(r"no folder \./nothing", "./nothing", tmp_path)
    refused("no folder /no/such/folder", "/no/such/folder", tmp_path)
    refused("neither a folder nor", "what is this?", tmp_path)
    (tmp_path / "empty").mkdir()
    refused("no config.json", tmp_path / "empty", tmp_path)
    (tmp_path / "file").write_text("x")
    refused("is a file", tmp_path / "file", tmp_path)
    (tmp_path / "model.gguf").touch()
    refused("transformers makes a folder of a GGUF file", tmp_path / "model.gguf", tmp_path)


def test_unsupported_and_converted_models(tiny_parent, tmp_path):
    source = copy_of(tiny_parent, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    for model_type in ("bert", "no-such-type"):
        (source / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
        refused(f"'{model_type}', which cannot be converted. docs/models.md lists the types that can", source, tmp_path)
    (source / "config.json").write_text("{not json")
    refused("cannot read .*config.json", source, tmp_path)
    (source / "config.json").write_text("{}")
    refused("has model_type None, which cannot be converted", source, tmp_path)
    convert(tiny_parent, tmp_path / "rfa")
    refused("RFA checkpoint already", tmp_path / "rfa", tmp_path)


def test_quantized_checkpoints(tiny_parent, tmp_path):
    source = copy_of(tiny_parent, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    for quantization in ({"quant_method": "gptq", "bits": 4}, {"load_in_8bit": True}):
        (source / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
        said = refused(r"is quantized \(quantization_config, in its config\.json\)", source, tmp_path)
        assert "full-precision weights" in said
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": None}))
    convert(source, tmp_path / "out", num_features=8)


def test_broken_weights(tiny_parent, tmp_path):
    source = copy_of(tiny_parent, tmp_path / "source")
    weights = source / "model.safetensors"
    whole = weights.read_bytes()
    for broken in (whole[: len(whole) // 2], whole[:5], b""):
        weights.write_bytes(broken)
        refused("model.safetensors is broken or cut short", source, tmp_path)
    weights.unlink()
    refused("has no weights", source, tmp_path)

    tensors = load_file(tiny_parent / "model.safetensors")
    key = "transformer.h.1.mlp.c_fc.weight"
    save_file({**tensors, key: tensors[key][:, :-1].contiguous()}, weights, metadata={"format": "pt"})
    refused(rf"{key} has shape \(24, 95\).*\(24, 96\)", source, tmp_path)
    save_file({name: tensor for name, tensor in tensors.items() if name != key}, weights, metadata={"format": "pt"})
    refused(f"lack 1 tensors.*{key}", source, tmp_path)
    for value in (float("nan"), float("inf"), -float("inf")):
        bad = tensors[key].clone()
        bad[3, 4] = value
        save_file({**tensors, key: bad}, weights, metadata={"format": "pt"})
        refused(f"tensor {key} holds 1 values that are NaN or infinite", source, tmp_path)


def test_every_shard_is_needed_and_checked(tiny_parent, tmp_path):
    GPT2LMHeadModel.from_pretrained(tiny_parent).save_pretrained(tmp_path / "source", max_shard_size="20KB")
    for shard in sorted((tmp_path / "source").glob("model-*.safetensors")):
        tensors, whole = load_file(shard), shard.read_bytes()
        name = next(iter(tensors))
        save_file({**tensors, name: torch.full_like(tensors[name], torch.nan)}, shard, metadata={"format": "pt"})
        refused(f"{shard.name}: tensor {name} holds", tmp_path / "source", tmp_path)
        shard.unlink()
        refused(f"lacks {shard.name}", tmp_path / "source", tmp_path)
        shard.write_bytes(whole)


def test_pickles_are_refused_unless_asked_for(tiny_parent, tmp_path):
    source = copy_of(tiny_parent, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    torch.save(tensors, source / "pytorch_model.bin")
    refused("pickle.*--config allow_pickle=true", source, tmp_path)
    torch.save({**tensors, "transformer.ln_f.bias": torch.full((24,), float("nan"))}, source / "pytorch_model.bin")
    refused("transformer.ln_f.bias holds 24 values", source, tmp_path, allow_pickle=True)


def test_destinations(tiny_parent, tmp_path):
    source = copy_of(tiny_parent, tmp_path / "source")
    refused("is the source itself", source, tmp_path, destination=source, overwrite=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("keep me")
    refused("exists and is kept.*--overwrite", source, tmp_path, destination=tmp_path / "out")
    refused("holds no checkpoint", source, tmp_path, destination=tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "precious.txt").read_text() == "keep me"
    (tmp_path / "file").write_text("x")
    refused("is not a folder", source, tmp_path, destination=tmp_path / "file", overwrite=True)
    refused("cannot write to", source, tmp_path, destination=tmp_path / "file" / "out")
    convert(source, tmp_path / "result")
    first = (tmp_path / "result" / "model.safetensors").read_bytes()
    refused("exists and is kept", source, tmp_path, destination=tmp_path / "result", seed=1)
    convert(source, tmp_path / "result", seed=1, overwrite=True)
    assert (tmp_path / "result" / "model.safetensors").read_bytes() != first
    (tmp_path / "free").mkdir()
    convert(source, tmp_path / "free")
    assert (tmp_path / "free" / "config.json").is_file()


#: Family, options, and words of the message.
OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    # a value
    ("gpt2", {"feature_map": "cosine"}, "feature_map='cosine' is unknown. Known: arccos, elu"),
    ("gpt2", {"preset": "half"}, "preset must be one of exact, mixed, rfa, got 'half'"),
    ("gpt2", {"dtype": "int8"}, "dtype must be one of .*got 'int8'"),
    ("gpt2", {"num_features": 0}, "num_features must be at least 1, got 0"),
    ("gpt2", {"memory": 97}, "memory=97 is more than the positions"),
    ("gpt2", {"layers": [2]}, r"indices from 0 to 1, got \[2\]"),
    ("gpt2", {"max_positions": 96}, "max_positions=96 does not extend the 96 positions"),
    ("gpt2", {"calibrate_on": "no/such/text.txt"}, "no text file no/such/text.txt"),
    (
        "gpt2",
        {"config": {"num_sink": 3}},
        "config names 'num_sink', which is not a field; the nearest is num_sinks. The",
    ),
    ("gpt2", {"config": {"window_size": 3}}, "config names 'window_size', which is not a field"),
    ("gpt2", {"config": {"unit_norm": 3}}, "unit_norm.*bool.*int"),
    ("bart", {"cross_layers": [3]}, r"cross_layers to convert must be indices from 0 to 2, got \[3\]"),
    # attention that there is not, or that is not converted
    ("gpt2", {"layers": []}, "no layer is left to convert"),
    ("gpt2", {"cross_layers": "all"}, "cross_layers=all does not apply to gpt2, which has no such attention"),
    ("bart", {"layers": [], "gate": True}, "gate=True applies to causal attention, and none is converted"),
    ("bart", {"layers": [], "preset": "mixed"}, "preset=mixed applies to causal attention, and none is converted"),
    ("bart", {"num_cross_features": 8}, "num_cross_features=8 applies to cross.*name cross_layers"),
    # what a preset or a feature map leaves no room for
    ("llama", {"num_features": 8}, "num_features=8 has no effect with preset=exact.*mixed.*rfa"),
    ("llama", {"trained": "features", "preset": "exact"}, "has no features, which attention transfer trains"),
    ("bart", {"preset": "exact", "cross_layers": "all"}, "cross attention needs them.*--config cross_layers=none"),
    ("gpt2", {"feature_map": "none"}, "leaves preset=mixed no features. Pass preset exact"),
    ("gpt2", {"feature_map": "elu", "num_features": 3}, "num_features=3"),
    ("gpt2", {"force": True}, r"force=True has no effect: nothing is measured without a text \(--calibrate\)"),
    # a memory
    ("gpt2", {"memory": 64, "preset": "rfa", "num_features": 8}, "memory=64 has no effect.*num_features"),
    ("llama", {"memory": 64, "window_size": 8, "num_slots": 4}, "memory=64 has no effect"),
    ("llama", {"memory": 64, "window_size": 61}, "memory=64 has no room for what preset=exact keeps"),
    # retrieval heads
    ("gpt2", {"retrieval_window": 5}, "has no effect without retrieval_heads"),
    ("gpt2", {"retrieval_slots": 5}, "has no effect without retrieval_heads"),
    ("gpt2", {"retrieval_heads": 1, "retrieval_slots": 97}, "more than the 96 positions of .* Take fewer"),
    ("gpt2", {"retrieval_heads": 1, "retrieval_window": 97}, "more than the 96 positions of .* Leave it out for 96"),
    ("gpt2", {"retrieval_heads": 5}, "at most 4"),
    ("gpt2", {"retrieval_heads": [[7, 0]]}, "layers of"),
    ("llama", {"retrieval_heads": 9, "memory": 12}, "9 are too many"),
    ("bart", {"retrieval_heads": 1, "cross_layers": []}, r"Name the heads \(layer.head\)"),
]


@pytest.mark.parametrize(("family", "options", "message"), OPTIONS, ids=str)
def test_options_that_cannot_be_are_refused(family, options, message, checkpoints, tmp_path):
    refused(message, checkpoints[family], tmp_path, **options)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--config", "unit_norm", "--config takes a field and its value such as num_sinks=2, got 'unit_norm'"),
        ("--config", "num_sinks=few", "--config num_sinks: it must be a whole number, got 'few'"),
        ("--config", "gate=maybe", "--config gate: it must be true or false, got 'maybe'"),
        ("--config", "memory=64", "--config memory: use its own option, --memory"),
        ("--config", "num_sinks=-1", "num_sinks must be at least 0, got -1"),
        ("--retrieval-heads", "0-1", "layer.head of each such as 18.2,7.2"),
    ],
)
def test_values_that_cannot_be_read_are_refused(option, value, message, tmp_path, refused_command):
    assert message in refused_command("convert", DEMO_MODEL, tmp_path / "out", option, value)


def test_a_text_needs_a_tokenizer(tiny_parent, tmp_path):
    refused("there is no tokenizer in it", tiny_parent, tmp_path, calibrate_on=DEMO_TEXT)


def test_full_disk(tiny_parent, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(atomic_io.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
        refused("GB free, but the result needs about", tiny_parent, tmp_path)

    def no_space(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ModelCard, "save", no_space)  # after the weights have been written
    refused("the disk of .* is full; nothing was written", tiny_parent, tmp_path)


def test_a_ruined_model_is_refused_unless_forced_or_trained_at_once(
    checkpoints, text, tmp_path, monkeypatch, run_cli, refused_command
):
    """Random weights make random texts of any text, and little is enough here to call a model ruined."""
    monkeypatch.setattr("hf_rfa.convert.report.MAX_PERPLEXITY_RATIO", 0.2)
    words = ("convert", checkpoints["gpt2"], tmp_path / "out", "--preset", "rfa", "--num-features", 1)
    words += ("--calibrate", text)
    said = refused_command(*words)
    found = re.search(r"its perplexity is ([\d.]+), more than 0.2 times the base model's ([\d.]+)\. ", said)
    assert float(found[1]) > 0.2 * float(found[2])
    for advice in ("--memory", "--layers", "--data", "--config force=true"):
        assert advice in said
    assert "nothing was written" in said
    assert "cross_layers" not in said
    assert leftovers(tmp_path) == []
    assert run_cli(*words, "--config", "force=true") == 0
    card = (tmp_path / "out" / "README.md").read_text()
    ratio = float(found[1]) / float(found[2])
    assert f"The conversion has ruined the model: on the text its perplexity is {ratio:.1f} times the base" in card
    assert "--config force=true" in card
    options = {"preset": "rfa", "num_features": 1, "calibrate_on": text, "trained": "features"}
    assert convert(checkpoints["gpt2"], tmp_path / "to train", **options).perplexities.ruined
    refused("force=True has no effect: training follows", checkpoints["gpt2"], tmp_path, force=True, **options)


def test_a_perplexity_that_is_no_number_is_of_a_ruined_model():
    figures = Perplexities(softmax=10.0, calibrated=float("nan"), tokens=9, own_outputs=True)
    config = make("bart").config
    with pytest.raises(InputError, match=r"or cross attention \(--config cross_layers=none\) softmax"):
        check_perplexity(figures, config)
    check_perplexity(replace(figures, calibrated=20.0), config)
    with pytest.raises(InputError, match=r"is 20\.01, more than 2 times the base model's 10\.00"):
        check_perplexity(replace(figures, calibrated=20.01), config)
    with pytest.raises(InputError, match=r"keep layers \(--layers\) softmax"):
        check_perplexity(figures, make("bart", {"softmax_cross_layers": [0, 1, 2]}).config)


def test_a_result_that_does_not_reload_the_same_is_not_kept(tiny_parent, tmp_path, monkeypatch):
    true_logits = pipeline.probe_logits
    shifts = iter([0.0, 1.0])  # before it is written, and reloaded
    monkeypatch.setattr(pipeline, "probe_logits", lambda *args: true_logits(*args) + next(shifts))
    refused("gives other logits", tiny_parent, tmp_path)


def test_an_interrupt_leaves_the_old_result(tiny_parent, tmp_path, monkeypatch):
    convert(tiny_parent, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "check_kept", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert(tiny_parent, tmp_path / "out", seed=1, overwrite=True)
    assert leftovers(tmp_path) == ["out"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
