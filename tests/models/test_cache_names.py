"""The names of a cache: transformers up to 5.23 calls it ``past_key_values``, and later ones ``cache``."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import DynamicCache, LlamaModel

from hf_rfa.models.cache_names import CACHE_NAME, cache_argument, returned_cache
from tests.families import logits, make, read, tokens

#: Families with an encoder and without, one of which hands its cache to attention under a third name.
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"window_size": 5},
    "llama": {"window_size": 5, "softmax_layers": [1]},
    "gpt_neox": {"window_size": 5},
    "gemma3_text": {"window_size": 5},
    "bart": {"window_size": 5, "softmax_layers": [1], "softmax_cross_layers": [0]},
    "marian": {"window_size": 5},
}
every_family = pytest.mark.parametrize("family", FAMILIES)


def test_the_name_is_that_of_the_installed_transformers():
    assert CACHE_NAME in inspect.signature(LlamaModel.forward).parameters
    assert cache_argument(None) == {CACHE_NAME: None}


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@every_family
@torch.no_grad()
def test_a_cache_is_read_and_filled_under_either_name(family, name):
    """And transformers, which has dropped one of them, or will, gets the other: it warns of nothing."""
    model, ids = make(family, FAMILIES[family]), tokens(2, 19)
    cache: Any = DynamicCache(config=model.config.get_text_config(decoder=True))
    parts = []
    for piece in ids.split([9, 1, 1, 8], dim=1):
        output = read(model, piece, use_cache=True, **{name: cache})
        cache = returned_cache(output)
        parts.append(output.logits)
    assert cache.get_seq_length() == 19
    assert_close(torch.cat(parts, dim=1), logits(model, ids), atol=2e-4, rtol=1e-4)


@every_family
def test_a_cache_under_another_name_is_refused(family):
    """It would be dropped without a word, and every token would see itself alone."""
    model, cache = make(family, FAMILIES[family]), DynamicCache()
    with pytest.raises(TypeError, match=rf"DynamicCache came as kv_cache.*Pass it as {CACHE_NAME}"):
        read(model, tokens(), kv_cache=cache)
    assert cache.get_seq_length() == 0
    (attention, *_) = (part for part in model.modules() if getattr(part, "rfa_kind", None) == "causal")
    states = torch.zeros(1, 1, model.config.hidden_size)
    with pytest.raises(TypeError, match="came as kv_cache"):
        attention(states, kv_cache=cache, output_rfa_attentions=False)


@every_family
def test_two_caches_are_refused(family):
    """transformers 5.24 leaves one of them out, and PEFT 0.21 has the prefix in that one."""
    model, cache = make(family, FAMILIES[family]), DynamicCache()
    with pytest.raises(TypeError, match="two caches"):
        read(model, tokens(), cache=cache, past_key_values=DynamicCache())
    assert read(model, tokens(), cache=cache, past_key_values=None).logits.isfinite().all()
