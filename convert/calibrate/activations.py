"""Activations of a softmax model's attention layers, and the divergence of an RFA layer's attention weights from softmax."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_rfa.models.attention import RFAAttentionMixin
from hf_rfa.models.attention_seq2seq import RFASeq2SeqAttentionMixin
from hf_rfa.models.importance import Importance
from hf_rfa.models.lifetimes import Lifetimes, arrivals_of, lifetimes
from hf_rfa.models.linear_attention import mask_padding
from hf_rfa.models.masking import MASKED_LOGIT, group_queries, rows_per_token, split_heads, to_rows
from hf_rfa.models.memory import EMPTY, MemoryLayout, compute_dtype

from .attention_weights import ExactTokens, log_attention_weights, seen_by

#: Queries whose attention weights are held at once.
QUERY_BLOCK = 128
#: Arguments of attention modules that say where their tokens stand.
POSITION_ARGUMENTS = ("position_embeddings", "position_ids")


@dataclass(frozen=True)
class LayerActivations:
    """Queries, keys and values of one attention layer of the softmax model; masks are None where nothing is padded.

    There may be G rows of queries per token (`hf_rfa.models.masking`).
    """

    query: Tensor  # [N, H, Tq G, d]
    key: Tensor  # [N, H, Tk, d]
    value: Tensor  # [N, H, Tk, d]
    query_mask: Tensor | None = None  # [N, Tq], True for tokens
    key_mask: Tensor | None = None  # [N, Tk]

    @property
    def is_token(self) -> Tensor:
        """Which keys are those of tokens, [N, Tk]."""
        key, mask = self.key, self.key_mask
        return torch.ones(len(key), key.shape[2], dtype=torch.bool, device=key.device) if mask is None else mask

    def row_mask(self) -> Tensor | None:
        """Return which rows of queries are those of tokens, [N, Tq G], or None for all."""
        if self.query_mask is None:
            return None
        return to_rows(self.query_mask, self.query.shape[2] // self.query_mask.shape[1], dim=1)

    def queries(self) -> Tensor:
        """Return the queries of all tokens, [H, n G, d], in float32."""
        return _tokens(self.query, self.row_mask()).float()

    def keys(self) -> Tensor:
        """Return the keys of all tokens, [H, n, d], in float32."""
        return _tokens(self.key, self.key_mask).float()

    def rows(self, stop: int, start: int = 0) -> LayerActivations:
        """Return the rows of the batch from ``start`` to ``stop`` − 1."""
        return replace(self, **{name: part[start:stop] for name, part in vars(self).items() if part is not None})

    def mean(self, per_query: Tensor) -> Tensor:
        """Return the mean of [N, H, Tq G] over the queries that are no padding, [H]."""
        mask = self.row_mask()
        return per_query.mean((0, 2)) if mask is None else per_query.transpose(1, 2)[mask].mean(0)


def _tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return [N, H, T, d] as [H, n, d], without padding."""
    rows = x.transpose(1, 2)
    return (rows.flatten(0, 1) if mask is None else rows[mask]).transpose(0, 1)


class SoftmaxWeights(NamedTuple):
    """Softmax attention weights of a block of a layer's queries, over the keys that causal ones can see."""

    rows: slice  # those of whole tokens, if causal
    softmax: Tensor  # [N, H, rows, keys]
    negative_entropy: Tensor  # [N, H, rows]

    def divergence(self, log_weights: Tensor) -> Tensor:
        """Return KL(softmax ‖ weights) for logarithms of weights [N, H, rows, keys], in nats per query, [N, H, rows]."""
        # 0 · MASKED_LOGIT is 0: keys that nobody sees count nothing.
        return self.negative_entropy - (self.softmax * log_weights).sum(-1)


