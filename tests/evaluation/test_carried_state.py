"""Perplexity of windows longer than a model's positions, the state carried from piece to piece."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2LMHeadModel

from hf_rfa import InputError
from hf_rfa.evaluation import perplexity
from hf_rfa.evaluation.perplexity import logits_of_pieces
from hf_rfa.models.cache_names import cache_argument
from tests.conftest import tiny_parent_config
from tests.families import make, make_gpt2

POSITIONS = 96
KINDS = {
    "features": {},
    "gates": {"gate": True},
    "a window": {"window_size": 5, "num_sinks": 2},
    "slots": {"window_size": 5, "num_sinks": 2, "num_slots": 4, "feature_map": "none", "num_features": None},
}


def model_of(kind: str, **options):
    return make_gpt2(KINDS[kind], **options)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5, deadline=None)
@given(length=st.integers(2, 70), piece=st.integers(1, 40))
def test_pieces_give_the_logits_of_tokens_read_one_by_one(kind, length, piece):
    model = model_of(kind)
    ids = torch.randint(3, 61, (2, length))
    cache, expected = None, []
    with torch.no_grad():
        for place in range(length):
            positions = torch.full((2, 1), place % piece)
            outputs = model(ids[:, place : place + 1], position_ids=positions, **cache_argument(cache), use_cache=True)
            cache = outputs.past_key_values
            expected.append(outputs.logits)
    found = torch.cat([*logits_of_pieces(model, ids, piece)], 1)
    torch.testing.assert_close(found, torch.cat(expected, 1), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_without_learned_positions_a_window_is_read_as_a_whole(family):
    model = make(family)
    if family == "gpt2":
        model.transformer.wpe.weight.data.zero_()
    ids = torch.randint(3, 61, (150,))
    positions = model.config.max_position_embeddings
    found = perplexity(model, ids, context_length=50, carry_state=True)
    assert found.nats == pytest.approx(perplexity(model, ids, context_length=50).nats, rel=1e-4)
    assert found.tokens == 147
    assert f"read {positions} tokens at a time with the state carried" in found.protocol


def test_windows_may_be_longer_than_the_positions():
    model = model_of("features")
    assert model.config.max_position_embeddings == POSITIONS
    ids = torch.randint(3, 61, (2 * 250,))
    found = perplexity(model, ids, context_length=250, carry_state=True, batch_size=1)
    logits = torch.cat([*logits_of_pieces(model, ids.view(2, 250), POSITIONS)], 1)[:, :-1].log_softmax(-1)
    expected = -logits.gather(-1, ids.view(2, 250)[:, 1:, None]).double().mean()
    assert found.nats == pytest.approx(float(expected), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(expected), rel=1e-5)
    overlapping = perplexity(model, ids, context_length=250, stride=100, carry_state=True)
    assert overlapping.tokens == 499


def test_models_without_a_state_to_carry_are_refused():
    ids = torch.randint(3, 61, (300,))
    with pytest.raises(InputError, match=r"carry_state: the cache of gpt2 grows \(every layer\)"):
        perplexity(GPT2LMHeadModel(tiny_parent_config()), ids, carry_state=True)
    with pytest.raises(InputError, match=r"the cache of rfa_gpt2 grows \(1\)"):
        perplexity(model_of("features", softmax_layers=[1]), ids, carry_state=True)
