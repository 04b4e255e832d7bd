"""Logarithms of the attention weights that features stand for: what distillation compares with a softmax teacher's.

They take quadratic time; no model needs them to run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_rfa.models.linear_attention import MASKED_LOGIT, denominator, differentiable, divide

#: Attention weights of signed features are raised to this before a logarithm is taken.
MIN_SIGNED_WEIGHT = 1e-9


class ExactWindow(NamedTuple):
    """Inputs of the exact weights of the last ``size`` keys (`hf_rfa.models.sliding_window`)."""

    size: int  # W, the query's own position included
    query: Tensor  # scaled, [B, H, Tq, d]
    key: Tensor  # [B, H, Tk, d]
    offset: Tensor  # makes exp(q·k·s) commensurate with φ(q)·φ(k), [B, H, Tq, 1]


def log_attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    rows: slice,
    log_decay: Tensor | None = None,
    input_scale: Tensor | None = None,
    causal: bool = True,
    denominator_floor: float | None = None,
    window: ExactWindow | None = None,
) -> Tensor:
    """Return logarithms of the attention weights of some queries of a whole sequence, [B, H, rows, keys].

    A few rows at a time take memory linear in the length, and causal ones skip the keys that they do not see: the columns
    are the keys before ``rows.stop``. A key that a query does not see has `MASKED_LOGIT`.

    Args:
        query: features of all queries, [B, H, Tq, F].
        key: features of all keys, [B, H, Tk, F].
        rows: the queries that are asked for.
        log_decay: [B, H, Tk] or None; only with ``causal=True``.
        input_scale: [B, H or 1, Tk], 0 for padding, or None.
        causal: whether a query sees only the keys up to its own position.
        denominator_floor: see `hf_rfa.models.linear_attention.denominator`; weights of signed features below
            `MIN_SIGNED_WEIGHT` are raised to it.
        window: the exact window, or None; padding must not stand between tokens then.
    """
    columns = slice(0, rows.stop) if causal else slice(0, key.shape[-2])
    query, key = query[..., rows, :], key[..., columns, :]
    scores = query @ key.transpose(-1, -2)
    tiny = torch.finfo(scores.dtype).tiny
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    if causal:
        seen = seen.tril(rows.start)
    near = torch.zeros_like(seen) if window is None else seen.triu(rows.start - window.size + 1)
    log_factor: Tensor | float = 0.0  # of decay and input scale
    if input_scale is not None:
        input_scale = input_scale[..., None, columns].to(scores.dtype)
        seen = seen & (input_scale > 0)
        log_factor = input_scale.clamp_min(tiny).log()
    if log_decay is not None:
        total = log_decay[..., columns].double().cumsum(-1)
        log_factor = log_factor + (total[..., rows, None] - total[..., None, :]).to(scores.dtype)

    log_total = None
    if denominator_floor is None:
        logits = differentiable(scores, scores).clamp_min(tiny).log() + log_factor
    else:
        scale = torch.where(seen & ~near, torch.as_tensor(log_factor, dtype=scores.dtype), MASKED_LOGIT).exp()
        scores = scores * scale
        key_norm_sum = (key.norm(dim=-1)[..., None, :] * scale).sum(-1, keepdim=True)
        divisor = denominator(scores.sum(-1, keepdim=True), query, key_norm_sum, denominator_floor)
        log_total = torch.where(divisor > 0, divisor, tiny).log()
        logits = divide(scores, divisor).clamp_min(MIN_SIGNED_WEIGHT).log() + log_total
    if window is not None:
        exact = window.query[..., rows, :] @ window.key[..., columns, :].transpose(-1, -2) + window.offset[..., rows, :]
        exact = exact + log_factor
        logits = torch.where(near, exact, logits)
        if log_total is not None:
            in_window = exact.masked_fill(~(near & seen), MASKED_LOGIT).logsumexp(-1, keepdim=True)
            log_total = torch.logaddexp(log_total, in_window)
    logits = logits.masked_fill(~seen, MASKED_LOGIT)
    return logits.log_softmax(-1) if log_total is None else logits - log_total
