"""Padding, packed documents, positions, and grouped queries, as masks, indices and rows.

Several query heads may share each key-value head. H counts key-value heads throughout, and H_q = G H query heads. States,
gates and what is learned per head are per key-value head. The G query heads of a group are further rows of its queries,
[B, H, T G, d] for T tokens: row t G + g is the query of head g of the group at token t, and sees the tokens up to t.
Features, outputs and what else there is per query have the same rows. Between functions only the shapes say what G is
(`rows_per_token`); with G = 1 rows are tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from transformers.utils.import_utils import is_tracing, torch_compilable_check


def read_mask(attention_mask: Tensor | None) -> Tensor | None:
    """Return a mask [B, T] of whole numbers, 1 where ``attention_mask`` is not 0.

    Masks come as booleans, in 16 bits, where sums are rounded, or with the numbers of documents. All others, which
    `local_padding` refuses, are returned as they are.
    """
    if attention_mask is None or attention_mask.ndim != 2:
        return attention_mask
    return (attention_mask != 0).long()


#: Logit of a key that a query does not see; finite, so that no gradient is NaN.
MASKED_LOGIT = -1e30


def can_ask(condition: Tensor) -> bool:
    """Return whether the value of a condition is to be had: no compiler traces it, and no training waits for a device."""
    return not is_tracing(condition) and (condition.device.type == "cpu" or not torch.is_grad_enabled())


def is_known(condition: Tensor) -> bool:
    """Return whether a condition is known to hold everywhere, where asking makes nobody wait for a device."""
    return condition.device.type == "cpu" and not is_tracing(condition) and bool(condition.all())


def local_padding(attention_mask: Tensor | None, length: int) -> Tensor | None:
    """Return the padding mask of the last ``length`` tokens, [B, length], or None if it is seen that none of them is padding.

    ``attention_mask`` is None, or [B, tokens so far] with 0 for padding and any other number for tokens.

    Raises:
        ValueError: for any other shape: a recurrence can leave tokens out for all queries, not for some.
    """
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2 or attention_mask.shape[-1] < length:
        raise ValueError(
            "converted attention takes a padding mask of shape (batch, tokens so far) with 0 for padding and 1 for "
            f"tokens; got shape {tuple(attention_mask.shape)} for {length} new tokens. A mask per query cannot be "
            "honored, since all queries read one state; leave those layers softmax (softmax_layers)."
        )
    padding = attention_mask[:, attention_mask.shape[-1] - length :]
    is_token = padding != 0
    return None if can_ask(is_token) and bool(is_token.all()) else padding


def padding_of_causal_mask(mask: Tensor | None, length: int) -> Tensor | None:
    """Return the padding mask [B, S] behind a causal mask [B, 1, T, S] of the last ``length`` = T tokens.

    transformers prepares such masks, as booleans or as numbers to add, for a decoder inside a model of two. Any other mask,
    which `local_padding` reads or refuses, is returned as it is.
    """
    if mask is None or mask.ndim != 4 or mask.shape[1:3] != (1, length):
        return mask
    if mask.dtype == torch.bool:
        seen = mask[:, 0]
    elif mask.is_floating_point():
        seen = mask[:, 0] == 0
    else:
        return mask
    padding, total = seen[:, -1], seen.shape[-1]
    causal = seen.new_ones(length, total).tril(total - length) & padding[:, None]
    wrong = (seen != causal) & padding[:, -length:, None]  # what a query that is padding sees is read by nobody
    if mask.is_floating_point():
        wrong |= (mask[:, 0] > torch.finfo(mask.dtype).min / 2) & ~seen  # a number to add that hides nothing
    return mask if not is_tracing(mask) and bool(wrong.any()) else padding


def document_starts(position_ids: Tensor | None, *, must_know: bool = True) -> Tensor | None:
    """Return where a new document starts in rows that hold several (packed batches), [B, T], or None if none does.

    As transformers has it, a document starts where ``position_ids`` [B, T] do not go on by one. Unless the caller must know,
    a training that would wait for its device to find that none does gets them all the same.
    """
    if position_ids is None or position_ids.ndim != 2:
        return None
    starts = position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1) != 1
    asked = not is_tracing(starts) if must_know else can_ask(starts)
    return None if asked and not bool(starts.any()) else starts


def check_one_document(starts: Tensor | None, layers: str) -> None:
    """Raise a ValueError if rows hold several documents, in a model with layers that do not keep them apart.

    Args:
        starts: what `document_starts` returns.
        layers: which layers these are and what they do, for the message.
    """
    if starts is not None:
        message = (
            f"position_ids start a new document within a row, but {layers}. Pass every document in a row of its own, with "
            "an attention_mask for padding."
        )
        torch_compilable_check(~starts, message)


def check_positions(last: int, count: int) -> None:
    """Raise a ValueError if a token's position ``last`` is past the ``count`` that a model has."""
    if last >= count:
        raise ValueError(
            f"the text reaches position {last}, but this model has {count} positions (0 to {count - 1}). Convert it with "
            f"--max-positions {last + 1} or more (hf_rfa.convert.convert(..., max_positions=...)), or pass shorter text."
        )