@torch.no_grad()
def softmax_weights(layer: RFAAttentionMixin, activations: LayerActivations) -> Iterator[SoftmaxWeights]:
    """Yield the softmax attention weights of a layer, about `QUERY_BLOCK` queries at a time."""
    length, causal = activations.query.shape[2], layer.rfa_kind == "causal"
    groups = rows_per_token(activations.query, activations.key) if causal else 1
    block = max(1, QUERY_BLOCK // groups) * groups
    for start in range(0, length, block):
        rows = slice(start, min(length, start + block))
        seen = seen_by(rows, activations.query, activations.key, causal=causal)
        keys = slice(0, seen.shape[-1])
        query, key = activations.query[:, :, rows].float(), activations.key[:, :, keys].float()
        scores = (query * layer.scaling) @ key.transpose(-1, -2)
        if activations.key_mask is not None:
            seen = seen & activations.key_mask[:, None, None, keys]
        # A padded query may see no key: finite logits give it weights instead of NaN, and no mean counts them.
        log_softmax = scores.masked_fill_(~seen, MASKED_LOGIT).log_softmax(-1)
        softmax = log_softmax.exp()
        yield SoftmaxWeights(rows, softmax, (softmax * log_softmax).sum(-1))


def compare_weights(
    layer: RFAAttentionMixin,
    activations: LayerActivations,
    hidden_states: Tensor,
    targets: Iterable[SoftmaxWeights] | None = None,
) -> Iterator[tuple[SoftmaxWeights, Tensor, ExactTokens | None]]:
    """Yield the softmax weights of a layer, the logarithms of its own attention weights, and what it sees exactly.

    Its features have weights of their own for every token. The arguments are those of `layer_divergence`.
    """
    dtype = compute_dtype(activations.query.dtype)
    query, key = activations.query.to(dtype), activations.key.to(dtype)
    least_shift = layer.feature_map.least_shift(None)
    features = layer.feature_map(query, key, least_shift=least_shift, offset=layer.window_size > 0)
    window = exact_tokens(layer, query, key, features.offset, activations.key_mask, hidden_states)
    log_decay, input_scale = (None, None) if layer.gate is None else layer.gate(hidden_states)
    log_decay, input_scale = mask_padding(activations.key_mask, log_decay, input_scale)
    for target in softmax_weights(layer, activations) if targets is None else targets:
        log_weights = log_attention_weights(
            features.query,
            features.key,
            rows=target.rows,
            log_decay=log_decay,
            input_scale=input_scale,
            causal=layer.rfa_kind == "causal",
            denominator_floor=layer.feature_map.denominator_floor,
            window=window,
        )
        yield target, log_weights, window


def exact_tokens(
    layer: RFAAttentionMixin,
    query: Tensor,
    key: Tensor,
    offset: Tensor | None,
    key_mask: Tensor | None,
    hidden_states: Tensor,
) -> ExactTokens | None:
    """Return what a layer sees exactly, or None for one that keeps no tokens.

    ``query`` is not scaled yet; the other arguments are those of `ExactTokens` and of `lifetimes_of`.
    """
    layout = layer.memory_layout(key.dtype)
    if not layout.places:
        return None
    tokens, ordinal = lifetimes_of(layer, layout, key, key_mask, hidden_states)
    return ExactTokens(query * layer.scaling, key, cast(Tensor, offset), tokens, ordinal)


def lifetimes_of(
    layer: RFAAttentionMixin,
    layout: MemoryLayout,
    key: Tensor,
    key_mask: Tensor | None,
    hidden_states: Tensor | None = None,
) -> tuple[Lifetimes, Tensor]:
    """Return when whole texts' tokens are seen exactly in a memory of some layout, and their ordinals, [N, T].

    Args:
        layer: the layer.
        layout: its own, or one with other numbers of tokens.
        key: [N, H, T, d].
        key_mask: [N, T], True for tokens, or None.
        hidden_states: the layer's input, [N, T, width], which importance reads; None without slots.
    """
    rows, heads, length, _ = key.shape
    arrivals = arrivals_of(torch.zeros(rows, dtype=torch.int32, device=key.device), length, layout, key_mask, None)
    ordinal = arrivals.ordinal
    arrival = ordinal if key_mask is None else ordinal.masked_fill(~key_mask, EMPTY)
    score = torch.zeros(rows, heads, length, device=key.device)
    if layout.slots:
        score = cast(Importance, layer.importance).score(cast(Tensor, hidden_states), key, ordinal)
    score = score.masked_fill(arrivals.is_sink[:, None], math.inf)
    arrival = arrival[:, None].expand_as(score)
    by_head = zip(score.split(1, dim=1), arrival.split(1, dim=1), strict=True)  # each takes quadratic memory
    parts = zip(*(lifetimes(scores, arrived, layout) for scores, arrived in by_head), strict=True)
    return Lifetimes(*(torch.cat(part, dim=1) for part in parts)), ordinal


def layer_divergence(
    layer: RFAAttentionMixin,
    activations: LayerActivations,
    hidden_states: Tensor,
    targets: Iterable[SoftmaxWeights] | None = None,
) -> Tensor:
    """Return KL(softmax ‖ RFA) of a layer's attention weights, in nats per query, [H]: the mean over a group's queries.

    Args:
        layer: the RFA layer.
        activations: its queries, keys and values in the softmax model.
        hidden_states: its input there, which gate and importance read.
        targets: the softmax weights of ``activations``; None computes them.
    """
    comparisons = compare_weights(layer, activations, hidden_states, targets)
    return activations.mean(
        torch.cat([target.divergence(log_weights) for target, log_weights, _ in comparisons], dim=-1)
    )


class LayerInputs(NamedTuple):
    """Inputs of an attention module: hidden states, for cross attention the encoder's, and rotations of its positions."""

    hidden_states: Tensor
    encoder_hidden_states: Tensor | None
    options: dict[str, Any]


def visit_layers(
    model: PreTrainedModel,
    names: Iterable[str],
    inputs: dict[str, Tensor],
    visit: Callable[[str, LayerInputs, str | None], None],
) -> None:
    """Run a model without its head, and call ``visit`` at some of its attention modules.

    Args:
        model: the softmax model, or the RFA model.
        names: of the modules; ``inputs`` may not reach all of them.
        inputs: what the model is called with; ``labels`` are ignored.
        visit: called after a module, with its name, its inputs, and the name in it of the last linear layer that it called,
            if there is one.
    """
    last_linear: dict[str, str] = {}

    def after_linear(name: str, linear: str, module: nn.Module, args: tuple, output: Tensor) -> None:
        last_linear[name] = linear

    def after_layer(name: str, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        hidden_states = args[0] if args else kwargs["hidden_states"]
        source = kwargs.get("key_value_states", kwargs.get("encoder_hidden_states"))
        positions = {argument: kwargs[argument] for argument in POSITION_ARGUMENTS if argument in kwargs}
        visit(name, LayerInputs(hidden_states, source, positions), last_linear.pop(name, None))

    body: Any = model.base_model
    with ExitStack() as hooks, torch.no_grad():
        for name in names:
            module = model.get_submodule(name)
            for linear, part in module.named_modules():
                if isinstance(part, nn.Linear | Conv1D):
                    hooks.enter_context(part.register_forward_hook(partial(after_linear, name, linear)))
            hooks.enter_context(module.register_forward_hook(partial(after_layer, name), with_kwargs=True))
        on_device = {name: tensor.to(model.device) for name, tensor in inputs.items() if name != "labels"}
        body(**on_device, use_cache=False)


def capture_inputs(model: PreTrainedModel, names: Iterable[str], inputs: dict[str, Tensor]) -> dict[str, LayerInputs]:
    """Return the inputs of attention modules by name, without those that are not reached; see `visit_layers`."""
    captured: dict[str, LayerInputs] = {}
    visit_layers(model, names, inputs, lambda name, layer_inputs, _: captured.__setitem__(name, layer_inputs))
    return captured


def layer_activations(
    layer: RFAAttentionMixin, inputs: LayerInputs, masks: dict[str, Tensor | None]
) -> list[LayerActivations]:
    """Return queries, keys and values of all heads but the retrieval heads, and of these if there are any.

    The layer is an RFA layer, and its projections are the softmax layer's.

    ``inputs`` are the layer's, of `capture_inputs`, and ``masks`` those of the model's inputs (`padding_masks`).
    """
    if isinstance(layer, RFASeq2SeqAttentionMixin) and layer.rfa_kind == "cross":
        query = layer.project_query(inputs.hidden_states)
        key, value = layer.project_source(cast(Tensor, inputs.encoder_hidden_states))
        query_mask, key_mask = masks["causal"], masks["encoder"]
    else:
        query, key, value = layer.project(inputs.hidden_states, **inputs.options)
        query_mask = key_mask = masks[layer.rfa_kind]
    query = group_queries(query, key.shape[1])
    activations = LayerActivations(query, key, value, query_mask, key_mask)
    if not layer.retrieval_heads:
        return [activations]
    queries, keys, values = (split_heads(tensor, layer.retrieval_heads) for tensor in (query, key, value))
    return [replace(activations, query=queries[i], key=keys[i], value=values[i]) for i in range(2)]


def padding_masks(inputs: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """Return the padding masks of a model's inputs by the kind of self-attention, True for tokens, None without padding."""

    def padding(name: str) -> Tensor | None:
        mask = inputs.get(name)
        return None if mask is None or bool(mask.all()) else mask != 0

    if "decoder_input_ids" in inputs:
        return {"causal": padding("decoder_attention_mask"), "encoder": padding("attention_mask")}
    return {"causal": padding("attention_mask"), "encoder": None}
