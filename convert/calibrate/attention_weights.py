"""Logarithms of the attention weights that features stand for, and of the features of keys.

Distillation compares the weights with a softmax teacher's, in quadratic time. No model needs any of these to run.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from hf_rfa.models.feature_maps import FeatureMap
from hf_rfa.models.learned_feature_maps import ExponentialMap
from hf_rfa.models.lifetimes import Lifetimes
from hf_rfa.models.linear_attention import denominator, differentiable, divide
from hf_rfa.models.masking import MASKED_LOGIT, rows_per_token, to_rows
from hf_rfa.models.projected_feature_maps import GaussianMap, PositiveMap

#: Attention weights of signed features are raised to this before a logarithm is taken.
MIN_SIGNED_WEIGHT = 1e-9


def tokens_of(rows: slice, groups: int) -> slice:
    """Return the tokens of some rows of queries, of which each token has ``groups``; the rows are all those of the tokens."""
    return slice(rows.start // groups, rows.stop // groups)


def seen_by(rows: slice, query: Tensor, key: Tensor, *, causal: bool = True) -> Tensor:
    """Return which of their keys some of the queries of a layer see, [rows, keys]: up to the last row's token if causal."""
    if not causal:
        return torch.ones(rows.stop - rows.start, key.shape[-2], dtype=torch.bool, device=key.device)
    groups = rows_per_token(query, key)
    tokens = tokens_of(rows, groups)
    seen = torch.ones(tokens.stop - tokens.start, tokens.stop, dtype=torch.bool, device=key.device)
    return to_rows(seen.tril(tokens.start), groups)


class ExactTokens(NamedTuple):
    """Inputs of the weights of the tokens that queries see exactly (`hf_rfa.models.exact_attention`).

    Attributes:
        query: scaled, [B, H, Tq G, d].
        key: [B, H, Tk, d].
        offset: makes exp(q·k·s) commensurate with φ(q)·φ(k), [B, H, Tq G, 1].
        tokens: when each key is seen, [B, H, Tk].
        ordinal: how many tokens came before each, [B, Tk].
    """

    query: Tensor
    key: Tensor
    offset: Tensor
    tokens: Lifetimes
    ordinal: Tensor

    def near(self, rows: slice) -> Tensor:
        """Return which of the keys up to theirs some queries see exactly, [B, H, rows, keys]."""
        groups = rows_per_token(self.query, self.key)
        tokens = tokens_of(rows, groups)
        return to_rows(self.tokens.visible(self.ordinal[:, tokens])[..., : tokens.stop], groups)

    def joins_with(self) -> Tensor:
        """Return the place of the token with which each key joins the state, [B, H, Tk]; the last one where none does."""
        is_token = self.tokens.arrival[:, 0] >= 0
        first = is_token.int().argmax(1)[:, None, None]  # padding stands before the tokens, or after them
        return (self.tokens.until + first).clamp(0, self.key.shape[2] - 1).long()


def log_attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    rows: slice,
    log_decay: Tensor | None = None,
    input_scale: Tensor | None = None,
    causal: bool = True,
    denominator_floor: float | None = None,
    window: ExactTokens | None = None,
) -> Tensor:
    """Return logarithms of the attention weights of some queries of a whole sequence, [B, H, rows, keys].

    A few rows at a time take memory linear in the length, and causal ones skip the keys that they do not see: the columns
    are the keys up to the last row's token. A key that a query does not see has `MASKED_LOGIT`.

    Args:
        query: features of all queries, [B, H, Tq G, F] (`hf_rfa.models.masking`).
        key: features of all keys, [B, H, Tk, F].
        rows: the queries that are asked for; if causal, those of whole tokens.
        log_decay: [B, H, Tk] or None; only with ``causal=True``.
        input_scale: [B, H or 1, Tk], 0 for padding, or None.
        causal: whether a query sees only the keys up to its own position.
        denominator_floor: see `hf_rfa.models.linear_attention.denominator`; weights of signed features below
            `MIN_SIGNED_WEIGHT` are raised to it.
        window: the tokens that are seen exactly, or None; padding must not stand between tokens then. All others are scaled
            and decayed from the place on where they are forgotten.
    """
    seen, groups = seen_by(rows, query, key, causal=causal), rows_per_token(query, key)
    columns = slice(0, seen.shape[-1])
    query, key = query[..., rows, :], key[..., columns, :]
    scores = query @ key.transpose(-1, -2)
    tiny = torch.finfo(scores.dtype).tiny
    near = torch.zeros_like(seen) if window is None else window.near(rows)
    log_factor: Tensor | float = 0.0  # of decay and input scale
    if input_scale is not None:
        seen = seen & (input_scale[..., None, columns] > 0)
        log_factor = absorbed(input_scale, window)[..., None, columns].to(scores.dtype).clamp_min(tiny).log()
    if log_decay is not None:
        total = log_decay.double().cumsum(-1)
        at_query = to_rows(total[..., tokens_of(rows, groups), None], groups)
        log_factor = log_factor + (at_query - absorbed(total, window)[..., None, columns]).to(scores.dtype)

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
        logits = torch.where(near, exact, logits)
        if log_total is not None:
            in_window = exact.masked_fill(~(near & seen), MASKED_LOGIT).logsumexp(-1, keepdim=True)
            log_total = torch.logaddexp(log_total, in_window)
    logits = logits.masked_fill(~seen, MASKED_LOGIT)
    return logits.log_softmax(-1) if log_total is None else logits - log_total


def absorbed(per_token: Tensor, window: ExactTokens | None) -> Tensor:
    """Return what there is per token, [B, H or 1, T], of the token with which each one joins the state, [B, H, T]."""
    if window is None:
        return per_token
    joins_with = window.joins_with()
    return per_token.expand(-1, joins_with.shape[1], -1).gather(-1, joins_with)


def key_exponents(feature_map: FeatureMap, key: Tensor) -> Tensor:
    """Return the exponents of keys [B, H, T, d] without the head's constant c, [B, H, T, F] or [B, H, T, 1] for ``gaussian``.

    Raises:
        NotImplementedError: for maps whose features have no exponents, and for such maps from outside hf-rfa.
    """
    key = feature_map.key_input(key)
    squares = key.square()
    if isinstance(feature_map, GaussianMap):
        return squares.sum(-1, keepdim=True) / 2
    if isinstance(feature_map, ExponentialMap):
        weight, bias = feature_map.key_projection, cast(Tensor, feature_map.key_bias)
        squares = squares * feature_map.norm_weight[:, None, :]
    elif isinstance(feature_map, PositiveMap):
        weight, bias = feature_map.projection, feature_map.feature_bias
    else:
        raise NotImplementedError(f"feature_map={feature_map.name!r} has no exponents.")
    linear = torch.einsum("bhtd,hfd->bhtf", key, weight.to(key.dtype)) + bias[:, None, :].to(key.dtype)
    return linear - squares.sum(-1, keepdim=True) / 2
