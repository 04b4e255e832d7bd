"""Which token is seen when, and which one leaves: the law of a memory, in the one place that states it.

Tokens are counted as they arrive, padding left out. Of each one number says all:

    query t sees token j exactly   ⇔   arrival_j ≤ t < until_j

Sinks are seen for good. Of all others a query sees the N last, its own included, and the first K by score of those that have
left this window, the earlier of two that are equal (`hf_rfa.models.importance`). So

    until_j = N + max(arrival_j, the arrival of the K-th token with a higher score)

and never, if there are not as many. A document that begins within a row ends all tokens before it.

The law is asked for in four forms: for some tokens and queries (`lifetimes`, `Lifetimes.visible`), for blocks of them
(`block_mask`), for what leaves with each new token (`Lifetimes.leaves`), and for the one place that falls vacant with the
next one (`targets_of`). Whoever needs to know what is seen asks here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers.utils.import_utils import is_tracing

from .masking import head_index, is_known, to_rows
from .memory import EMPTY, MemoryLayout, Places
from .positions import moved_positions, origins

#: Until of a token that nothing replaces.
NEVER = 2**30
#: Tokens up to which each is compared with every other one.
COMPARED_AT_ONCE = 512
#: Queries and keys of a block of FlexAttention, and least tokens of a part.
BLOCK = 128


class Arrivals(NamedTuple):
    """Where some new tokens stand in their texts.

    Attributes:
        ordinal: number of tokens before each, [B, T] in int32; padding has that of the token before it.
        is_token: False for padding, [B, T], or None where nothing is padded.
        is_sink: whether a token is one of the first S of its document, [B, T].
        document_end: ordinal of the first token of the next document, [B, T], or None where no document starts.
        previous_end: the same of the token before each, [B, T], or None.
        origin: what is taken off the position of each (`hf_rfa.models.positions`), [B, T] in int32, or None for 0.
        start: ordinal of the first token of its document, [B, T] in int32, or None for 0.
    """

    ordinal: Tensor
    is_token: Tensor | None
    is_sink: Tensor
    document_end: Tensor | None = None
    previous_end: Tensor | None = None
    origin: Tensor | None = None
    start: Tensor | None = None

    def split(self, lengths: list[int]) -> list[Arrivals]:
        """Return the arrivals of some tokens at a time."""
        parts = ([None] * len(lengths) if tensor is None else tensor.split(lengths, dim=1) for tensor in self)
        return [Arrivals(*part) for part in zip(*parts, strict=True)]

    def since_origin(self) -> Tensor:
        """Return the ordinals from the origin on, which scores count."""
        return self.ordinal if self.origin is None else self.ordinal - self.origin

    def in_document(self) -> Tensor:
        """Return the ordinals from the beginning of each token's document on."""
        return self.ordinal if self.start is None else self.ordinal - self.start


def arrivals_of(
    count: Tensor,
    length: int,
    layout: MemoryLayout,
    padding_mask: Tensor | None,
    document_starts: Tensor | None,
    before: Places | None = None,
) -> Arrivals:
    """Return where some new tokens stand in texts.

    Args:
        count: number of tokens of each text that have been seen, [B].
        length: T, the number of new ones.
        layout: says S, and whether old tokens move.
        padding_mask: [B, T], 0 for padding, or None.
        document_starts: [B, T], True where a text begins that sees nothing before it, or None.
        before: what is kept of the tokens before; None where there are none.
    """
    is_token = None if padding_mask is None else padding_mask != 0
    if is_token is None:
        ordinal = count[:, None] + torch.arange(length, dtype=torch.int32, device=count.device)
    else:
        ordinal = count[:, None] + is_token.cumsum(1, dtype=torch.int32) - 1
    # Numbers of the tokens in their documents, up to S: a text that began within a document may have fewer sinks.
    number = ordinal
    if before is not None and layout.sinks:
        number = ordinal - (count - before.num_sinks())[:, None]
    if document_starts is None:
        return _with_origin(Arrivals(ordinal, is_token, number < layout.sinks), layout, before)
    start = torch.where(document_starts, ordinal, 0).cummax(1).values
    number = torch.where(document_starts.cumsum(1) > 0, ordinal - start, number)
    # The next start after each token: the least of all later ones.
    later = F.pad(torch.where(document_starts, ordinal, NEVER)[:, 1:], (0, 1), value=NEVER)
    document_end = later.flip(1).cummin(1).values.flip(1)
    first = torch.where(document_starts[:, :1], ordinal[:, :1], document_end[:, :1])
    previous_end = torch.cat([first, document_end[:, :-1]], dim=1)
    arrivals = Arrivals(ordinal, is_token, number < layout.sinks, document_end, previous_end, start=start)
    return _with_origin(arrivals, layout, before)


