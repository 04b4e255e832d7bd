"""A model computes the same function with gradients as without, and its gradients are those of float64."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_rfa import RFAGPT2LMHeadModel
from hf_rfa.convert.attention_weights import key_exponents
from hf_rfa.models.cache_names import cache_argument
from hf_rfa.models.feature_maps import FEATURE_MAPS
from tests.families import make

OPTIONS = [{}, {"gate": True}, {"window_size": 3}, {"window_size": 3, "gate": True}]
LENGTH = 23


def demanding_model(**options) -> RFAGPT2LMHeadModel:
    """Return a float64 model whose key features differ by up to e^90, as those of trained heads do.

    Queries prefer features that are small for every key: the weights of all keys are far below the largest product.
    """
    model = make("gpt2", options, dtype=torch.float64)
    width = model.config.hidden_size
    hooks = []
    with torch.no_grad():
        for block in model.transformer.h:
            attention = block.attn
            attention.c_attn.weight.normal_(std=0.4)
            if attention.feature_map.signed:  # its variance grows with e^‖k‖²: larger keys leave nothing but noise
                attention.c_attn.bias[width : 2 * width].normal_(std=0.5)
            else:
                # Beside a window the far part would have no weight left, and its gradients would be rounding errors.
                strength = 0.5 if options.get("window_size") else 1.0
                attention.c_attn.weight[:, :width] *= 5.0 * strength
                attention.c_attn.weight[:, width : 2 * width] *= 3.0 * strength
                attention.c_attn.bias[width : 2 * width].normal_(std=3.0 * strength)
            if attention.feature_map.has_exponent:
                hooks.append(attention.feature_map.register_forward_pre_hook(set_log_scale))
        model(torch.arange(LENGTH)[None])
    for hook in hooks:
        hook.remove()
    return model


def set_log_scale(feature_map, args):
    """Make a head's largest key feature e^0, as calibration does."""
    feature_map.log_scale.copy_(key_exponents(feature_map, args[1]).amax((0, 2, 3)))


def smallest_products(model, ids):
    """Return the least logarithm, over layers, heads and queries, of Σ φ(q)·φ(k) over the largest query feature."""
    found = []

    def look(feature_map, args, features):
        query, key = features[0].log() - 40.0, features[1].log()
        total = (query[..., :, None, :] + key[..., None, :, :]).logsumexp(-1)
        seen = torch.ones(total.shape[-2:], dtype=torch.bool).tril()
        found.append(total.masked_fill(~seen, -torch.inf).logsumexp(-1).min())

    hooks = [block.attn.feature_map.register_forward_hook(look) for block in model.transformer.h]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return float(min(found))


def run(model, ids, **inputs):
    return model(ids, **inputs).logits


def error(one, other, least_scale=0.0):
    """Return the largest difference relative to the largest entry, or to ``least_scale`` if that is larger."""
    difference = one.detach().to(other.dtype) - other.detach()
    return float(difference.abs().max() / other.detach().abs().max().clamp_min(least_scale))


def test_the_model_is_as_demanding_as_trained_ones():
    for name in ("positive", "exponential"):
        assert -100 < smallest_products(demanding_model(feature_map=name), torch.arange(LENGTH)[None]) < -50


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, options) for name in FEATURE_MAPS if name != "none" for options in OPTIONS]
    + [
        ("none", {"window_size": 3}),
        ("none", {"window_size": 3, "num_sinks": 4}),
        ("none", {"window_size": 3, "num_sinks": 1, "num_slots": 4}),
        ("exponential", {"window_size": 3, "num_slots": 4}),
        ("exponential", {"window_size": 3, "num_sinks": 4}),
    ],
    ids=str,
)
def test_logits_and_gradients_are_those_of_float64_in_both_modes(name, options):
    exact = demanding_model(feature_map=name, **options)
    model = copy.deepcopy(exact).float()
    ids = torch.arange(2 * LENGTH).view(2, LENGTH)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    with torch.no_grad():
        truth = run(exact, ids, attention_mask=mask)
        without = run(model, ids, attention_mask=mask)
    # An exact window's logits are hundreds here: float32 rounds them to 1e-5, and gradients through them cancel.
    tolerance, least_scale = (2e-4, 0.1) if "window_size" in options else (1e-5, 1e-4)
    found = run(model, ids, attention_mask=mask)
    assert error(without, truth) < tolerance
    assert error(found, without) < tolerance
    assert error(run(exact, ids, attention_mask=mask), truth) < 1e-12

    weights = torch.randn_like(truth)
    (found * weights.float()).sum().backward()
    (run(exact, ids, attention_mask=mask) * weights).sum().backward()
    gradients = [(one.grad, other.grad) for one, other in zip(model.parameters(), exact.parameters(), strict=True)]
    gradients = [(one, other) for one, other in gradients if other is not None]
    largest = max(float(other.abs().max()) for _, other in gradients)
    for one, other in gradients:
        assert torch.isfinite(one).all()
        assert error(one, other, least_scale=least_scale * largest) < 1e-3


def test_the_converted_demo_model_is_the_same_function_in_both_modes(converted_demo):
    """A trained model, whose heads have what random ones lack."""
    model = AutoModelForCausalLM.from_pretrained(converted_demo).eval()
    ids = torch.arange(2, 194)[None] * 7 % model.config.vocab_size
    with torch.no_grad():
        without = run(model, ids)
    assert error(run(model, ids), without) < 1e-5


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["positive", "gaussian", "hedgehog"])
def test_a_cache_goes_from_one_mode_to_the_other(name, options):
    """States mean the same in both modes, whatever the gradients' features are scaled by."""
    model = demanding_model(feature_map=name, **options)
    ids = torch.arange(LENGTH)[None]
    with torch.no_grad():
        truth = run(model, ids)
    for first in (True, False):
        parts = []
        cache = None
        for step, part in enumerate(ids.split(5, dim=1)):
            with torch.set_grad_enabled(first == (step % 2 == 0)):
                output = model(part, **cache_argument(cache), use_cache=True)
            cache = output.past_key_values
            parts.append(output.logits.detach())
        assert error(torch.cat(parts, dim=1), truth) < 1e-10


@pytest.mark.parametrize("name", ["positive", "gaussian"])
def test_blocks_of_a_long_text_have_the_gradients_of_the_whole(name, monkeypatch):
    model = demanding_model(feature_map=name, gate=True)
    ids = torch.arange(LENGTH)[None]
    gradients = []
    for length in (100, 4):
        monkeypatch.setattr("hf_rfa.models.attention.MAX_LENGTH_WITHOUT_SEGMENTS", length)
        monkeypatch.setattr("hf_rfa.models.attention.SEGMENT_LENGTH", length)
        model.zero_grad()
        run(model, ids).square().sum().backward()
        gradients.append([each.grad.clone() for each in model.parameters() if each.grad is not None])
    for one, other in zip(*gradients, strict=True):
        assert error(one, other) < 1e-9
