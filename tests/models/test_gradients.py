"""Gradients, checkpointed activations, dropout, gates and mixed precision, over families and variants.

A model computes the same function with gradients as without, and its gradients are those of float64.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hf_rfa import RFAGPT2LMHeadModel
from hf_rfa.convert.calibrate.attention_weights import key_exponents
from hf_rfa.families import FAMILIES
from hf_rfa.models.feature_maps import FEATURE_MAPS
from tests.families import (
    CASES,
    COMMON,
    HEADS,
    ROWS,
    WIDTH,
    base_config,
    has_encoder,
    inputs_for,
    logits,
    make,
    make_named,
    relative_error,
    state_of,
    tokens,
)
from tests.tiny_models import tiny_config


def loss_of(model: Any) -> Tensor:
    """Return the loss of a head, or something like one of a body."""
    name, inputs, classes = type(model).__name__, inputs_for(model), torch.arange(ROWS)
    ids, labels = inputs["input_ids"], {}
    if name.endswith("ForSequenceClassification"):
        labels = {"labels": classes}
    elif name.endswith("ForTokenClassification"):
        labels = {"labels": ids % 3}
    elif name.endswith("ForQuestionAnswering"):
        labels = {"start_positions": classes, "end_positions": classes + 2}
    elif name.endswith("DoubleHeadsModel"):
        labels = {"labels": ids, "mc_labels": classes % 2}
    elif name.endswith(("LMHeadModel", "CausalLM", "MTModel", "Generation")):
        labels = {"labels": inputs.get("decoder_input_ids", ids)}
    outputs = model(**inputs, **labels, use_cache=False)
    if not labels:
        return outputs[0].square().mean()
    return outputs.loss + outputs.mc_loss if "mc_labels" in labels else outputs.loss


@pytest.mark.parametrize(("family", "name"), HEADS + CASES)
def test_a_gradient_step_reaches_every_parameter_and_lowers_the_loss(family, name):
    """Only cross, only causal or both: each trains."""
    model = make_named(family, name).train()
    loss = loss_of(model)
    assert torch.isfinite(loss)
    loss.backward()
    # A decoder alone has cross attention, and nothing to attend to.
    unreached = "encoder_attn" if type(model).__name__ in ("RFABartForCausalLM", "RFAMarianForCausalLM") else "-"
    for key, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (parameter.requires_grad and unreached not in key), key
        assert parameter.grad is None or torch.isfinite(parameter.grad).all(), key
        # σ and W of maps whose scale cancels (arccos) may have a zero gradient; the projections may not
        assert not key.endswith("attn.c_attn.weight") or parameter.grad.any(), key
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 1e-3 * parameter.grad / (1e-6 + parameter.grad.norm())
        assert loss_of(model) < loss.detach()


CHECKPOINTED = [("gpt2", name) for name in ("positive-gate", "hybrid")]
CHECKPOINTED += [("bart", name) for name in ("both-gate", "everything", "per-layer")]


@pytest.mark.parametrize(
    ("family", "name", "reentrant"),
    [*((*each, False) for each in HEADS + CHECKPOINTED), *((*each, True) for each in CHECKPOINTED)],
)
def test_gradient_checkpointing_changes_nothing(family, name, reentrant):
    gradients = []
    for checkpointed in (False, True):
        model = make_named(family, name).train()
        if checkpointed:  # the later of the names that transformers 5 has had for it
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable({"use_reentrant": reentrant})
            assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
        torch.manual_seed(4)
        loss_of(model).backward()
        gradients.append({key: parameter.grad for key, parameter in model.named_parameters()})
    assert_close(*({key: each for key, each in found.items() if each is not None} for found in gradients))
    getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


@pytest.mark.parametrize(("family", "head"), [*HEADS, ("gpt_bigcode", "GPTBigCodeModel")])
def test_a_new_model_starts_with_the_values_of_a_new_softmax_model(family, head):
    """GPT-2 and its like start what is added to the residual stream smaller."""
    base = base_config(family) if family in COMMON else tiny_config(family)
    softmax, rfa = FAMILIES[family].architectures[head]
    models = []
    for cls, config in ((softmax, base), (rfa, FAMILIES[family].rfa_config.from_base(base, window_size=4))):
        torch.manual_seed(3)
        models.append(cls(config).state_dict())
    assert_close({name: models[1][name] for name in models[0]}, dict(models[0]), rtol=0, atol=0)


DROPOUTS = {
    "gpt2": ["attn_pdrop", "resid_pdrop", "embd_pdrop"],
    "bart": ["attention_dropout", "dropout", "activation_dropout", "decoder_layerdrop", "encoder_layerdrop"],
}


@pytest.mark.parametrize(("family", "dropout"), [(name, each) for name, all_ in DROPOUTS.items() for each in all_])
def test_dropouts_act_in_training_only(family, dropout):
    model, ids = make(family, "positive" if not has_encoder(family) else "everything", **{dropout: 0.5}), tokens()
    assert torch.equal(logits(model, ids), logits(model, ids))
    model.train()
    first, *others = (logits(model, ids) for _ in range(4))
    assert any(not torch.equal(first, other) for other in others)


@torch.no_grad()
def test_attention_dropout_keeps_the_mean():
    attention = make("gpt2", "positive", attn_pdrop=0.3).transformer.h[0].attn.train()
    hidden = torch.randn(1, 6, WIDTH)
    mean = attention(hidden.repeat(4000, 1, 1))[0].mean(0, keepdim=True)
    assert relative_error(mean, attention.eval()(hidden)[0]) < 0.05


def test_a_gate_has_the_weights_of_a_linear_layer_and_is_none():
    """Libraries that adapt or quantize linear layers expect one tensor of them. Its heads start with time scales apart."""
    gate, linear = make("gpt2", "positive-gate").transformer.h[0].attn.gate, torch.nn.Linear(WIDTH, 3)
    x = torch.randn(2, 5, WIDTH)
    assert_close(1 / gate(x)[1][0, :, 0], torch.tensor([24.0, 96.0, 384.0]), rtol=1e-4, atol=0)
    gate.load_state_dict(linear.state_dict())
    log_decay, input_scale = gate(x)
    assert_close(log_decay, linear(x).sigmoid().log().transpose(1, 2))
    assert_close(input_scale, 1 - linear(x).sigmoid().transpose(1, 2))
    assert not isinstance(gate, torch.nn.Linear)


@pytest.mark.parametrize("variant", ["positive-gate", "gaussian-paper", "arccos"])
def test_autocast_rounds_projections_only(variant):
    """Phases, features, gates and states are those of float32: of the same projections attention gives the same bits."""
    model, ids = make("gpt2", variant), tokens()
    attention = model.transformer.h[0].attn
    projected, merged, states = [], [], []
    attention.c_proj.register_forward_pre_hook(lambda module, args: merged.append(args[0]) or (args[0].float(),))
    with torch.no_grad():
        for enabled in (True, False):
            hook = attention.c_attn.register_forward_hook(
                lambda module, args, out: projected.append(out) or projected[0]
            )
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                states.append(model(ids, use_cache=True).past_key_values)
            hook.remove()
    assert projected[0].dtype == torch.bfloat16
    assert torch.equal(*merged)
    assert torch.equal(*(state_of(cache.layers[0]) for cache in states))


# The same function with gradients as without


OPTIONS = [{}, {"gate": True}, {"window_size": 3}, {"window_size": 3, "gate": True}]
SHORT = 23


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
        model(torch.arange(SHORT)[None])
    for hook in hooks:
        hook.remove()
    return model


def set_log_scale(feature_map, args):
    """Make a head's largest key feature e^0, as calibration does."""
    feature_map.log_scale.copy_(key_exponents(feature_map, args[1]).amax((0, 2, 3)))