def _with_origin(arrivals: Arrivals, layout: MemoryLayout, before: Places | None) -> Arrivals:
    """Return arrivals with their origins, where these or that of the memory before may be other than 0."""
    ordinal = arrivals.ordinal
    if not layout.max_distance:
        return arrivals
    if is_tracing(ordinal):  # epochs begin between the calls of a compiled step
        if before is None:
            return arrivals
        return arrivals._replace(origin=before.origin[:, None].expand_as(ordinal))
    if before is None and ordinal.shape[1] <= layout.max_distance:
        return arrivals
    origin = origins(arrivals.in_document(), layout)
    moved = origin if before is None else torch.cat([origin, before.origin[:, None]], dim=1)
    if origin.device.type == "cpu" and not bool(moved.any()):
        return arrivals
    return arrivals._replace(origin=origin)


def is_seen(arrival: Tensor, until: Tensor, now: Tensor) -> Tensor:
    """Return whether queries ``now`` see tokens exactly: the law itself, of ordinals that broadcast."""
    return (arrival <= now) & (now < until)


class Lifetimes(NamedTuple):
    """When some tokens are seen exactly.

    Attributes:
        arrival: how many tokens of the text came before each, [B, H, N] in int32; `EMPTY` for empty places and padding.
        until: ordinal of the first query that does not see each any more, [B, H, N] in int32; `EMPTY` for what nobody sees.
            Of tokens that all queries at hand see it is some number behind these.
        replaced: the same where another token takes its place; `NEVER` where none does, or its document ends first.
    """

    arrival: Tensor
    until: Tensor
    replaced: Tensor

    def visible(self, now: Tensor) -> Tensor:
        """Return which tokens are seen by queries with the ordinals ``now`` [B, T], [B, H, T, N]."""
        return is_seen(self.arrival[:, :, None], self.until[:, :, None], now[:, None, :, None])

    def leaves(self, count: Tensor, arrivals: Arrivals) -> Tensor:
        """Return which token each new one replaces, by its index among all, [B, H, T]; −1 where it replaces none.

        Args:
            count: number of tokens of each text before the new ones, [B].
            arrivals: of the new tokens.
        """
        batch, heads, _ = self.arrival.shape
        length = arrivals.ordinal.shape[1]
        since = self.replaced - count[:, None, None]  # the new token with which each leaves
        inside = (since >= 0) & (since < length) & (self.arrival >= 0)
        index = torch.arange(self.arrival.shape[-1], device=since.device).expand_as(since)
        leaves = torch.full((batch, heads, length + 1), -1, device=since.device)
        leaves = leaves.scatter(-1, torch.where(inside, since, length).long(), index)[..., :length]
        if arrivals.is_token is None:
            return leaves
        number = (arrivals.ordinal - count[:, None]).clamp_min(0).long()[:, None].expand(-1, heads, -1)
        return leaves.gather(-1, number).masked_fill(~arrivals.is_token[:, None], -1)


