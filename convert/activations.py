"""Queries, keys and values of a softmax model's layers, and how far the weights that features imply are from its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from hf_rfa.models.attention import RFAAttentionMixin
from hf_rfa.models.attention_weights import MASKED_LOGIT, ExactWindow, log_attention_weights
from hf_rfa.models.feature_maps import compute_dtype
from hf_rfa.models.linear_attention import mask_padding

#: Queries whose weights are held at once.
QUERIES_AT_ONCE = 128


@dataclass(frozen=True)
class Sample:
    """Queries, keys and values of one attention layer of the softmax model.

    Attributes:
        query: [N, H, Tq, d].
        key: [N, H, Tk, d].
        value: [N, H, Tk, d].
        query_mask: [N, Tq], True for tokens, or None where nothing is padded.
        key_mask: [N, Tk], likewise.
    """

    query: Tensor
    key: Tensor
    value: Tensor
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
        parts = (self.query, self.key, self.value, self.query_mask, self.key_mask)
        return Sample(*(None if part is None else part[:count] for part in parts))  # type: ignore[arg-type]

    def mean(self, per_query: Tensor) -> Tensor:
        """Return the mean of [N, H, Tq] over the queries that are no padding, [H]."""
        if self.query_mask is None:
            return per_query.mean((0, 2))
        return per_query.transpose(1, 2)[self.query_mask].mean(0)


@dataclass(frozen=True)
class Target:
    """The softmax weights of some queries of a layer, over the keys that causal ones can see.

    Attributes:
        rows: the queries.
        softmax: [N, H, rows, keys].
        negative_entropy: [N, H, rows].
    """

    rows: slice
    softmax: Tensor
    negative_entropy: Tensor


@torch.no_grad()
def softmax_targets(layer: RFAAttentionMixin, sample: Sample) -> Iterator[Target]:
    """Yield the softmax weights of a layer, `QUERIES_AT_ONCE` queries at a time."""
    length, causal = sample.query.shape[2], layer.rfa_kind == "causal"
    for start in range(0, length, QUERIES_AT_ONCE):
        rows = slice(start, min(length, start + QUERIES_AT_ONCE))
        keys = slice(0, rows.stop if causal else sample.key.shape[2])
        query, key = sample.query[:, :, rows].float(), sample.key[:, :, keys].float()
        scores = (query * layer.scaling) @ key.transpose(-1, -2)
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=key.device)
        if causal:
            seen = seen.tril(start)
        if sample.key_mask is not None:
            seen = seen & sample.key_mask[:, None, None, keys]
        # A query that sees nothing, among padding, gets weights that nobody counts instead of NaN.
        log_softmax = scores.masked_fill(~seen, MASKED_LOGIT).log_softmax(-1)
        softmax = log_softmax.exp()
        yield Target(rows, softmax, (softmax * log_softmax.masked_fill(~seen, 0.0)).sum(-1))


def compare_weights(
    layer: RFAAttentionMixin,
    sample: Sample,
    hidden_states: Tensor | None = None,
    targets: Iterable[Target] | None = None,
) -> Iterator[tuple[Target, Tensor]]:
    """Yield the softmax weights of some queries of a layer, and the logarithms of those that its features imply.

    Args:
        layer: the RFA layer.
        sample: its queries and keys in the softmax model.
        hidden_states: its input there, which a gate reads; None leaves a gate out.
        targets: the softmax weights of ``sample``, if they are at hand.
    """
    dtype = compute_dtype(sample.query.dtype)
    query, key = sample.query.to(dtype), sample.key.to(dtype)
    window = None
    least_shift = layer.feature_map.least_shift(None)
    features = layer.feature_map(query, key, least_shift=least_shift, offset=layer.window_size > 0)
    if layer.window_size:
        window = ExactWindow(layer.window_size, query * layer.scaling, key, features.offset)
    gated = layer.gate is not None and hidden_states is not None
    log_gate, weights = layer.gate(hidden_states) if gated else (None, None)  # type: ignore[misc]
    log_gate, weights = mask_padding(sample.key_mask, log_gate, weights)
    for target in softmax_targets(layer, sample) if targets is None else targets:
        yield (
            target,
            log_attention_weights(
                features.query,
                features.key,
                rows=target.rows,
                log_decay=log_gate,
                input_scale=weights,
                causal=layer.rfa_kind == "causal",
                denominator_floor=layer.feature_map.denominator_floor,
                window=window,
            ),
        )


def layer_divergence(
    layer: RFAAttentionMixin,
    sample: Sample,
    hidden_states: Tensor | None = None,
    targets: Iterable[Target] | None = None,
    *,
    output_weight: float = 0.0,
) -> Tensor:
    """Return KL(softmax ‖ implied) of a layer, in nats per query, [H].

    Args:
        layer: see `compare_weights`.
        sample: see there.
        hidden_states: see there.
        targets: see there.
        output_weight: add the squared error of the attention's outputs, relative to the outputs' own squares, times this.
    """
    divergences = []
    error = norm = torch.zeros((), device=sample.key.device)
    for target, log_weights in compare_weights(layer, sample, hidden_states, targets):
        # 0 · MASKED_LOGIT is 0: keys that nobody sees count nothing.
        divergences.append(target.negative_entropy - (target.softmax * log_weights).sum(-1))
        if output_weight:
            value = sample.value[:, :, : log_weights.shape[-1]].to(log_weights.dtype)
            expected, found = target.softmax @ value, log_weights.exp() @ value
            kept = 1.0 if sample.query_mask is None else sample.query_mask[:, None, target.rows, None].to(value.dtype)
            error = error + ((found - expected) * kept).square().sum((0, 2, 3))
            norm = norm + (expected * kept).square().sum((0, 2, 3))
    divergence = sample.mean(torch.cat(divergences, dim=-1))
    return divergence + output_weight * error / norm if output_weight else divergence


def _tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return [N, H, T, d] as [H, n, d], without padding."""
    rows = x.transpose(1, 2)
    return (rows.flatten(0, 1) if mask is None else rows[mask]).transpose(0, 1)


