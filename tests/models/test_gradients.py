"""Gradients, checkpointed activations, dropout, gates, 16 bits and mixed precision, over families and variants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hf_rfa.families import FAMILIES
from hf_rfa.models.cache_names import cache_argument
from tests.families import (
    COMMON,
    HEADS,
    LENGTH,
    ROWS,
    WIDTH,
    base_config,
    caches,
    every_case,
    every_family,
    every_head,
    every_model,
    has_encoder,
    inputs_for,
    logits,
    logits_by_steps,
    make,
    make_head,
    make_named,
    read,
    relative_error,
    rfa_modules,
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


@every_model
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


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("family", "name"), HEADS + CHECKPOINTED)
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


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@every_head
def test_checkpointing_that_the_configuration_asks_for_is_on_where_the_softmax_model_has_it(family, head):
    on = []
    for cls in FAMILIES[family].architectures[head]:
        config = (
            make_head(family, head).config if cls.config_class.model_type.startswith("rfa_") else base_config(family)
        )
        config.gradient_checkpointing = True
        modules = cls(config).named_modules()
        on.append({name for name, module in modules if getattr(module, "gradient_checkpointing", False)})
    assert on[0] == on[1] != set()


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


@torch.no_grad()
@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_models_are_close_to_float32(family, variant, dtype):
    model, ids = make(family, variant), tokens()
    for module in rfa_modules(model).values():
        if module.importance is not None:  # else another of two tokens that are nearly as important may be kept
            module.importance.weight.zero_()
    expected = logits(model, ids)
    model.to(dtype)
    steps, cache = logits_by_steps(model, ids, range(1, LENGTH))
    tolerance = (
        {torch.bfloat16: 0.15, torch.float16: 0.02}
        if not has_encoder(family)
        else {torch.bfloat16: 0.2, torch.float16: 0.03}
    )
    for found in (logits(model, ids), steps):
        assert torch.isfinite(found).all()
        assert relative_error(found, expected) < tolerance[dtype]
    for kind, part in caches(cache).items():
        for index, layer in enumerate(part.layers):
            if model.config.is_rfa(kind, index):
                assert (state_of(layer) is None) == (model.config.num_features_for(kind) == 0)
                assert state_of(layer) is None or state_of(layer).dtype == torch.float32


def test_gates_start_with_time_scales_spread_over_heads():
    gate = make("gpt2", "positive-gate").transformer.h[0].attn.gate
    log_decay, input_scale = gate(torch.randn(2, 5, WIDTH))
    assert_close(1 / input_scale[0, :, 0], torch.tensor([24.0, 96.0, 384.0]), rtol=1e-4, atol=0)
    assert_close(log_decay.exp() + input_scale, torch.ones_like(input_scale))


def test_a_gate_has_the_weights_of_a_linear_layer_and_is_none():
    """Libraries that adapt or quantize linear layers expect one tensor of them."""
    gate, linear = make("gpt2", "positive-gate").transformer.h[0].attn.gate, torch.nn.Linear(WIDTH, 3)
    gate.load_state_dict(linear.state_dict())
    x = torch.randn(2, 5, WIDTH)
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
    losses = {}
    for enabled in (True, False):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            losses[enabled] = model(ids, labels=ids).loss
        losses[enabled].backward()
        assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
    assert abs(float((losses[True] - losses[False]).detach())) < 0.05


@torch.no_grad()
@every_family
def test_autocast_leaves_states_in_float32(family):
    model, ids = make(family, {} if not has_encoder(family) else {"softmax_encoder_layers": []}), tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = read(model, ids, use_cache=True)
        step = read(model, ids[:, :1], **cache_argument(output.past_key_values))
    layers = [layer for part in caches(step.past_key_values).values() for layer in part.layers]
    assert {state_of(layer).dtype for layer in layers} == {torch.float32}
    assert torch.isfinite(step.logits).all()
