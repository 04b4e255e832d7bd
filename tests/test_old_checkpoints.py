"""Checkpoints and caches that earlier versions wrote load unchanged: their names are mapped in one place."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_rfa import RFAGPT2Config, load_cache, save_cache
from hf_rfa.models.cache_names import cache_argument
from hf_rfa.models.configuration_rfa import RENAMED_FIELDS

#: A GPT-2 of two layers with a window and gates, its logits, and its cache, as version 0.1.0 at commit 16f3c38 wrote them.
OLD = Path(__file__).parent / "data" / "rfa_gpt2_with_old_names"


def test_a_checkpoint_with_old_names_gives_the_logits_that_it_gave():
    written = json.loads((OLD / "config.json").read_text())
    assert set(RENAMED_FIELDS) <= written.keys(), "it has every old name"
    model = AutoModelForCausalLM.from_pretrained(OLD).eval()
    expected = load_file(OLD / "expected.safetensors")
    assert (model.config.window_size, model.config.window) == (3, 3)
    with torch.no_grad():
        torch.testing.assert_close(model(expected["ids"]).logits, expected["logits"])


def test_it_is_saved_with_the_new_names(tmp_path):
    AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    for old, new in RENAMED_FIELDS.items():
        assert old not in written
        assert written[new] == 3


def test_old_names_of_fields_are_taken_as_arguments_and_as_attributes():
    config = RFAGPT2Config(window=5)
    assert config.window_size == config.window == 5
    config.window = 7
    assert config.window_size == 7
    assert "window" not in config.to_dict()


def test_a_cache_with_old_names_is_read_and_gives_the_same_continuation(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(OLD).eval()
    ids = load_file(OLD / "expected.safetensors")["ids"]
    follow = torch.tensor([[4, 9]])
    with torch.no_grad():
        expected = model(torch.cat([ids, follow], dim=1)).logits[:, -2:]
        found = model(follow, **cache_argument(load_cache(OLD / "cache.safetensors", model))).logits
    torch.testing.assert_close(found, expected)
    save_cache(load_cache(OLD / "cache.safetensors", model), tmp_path / "again.safetensors")
    old, new = load_file(OLD / "cache.safetensors"), load_file(tmp_path / "again.safetensors")
    assert old.keys() == new.keys()
    assert all(torch.equal(new[name], tensor) for name, tensor in old.items())
