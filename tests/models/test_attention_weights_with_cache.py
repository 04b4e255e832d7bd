"""Attention weights with a cache that has seen tokens before: those of the places that hold them."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from hf_rfa.models.cache_names import cache_argument
from tests.families import make, rfa_modules, tokens

SIZES = {"window_size": 5, "num_sinks": 2, "num_slots": 3}
PLACES = sum(SIZES.values())
HEADS = {"retrieval_heads": [[1, 0]], "retrieval_window": 5, "num_slots": 0}
OPTIONS = {
    "exact": {"feature_map": "none", **SIZES},
    "retrieval": {"feature_map": "none", **SIZES, **HEADS},
    "features": {"feature_map": "positive", "num_features": 16, **SIZES},
}
CASES = [("llama", name) for name in OPTIONS] + [("gpt2", "exact"), ("gpt2", "features")]


def importance_at_random(model):
    """Let every head keep tokens of its own."""
    for layer in rfa_modules(model).values():
        if layer.importance is not None:
            layer.importance.weight.normal_(generator=torch.Generator().manual_seed(layer.rfa_layer_idx))


@torch.no_grad()
@pytest.mark.parametrize(("family", "name"), CASES)
def test_weights_of_a_step_are_those_of_one_pass(family, name):
    """The row of a token in one pass over all, where what it sees is in the places, and what it does not see weighs 0."""
    options = OPTIONS[name]
    model, ids = make(family, **options), tokens(2, 20)
    importance_at_random(model)
    whole = model(ids, output_attentions=True, use_cache=False).attentions
    cache = DynamicCache(config=model.config)
    model(ids[:, :12], **cache_argument(cache))
    for t in range(12, 20):
        step = model(ids[:, t : t + 1], **cache_argument(cache), output_attentions=True).attentions
        for layer, (found, row) in enumerate(zip(step, whole, strict=True)):
            places = PLACES - (3 if name == "retrieval" else 0)
            assert found.shape == (*row.shape[:2], 1, places)
            if name != "features":  # all that is seen: the same weights, each in the place of its token
                expected = row[:, :, t].sort(-1).values[..., -places:]
                torch.testing.assert_close(found[:, :, 0].sort(-1).values, expected, atol=1e-5, rtol=1e-4)
                torch.testing.assert_close(found.sum(-1), torch.ones_like(found.sum(-1)))
            memory = cache.layers[layer].memories[0]
            assert bool((memory.arrival.amax(-1) == t).all())
            torch.testing.assert_close(
                found[..., -1], row[:, :, t : t + 1, t], atol=1e-5, rtol=1e-4
            )  # the token itself
    generated = model.generate(
        ids, max_new_tokens=3, output_attentions=True, return_dict_in_generate=True, do_sample=False
    )
    assert [each[0].shape[2:] for each in generated.attentions] == [(20, 20), (1, places), (1, places)]


@torch.no_grad()
def test_weights_of_several_tokens_come_after_those_of_the_places():
    """A window as long as the text: in the order of arrival all are those of one pass."""
    model, ids = make("llama", feature_map="none", window_size=30, num_sinks=2), tokens(2, 20)
    whole = model(ids, output_attentions=True, use_cache=False).attentions
    cache = DynamicCache(config=model.config)
    model(ids[:, :12], **cache_argument(cache))
    rest = model(ids[:, 12:], **cache_argument(cache), output_attentions=True).attentions
    for found, expected in zip(rest, whole, strict=True):
        assert found.shape == (2, expected.shape[1], 8, 32 + 8)
        assert found[..., :20].abs().max() == 0  # empty places come first
        torch.testing.assert_close(found[..., 20:], expected[:, :, 12:], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_cache_that_was_filled_in_inference_mode_can_be_continued(family, options):
    """Its tensors cannot be changed in place outside of that mode."""
    model, ids = make(family, **options), tokens(2, 20)
    with torch.inference_mode():
        cache = model(ids[:, :19]).past_key_values
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **cache_argument(cache), **options)
    assert torch.equal(found, model.generate(ids, attention_mask=torch.ones_like(ids), **options))
    with torch.inference_mode():  # and back again
        model(ids[:, :1], **cache_argument(cache))
