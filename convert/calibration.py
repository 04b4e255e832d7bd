"""Calibration: set what a feature map has to set, per head, from the softmax model's own queries and keys.

For every layer, on its input in the softmax model (a few thousand tokens, no training):

1. centre: k → k − μ with μ = mean(k) + a² mean(q). Softmax attention does not see a shift of all keys; the relative second
   moment of positive features, exp(‖q̂ + k̂‖²) (Choromanski et al. 2021, lemma 2), falls with ‖q̂ + k̂‖.
2. balance: (q∘a, k/a) with a = (var k / var q)^¼, which minimises the mean of ‖q̂ + k̂‖² and leaves q·k as it is.
3. shape: W ← BW with a bias, A and B by the second moment of q̂ + k̂, which lowers the variance and keeps the kernel
   (`hf_rfa.models.random_feature_maps.PositiveMap.fit_projection`).
4. gate: the span of each head, of a grid, whose implied weights have the least cross-entropy to the softmax weights.
5. temperature: σ = τ per head, the τ of a grid whose implied weights have the least cross-entropy to the softmax weights.
6. scale: the constant c of a head's exponents, so that the features of its median key have mass 1.
7. window: the shift between exact and implied weights, where there is a window, with the least cross-entropy.

Steps 1 to 3 apply to positive features with the norm carried, step 5 to maps with σ, step 6 to maps with exponents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_rfa.memory import give_back_memory
from hf_rfa.models.attention import Gate, RFAAttentionMixin
from hf_rfa.models.feature_maps import FeatureMap
from hf_rfa.models.random_feature_maps import PositiveMap

from .activations import (
    Recorded,
    Sample,
    compare_weights,
    layer_divergence,
    model_masks,
    sample_layer,
    softmax_targets,
    watch_inputs,
)
from .twin import rfa_layers

#: Spans that step 4 tries, by the model's positions; the first one wins ties. Longer ones would hardly be trainable: what
#: they learn goes with 1 / span.
SPANS = (16.0, 8.0, 4.0, 2.0, 1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32)
#: σ that step 5 tries; the first one, σ as it is, wins ties.
TEMPERATURES = (1.0, 0.35, 0.5, 0.65, 0.8, 0.9, 1.25)
#: Largest logarithm of the mass of a calibration key's features: room is left below `MAX_EXPONENT` for heavier ones.
HEAVIEST = 15.0
#: Step 7 looks for the shift within ± this, in nats, and narrows the range by 0.618 so many times.
WIDEST_SHIFT, SHIFT_STEPS = 6.0, 22
#: Tokens on which implied and softmax weights are compared.
TARGET_TOKENS = 1024


@dataclass(frozen=True)
class LayerGain:
    """What calibration gained in one layer: KL(softmax ‖ implied) of every head in nats per query, before and after."""

    name: str
    before: tuple[float, ...]
    after: tuple[float, ...]


@torch.no_grad()
def calibrate(
    model: PreTrainedModel,
    softmax_model: PreTrainedModel,
    inputs: dict[str, Tensor],
    *,
    on_layer: Callable[[str], None] | None = None,
) -> list[LayerGain]:
    """Calibrate every RFA layer of a model, in place.

    Args:
        model: the RFA model.
        softmax_model: its softmax parent, with modules of the same names.
        inputs: what the model is called with (`hf_rfa.convert.calibration_data`).
        on_layer: called with a layer's name when it is calibrated.

    Returns:
        The gain of every layer that these inputs reach: a decoder with cross attention that no encoder feeds is not reached.
    """
    layers, masks = rfa_layers(model), model_masks(inputs)
    gains: list[LayerGain] = []

    def visit(name: str, recorded: Recorded) -> None:
        """Calibrate a layer when the softmax model comes to it, so that the inputs of one layer are held at a time."""
        gains.append(_calibrate_recorded(name, layers[name], recorded, masks))
        give_back_memory()
        if on_layer is not None:
            on_layer(name)

    with watch_inputs({name: softmax_model.get_submodule(name) for name in layers}, visit):
        body: Any = softmax_model.base_model
        device = softmax_model.device
        body(**{name: tensor.to(device) for name, tensor in inputs.items() if name != "labels"}, use_cache=False)
    return gains


def _calibrate_recorded(
    name: str, layer: RFAAttentionMixin, recorded: Recorded, masks: dict[str, Tensor | None]
) -> LayerGain:
    """Calibrate one layer on what entered its parent (`hf_rfa.convert.activations.watch_inputs`)."""
    sample = sample_layer(layer, recorded, masks)
    comparison = _Comparison(layer, sample, recorded[0])
    before = comparison.divergence()
    calibrate_layer(layer, sample, recorded[0], comparison)
    return LayerGain(name, tuple(before.tolist()), tuple(comparison.divergence().tolist()))


class _Comparison:
    """How far a layer is from its softmax weights, on the first `TARGET_TOKENS` queries."""

    def __init__(self, layer: RFAAttentionMixin, sample: Sample, hidden_states: Tensor | None) -> None:
        rows = max(1, TARGET_TOKENS // sample.query.shape[2])
        self.layer, self.sample = layer, sample.rows(rows)
        self.hidden_states = None if hidden_states is None else hidden_states[:rows]
        self.targets = list(softmax_targets(layer, self.sample))

    def divergence(self) -> Tensor:
        """Return KL(softmax ‖ implied) as the layer is, [H]."""
        divergence = layer_divergence(self.layer, self.sample, self.hidden_states, self.targets)
        give_back_memory()
        return divergence

    def best_divergence(self) -> Tensor:
        """Return KL(softmax ‖ implied) as the layer is, but for the shift of its window, which is the best one, [H]."""
        return self.best_shift()[1] if self.layer.feature_map.windowed else self.divergence()

    def best_shift(self) -> tuple[Tensor, Tensor]:
        """Return the window's best shift, relative to the one it has, and KL(softmax ‖ implied) with it, each [H].

        With p and m the shares of the softmax and of the implied weights that fall in the window, a shift by δ changes the
        divergence by E[log(1 + m (e^δ − 1))] − E[p] δ, which is convex: golden sections find its least.
        """
        window, shares, implied = self.layer.window_size, [], []
        for target, log_weights in compare_weights(self.layer, self.sample, self.hidden_states, self.targets):
            near = torch.ones(log_weights.shape[-2:], dtype=torch.bool, device=log_weights.device)
            near = near.triu(target.rows.start - window + 1)
            shares.append((target.softmax * near).sum(-1))
            implied.append((log_weights.exp() * near).sum(-1))
        share, mass = torch.cat(shares, dim=-1), torch.cat(implied, dim=-1).clamp(0.0, 1.0)
        mean_share = self.sample.mean(share)

        def change(shift: Tensor) -> Tensor:
            return self.sample.mean(torch.log1p(mass * torch.expm1(shift)[:, None])) - mean_share * shift

        low = torch.full_like(mean_share, -WIDEST_SHIFT)
        high = -low
        ratio = (math.sqrt(5) - 1) / 2
        for _ in range(SHIFT_STEPS):
            left, right = high - ratio * (high - low), low + ratio * (high - low)
            to_left = change(left) < change(right)
            low, high = torch.where(to_left, low, left), torch.where(to_left, right, high)
        best = (low + high) / 2
        return best, self.divergence() + change(best)


@torch.no_grad()
def calibrate_layer(
    layer: RFAAttentionMixin,
    sample: Sample,
    hidden_states: Tensor | None = None,
    comparison: _Comparison | None = None,
) -> None:
    """Calibrate one layer on its queries and keys, and on its inputs if it has a gate."""
    feature_map = layer.feature_map
    keys = sample.keys()
    if feature_map.has_sigma:
        feature_map.sigma.fill_(1.0)
    if feature_map.reparametrizable:
        _centre_and_balance(feature_map, sample.queries(), keys)
    _set_log_scale(feature_map, keys)
    comparison = comparison or _Comparison(layer, sample, hidden_states)
    if isinstance(feature_map, PositiveMap) and feature_map.supports_derf:
        _shape_projection(feature_map, sample.queries(), keys)
    if layer.gate is not None and comparison.hidden_states is not None:
        _set_spans(layer.gate, comparison)
    if feature_map.has_sigma:
        _set_temperature(feature_map, keys, comparison)
    if feature_map.windowed:
        feature_map.window_shift.zero_()
        feature_map.window_shift.copy_(comparison.best_shift()[0])


def _shape_projection(feature_map: PositiveMap, query: Tensor, key: Tensor) -> None:
    """Fit W to the second moment of q̂ + k̂ over all pairs (step 3)."""
    query, key = feature_map.query_input(query[None])[0].double(), feature_map.key_input(key[None])[0].double()
    second = sum(x.transpose(-1, -2) @ x / x.shape[1] for x in (query, key))
    means = query.mean(1)[:, :, None] * key.mean(1)[:, None, :]
    feature_map.fit_projection(second + means + means.transpose(-1, -2))


def _nearest(comparison: _Comparison, values: Sequence[float], set_to: Callable[[float], None]) -> Tensor:
    """Return every head's value, [H], of those tried, that is nearest the softmax weights; the first one wins ties."""
    best, chosen = torch.tensor(math.inf), torch.tensor(values[0])
    for value in values:
        set_to(value)
        divergence = comparison.best_divergence()
        better = divergence < best - 1e-6
        best, chosen = torch.where(better, divergence, best), torch.where(better, value, chosen)
    return chosen


