"""Calibration of grouped queries: against that of one key-value head for every query head, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hf_rfa.convert.calibrate import activations as activations_module
from hf_rfa.convert.calibrate.activations import (
    LayerActivations,
    LayerInputs,
    compare_weights,
    layer_activations,
    layer_divergence,
)
from hf_rfa.models.masking import group_queries, ungroup
from tests.grouped_layers import HIDDEN, WIDTH, Layer

HEADS, GROUPS = 2, 3
PADDING = torch.ones(2, 13, dtype=torch.long)
PADDING[0, :3], PADDING[1, 5], PADDING[1, 11:] = 0, 0, 0
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "exponential": {"feature_map": "exponential"},
    "gaussian": {"feature_map": "gaussian", "gate": True},
    "signed window": {"feature_map": "gaussian", "window_size": 3, "num_sinks": 2},
    "elu": {"feature_map": "elu", "gate": True, "window_size": 1},
    "hedgehog": {"feature_map": "hedgehog", "window_size": 4},
    "sinks": {"feature_map": "exponential", "window_size": 3, "num_sinks": 2, "gate": True},
    "to all": {"kind": "encoder", "feature_map": "gaussian"},
    "slots and features": {"feature_map": "exponential", "window_size": 2, "num_slots": 2},
}


def repeat(tensor: Tensor, dim: int = 1) -> Tensor:
    """Return what key-value heads have, for each of their query heads."""
    return tensor.repeat_interleave(GROUPS, dim=dim)


def pair(kind: str = "causal", **fields: Any) -> tuple[Layer, Layer]:
    """Return a layer of grouped queries with any parameters, and the same layer with a key-value head per query head."""
    torch.manual_seed(0)
    grouped, single = Layer(HEADS, GROUPS, kind, **fields).double(), Layer(HEADS * GROUPS, 1, kind, **fields).double()
    with torch.no_grad():
        for tensor in grouped.state_dict().values():
            tensor.add_(0.2 * torch.randn_like(tensor))
        theirs = grouped.state_dict()
        for name, tensor in single.state_dict().items():
            tensor.copy_(theirs[name].repeat_interleave(tensor.shape[0] // theirs[name].shape[0], dim=0))
    return grouped.eval(), single.eval()


def sample() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys, values and hidden states."""
    torch.manual_seed(1)
    heads = torch.randn(2, HEADS * GROUPS, 13, WIDTH), *torch.randn(2, 2, HEADS, 13, WIDTH)
    return tuple(tensor.double() for tensor in (*heads, torch.randn(2, 13, HIDDEN)))


def divergences(fields: dict[str, Any], mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the divergence of grouped queries' layer, and the mean over a group's heads of the other layer."""
    grouped, single = pair(**fields)
    query, key, value, hidden = sample()
    gated = None if "kind" in fields else hidden
    found = layer_divergence(grouped, LayerActivations(group_queries(query, HEADS), key, value, mask, mask), gated)
    expected = layer_divergence(single, LayerActivations(query, repeat(key), repeat(value), mask, mask), gated)
    return found, expected.unflatten(0, (HEADS, GROUPS)).mean(1)


@torch.no_grad()
@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
@pytest.mark.parametrize("padding", [None, PADDING[:, :5].repeat(1, 3)[:, :13]], ids=["whole", "padded"])
@pytest.mark.parametrize("block", [128, 7])
def test_the_divergence_is_the_mean_over_a_groups_queries(fields, padding, block, monkeypatch):
    monkeypatch.setattr(activations_module, "QUERY_BLOCK", block)
    mask = None if padding is None else torch.arange(13) >= torch.tensor([[4], [0]])
    assert_close(*divergences(fields, mask))


@torch.no_grad()
@pytest.mark.parametrize("fields", [CASES["sinks"], CASES["elu"], CASES["plain"]], ids=str)
def test_weights_of_the_features_are_those_of_attention(fields):
    layer, _ = pair(**fields)
    query, key, value, hidden = sample()
    _, expected = layer.attend(query, key, value, hidden_states=hidden, output_attentions=True)
    folded = LayerActivations(group_queries(query, HEADS), key, value)
    (_, log_weights, _), *others = compare_weights(layer, folded, hidden)
    assert not others
    assert_close(ungroup(log_weights.exp(), HEADS * GROUPS), expected, rtol=1e-4, atol=1e-7)


def test_activations_of_a_layer_are_grouped():
    layer, _ = pair()
    query, key, value, hidden = sample()
    layer.source = (query, key, value)
    found = layer_activations(layer, LayerInputs(hidden, None, {}), {"causal": PADDING.bool()})
    assert torch.equal(found.query, group_queries(query, HEADS))
    assert torch.equal(found.query[:, 1, 5 * GROUPS + 2], query[:, GROUPS + 2, 5])
    assert torch.equal(ungroup(found.query, HEADS * GROUPS), query)
