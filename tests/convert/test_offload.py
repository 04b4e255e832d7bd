"""Conversions that leave the blocks in their files: the result is that of a conversion in memory."""

from __future__ import annotations

import json
import shutil
from unittest.mock import Mock

import pytest
import torch
from transformers import BartForConditionalGeneration, GPT2LMHeadModel, GPT2Model, LlamaForCausalLM

from hf_rfa import RFABartConfig, RFABartForConditionalGeneration
from hf_rfa.convert import checkpoint, convert
from hf_rfa.convert.offload import blocks_on_disk
from tests.conftest import save_tiny_tokenizer, tiny_parent_config, tiny_seq2seq_config
from tests.convert.conftest import fields, tensors
from tests.families import base_config

PARENTS = {
    "gpt2": lambda: GPT2LMHeadModel(tiny_parent_config(eos_token_id=2)),
    "untied": lambda: GPT2LMHeadModel(tiny_parent_config(eos_token_id=2, tie_word_embeddings=False)),
    "body": lambda: GPT2Model(tiny_parent_config(eos_token_id=2)),
    "llama": lambda: LlamaForCausalLM(base_config("llama")),
    "bart": lambda: BartForConditionalGeneration(tiny_seq2seq_config("bart")),
}
CASES = [
    ("gpt2", True, {"window_size": 3, "keep_softmax": 1, "max_positions": 150}),
    ("untied", True, {"dtype": "bfloat16", "feature_map": "exponential"}),
    ("body", False, {"keep_softmax": 1}),
    ("llama", False, {}),  # a window, sinks and slots
    ("llama", True, {"search": True, "memory": 12}),
    ("gpt2", True, {"retrieval_heads": 1, "retrieval_window": 8, "window_size": 4, "feature_map": "hedgehog"}),
    ("bart", False, {"encoder_layers": "all", "max_positions": 150}),
    ("bart", True, {"gate": True, "keep_softmax": 2}),
]


@pytest.mark.parametrize(("name", "has_text", "options"), CASES)
def test_the_result_is_that_of_a_conversion_in_memory(name, has_text, options, text, tmp_path, monkeypatch):
    """Pickles are loaded into memory, and everything else of the two conversions is the same."""
    monkeypatch.setattr(checkpoint, "MAX_BYTES_IN_MEMORY", 0)
    offloaded = Mock(wraps=blocks_on_disk)
    monkeypatch.setattr(checkpoint, "blocks_on_disk", offloaded)
    torch.manual_seed(1)
    parent = PARENTS[name]()
    parent.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
    save_tiny_tokenizer(tmp_path / "shards")
    weights = shutil.ignore_patterns("*.safetensors", "*.index.json")
    shutil.copytree(tmp_path / "shards", tmp_path / "pickle", ignore=weights)
    torch.save(parent.state_dict(), tmp_path / "pickle" / "pytorch_model.bin")
    if has_text:
        options = {**options, "calibrate_on": text}
    reports = {}
    for folder in ("shards", "pickle"):
        given = {"allow_pickle": folder == "pickle", "command": "the command"}
        convert(tmp_path / folder, tmp_path / f"{folder}-rfa", **given, **options)
        reports[folder] = json.loads((tmp_path / f"{folder}-rfa" / "conversion.json").read_text())
        assert bool(reports[folder]["gains"]) == (name != "llama" or "memory" in options)  # the divergence of features
        assert bool(reports[folder]["retrieval_heads"]) == ("retrieval_heads" in options)
        for key in ("source", "destination"):
            del reports[folder][key]
    loaded = {"memory": 1 + len(reports["shards"]["trials"]), "retrieval_heads": 1}
    more = sum(count for option, count in loaded.items() if option in options)
    assert offloaded.call_count == 4 + more, "the shards twice, once more for every way that is tried, and both results"
    assert reports["shards"] == reports["pickle"]
    found, expected = tensors(tmp_path / "shards-rfa"), tensors(tmp_path / "pickle-rfa")
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
    assert len(list((tmp_path / "shards-rfa").glob("model-*.safetensors"))) > 2
    assert fields(tmp_path / "shards-rfa") == fields(tmp_path / "pickle-rfa")


def test_small_checkpoints_are_loaded_whole(tiny_parent, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "blocks_on_disk", Mock(side_effect=AssertionError("left on disk")))
    convert(tiny_parent, tmp_path / "out")


def test_which_modules_stay_on_disk():
    config = RFABartConfig.from_base(tiny_seq2seq_config("bart"), gate=True)
    devices = blocks_on_disk(RFABartForConditionalGeneration, config, torch.device("cuda:1"))
    for name in ("self_attn.q_proj", "encoder_attn.out_proj", "fc1", "final_layer_norm"):
        assert devices[f"model.decoder.layers.2.{name}"] == "disk"
    new = {f"model.decoder.layers.0.{name}" for name in ("self_attn.feature_map", "encoder_attn.feature_map")}
    shared = {"model.shared", "model.encoder.embed_tokens", "lm_head", "final_logits_bias"}
    for name in {*new, *shared, "model.decoder.layers.0.self_attn.gate", "model.decoder.embed_positions"}:
        assert devices[name] == "cuda:1"
