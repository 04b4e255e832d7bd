"""Grouped queries: several query heads share each key-value head.

H counts key-value heads throughout, and H_q = G H query heads. States, gates and what is learned per head are per key-value
head. The G query heads of a group are further rows of its queries, [B, H, T G, d] for T tokens: row t G + g is the query of
head g of the group at token t, and sees the tokens up to t. Features, outputs and what else there is per query have the same
rows. Between functions only the shapes say what G is (`rows_per_token`); with G = 1 rows are tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_queries(query: Tensor, num_heads: int) -> Tensor:
    """Return queries [B, H_q, T, d] as rows [B, H, T G, d] of the ``num_heads`` key-value heads that they share in order."""
    if query.shape[1] == num_heads:
        return query
    return query.unflatten(1, (num_heads, -1)).transpose(2, 3).flatten(2, 3)


def ungroup(rows: Tensor, num_query_heads: int) -> Tensor:
    """Return rows [B, H, T G, n] by query heads, [B, H_q, T, n]: the inverse of `group_queries`."""
    groups = num_query_heads // rows.shape[1]
    return rows if groups == 1 else rows.unflatten(2, (-1, groups)).transpose(2, 3).flatten(1, 2)


def rows_per_token(query: Tensor, key: Tensor) -> int:
    """Return G, the number of rows that ``query`` [..., T G, ·] has for each token of ``key`` [..., T, ·]."""
    return query.shape[-2] // key.shape[-2]


def to_rows(per_token: Tensor, groups: int, dim: int = -2) -> Tensor:
    """Return what there is per token, T along ``dim``, for each of a token's ``groups`` query rows, T G along it."""
    if groups == 1:
        return per_token
    if isinstance(per_token.shape[-1], torch.SymInt):  # an exporter cannot merge dimensions in front of an open one
        rows = torch.arange(per_token.shape[dim] * groups, device=per_token.device)
        return per_token.index_select(dim, rows // groups)
    return per_token.repeat_interleave(groups, dim=dim)


def up_to_own_token(scores: Tensor, groups: int, *, in_place: bool = False) -> Tensor:
    """Return the scores of query rows and tokens, [..., T G, T], with 0 for the tokens that come after a row's own."""
    if groups == 1:
        return scores.tril_() if in_place else scores.tril()
    length = scores.shape[-1]
    seen = to_rows(scores.new_ones(length, length).tril(), groups)
    return scores.mul_(seen) if in_place else scores * seen  # faster than to fill what is not seen
