"""Calibration: set the constants of feature maps and gates, per head, from the softmax model's own queries and keys.

For every layer, on its input in the softmax model (a few thousand tokens, no training):

1. center: k → k − μ with μ = mean(k) + a² mean(q). Softmax attention does not see a shift of all keys; the relative second
   moment of positive features, exp(‖q̂ + k̂‖²) (Choromanski et al. 2021, lemma 2), falls with ‖q̂ + k̂‖.
2. balance: (q∘a, k/a) with a = (var k / var q)^¼, which minimises the mean of ‖q̂ + k̂‖² and leaves q·k as it is.
3. shape: W ← BW with a bias, A and B by the second moment of q̂ + k̂, which lowers the variance and keeps the kernel
   (`hf_rfa.models.projected_feature_maps.PositiveMap`).
4. gate: the time scale of each head, of a grid, whose attention weights have the least divergence from softmax.
5. temperature: σ = τ per head, the τ of a grid whose attention weights have the least divergence from softmax.
6. scale: the constant c of a head's exponents, so that the features of its median key have mass 1.
7. importance: how much attention a token will get from far away, by its hidden state, where there are slots
   (`hf_rfa.convert.calibrate.importance`). It comes first.
8. window: the shift between the weights of exact tokens and of features, where both are kept, with the least error of a
   head's outputs. It may close the features: adding them to exact tokens is then no worse than these alone. Where training
   follows, which has to find them open, and for features with signs, it is the shift with the least divergence.

A summary of what is forgotten is fitted in another way (`hf_rfa.convert.calibrate.summary_fit`).

A head is a key-value head here, and its queries are those of all query heads that share it.

Steps 1 to 3 apply to positive features with the norm carried, step 5 to maps with σ, step 6 to maps with exponents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_rfa.models.attention import RFAAttentionMixin
from hf_rfa.models.configuration_rfa import AttentionKind
from hf_rfa.models.feature_maps import FeatureMap
from hf_rfa.models.gate import Gate
from hf_rfa.models.importance import LearnedImportance
from hf_rfa.models.no_features import NoFeatures
from hf_rfa.models.projected_feature_maps import PositiveMap
from hf_rfa.models.streaming import find_out_rotations
from hf_rfa.models.summary_feature_map import SummaryMap
from hf_rfa.process_memory import give_back_memory

from ..checkpoint.base_model import rfa_layers
from ..inputs import Inputs
from .activations import (
    LayerActivations,
    LayerInputs,
    compare_weights,
    layer_activations,
    layer_divergence,
    padding_masks,
    softmax_weights,
    visit_layers,
)
from .attention_weights import ExactTokens, key_exponents
from .far_outputs import FarText, output_roots
from .importance import refine_importance, regress_importance
from .summary_fit import fit_summary
from .threads import run_together

#: Time scales that step 4 tries, in units of the model's positions; the first one wins ties. Longer ones would hardly be
#: trainable: the gradient of a gate's bias goes with 1 / time scale.
GATE_TIME_SCALES = (16.0, 8.0, 4.0, 2.0, 1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32)
#: σ that step 5 tries; the first one, σ as it is, wins ties.
TEMPERATURES = (1.0, 0.35, 0.5, 0.65, 0.8, 0.9, 1.25)
#: Largest logarithm of a calibration key's mass after step 6, which leaves room below `MAX_EXPONENT` for heavier keys.
MAX_LOG_KEY_MASS = 15.0
#: Largest shift that step 8 considers for the divergence, in nats, and its golden-section steps, each of which narrows the
#: range by 0.618.
MAX_WINDOW_SHIFT = 6.0
GOLDEN_SECTION_STEPS = 22
#: Shift that closes features: their share is less than float32 tells from 0.
CLOSED = 24.0
#: Shifts that step 8 tries for the outputs; the first one wins ties.
SHIFTS = (CLOSED, *(quarter / 4 for quarter in range(-24, 41)))
#: Layers that are fitted at the same time on a processor, and whose inputs are held then.
LAYERS_AT_ONCE = 4
#: Tokens on which a layer's attention weights are compared with softmax.
COMPARED_TOKENS = 1024


@dataclass(frozen=True)
class LayerGain:
    """KL(softmax ‖ RFA) of every head of a layer, in nats per query, before and after calibration.

    Beside exact tokens it is that at the shift where it is least: what features stand for does not depend on their share.
    """

    name: str
    kind: AttentionKind
    before: tuple[float, ...]
    after: tuple[float, ...]


@torch.no_grad()
def calibrate(
    model: PreTrainedModel,
    base_model: PreTrainedModel,
    inputs: Inputs,
    *,
    on_layer: Callable[[], None],
    to_train: bool = False,
) -> list[LayerGain]:
    """Calibrate every RFA layer that ``inputs`` reach, in place, and call ``on_layer`` after each.

    A decoder's cross attention that no encoder feeds is not reached. The base model has modules of the same names.

    Args:
        model: the RFA model.
        base_model: the softmax model.
        inputs: of both.
        on_layer: called after each layer.
        to_train: whether the model is going to be trained (step 8 of the module).

    Returns:
        The gains of all layers with features that have weights of their own for every token; no others have.
    """
    masks = padding_masks(inputs)
    gains: list[LayerGain] = []

    def has_features(layer: RFAAttentionMixin) -> bool:
        return not isinstance(layer.feature_map, NoFeatures)

    def learns(layer: RFAAttentionMixin) -> bool:
        return any(isinstance(rule, LearnedImportance) for rule in layer.importances())

    layers = {name: layer for name, layer in rfa_layers(model).items() if has_features(layer) or learns(layer)}
    at_once = min(LAYERS_AT_ONCE, torch.get_num_threads()) if model.device.type == "cpu" else 1
    fits: list[Callable[[], LayerGain | None]] = []

    def finish() -> None:
        for gain in run_together(fits):
            gains.extend([] if gain is None else [gain])
            on_layer()
        fits.clear()
        give_back_memory()

    def calibrate_named(name: str, layer_inputs: LayerInputs, projection: str | None) -> None:
        """Calibrate layers when the softmax model comes to them, so that the inputs of few are held at a time."""
        fits.append(partial(_fit_layer, name, layers[name], layer_inputs, masks, projection, to_train=to_train))
        if len(fits) == at_once:
            finish()

    if any(layer.feature_map.reads_means for layer in layers.values()):
        for stack in cast(Any, model).rfa_stacks:
            if stack.reads_unrotated:
                find_out_rotations(stack, inputs["input_ids"])
    if layers:
        visit_layers(base_model, layers, inputs, calibrate_named)
        finish()
    return gains


def _fit_layer(
    name: str,
    layer: RFAAttentionMixin,
    inputs: LayerInputs,
    masks: dict[str, Tensor | None],
    projection: str | None,
    *,
    to_train: bool,
) -> LayerGain | None:
    """Fit what a layer has, and return the gain of features with weights of their own.

    The arguments are those of `layer_activations` and of `output_roots`, and the layer's name.
    """
    parts = zip(layer_activations(layer, inputs, masks), output_roots(layer, projection), strict=False)
    texts = [FarText(layer, part, inputs.hidden_states, root, group) for group, (part, root) in enumerate(parts)]
    first = texts[0]
    for text in texts:
        if isinstance(text.importance, LearnedImportance):
            regress_importance(text)
            if text.is_long:
                refine_importance(text)
    if isinstance(layer.feature_map, SummaryMap):
        summarise(first, to_train=to_train)
    elif not isinstance(layer.feature_map, NoFeatures):
        before, after = calibrate_layer(layer, first.activations, first.hidden_states, to_train=to_train)
        return LayerGain(name, layer.rfa_kind, tuple(before.tolist()), tuple(after.tolist()))
    return None


class _Comparison:
    """The divergence of a layer's attention weights from softmax, on the first `COMPARED_TOKENS` tokens."""

    def __init__(self, layer: RFAAttentionMixin, activations: LayerActivations, hidden_states: Tensor) -> None:
        rows = max(1, COMPARED_TOKENS * layer.feature_map.groups // activations.query.shape[2])
        self.layer, self.activations = layer, activations.rows(rows)
        self.hidden_states = hidden_states[:rows]
        self.targets = list(softmax_weights(layer, self.activations))

    def divergence(self) -> Tensor:
        """Return KL(softmax ‖ RFA) of the layer as it is, [H]."""
        divergence = layer_divergence(self.layer, self.activations, self.hidden_states, self.targets)
        give_back_memory()
        return divergence

    def best_divergence(self) -> Tensor:
        """Return KL(softmax ‖ RFA) of the layer with the best shift of its window, if it has one, [H]."""
        return self.best_shift()[1] if self.layer.feature_map.windowed else self.divergence()

    def best_shift(self) -> tuple[Tensor, Tensor]:
        """Return the window's best shift relative to the one it has, and KL(softmax ‖ RFA) with it, each [H].

        With p and m the shares of the softmax and of the RFA weights that fall in the window, a shift by δ changes the
        divergence by E[log(1 + m (e^δ − 1))] − E[p] δ. That is convex, so a golden-section search finds its minimum.
        """
        softmax_shares, rfa_shares, divergences = [], [], []
        comparisons = compare_weights(self.layer, self.activations, self.hidden_states, self.targets)
        for target, log_weights, window in comparisons:
            divergences.append(target.divergence(log_weights))
            near = cast(ExactTokens, window).near(target.rows)
            softmax_shares.append((target.softmax * near).sum(-1))
            rfa_shares.append((log_weights.exp() * near).sum(-1))
        rfa_share = torch.cat(rfa_shares, dim=-1).clamp(0.0, 1.0)  # [N, H, T G]
        mean_softmax_share = self.activations.mean(torch.cat(softmax_shares, dim=-1))  # [H]

        def change(shift: Tensor) -> Tensor:
            rise = torch.log1p(rfa_share * torch.expm1(shift)[:, None])
            return self.activations.mean(rise) - mean_softmax_share * shift

        low = torch.full_like(mean_softmax_share, -MAX_WINDOW_SHIFT)
        high = -low
        ratio = (math.sqrt(5) - 1) / 2
        for _ in range(GOLDEN_SECTION_STEPS):
            left, right = high - ratio * (high - low), low + ratio * (high - low)
            to_left = change(left) < change(right)
            low, high = torch.where(to_left, low, left), torch.where(to_left, right, high)
        best = (low + high) / 2
        return best, self.activations.mean(torch.cat(divergences, dim=-1)) + change(best)

    def least_error_shift(self) -> Tensor:
        """Return the shift of `SHIFTS`, relative to the window's, with the least squared error of every head's outputs, [H].

        With m the share of the weights that exact tokens have, and o_E and o_F the outputs of these and of the features, a
        shift by δ makes it m′ = m e^δ / (1 + m (e^δ − 1)). The error of m′ o_E + (1 − m′) o_F is u + (1 − m′) f, with
        u = o_E − o and f = o_F − o_E.
        """
        value, parts = self.activations.value.float(), []
        for target, log_weights, window in compare_weights(
            self.layer, self.activations, self.hidden_states, self.targets
        ):
            weights, near = log_weights.exp(), cast(ExactTokens, window).near(target.rows)
            values, least = value[:, :, : weights.shape[-1]], torch.finfo(weights.dtype).tiny
            exact, features = weights * near, weights * ~near
            exact_share, feature_share = (part.sum(-1, keepdim=True) for part in (exact, features))
            exact_output = exact @ values / exact_share.clamp_min(least)
            feature_output = torch.where(
                feature_share > 0, features @ values / feature_share.clamp_min(least), exact_output
            )
            error, change = exact_output - target.softmax @ values, feature_output - exact_output
            moments = error.square().sum(-1), (error * change).sum(-1), change.square().sum(-1)
            parts.append((exact_share[..., 0].clamp(0.0, 1.0), *moments))
        share, error_squares, products, change_squares = (torch.cat(part, -1) for part in zip(*parts, strict=True))

        def mean_error(shift: float) -> Tensor:
            left = (1 - share) / (1 + share * math.expm1(shift))  # to the features
            return self.activations.mean(error_squares + 2 * left * products + left.square() * change_squares)

        best = torch.stack([mean_error(shift) for shift in SHIFTS]).argmin(0)
        return torch.tensor(SHIFTS, device=best.device)[best]


def summarise(text: FarText, *, to_train: bool) -> None:
    """Fit a layer's summary, and close that of heads which it does not help, unless training follows, which needs it open."""
    before, after = fit_summary(text)
    if not to_train:
        text.layer.feature_map.window_shift[after >= before] = CLOSED


@torch.no_grad()
def calibrate_layer(
    layer: RFAAttentionMixin,
    activations: LayerActivations,
    hidden_states: Tensor,
    *,
    to_train: bool = False,
) -> tuple[Tensor, Tensor]:
    """Calibrate a layer, whose input is ``hidden_states``, and return the divergences of `LayerGain`, each [H]."""
    feature_map = layer.feature_map
    keys = activations.keys()
    comparison = _Comparison(layer, activations, hidden_states)
    before = comparison.divergence()
    if feature_map.has_sigma:
        feature_map.sigma.fill_(1.0)
    if feature_map.reparametrizable:
        _center_and_balance(feature_map, activations.queries(), keys)
    _set_log_scale(feature_map, keys)
    if isinstance(feature_map, PositiveMap) and feature_map.reparametrizable:
        _shape_projection(feature_map, activations.queries(), keys)
    if layer.gate is not None:
        _set_time_scales(layer.gate, comparison)
    if feature_map.has_sigma:
        _set_temperature(feature_map, keys, comparison)
    if feature_map.windowed:
        feature_map.window_shift.zero_()
        shift, after = comparison.best_shift()
        # Features with signs have outputs that their weights, of which none is negative, do not tell.
        by_divergence = to_train or feature_map.signed
        feature_map.window_shift.copy_(shift if by_divergence else comparison.least_error_shift())
        return before, after
    return before, comparison.divergence()


def _shape_projection(feature_map: PositiveMap, query: Tensor, key: Tensor) -> None:
    """Fit W to the second moment of q̂ + k̂ over all pairs (step 3)."""
    query, key = feature_map.query_input(query[None])[0].double(), feature_map.key_input(key[None])[0].double()
    second = sum(x.transpose(-1, -2) @ x / x.shape[1] for x in (query, key))
    means = query.mean(1)[:, :, None] * key.mean(1)[:, None, :]
    fit_projection(feature_map, second + means + means.transpose(-1, -2))


@torch.no_grad()
def fit_projection(feature_map: PositiveMap, second_moment: Tensor) -> None:
    """Fit W to data, so that the logarithm of the kernel's second moment is least on average (Likhosherstov et al. 2023).

    In the eigenvectors of E[(q̂ + k̂)(q̂ + k̂)ᵀ] with eigenvalues λ, A has the entries
    a = (1 − 2λ − √((2λ + 1)² + 8λ)) / 16 ≤ 0, and B = (1 − 4A)^½ in their directions: w ← Bw, b = wᵀAw.

    Args:
        feature_map: changed in place; both sides of a map with two matrices get the same, and all query heads of a group.
        second_moment: E[(q̂ + k̂)(q̂ + k̂)ᵀ] of prepared queries and keys, [H, d, d].
    """
    values, vectors = torch.linalg.eigh(second_moment.double())
    values = values.clamp_min(0.0)[:, None, :]
    entries = (1 - 2 * values - ((2 * values + 1).square() + 8 * values).sqrt()) / 16
    drawn = feature_map.initial_projection().to(vectors)
    projection = (drawn * (1 - 4 * entries).sqrt()) @ vectors.transpose(-1, -2)
    bias = (drawn.square() * entries).sum(-1) + (1 - 4 * entries).log().sum(-1) / 4
    tensors = feature_map.state_dict(keep_vars=True)
    fitted = {name: projection for name in ("projection", "key_projection")}
    fitted |= {name: bias for name in ("feature_bias", "query_bias", "key_bias")}
    for name in tensors.keys() & fitted.keys():
        heads = tensors[name].shape[0]
        tensors[name].copy_(fitted[name].repeat_interleave(heads // feature_map.num_heads, dim=0))


def _set_to_nearest(comparison: _Comparison, values: Sequence[float], set_to: Callable[[Tensor], None]) -> None:
    """Set every head to its best of some values by its divergence; the first one wins ties."""
    best, chosen = torch.tensor(math.inf), torch.tensor(values[0])
    for value in torch.tensor(values):
        set_to(value)
        divergence = comparison.best_divergence()
        better = divergence < best - 1e-6
        best, chosen = torch.where(better, divergence, best), torch.where(better, value, chosen)
    set_to(chosen)


def _set_time_scales(gate: Gate, comparison: _Comparison) -> None:
    """Set every head's time scale to the one that is nearest the softmax weights (step 4)."""
    scales = [max(2.0, share * gate.max_positions) for share in GATE_TIME_SCALES]

    def set_to(scale: Tensor) -> None:  # 1 / (1 − g) where w·x is 0
        gate.bias.copy_((scale - 1.0).log())

    _set_to_nearest(comparison, scales, set_to)


def _set_temperature(feature_map: FeatureMap, keys: Tensor, comparison: _Comparison) -> None:
    """Set σ of every head to the temperature that is nearest the softmax weights (step 5), with its best shift."""

    def set_to(temperature: Tensor) -> None:
        feature_map.sigma.copy_(temperature.reshape(-1, 1))
        _set_log_scale(feature_map, keys)

    _set_to_nearest(comparison, TEMPERATURES, set_to)


def _center_and_balance(feature_map: FeatureMap, query: Tensor, key: Tensor) -> None:
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

    The median key's features then have mass 1, and the heaviest key's at most exp(`MAX_LOG_KEY_MASS`). A mean would follow
    a few heavy keys and let the features of all others underflow.
    """
    if not feature_map.has_exponent:
        return
    mass = key_exponents(feature_map, key[None])[0].logsumexp(-1)
    feature_map.log_scale.copy_(torch.maximum(mass.median(dim=1).values, mass.amax(1) - MAX_LOG_KEY_MASS))