def error(one, other, least_scale=0.0):
    """Return the largest difference relative to the largest entry, or to ``least_scale`` if that is larger."""
    difference = one.detach().to(other.dtype) - other.detach()
    return float(difference.abs().max() / other.detach().abs().max().clamp_min(least_scale))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (name, options)
        for name, cls in FEATURE_MAPS.items()
        for options in OPTIONS
        if name != "none" and ("window_size" in options or not cls.needs_window)
    ]
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
    ids = torch.arange(2 * SHORT).view(2, SHORT)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    with torch.no_grad():
        truth = exact(ids, attention_mask=mask).logits
        without = model(ids, attention_mask=mask).logits
    # An exact window's logits are hundreds here: float32 rounds them to 1e-5, and gradients through them cancel.
    tolerance, least_scale = (2e-4, 0.1) if "window_size" in options else (1e-5, 1e-4)
    found = model(ids, attention_mask=mask).logits
    assert error(without, truth) < tolerance
    assert error(found, without) < tolerance
    assert error(exact(ids, attention_mask=mask).logits, truth) < 1e-12

    weights = torch.randn_like(truth)
    (found * weights.float()).sum().backward()
    (exact(ids, attention_mask=mask).logits * weights).sum().backward()
    gradients = [(one.grad, other.grad) for one, other in zip(model.parameters(), exact.parameters(), strict=True)]
    gradients = [(one, other) for one, other in gradients if other is not None]
    largest = max(float(other.abs().max()) for _, other in gradients)
    for one, other in gradients:
        assert torch.isfinite(one).all()
        assert error(one, other, least_scale=least_scale * largest) < 1e-3


def test_nan_does_not_pass_in_silence():
    model = make("gpt2")
    embeddings = torch.randn(1, 6, WIDTH)
    embeddings[0, 2] = float("nan")
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            logits = model(inputs_embeds=embeddings).logits
        assert logits[0, 2:].isnan().any(-1).all()


@pytest.mark.parametrize("options", [{}, {"gate": True}, {"window_size": 3, "num_slots": 2}], ids=str)
@pytest.mark.parametrize("name", ["positive", "exponential"])
def test_gradients_of_a_small_loss_do_not_underflow(name, options):
    """Those of a mean over many tokens are as small; numbers that float32 rounds to nothing are slow besides."""
    model = make("gpt2", {"feature_map": name, **options})
    gradients = []
    for scale in (1.0, 2.0**-40):
        model.zero_grad()
        (model(torch.arange(46).view(2, 23)).logits.square().mean() * scale).backward()
        gradients.append([each.grad / scale for each in model.parameters() if each.grad is not None])
    for one, other in zip(*gradients, strict=True):
        assert error(other, one, least_scale=1e-6) < 1e-3
