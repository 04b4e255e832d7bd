"""The attention weights that features imply: for looking at them, and for learning from a softmax teacher's.

Every function here takes quadratic time; no model needs them to run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .linear_attention import denominator, differentiable, divide, noncausal, parallel, parallel_weights

#: Logarithm of the weight of a key that a query does not see; finite, so that no gradient is NaN.
UNSEEN = -1e30
#: Implied weights of signed features are raised to this before a logarithm is taken.
SMALLEST_WEIGHT = 1e-9


def implied_weights(
    query: Tensor,
    key: Tensor,
    *,
    log_gate: Tensor | None = None,
    weights: Tensor | None = None,
    state: Tensor | None = None,
    causal: bool = True,
    signed: bool = False,
    floor: float = 0.0,
) -> Tensor:
    """Return the attention weights that the features imply, [B, H, Tq, Tk].

    Multiplied with the values they give the output of `hf_rfa.models.linear_attention.rfa_attention`. With a
    ``state`` from earlier tokens
    the columns are those of the tokens at hand, and a row sums to the share of the weight that falls on them.
    ``causal=False`` is for cross and bidirectional attention.
    """
    scores = parallel_weights(query, key, log_gate=log_gate, weights=weights, causal=causal)
    # The normaliser and the mass are the recurrence on the ones column alone: d = 0.
    ones = torch.ones_like(key[..., :1])

    def sums(query: Tensor, key: Tensor, rows: Tensor | None) -> Tensor:
        if not causal:
            return noncausal(query, key, ones, weights=weights, state=rows)[0]
        return parallel(query, key, ones, log_gate=log_gate, weights=weights, state=rows)[0]

    normaliser = sums(query, key, None if state is None else state[..., : query.shape[-1], -1:])
    mass = None
    if signed:
        unit, norm = torch.ones_like(query[..., :1]), key.norm(dim=-1, keepdim=True)
        mass = sums(unit, norm, None if state is None else state[..., -1:, -1:])
    return divide(scores, denominator(normaliser, query, mass, floor))


class ExactWindow(NamedTuple):
    """What the weights of the last ``size`` keys are made of, where they are exact (`hf_rfa.models.sliding_window`).

    Attributes:
        size: W, the query's own position included.
        query: scaled queries, [B, H, Tq, d].
        key: [B, H, Tk, d].
        offset: what makes exp(q·k·s) commensurate with φ(q)·φ(k), [B, H, Tq, 1].
    """

    size: int
    query: Tensor
    key: Tensor
    offset: Tensor


def implied_log_weights(
    query: Tensor,
    key: Tensor,
    *,
    rows: slice,
    log_gate: Tensor | None = None,
    weights: Tensor | None = None,
    causal: bool = True,
    signed: bool = False,
    floor: float = 0.0,
    window: ExactWindow | None = None,
) -> Tensor:
    """Return logarithms of the weights implied for some queries of a whole sequence, [B, H, rows, keys].

    A few rows at a time take memory linear in the length, and causal ones skip the keys that they do not see: the columns
    are the keys before ``rows.stop``.  A key that a query does not see has `UNSEEN`.

    Args:
        query: features of all queries, [B, H, Tq, F].
        key: features of all keys, [B, H, Tk, F].
        rows: the queries that are asked for.
        log_gate: [B, H, Tk] or None; only with ``causal=True``.
        weights: [B, H or 1, Tk], 0 for padding, or None.
        causal: whether a query sees only the keys up to its own position.
        signed: see `hf_rfa.models.linear_attention.rfa_attention`; weights below `SMALLEST_WEIGHT` are raised to it.
        floor: likewise.
        window: the exact window, or None; padding must not stand between tokens then.
    """
    columns = slice(0, rows.stop) if causal else slice(0, key.shape[-2])
    query, key = query[..., rows, :], key[..., columns, :]
    scores = query @ key.transpose(-1, -2)
    tiny = torch.finfo(scores.dtype).tiny
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    near = torch.zeros_like(seen)
    if causal:
        seen = seen.tril(rows.start)
    if window is not None:
        near = seen.triu(rows.start - window.size + 1)
    factor: Tensor | float = 0.0  # logarithm of what a key's weight is multiplied by
    if weights is not None:
        weights = weights[..., None, columns].to(scores.dtype)
        seen = seen & (weights > 0)
        factor = weights.clamp_min(tiny).log()
    if log_gate is not None:
        total = log_gate[..., columns].double().cumsum(-1)
        factor = factor + (total[..., rows, None] - total[..., None, :]).to(scores.dtype)

    if signed:
        scale = torch.where(seen & ~near, torch.as_tensor(factor, dtype=scores.dtype), UNSEEN).exp()
        scores = scores * scale
        mass = (key.norm(dim=-1)[..., None, :] * scale).sum(-1, keepdim=True)
        divisor = denominator(scores.sum(-1, keepdim=True), query, mass, floor)
        log_total = torch.where(divisor > 0, divisor, tiny).log()
        logits = divide(scores, divisor).clamp_min(SMALLEST_WEIGHT).log() + log_total
    else:
        logits = differentiable(scores, scores).clamp_min(tiny).log() + factor
    if window is not None:
        exact = window.query[..., rows, :] @ window.key[..., columns, :].transpose(-1, -2) + window.offset[..., rows, :]
        exact = exact + factor
        logits = torch.where(near, exact, logits)
        if signed:
            log_total = torch.logaddexp(
                log_total, exact.masked_fill(~(near & seen), UNSEEN).logsumexp(-1, keepdim=True)
            )
    logits = logits.masked_fill(~seen, UNSEEN)
    return logits - log_total if signed else logits.log_softmax(-1)