def _set_spans(gate: Gate, comparison: _Comparison) -> None:
    """Set every head's span to the one that is nearest the softmax weights (step 4)."""
    spans = [max(2.0, share * gate.max_positions) for share in SPANS]
    gate.set_time_scales(
        _nearest(comparison, spans, lambda span: gate.set_time_scales(torch.full_like(gate.bias, span)))
    )


def _set_temperature(feature_map: FeatureMap, keys: Tensor, comparison: _Comparison) -> None:
    """Set σ of every head to the temperature that is nearest the softmax weights (step 5), with its best shift."""

    def set_to(temperature: Tensor | float) -> None:
        feature_map.sigma.copy_(torch.as_tensor(temperature).reshape(-1, 1).expand_as(feature_map.sigma))
        _set_log_scale(feature_map, keys)

    set_to(_nearest(comparison, TEMPERATURES, set_to))


def _centre_and_balance(feature_map: FeatureMap, query: Tensor, key: Tensor) -> None:
    """Set ``balance`` and ``key_shift`` from queries and keys [H, n, d] (steps 1 and 2)."""
    smallest = torch.finfo(torch.float32).tiny
    variances = [x.var(dim=1, correction=0).clamp_min(smallest) for x in (query, key)]
    ratio = (variances[1] / variances[0]).pow(0.25)
    # A dimension in which queries or keys do not vary has no balance to set.
    ratio = torch.where((ratio > 1e-3) & (ratio < 1e3), ratio, 1.0)
    feature_map.balance.copy_(ratio)
    feature_map.key_shift.copy_(key.mean(1) + ratio.square() * query.mean(1))


def _set_log_scale(feature_map: FeatureMap, key: Tensor) -> None:
    """Set c from a head's keys [H, n, d] (step 6).

    The median key's features then have mass 1, and the heaviest key's at most exp(`HEAVIEST`): a mean would follow a few
    heavy keys, beside which the features of all others underflow.
    """
    if not feature_map.has_exponent:
        return
    mass = feature_map.key_exponent(key[None])[0].logsumexp(-1)
    feature_map.log_scale.copy_(torch.maximum(mass.median(dim=1).values, mass.amax(1) - HEAVIEST))