def lifetimes(
    score: Tensor, arrival: Tensor, layout: MemoryLayout, document: Tensor | None = None, *, new: int | None = None
) -> Lifetimes:
    """Return when tokens are seen, if no others come after them.

    Args:
        score: of the tokens, in the order of their arrival, [B, H, N]; +∞ for sinks.
        arrival: [B, H, N]; `EMPTY` for places without a token, and for padding.
        layout: says N of the window, and K.
        document: ordinal of the first token of the document after that of each, [B, H, N], or None for one document.
        new: how many of the tokens are new, behind those of a memory of this layout, in whose places all others are. What
            their queries do not ask is then left out.
    """
    if not layout.slots:
        until = arrival + layout.window
    elif new is not None and new < layout.slots:
        until = _until_with_few_new(score, arrival, layout, document)
    elif score.shape[-1] <= COMPARED_AT_ONCE:
        index = torch.arange(score.shape[-1], device=score.device)
        until = _until_among(score, arrival, index, layout.window, layout.slots, document)
    else:
        until = _until_by_parts(score, arrival, layout, document)
    until = replaced = torch.where(score == math.inf, NEVER, until)
    if document is not None:  # a state begins anew with a document as well: what that ends is replaced by nobody
        until, replaced = torch.minimum(until, document), replaced.masked_fill(replaced >= document, NEVER)
    return Lifetimes(arrival, until.masked_fill(arrival < 0, EMPTY), replaced)


def _is_ranked(score: Tensor, arrival: Tensor) -> Tensor:
    """Return which tokens compete for slots: all but sinks, padding and empty places."""
    return (score > -math.inf) & (score < math.inf) & (arrival >= 0)


def _until_among(
    score: Tensor, arrival: Tensor, index: Tensor, window: int, slots: int | Tensor, document: Tensor | None
) -> Tensor:
    """Return until of tokens [..., N] by comparing each with every other one; `NEVER` for those that do not compete.

    The K best ones so far come first, and the others in the order of ``index``, which says who of two equals came first.
    ``slots``, K, may be a number for every row, [..., 1, 1].
    """
    ranked = _is_ranked(score, arrival)
    ours, theirs = score[..., :, None], score[..., None, :]
    earlier = index[..., None, :] < index[..., :, None]
    better = ((theirs > ours) | ((theirs == ours) & earlier)) & ranked[..., None, :]
    if document is not None:
        better = better & (document[..., :, None] == document[..., None, :])
    kth = (better.cumsum(-1, dtype=torch.int32) < slots).sum(-1)  # the column of the K-th better one
    beaten = arrival.gather(-1, kth.clamp_max(score.shape[-1] - 1))
    is_beaten = ranked & (kth < score.shape[-1])
    return torch.where(is_beaten, torch.maximum(arrival, beaten) + window, NEVER)


def _until_with_few_new(score: Tensor, arrival: Tensor, layout: MemoryLayout, document: Tensor | None) -> Tensor:
    """Return until of the tokens of a memory and of C < K new ones behind them, [B, H, P + C].

    It is right for tokens that one of the new ones does not see any more, and for others behind the last of these. C new
    tokens push at most C into the slots and as many out of them, so that the best K − C of these stay: they are only counted.
    """
    places, new = layout.places, score.shape[-1] - layout.places
    count = (arrival[..., :places].amax(-1, keepdim=True) + 1).clamp_min(0)
    in_window = arrival[..., :places] >= count - layout.window
    rank = score[..., :places].clamp_min(torch.finfo(score.dtype).min).masked_fill(in_window, -math.inf)
    order = rank.sort(dim=-1, descending=True, stable=True).indices
    staying, others = order.tensor_split([layout.sinks + layout.slots - new], dim=-1)
    counted = _is_ranked(score, arrival).gather(-1, staying).sum(-1, keepdim=True)
    added = torch.arange(places, places + new, device=order.device).expand(*order.shape[:2], -1)
    index = torch.cat([others.sort(dim=-1).values, added], dim=-1)
    slots = layout.slots - counted[..., None]  # at least C, so that in a new document nobody is beaten
    document = None if document is None else document.gather(-1, index)
    until = _until_among(score.gather(-1, index), arrival.gather(-1, index), index, layout.window, slots, document)
    return torch.full_like(arrival, NEVER).scatter(-1, index, until)


