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
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_rfa.attention import RFAAttentionMixin
from hf_rfa.errors import InputError
from hf_rfa.feature_maps import FeatureMap
from hf_rfa.kernels import implied_weights

from .families import rfa_layers

#: σ that step 3 tries; the first one, σ as it is, wins ties.
TEMPERATURES = (1.0, 0.35, 0.5, 0.65, 0.8, 0.9, 1.25)
#: Tokens that calibration reads from a text.
TEXT_TOKENS = 4096
#: Random tokens that it reads where there is no text.
RANDOM_TOKENS = 1024
BLOCK_LENGTH = 512
#: Tokens on which implied and softmax weights are compared.
TARGET_TOKENS = 1024


@dataclass(frozen=True)
class LayerGain:
    """What calibration gained in one layer: mean KL(softmax ‖ implied) in nats per query, before and after."""

    name: str
    before: float
    after: float


def random_blocks(vocab_size: int, max_length: int, *, seed: int, tokens: int = RANDOM_TOKENS) -> Tensor:
    """Return uniformly random token ids [N, T] to calibrate on where there is no text."""
    length = min(BLOCK_LENGTH, max_length)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (math.ceil(tokens / length), length), generator=generator)


def text_blocks(tokenizer: Any, documents: Iterator[str], max_length: int, *, tokens: int = TEXT_TOKENS) -> Tensor:
    """Return the first ``tokens`` tokens of some documents as blocks [N, T].

    Raises:
        InputError: if there is not a single full block.
    """
    length = min(BLOCK_LENGTH, max_length)
    ids: list[int] = []
    for document in documents:
        ids += tokenizer(document, verbose=False)["input_ids"]
        if tokenizer.eos_token_id is not None:
            ids.append(tokenizer.eos_token_id)
        if len(ids) >= tokens:
            break
    blocks = min(len(ids), tokens) // length
    if blocks == 0:
        raise InputError(f"the text to calibrate on has {len(ids)} tokens; at least {length} are needed.")
    return torch.tensor(ids[: blocks * length]).view(blocks, length)


@contextmanager
def record_inputs(modules: dict[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """Record the hidden states that enter some modules."""
    inputs: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple, kwargs: dict) -> None:
            inputs[name] = args[0] if args else kwargs["hidden_states"]

        return record

    handles = [module.register_forward_pre_hook(hook(name), with_kwargs=True) for name, module in modules.items()]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def calibrate(
    model: PreTrainedModel,
    softmax_model: PreTrainedModel,
    blocks: Tensor,
    *,
    on_layer: Callable[[str], None] | None = None,
) -> list[LayerGain]:
    """Calibrate every causal RFA layer of a model, in place.

    Args:
        model: the RFA model.
        softmax_model: its softmax parent, with modules of the same names.
        blocks: token ids [N, T].
        on_layer: called with a layer's name when it is done.

    Returns:
        The gain of every layer.
    """
    layers = {name: layer for name, layer in rfa_layers(model).items() if layer.rfa_causal}
    with record_inputs({name: softmax_model.get_submodule(name) for name in layers}) as inputs:
        body: Any = softmax_model.base_model
        body(blocks.to(softmax_model.device), use_cache=False)
    gains = []
    for name, layer in layers.items():
        query, key, _ = layer.project(inputs.pop(name))
        target = _Target(layer, query, key)
        before = float(target.divergence().mean())
        calibrate_layer(layer, query, key, target)
        gains.append(LayerGain(name, before, float(target.divergence().mean())))
        if on_layer is not None:
            on_layer(name)
    return gains


def calibrate_layer(layer: RFAAttentionMixin, query: Tensor, key: Tensor, target: _Target | None = None) -> None:
    """Calibrate one layer on queries and keys [N, H, T, d]; ``target`` holds their softmax weights if they are at hand."""
    feature_map = layer.feature_map
    if feature_map.invariant:
        _centre_and_balance(feature_map, query, key)
    _set_log_scale(feature_map, key)
    if not feature_map.has_sigma:
        return
    target = target or _Target(layer, query, key)
    best = torch.full((feature_map.num_heads,), math.inf, device=key.device)
    chosen = torch.ones_like(best)
    for temperature in TEMPERATURES:
        feature_map.sigma.fill_(temperature)
        _set_log_scale(feature_map, key)
        divergence = target.divergence()
        better = divergence < best - 1e-6
        best, chosen = torch.where(better, divergence, best), torch.where(better, temperature, chosen)
    feature_map.sigma.copy_(chosen[:, None].expand_as(feature_map.sigma))
    _set_log_scale(feature_map, key)


def _centre_and_balance(feature_map: FeatureMap, query: Tensor, key: Tensor) -> None:
    """Set ``balance`` and ``key_shift`` (steps 1 and 2)."""
    query, key = query.float(), key.float()
    smallest = torch.finfo(torch.float32).tiny
    variances = [x.var(dim=(0, 2), correction=0).clamp_min(smallest) for x in (query, key)]
    ratio = (variances[1] / variances[0]).pow(0.25)
    # A dimension in which queries or keys do not vary has no balance to set.
    ratio = torch.where((ratio > 1e-3) & (ratio < 1e3), ratio, 1.0)
    feature_map.balance.copy_(ratio)
    feature_map.key_shift.copy_(key.mean((0, 2)) + ratio.square() * query.mean((0, 2)))


def _set_log_scale(feature_map: FeatureMap, key: Tensor) -> None:
    """Set c so that the features of a head's keys have mean mass 1 (step 4)."""
    if not feature_map.has_exponent:
        return
    mass = feature_map.key_exponent(feature_map.key_input(key)).transpose(0, 1).flatten(1).logsumexp(1)
    feature_map.log_scale.copy_(mass - math.log(key.shape[0] * key.shape[2]))


class _Target:
    """The softmax weights of one layer, computed once, and how far implied weights are from them.

    It holds [N, H, T, T] numbers: of many queries the first `TARGET_TOKENS` are enough to compare on.
    """

    def __init__(self, layer: RFAAttentionMixin, query: Tensor, key: Tensor) -> None:
        rows = max(1, TARGET_TOKENS // query.shape[2])
        self.query, self.key = query[:rows].float(), key[:rows].float()
        self.feature_map = layer.feature_map
        length = query.shape[2]
        visible = torch.ones(length, length, dtype=torch.bool, device=key.device).tril()
        scores = (self.query @ self.key.transpose(-1, -2)) * layer.scaling
        log_softmax = scores.masked_fill(~visible, -math.inf).log_softmax(-1)
        self.softmax = log_softmax.exp()
        self.negative_entropy = (self.softmax * log_softmax.masked_fill(~visible, 0.0)).sum(-1).mean((0, 2))

    def divergence(self) -> Tensor:
        """Return the mean KL(softmax ‖ implied) of each head, in nats per query, [H]."""
        features = self.feature_map(self.query, self.key)
        weights = implied_weights(*features, signed=self.feature_map.signed, floor=self.feature_map.floor)
        cross_entropy = -(self.softmax * weights.clamp_min_(1e-9).log_()).sum(-1).mean((0, 2))
        return self.negative_entropy + cross_entropy
