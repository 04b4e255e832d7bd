"""A conversion keeps the weights that transformers loads, whatever the configuration says of them.

With the blocks left in their files the result is that of a conversion in memory.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file
from transformers import BartForConditionalGeneration, GPT2LMHeadModel, GPT2Model, LlamaForCausalLM

from hf_rfa.convert import convert, pipeline
from hf_rfa.convert.checkpoint import loading
from hf_rfa.convert.checkpoint.offload import blocks_on_disk
from tests.conftest import refused, save_tiny_tokenizer, tiny_parent_config, tiny_seq2seq_config
from tests.convert.conftest import fields, load, tensors
from tests.families import base_config, save_softmax_model

#: Tokens of a text to calibrate on.
TOKENS = 200
#: The embedding, which the configuration says is the head too, by family.
TIED = {"gpt2": "transformer.wte.weight", "llama": "model.embed_tokens.weight", "bart": "model.shared.weight"}


def save_with_head(name: str, folder: Path) -> Path:
    """Save a model whose file has a head of its own, which its configuration does not say."""
    save_softmax_model(name, folder, tie_word_embeddings=True)
    weights = tensors(folder)
    weights["lm_head.weight"] = 0.5 * weights[TIED[name]]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("name", TIED)
def test_a_head_that_the_configuration_does_not_tell_of_is_kept(name, on_disk, text, tmp_path, monkeypatch):
    if on_disk:
        monkeypatch.setattr(loading, "MAX_BYTES_IN_MEMORY", 0)
        monkeypatch.setattr("hf_rfa.convert.inputs.OUTPUT_TOKENS", 6)  # each reads all matrices anew
    source = save_with_head(name, tmp_path / "source")
    convert(source, tmp_path / "out", calibrate_on=text, calibration_tokens=TOKENS)
    parent, result = load(source), load(tmp_path / "out")
    assert not torch.equal(parent.lm_head.weight, parent.get_input_embeddings().weight)
    theirs = result.state_dict()
    for key, tensor in parent.state_dict().items():
        assert torch.equal(theirs[key], tensor), key
    assert result.config.tie_word_embeddings == (name == "bart")  # whose other embeddings are tied


def test_a_head_that_is_the_embedding_stays_one(tmp_path):
    """In the file twice, as pickles have it."""
    source = save_with_head("gpt2", tmp_path / "source")
    weights = tensors(source)
    weights["lm_head.weight"] = weights["transformer.wte.weight"].clone()
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    convert(source, tmp_path / "out")
    result = load(tmp_path / "out")
    assert result.lm_head.weight is result.transformer.wte.weight
    assert result.config.tie_word_embeddings


@pytest.mark.parametrize("key", ["lm_head.weight", "transformer.wte.weight", "transformer.h.1.mlp.c_fc.weight"])
def test_a_result_with_other_weights_than_its_source_is_not_kept(key, tmp_path, monkeypatch):
    """It is compared with the source, and not with the model in memory, which has lost the same."""
    source = save_with_head("gpt2", tmp_path / "source")
    load_models = pipeline.load_models

    def load_wrongly(*args: Any) -> Any:
        models = load_models(*args)
        models[0].get_parameter(key).data[0, 0] += 1e-3
        return models

    monkeypatch.setattr(pipeline, "load_models", load_wrongly)
    refused(f"tensor {key} of the result is not that of {source}", source, tmp_path)


# Blocks that stay in their files

PARENTS = {
    "gpt2": lambda: GPT2LMHeadModel(tiny_parent_config(eos_token_id=2)),
    "body": lambda: GPT2Model(tiny_parent_config(eos_token_id=2)),
    "llama": lambda: LlamaForCausalLM(base_config("llama")),
    "bart": lambda: BartForConditionalGeneration(tiny_seq2seq_config("bart")),
}
CASES = [
    ("gpt2", True, {"window_size": 3, "layers": [1], "max_positions": 150}),
    ("gpt2", True, {"dtype": "bfloat16", "feature_map": "exponential"}),
    ("body", False, {"layers": [1]}),
    ("llama", True, {"memory": 12}),
    ("gpt2", True, {"retrieval_heads": 1, "retrieval_window": 8, "window_size": 4, "feature_map": "elu"}),
    ("bart", True, {"encoder_layers": "all", "gate": True, "layers": [0], "max_positions": 150, "force": True}),
]


@pytest.mark.parametrize(("name", "has_text", "options"), CASES)
def test_the_result_is_that_of_a_conversion_in_memory(name, has_text, options, text, tmp_path, monkeypatch):
    """Pickles are loaded into memory, and everything else of the two conversions is the same."""
    monkeypatch.setattr(loading, "MAX_BYTES_IN_MEMORY", 0)
    offloaded = Mock(wraps=blocks_on_disk)
    monkeypatch.setattr(loading, "blocks_on_disk", offloaded)
    torch.manual_seed(1)
    parent = PARENTS[name]()
    parent.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
    save_tiny_tokenizer(tmp_path / "shards")
    weights = shutil.ignore_patterns("*.safetensors", "*.index.json")
    shutil.copytree(tmp_path / "shards", tmp_path / "pickle", ignore=weights)
    torch.save(parent.state_dict(), tmp_path / "pickle" / "pytorch_model.bin")
    if has_text:
        options = {**options, "calibrate_on": text, "calibration_tokens": TOKENS}
    reports = {}
    for folder in ("shards", "pickle"):
        given = {"allow_pickle": folder == "pickle", "command": "the command"}
        convert(tmp_path / folder, tmp_path / f"{folder}-rfa", **given, **options)
        reports[folder] = json.loads((tmp_path / f"{folder}-rfa" / "conversion.json").read_text())
        has_features = fields(tmp_path / f"{folder}-rfa")["feature_map"] != "none"
        assert bool(reports[folder]["gains"]) == has_features
        heads = (reports[folder]["retrieval_heads"] or {"heads": []})["heads"]
        assert len(heads) == options.get("retrieval_heads", int("memory" in options))
        for key in ("source", "destination"):
            del reports[folder][key]
    more = bool({"memory", "retrieval_heads"} & options.keys())
    assert offloaded.call_count == 4 + more, "the shards twice, once more where heads are chosen, and both results"
    assert reports["shards"] == reports["pickle"]
    found, expected = tensors(tmp_path / "shards-rfa"), tensors(tmp_path / "pickle-rfa")
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
    assert len(list((tmp_path / "shards-rfa").glob("model-*.safetensors"))) > 2
    assert fields(tmp_path / "shards-rfa") == fields(tmp_path / "pickle-rfa")