def _until_by_parts(score: Tensor, arrival: Tensor, layout: MemoryLayout, document: Tensor | None) -> Tensor:
    """Return until of tokens [B, H, N] as `_until_among` does, in time and memory linear in N up to a logarithm.

    Whoever is among the K best at the beginning of a part ends there or later. These are found for all parts at once, by
    doubling; then each part compares them and its own tokens.
    """
    slots, length = layout.slots, score.shape[-1]
    size = max(BLOCK, slots)
    count = -(-length // size)
    score = score.masked_fill(~_is_ranked(score, arrival), -math.inf)
    score, arrival = (F.pad(x, (0, count * size - length), value=v) for x, v in ((score, -math.inf), (arrival, EMPTY)))
    document = None if document is None else F.pad(document, (0, count * size - length))
    scores = score.unflatten(-1, (count, size))
    indices = torch.arange(count * size, device=score.device).view(count, size).expand_as(scores)

    def of(per_token: Tensor, index: Tensor) -> Tensor:
        return per_token.gather(-1, index.flatten(-2)).view_as(index)

    def best_of(scores: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the K best of the last document among tokens [..., n], the earlier of equals first."""
        if document is not None:
            documents = of(document, index).masked_fill(scores == -math.inf, -1)
            scores = scores.masked_fill(documents < documents.amax(-1, keepdim=True), -math.inf)
        scores, order = scores.sort(dim=-1, descending=True, stable=True)
        return scores[..., :slots], index.gather(-1, order[..., :slots])

    def before(per_part: Tensor, parts: int, value: float) -> Tensor:
        return F.pad(per_part, (0, 0, parts, 0), value=value)[..., :count, :]

    best, index = best_of(scores, indices)
    parts = 1
    while parts < count:  # the best of so many parts become those of twice as many
        pairs = (before(best, parts, -math.inf), best), (before(index, parts, 0), index)
        best, index = best_of(*(torch.cat(pair, dim=-1) for pair in pairs))
        parts *= 2
    scores = torch.cat([before(best, 1, -math.inf), scores], dim=-1)
    indices = torch.cat([before(index, 1, 0), indices], dim=-1)
    documents = None if document is None else of(document, indices)
    until = _until_among(scores, of(arrival, indices), indices, layout.window, slots, documents)
    untils = torch.full_like(arrival, NEVER)
    return untils.scatter_reduce(-1, indices.flatten(-2), until.flatten(-2), "amin")[..., :length]


def block_mask(tokens: Lifetimes, ordinal: Tensor, queries_per_token: int) -> BlockMask:
    """Return what FlexAttention computes for queries of new tokens, [B, T] by their ordinals, some a token.

    `torch.nn.attention.flex_attention.create_block_mask` would ask of every query whether it sees every key. A block of
    queries can see none of a block of keys that all arrive later, or all end before.
    """
    arrival, until = tokens.arrival, tokens.until

    def by_block(per_token: Tensor, value: int) -> Tensor:
        return F.pad(per_token, (0, -per_token.shape[-1] % BLOCK), value=value).unflatten(-1, (-1, BLOCK))

    now = to_rows(ordinal, queries_per_token, dim=1)
    first, last = by_block(now, NEVER).amin(-1)[:, None, :, None], by_block(now, EMPTY).amax(-1)[:, None, :, None]
    arrives = by_block(arrival.masked_fill(arrival < 0, NEVER), NEVER).amin(-1)[:, :, None]
    ends = by_block(until, 0).amax(-1)[:, :, None]
    visible = (arrives <= last) & (first < ends)

    def mask(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return is_seen(arrival[row, head, key], until[row, head, key], ordinal[row, query // queries_per_token])

    return BlockMask.from_kv_blocks(
        visible.sum(-1, dtype=torch.int32),
        visible.byte().argsort(dim=-1, descending=True, stable=True).int(),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask,
        seq_lengths=(now.shape[1], arrival.shape[-1]),
    )


class Target(NamedTuple):
    """The place that the next token of a text takes, and what follows from it: nothing here depends on the token.

    Attributes:
        place: an empty one, or that of the token that leaves with the new one, [B, H, 1].
        rows: the place as an index of keys and values, [B, H, 1, 2d].
        arrival: number of tokens before the new one, [B, H, 1] in int32.
        ordinal: the same since the origin, [B, 1] in float32, or None without slots and state.
        is_sink: whether the new one is one of the first S, [B, H, 1], or None where it is known that it is not.
        position: that of the token there now, by which its key is rotated, [B, H, 1] in float32, or None without a state.
        leaves: whether a token leaves with it, [B, H, 1], or None where it is known that one does, or nobody asks.
        visible: which places hold a token then, [B, H, 1, P], or None where it is known that all of them do.
        forgotten: what a summary says to its queries (`hf_rfa.models.summary_feature_map.Forgotten`), or None where nobody
            has asked.
    """

    place: Tensor
    rows: Tensor
    arrival: Tensor
    ordinal: Tensor | None
    is_sink: Tensor | None
    position: Tensor | None
    leaves: Tensor | None
    visible: Tensor | None
    forgotten: Any = None


def targets_of(memories: Sequence[Places], layouts: Sequence[MemoryLayout]) -> list[Target]:
    """Return the targets of memories whose layouts differ in their heads alone.

    They may be those of many layers: each operation costs as much for one.
    """
    layout, heads = layouts[0], [layout.heads for layout in layouts]
    score = torch.cat([places.score for places in memories], dim=1)  # [B, all heads, P]
    arrival = torch.cat([places.arrival for places in memories], dim=1)
    now = (arrival.amax(-1, keepdim=True) + 1).clamp_min_(0)
    ranked = score.masked_fill(arrival > now - layout.window, math.inf)  # the window's stay
    better = ranked != ranked.amin(-1, keepdim=True)
    place = arrival.masked_fill(better, -(2**31)).argmax(-1, keepdim=True)  # of several, the last to come
    ordinal: Sequence[Tensor | None] = [None] * len(heads)
    is_sink, position, leaves, visible = ordinal, ordinal, ordinal, ordinal
    if layout.slots or layout.state_rows:
        first = head_index(tuple(accumulate(heads[:-1], initial=0)), now.device)  # head of each memory
        origin = torch.stack([places.origin for places in memories], dim=1)
        ordinal = (now[..., 0].index_select(1, first) - origin).float().split(1, dim=1)
        if layout.state_rows:
            of_head = head_index(tuple(index for index, count in enumerate(heads) for _ in range(count)), now.device)
            origin = origin.index_select(1, of_head)[..., None]
            position = moved_positions(arrival.gather(-1, place), origin, layout.sinks).float().split(heads, dim=1)
    if not is_known(arrival >= 0):
        is_sink = ((score == math.inf).sum(-1, keepdim=True) < layout.sinks).split(heads, dim=1)
        visible = (arrival.scatter(-1, place, now) >= 0)[..., None, :].split(heads, dim=1)
        if layout.state_rows:
            leaves = (arrival.gather(-1, place) >= 0).split(heads, dim=1)
    rows = place[..., None].expand(*place.shape, 2 * layout.head_dim).split(heads, dim=1)
    parts = (place.split(heads, dim=1), rows, now.split(heads, dim=1), ordinal, is_sink, position, leaves, visible)
    return [Target(*part) for part in zip(*parts, strict=True)]