#: What entered an attention module: hidden states, and what cross attention attends to.
Recorded = tuple[Tensor, Tensor | None]


@contextmanager
def watch_inputs(modules: dict[str, nn.Module], visit: Callable[[str, Recorded], None]) -> Iterator[None]:
    """Call ``visit`` with a module's name and what enters it, whenever something enters one of some attention modules."""

    def hook(name: str) -> Callable[..., None]:
        def tell(module: nn.Module, args: tuple, kwargs: dict) -> None:
            hidden_states = args[0] if args else kwargs["hidden_states"]
            visit(name, (hidden_states, kwargs.get("key_value_states", kwargs.get("encoder_hidden_states"))))

        return tell

    handles = [module.register_forward_pre_hook(hook(name), with_kwargs=True) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def record_inputs(modules: dict[str, nn.Module]) -> Iterator[dict[str, Recorded]]:
    """Record what enters some attention modules."""
    inputs: dict[str, Recorded] = {}
    with watch_inputs(modules, inputs.__setitem__):
        yield inputs


def sample_layer(layer: RFAAttentionMixin, recorded: Recorded, masks: dict[str, Tensor | None]) -> Sample:
    """Return the queries and keys of a layer.

    Args:
        layer: the RFA layer, whose projections are the softmax layer's.
        recorded: what entered it, from `record_inputs`.
        masks: the masks of the model's inputs, by `model_masks`.
    """
    hidden_states, source = recorded
    if layer.rfa_kind != "cross":
        query, key, value = layer.project(hidden_states)
        mask = masks["source" if layer.rfa_kind == "encoder" else "own"]
        return Sample(query, key, value, mask, mask)
    key, value = layer.project_source(cast(Tensor, source))
    return Sample(layer.project_query(hidden_states), key, value, masks["own"], masks["source"])


def model_masks(inputs: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """Return the padding masks of a model's inputs: of the tokens its causal attention sees, and of the source."""

    def mask(name: str) -> Tensor | None:
        found = inputs.get(name)
        return None if found is None or bool((found != 0).all()) else found != 0

    if "decoder_input_ids" in inputs:
        return {"own": mask("decoder_attention_mask"), "source": mask("attention_mask")}
    return {"own": mask("attention_mask"), "source": None}
