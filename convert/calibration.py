"""Calibration: set what a feature map has to set, per head, from the softmax model's own queries and keys.

For every layer, on its input in the softmax model (a few thousand tokens, no training):

1. centre: k → k − μ with μ = mean(k) + a² mean(q). Softmax attention does not see a shift of all keys; the relative second
   moment of positive features, exp(‖q̂ + k̂‖²) (Choromanski et al. 2021, lemma 2), falls with ‖q̂ + k̂‖.
2. balance: (q∘a, k/a) with a = (var k / var q)^¼, which minimises the mean of ‖q̂ + k̂‖² and leaves q·k as it is.
3. temperature: σ = τ per head, the τ of a grid whose implied weights have the least cross-entropy to the softmax weights.
4. scale: the constant c of a head's exponents, so that the features of its keys have mean mass 1.

Steps 1 and 2 apply to positive features with the norm carried, step 3 to maps with σ, step 4 to maps with exponents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_rfa.attention import RFAAttentionMixin
from hf_rfa.feature_maps import FeatureMap
from hf_rfa.kernels import implied_weights

from .families import rfa_layers

#: σ that step 3 tries; the first one, σ as it is, wins ties.
TEMPERATURES = (1.0, 0.35, 0.5, 0.65, 0.8, 0.9, 1.25)
#: Implied weights are raised to this before a logarithm is taken.
SMALLEST_WEIGHT = 1e-9
#: Tokens on which implied and softmax weights are compared.
TARGET_TOKENS = 1024


@dataclass(frozen=True)
class LayerGain:
    """What calibration gained in one layer: mean KL(softmax ‖ implied) in nats per query, before and after."""

    name: str
    before: float
    after: float


@dataclass(frozen=True)
class Sample:
    """Queries and keys of one attention layer of the softmax model.

    Attributes:
        query: [N, H, Tq, d].
        key: [N, H, Tk, d].
        query_mask: [N, Tq], True for tokens, or None where nothing is padded.
        key_mask: [N, Tk], likewise.
    """

    query: Tensor
    key: Tensor
    query_mask: Tensor | None = None
    key_mask: Tensor | None = None

    def queries(self) -> Tensor:
        """Return the queries of all tokens, [H, n, d], in float32."""
        return _tokens(self.query, self.query_mask).float()

    def keys(self) -> Tensor:
        """Return the keys of all tokens, [H, n, d], in float32."""
        return _tokens(self.key, self.key_mask).float()

    def rows(self, count: int) -> Sample:
        """Return the first ``count`` rows of the batch."""
        parts = (self.query, self.key, self.query_mask, self.key_mask)
        return Sample(*(None if part is None else part[:count] for part in parts))  # type: ignore[arg-type]

    def mean(self, per_query: Tensor) -> Tensor:
        """Return the mean of [N, H, Tq] over the queries that are no padding, [H]."""
        if self.query_mask is None:
            return per_query.mean((0, 2))
        return per_query.transpose(1, 2)[self.query_mask].mean(0)

    def key_weights(self) -> Tensor | None:
        """Return 1 for tokens and 0 for padding, [N, 1, Tk], as the recurrence takes them."""
        return None if self.key_mask is None else self.key_mask[:, None].float()


def softmax_weights(layer: RFAAttentionMixin, sample: Sample) -> tuple[Tensor, Tensor]:
    """Return the softmax weights of a layer, [N, H, Tq, Tk], and their negative entropy, [N, H, Tq]."""
    query, key = sample.query.float(), sample.key.float()
    visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=key.device)
    if layer.rfa_kind == "causal":
        visible = visible.tril()
    if sample.key_mask is not None:
        visible = visible & sample.key_mask[:, None, None]
    scores = (query @ key.transpose(-1, -2)) * layer.scaling
    # A query that sees nothing, among padding, gets weights that nobody counts instead of NaN.
    log_softmax = scores.masked_fill(~visible, torch.finfo(scores.dtype).min).log_softmax(-1)
    softmax = log_softmax.exp()
    return softmax, (softmax * log_softmax.masked_fill(~visible, 0.0)).sum(-1)


def _tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return [N, H, T, d] as [H, n, d], without padding."""
    rows = x.transpose(1, 2)
    return (rows.flatten(0, 1) if mask is None else rows[mask]).transpose(0, 1)


@contextmanager
def record_inputs(modules: dict[str, nn.Module]) -> Iterator[dict[str, tuple[Tensor, Tensor | None]]]:
    """Record what enters some attention modules: hidden states, and what cross attention attends to."""
    inputs: dict[str, tuple[Tensor, Tensor | None]] = {}

    def hook(name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple, kwargs: dict) -> None:
            hidden_states = args[0] if args else kwargs["hidden_states"]
            inputs[name] = hidden_states, kwargs.get("key_value_states", kwargs.get("encoder_hidden_states"))

        return record

    handles = [module.register_forward_pre_hook(hook(name), with_kwargs=True) for name, module in modules.items()]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