def check_direction(is_causal: bool | None, *, causal: bool) -> None:
    """Raise a ValueError for a call's argument ``is_causal`` that is not what its RFA layers are, ``causal`` or not."""
    if is_causal is not None and bool(is_causal) != causal:
        raise ValueError(
            f"is_causal={is_causal} contradicts this model's converted attention, which sees "
            f"{'the tokens up to each' if causal else 'all tokens of the source'}. Leave the argument out."
        )


def group_queries(query: Tensor, num_heads: int) -> Tensor:
    """Return queries [B, H_q, T, d] as rows [B, H, T G, d] of the ``num_heads`` key-value heads that they share in order."""
    batch, heads, length, width = query.shape
    if heads == num_heads:
        return query
    if length == 1:  # of one token no rows change their order
        return query.reshape(batch, num_heads, heads // num_heads, width)
    return query.unflatten(1, (num_heads, -1)).transpose(2, 3).flatten(2, 3)


def ungroup(rows: Tensor, num_query_heads: int) -> Tensor:
    """Return rows [B, H, T G, n] by query heads, [B, H_q, T, n]: the inverse of `group_queries`."""
    batch, heads, length, width = rows.shape
    groups = num_query_heads // heads
    if length == groups:
        return rows.reshape(batch, num_query_heads, 1, width)
    return rows if groups == 1 else rows.unflatten(2, (-1, groups)).transpose(2, 3).flatten(1, 2)


def split_heads(tensor: Tensor, chosen: list[int]) -> tuple[Tensor, Tensor]:
    """Return the heads of [B, H, …] that are not chosen, and those that are, in this order."""
    order, _ = head_orders(tensor.shape[1], tuple(chosen))
    others, last = tensor.index_select(1, head_index(order, tensor.device)).split(
        [len(order) - len(chosen), len(chosen)], 1
    )
    return others, last


def join_heads(parts: Sequence[Tensor], chosen: list[int]) -> Tensor:
    """Return all heads in order: the inverse of `split_heads`. If none is chosen there is one part."""
    if not chosen:
        return parts[0]
    joined = torch.cat(list(parts), dim=1)
    _, order = head_orders(joined.shape[1], tuple(chosen))
    return joined.index_select(1, head_index(order, joined.device))


@cache
def head_orders(heads: int, chosen: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the order that has the chosen heads last, and the one that undoes it."""
    order = (*(head for head in range(heads) if head not in chosen), *chosen)
    return order, tuple(order.index(head) for head in range(heads))


def head_index(order: tuple[int, ...], device: torch.device) -> Tensor:
    """Return an order of heads as an index, which a step of decoding does not make anew."""
    return torch.tensor(order, device=device) if torch.compiler.is_compiling() else _stored_index(order, device)


@cache
def _stored_index(order: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # gradients may need it
        return torch.tensor(order, device=device)


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