def sample_layer(
    layer: RFAAttentionMixin, recorded: tuple[Tensor, Tensor | None], masks: dict[str, Tensor | None]
) -> Sample:
    """Return the queries and keys of a layer.

    Args:
        layer: the RFA layer, whose projections are the softmax layer's.
        recorded: what entered it, from `record_inputs`.
        masks: the masks of the model's inputs, by `model_masks`.
    """
    hidden_states, source = recorded
    if layer.rfa_kind != "cross":
        query, key, _ = layer.project(hidden_states)
        mask = masks["source" if layer.rfa_kind == "encoder" else "own"]
        return Sample(query, key, mask, mask)
    query, key = layer.project_query(hidden_states), layer.project_source(cast(Tensor, source))[0]
    return Sample(query, key, masks["own"], masks["source"])


def model_masks(inputs: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """Return the padding masks of a model's inputs: of the tokens its causal attention sees, and of the source."""

    def mask(name: str) -> Tensor | None:
        found = inputs.get(name)
        return None if found is None or bool((found != 0).all()) else found != 0

    if "decoder_input_ids" in inputs:
        return {"own": mask("decoder_attention_mask"), "source": mask("attention_mask")}
    return {"own": mask("attention_mask"), "source": None}


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
        inputs: what the model is called with (`hf_rfa.convert.inputs`).
        on_layer: called with a layer's name when it is done.

    Returns:
        The gain of every layer that these inputs reach: a decoder with cross attention that no encoder feeds is not reached.
    """
    layers = rfa_layers(model)
    with record_inputs({name: softmax_model.get_submodule(name) for name in layers}) as recorded:
        body: Any = softmax_model.base_model
        device = softmax_model.device
        body(**{name: tensor.to(device) for name, tensor in inputs.items() if name != "labels"}, use_cache=False)
    masks = model_masks(inputs)
    gains = []
    for name, layer in layers.items():
        if name in recorded:
            sample = sample_layer(layer, recorded.pop(name), masks)
            target = _Target(layer, sample)
            before = float(target.divergence().mean())
            calibrate_layer(layer, sample, target)
            gains.append(LayerGain(name, before, float(target.divergence().mean())))
        if on_layer is not None:
            on_layer(name)
    return gains


def calibrate_layer(layer: RFAAttentionMixin, sample: Sample, target: _Target | None = None) -> None:
    """Calibrate one layer on queries and keys; ``target`` holds their softmax weights if they are at hand."""
    feature_map = layer.feature_map
    keys = sample.keys()
    if feature_map.invariant:
        _centre_and_balance(feature_map, sample.queries(), keys)
    _set_log_scale(feature_map, keys)
    if not feature_map.has_sigma:
        return
    target = target or _Target(layer, sample)
    best = torch.full((feature_map.num_heads,), math.inf, device=keys.device)
    chosen = torch.ones_like(best)
    for temperature in TEMPERATURES:
        feature_map.sigma.fill_(temperature)
        _set_log_scale(feature_map, keys)
        divergence = target.divergence()
        better = divergence < best - 1e-6
        best, chosen = torch.where(better, divergence, best), torch.where(better, temperature, chosen)
    feature_map.sigma.copy_(chosen[:, None].expand_as(feature_map.sigma))
    _set_log_scale(feature_map, keys)


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
    """Set c so that the features of a head's keys [H, n, d] have mean mass 1 (step 4)."""
    if not feature_map.has_exponent:
        return
    exponent = feature_map.key_exponent(feature_map.key_input(key[None]))[0]
    feature_map.log_scale.copy_(exponent.flatten(1).logsumexp(1) - math.log(key.shape[1]))


class _Target:
    """The softmax weights of one layer, computed once, and how far implied weights are from them.

    It holds [N, H, Tq, Tk] numbers: of many queries the first `TARGET_TOKENS` are enough to compare on.
    """

    def __init__(self, layer: RFAAttentionMixin, sample: Sample) -> None:
        rows = max(1, TARGET_TOKENS // sample.query.shape[2])
        self.sample = sample.rows(rows)
        self.feature_map, self.causal = layer.feature_map, layer.rfa_kind == "causal"
        self.softmax, negative_entropy = softmax_weights(layer, self.sample)
        self.negative_entropy = self.sample.mean(negative_entropy)

    def divergence(self) -> Tensor:
        """Return the mean KL(softmax ‖ implied) of each head, in nats per query, [H]."""
        features = self.feature_map(self.sample.query.float(), self.sample.key.float())
        options: dict[str, Any] = {"signed": self.feature_map.signed, "floor": self.feature_map.floor}
        weights = implied_weights(*features, weights=self.sample.key_weights(), causal=self.causal, **options)
        cross_entropy = self.sample.mean(-(self.softmax * weights.clamp_min_(SMALLEST_WEIGHT).log_()).sum(-1))
        return self.negative_entropy + cross_entropy
