"""Exact attention to the tokens of a memory: which of them queries see, and how they read them, in three forms.

- `attend_in_place`, one new token: decoding;
- `attend_in_chunks`, many of them, some at a time or all at once: prompts and training;
- on a GPU the latter by torch's FlexAttention, which computes no block of logits that nobody sees.

Tokens are counted as they arrive, padding left out, and query t sees token j exactly iff j ≤ t < until_j
(`hf_rfa.models.memory`). There may be G rows of queries per token, [B, H, T G, d] (`hf_rfa.models.masking`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from transformers.utils.import_utils import is_tracing

from .masking import MASKED_LOGIT, to_rows
from .memory import EMPTY, Memory, MemoryLayout, Target, put, rows_at
from .positions import Motion, origins

#: New tokens that are attended to at once on a processor, whose caches hold what that takes.
CHUNK_LENGTH = 96
#: Queries and keys of a block of FlexAttention.
BLOCK = 128
#: The end of a token that nothing has replaced.
FOREVER = 2**30
#: Tokens up to which each is compared with every other one, to find its end.
COMPARED_AT_ONCE = 512


def uses_flex_attention(keys_values: Tensor) -> bool:
    """Return whether new tokens are attended to at once by FlexAttention: on GPUs, for whose kernels 64 bits are too many."""
    return keys_values.device.type in ("cuda", "xpu") and keys_values.dtype != torch.float64


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

    def counted(self) -> Tensor:
        """Return the ordinals from the origin on, which scores count."""
        return self.ordinal if self.origin is None else self.ordinal - self.origin


def arrivals_of(
    count: Tensor,
    length: int,
    layout: MemoryLayout,
    padding_mask: Tensor | None,
    document_starts: Tensor | None,
    before: Memory | None = None,
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
    sinks = layout.sinks
    sinks_held = before.sinks_held() if before is not None and sinks else None
    is_token = None if padding_mask is None else padding_mask != 0
    if is_token is None:
        ordinal = count[:, None] + torch.arange(length, dtype=torch.int32, device=count.device)
    else:
        ordinal = count[:, None] + is_token.cumsum(1, dtype=torch.int32) - 1
    # Numbers of the tokens in their documents, but for one that has all of its sinks.
    number = ordinal if sinks_held is None else ordinal - (count - sinks_held)[:, None]
    if document_starts is None:
        arrivals = Arrivals(ordinal, is_token, number < sinks)
        return _with_origin(arrivals, layout, before)
    start = torch.where(document_starts, ordinal, 0).cummax(1).values
    number = torch.where(document_starts.cumsum(1) > 0, ordinal - start, number)
    # The next start after each token: the least of all later ones.
    later = torch.where(document_starts, ordinal, FOREVER)
    later = F.pad(later[:, 1:], (0, 1), value=FOREVER)
    document_end = later.flip(1).cummin(1).values.flip(1)
    first = torch.where(document_starts[:, :1], ordinal[:, :1], document_end[:, :1])
    previous_end = torch.cat([first, document_end[:, :-1]], dim=1)
    return _with_origin(
        Arrivals(ordinal, is_token, number < sinks, document_end, previous_end, start=start), layout, before
    )


def _with_origin(arrivals: Arrivals, layout: MemoryLayout, before: Memory | None) -> Arrivals:
    """Return arrivals with their origins, where these or that of the memory before may be other than 0."""
    ordinal = arrivals.ordinal
    if not layout.max_distance:
        return arrivals
    if is_tracing(ordinal):  # epochs begin between the calls of a compiled step
        if before is None:
            return arrivals
        return arrivals._replace(origin=before.origin_of_rows()[:, None].expand_as(ordinal))
    if before is None and ordinal.shape[1] <= layout.max_distance:
        return arrivals
    origin = origins(ordinal if arrivals.start is None else ordinal - arrivals.start, layout)
    moved = origin if before is None else torch.cat([origin, before.origin_of_rows()[:, None]], dim=1)
    if origin.device.type == "cpu" and not bool(moved.any()):
        return arrivals
    return arrivals._replace(origin=origin)


def ends_of(score: Tensor, arrival: Tensor, layout: MemoryLayout, document: Tensor | None = None) -> Tensor:
    """Return the ordinal of the first query that does not see a token any more, until, [B, H, N] in int32.

    It is `FOREVER` for a token that none of the others replaces. Later tokens may still replace it.

    Args:
        score: of the tokens, in the order of their arrival, [B, H, N]; +∞ for sinks.
        arrival: [B, H, N]; `EMPTY` for places without a token.
        layout: says W and K.
        document: what tells the documents of tokens apart, and grows from one to the next, [B, H, N], or None for one.
    """
    if not layout.slots:
        end = arrival + layout.window
    elif score.shape[-1] <= COMPARED_AT_ONCE:
        number = torch.arange(score.shape[-1], device=score.device)
        end = _ends_among(score, arrival, number, layout.window, layout.slots, document)
    else:
        end = _ends_by_parts(score, arrival, layout, document)
    return torch.where(score == math.inf, FOREVER, end)


def _is_ranked(score: Tensor, arrival: Tensor) -> Tensor:
    """Return which tokens compete for slots: all but sinks, padding and empty places."""
    return (score > -math.inf) & (score < math.inf) & (arrival >= 0)


def _ends_meanwhile(
    score: Tensor, arrival: Tensor, count: Tensor, layout: MemoryLayout, document: Tensor | None
) -> Tensor:
    """Return until of the tokens of a memory and of fewer new ones than it has slots, [B, H, P + C].

    It is right for tokens that one of the new ones does not see any more, and for others behind the last of these. C new
    tokens push at most C into the slots and as many out of them, so that the best K − C of these stay: they are only counted.

    Args:
        score: of the tokens, in the order of their arrival, [B, H, P + C]; +∞ for sinks.
        arrival: [B, H, P + C].
        count: number of tokens of each text before the new ones, [B].
        layout: says P, W and K.
        document: as for `ends_of`; a memory's tokens are all of one.
    """
    places, new = layout.places, score.shape[-1] - layout.places
    in_window = arrival[..., :places] >= count[:, None, None] - layout.window
    rank = score[..., :places].clamp_min(torch.finfo(score.dtype).min).masked_fill(in_window, -math.inf)
    order = rank.sort(dim=-1, descending=True, stable=True).indices
    staying, others = order.tensor_split([layout.sinks + layout.slots - new], dim=-1)
    counted = _is_ranked(score, arrival).gather(-1, staying).sum(-1, keepdim=True)
    added = torch.arange(places, places + new, device=order.device).expand(*order.shape[:2], -1)
    number = torch.cat([others.sort(dim=-1).values, added], dim=-1)
    slots = layout.slots - counted[..., None]  # at least C, so that in a new document nobody is beaten
    document = None if document is None else document.gather(-1, number)
    end = _ends_among(score.gather(-1, number), arrival.gather(-1, number), number, layout.window, slots, document)
    return torch.full_like(arrival, FOREVER).scatter(-1, number, end)


def _ends_among(
    score: Tensor, arrival: Tensor, number: Tensor, window: int, slots: int | Tensor, document: Tensor | None
) -> Tensor:
    """Return until of tokens [..., N] by comparing each with every other one; `FOREVER` for those that do not compete.

    The K best ones so far come first, and the others in the order of ``number``, which says who of two equals came first.
    ``slots``, K, may be a number for every row, [..., 1, 1].
    """
    ranked = _is_ranked(score, arrival)
    ours, theirs = score[..., :, None], score[..., None, :]
    earlier = number[..., None, :] < number[..., :, None]
    better = ((theirs > ours) | ((theirs == ours) & earlier)) & ranked[..., None, :]
    if document is not None:
        better = better & (document[..., :, None] == document[..., None, :])
    place = (better.cumsum(-1, dtype=torch.int32) < slots).sum(-1)  # that of the K-th better one
    beaten = arrival.gather(-1, place.clamp_max(score.shape[-1] - 1))
    is_beaten = ranked & (place < score.shape[-1])
    return torch.where(is_beaten, torch.maximum(arrival, beaten) + window, FOREVER)


def _ends_by_parts(score: Tensor, arrival: Tensor, layout: MemoryLayout, document: Tensor | None) -> Tensor:
    """Return until of tokens [B, H, N] as `_ends_among` does, in time and memory linear in N but for a logarithm.

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
    numbers = torch.arange(count * size, device=score.device).view(count, size).expand_as(scores)

    def of(per_token: Tensor, number: Tensor) -> Tensor:
        return per_token.gather(-1, number.flatten(-2)).view_as(number)

    def best_of(scores: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
        """Return the K best of the last document among tokens [..., n], the earlier of equals first."""
        if document is not None:
            documents = of(document, number).masked_fill(scores == -math.inf, -1)
            scores = scores.masked_fill(documents < documents.amax(-1, keepdim=True), -math.inf)
        scores, order = scores.sort(dim=-1, descending=True, stable=True)
        return scores[..., :slots], number.gather(-1, order[..., :slots])

    def before(per_part: Tensor, parts: int, value: float) -> Tensor:
        return F.pad(per_part, (0, 0, parts, 0), value=value)[..., :count, :]

    best, number, parts = *best_of(scores, numbers), 1
    while parts < count:  # the best of so many parts become those of twice as many
        pairs = (before(best, parts, -math.inf), best), (before(number, parts, 0), number)
        best, number = best_of(*(torch.cat(pair, dim=-1) for pair in pairs))
        parts *= 2
    scores = torch.cat([before(best, 1, -math.inf), scores], dim=-1)
    numbers = torch.cat([before(number, 1, 0), numbers], dim=-1)
    documents = None if document is None else of(document, numbers)
    end = _ends_among(scores, of(arrival, numbers), numbers, layout.window, slots, documents)
    ends = torch.full_like(arrival, FOREVER)
    return ends.scatter_reduce(-1, numbers.flatten(-2), end.flatten(-2), "amin")[..., :length]


class Chunk(NamedTuple):
    """C new tokens behind those of a memory, N = P + C in all.

    Attributes:
        keys_values: keys and values, [B, H, N, 2d].
        arrival: how many tokens of the text came before each, [B, H, N] in int32; `EMPTY` for empty places and padding.
        end: ordinal of the first query that does not see each any more, [B, H, N] in int32; 0 for what nobody sees, and some
            number behind the last new token for what all of these see.
        ordinal: of the new tokens' queries, [B, C] in int32.
        is_token: False for padding among the new tokens, [B, C], or None.
        leaves: which of all tokens is forgotten with each new one, [B, H, C]; its own number where none is.
        forgets: whether one is, [B, H, C].
    """

    keys_values: Tensor
    arrival: Tensor
    end: Tensor
    ordinal: Tensor
    is_token: Tensor | None
    leaves: Tensor
    forgets: Tensor

    def visible(self) -> Tensor:
        """Return which tokens the new ones' queries see, [B, H, C, N]; padding sees all, so that nothing is divided by 0."""
        now = self.ordinal[:, None, :, None]
        visible = (self.arrival[:, :, None] <= now) & (now < self.end[:, :, None])
        return visible if self.is_token is None else visible | ~self.is_token[:, None, :, None]


def absorb(
    memory: Memory, keys_values: Tensor, score: Tensor | None, arrivals: Arrivals, layout: MemoryLayout
) -> tuple[Chunk, Memory]:
    """Take C new tokens into a memory whose places are in the order of arrival (`in_order`).

    Args:
        memory: what is kept of the tokens before; it stays as it is.
        keys_values: keys and values of the new tokens, [B, H, C, 2d].
        score: of the new tokens, [B, H, C], or None without slots.
        arrivals: of the new tokens.
        layout: of the memory.

    Returns:
        What the new tokens' queries see, and the memory after them, in the order of arrival.
    """
    (batch, heads, length, _), places, count = keys_values.shape, layout.places, memory.count
    rows_before, scores, arrivals_before = memory.filled()
    ordinal, is_token, is_sink, document_end, previous_end, *_ = arrivals
    score = keys_values.new_zeros(batch, heads, length, dtype=torch.float32) if score is None else score.float()
    score = score.masked_fill(is_sink[:, None], math.inf)
    arrival = ordinal if is_token is None else ordinal.masked_fill(~is_token, EMPTY)
    keys_values = torch.cat([rows_before, keys_values], dim=2)
    score = torch.cat([scores, score], dim=2)
    arrival = torch.cat([arrivals_before, arrival[:, None].expand(-1, heads, -1)], dim=2)
    document = None
    if document_end is not None and previous_end is not None:  # a memory's tokens are all of one document
        document = torch.cat([previous_end[:, :1].expand(-1, places), document_end], dim=1)
        document = document[:, None].expand(-1, heads, -1)
    if not isinstance(length, torch.SymInt) and length < layout.slots:
        end = _ends_meanwhile(score, arrival, count, layout, document)
    else:
        end = ends_of(score, arrival, layout, document)
    # What a new document ends is not forgotten to the state, which begins anew as well.
    forgotten = end if document is None else end.masked_fill(end >= document, FOREVER)
    end = end if document is None else torch.minimum(end, document)
    end = end.masked_fill(arrival < 0, 0)

    numbers = torch.arange(places + length, device=end.device)
    since = forgotten - count[:, None, None]  # the new token with which each is forgotten
    inside = (since >= 0) & (since < length) & (arrival >= 0)
    leaves = torch.full((batch, heads, length + 1), -1, device=end.device)
    leaves = leaves.scatter(-1, torch.where(inside, since, length).long(), numbers.expand_as(end))
    token = (ordinal - count[:, None]).clamp_min(0).long()[:, None].expand(-1, heads, -1)
    leaves = leaves[..., :length].gather(-1, token)
    forgets = leaves >= 0 if is_token is None else (leaves >= 0) & is_token[:, None]
    leaves = torch.where(forgets, leaves, numbers[places:])

    after = ordinal[:, -1:, None] + 1
    stays = end >= after if document is None else (end >= after) & (document >= after)
    taken = (~stays).byte().argsort(dim=-1, stable=True)[..., :places]
    stays = stays.gather(-1, taken)
    new = Memory(
        keys_values.gather(2, rows_at(taken, keys_values)),
        score.gather(-1, taken).masked_fill(~stays, -math.inf),
        arrival.gather(-1, taken).masked_fill(~stays, EMPTY),
        memory.state,
        memory.origin,
    )
    return Chunk(keys_values, arrival, end, ordinal, is_token, leaves, forgets), new


class Reading(NamedTuple):
    """How queries read the tokens that are kept exactly.

    Attributes:
        scaling: s of exp(q·k·s).
        joined: whether something else joins them by their normalizers, so that these are needed.
        sink_logits: logits of the query heads' learned sinks, [H G], or None. They are in the normalizer, and have no value
            (gpt-oss).
    """

    scaling: float
    joined: bool = False
    sink_logits: Tensor | None = None

    def __call__(self, query: Tensor, keys_values: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Attend to tokens.

        Args:
            query: [B, H, C G, d].
            keys_values: [B, H, N, d + M].
            visible: which of them each token's queries see, [B, H, C, N], or None for all.

        Returns:
            The outputs [B, H, C G, M], and if joined the logarithms of their normalizers, [B, H, C G, 1].
        """
        width = query.shape[-1]
        mask = visible
        if visible is not None and visible.shape[2] > 1:
            mask = to_rows(visible, query.shape[2] // visible.shape[2])
        if not self.joined and self.sink_logits is None:
            key, value = keys_values[..., :width], keys_values[..., width:]
            query = query.to(key.dtype)
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=self.scaling), None
        keys_values = keys_values.to(query.dtype)
        key, value = keys_values[..., :width], keys_values[..., width:]
        logits = (query * self.scaling) @ key.mT
        logits = logits if mask is None else logits.masked_fill(~mask, MASKED_LOGIT)
        weights = logits.softmax(dim=-1)
        # Of one weight: on a processor logsumexp takes longer than all the rest.
        highest, place = logits.max(dim=-1, keepdim=True)
        output, log_total = weights @ value, highest - weights.gather(-1, place).log()
        return self._with_sinks(output, log_total)

    def of_chunk(self, query: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor | None]:
        """Attend to a chunk, whose new tokens' queries are [B, H, C G, d]; results are those of a call."""
        keys_values = chunk.keys_values
        if not uses_flex_attention(keys_values):
            return self(query, keys_values, chunk.visible())
        key, value = keys_values[..., : query.shape[-1]], keys_values[..., query.shape[-1] :]
        mask = block_mask(chunk, query.shape[2] // chunk.ordinal.shape[1])
        attend = partial(_flex_attention(), query.to(key.dtype), key, value, block_mask=mask, scale=self.scaling)
        if not self.joined and self.sink_logits is None:
            return attend(), None
        output, about = attend(return_aux=AuxRequest(lse=True))
        return self._with_sinks(output.to(query.dtype), about.lse[..., None].to(query.dtype))

    def _with_sinks(self, output: Tensor, log_total: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and logarithms of normalizers with learned sinks in these, if there are any."""
        if self.sink_logits is None:
            return output, log_total
        log_sink = self.sink_logits.to(log_total.dtype).view(output.shape[1], -1)
        log_sink = log_sink.repeat(1, output.shape[2] // log_sink.shape[1])[..., None]
        return output * torch.sigmoid(log_total - log_sink), torch.logaddexp(log_total, log_sink)


def _flex_attention() -> Callable[..., Any]:
    """Return FlexAttention, compiled with what is around it or by itself: torch's form that is not holds all logits."""
    return cast(Any, flex_attention) if torch.compiler.is_compiling() else _compiled_flex_attention()


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def block_mask(chunk: Chunk, groups: int) -> BlockMask:
    """Return what FlexAttention computes of a chunk, whose new tokens have ``groups`` rows of queries each.

    `torch.nn.attention.flex_attention.create_block_mask` would ask of every query whether it sees every key. A block of
    queries can see none of a block of keys that all arrive later, or all end before.
    """
    arrival, end, ordinal = chunk.arrival, chunk.end, chunk.ordinal

    def by_block(per_token: Tensor, value: int) -> Tensor:
        return F.pad(per_token, (0, -per_token.shape[-1] % BLOCK), value=value).unflatten(-1, (-1, BLOCK))

    now = to_rows(ordinal, groups, dim=1)
    first, last = by_block(now, FOREVER).amin(-1)[:, None, :, None], by_block(now, EMPTY).amax(-1)[:, None, :, None]
    arrives = by_block(arrival.masked_fill(arrival < 0, FOREVER), FOREVER).amin(-1)[:, :, None]
    ends = by_block(end, 0).amax(-1)[:, :, None]
    visible = (arrives <= last) & (ends > first)

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        now = ordinal[row, query // groups]
        return (arrival[row, head, key] <= now) & (now < end[row, head, key])

    return BlockMask.from_kv_blocks(
        visible.sum(-1, dtype=torch.int32),
        visible.byte().argsort(dim=-1, descending=True, stable=True).int(),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(now.shape[1], arrival.shape[-1]),
    )


class Exact(NamedTuple):
    """What some tokens' queries read of the tokens kept exactly, and which of these were forgotten meanwhile.

    Attributes:
        output: [B, H, T G, M].
        log_total: logarithms of the normalizers, [B, H, T G, 1], or None where nothing joins them.
        leaving: key and value of the token that is forgotten with each new one, [B, H, T, d + M], or None as well.
        forgets: whether one is, [B, H or 1, T], or None where one always is; elsewhere ``leaving`` is some other token.
    """

    output: Tensor
    log_total: Tensor | None
    leaving: Tensor | None
    forgets: Tensor | None


def attend_in_place(
    query: Tensor,
    keys_values: Tensor,
    score: Tensor | None,
    memory: Memory,
    target: Target,
    reading: Reading,
    is_token: Tensor | None = None,
) -> Exact:
    """Take one new token into a memory in place, and attend: decoding. Arguments are those of `put` and `Reading`."""
    rows, leaving, forgets = cast(Tensor, memory.keys_values), None, None
    visible = target.visible
    if reading.joined:
        leaving, forgets = rows.gather(2, target.row), target.forgets
    if is_token is not None:  # padding sees something, so that nothing is divided by 0
        forgets = is_token[:, None] if forgets is None else forgets & is_token[:, None]
        visible = None if visible is None else visible | ~is_token[:, None, :, None]
    put(memory, target, keys_values, score, is_token)
    output, log_total = reading(query, rows, visible)
    return Exact(output, log_total, leaving, forgets)


def attend_in_chunks(
    query: Tensor,
    keys_values: Tensor,
    score: Tensor | None,
    arrivals: Arrivals,
    memory: Memory,
    layout: MemoryLayout,
    reading: Reading,
    motion: Motion | None = None,
) -> tuple[Exact, Memory]:
    """Take new tokens into a memory, some at a time, and attend: prompts and training.

    The memory's places have to be in the order of arrival (`in_order`). Arguments are those of `absorb` and `Reading`, and
    how the memory's tokens move where an epoch begins.
    """
    groups = query.shape[2] // keys_values.shape[2]
    lengths = _chunk_lengths(keys_values, arrivals)
    # Split, not sliced: the gradient of a slice is as large as the whole.
    queries = [query] if lengths is None else query.split([length * groups for length in lengths], dim=2)
    parts = []
    chunks = _chunks(keys_values, score, arrivals, memory, layout, motion, lengths)
    for rows, (chunk, after) in zip(queries, chunks, strict=True):
        memory = after
        output, log_total = reading.of_chunk(rows, chunk)
        leaving = chunk.keys_values.gather(2, rows_at(chunk.leaves, chunk.keys_values)) if reading.joined else None
        parts.append(Exact(output, log_total, leaving, chunk.forgets if reading.joined else None))
    if len(parts) == 1:
        return parts[0], memory
    joined: Any = (None if part[0] is None else torch.cat(part, dim=2) for part in zip(*parts, strict=True))
    return Exact(*joined), memory


def take_in(
    keys_values: Tensor,
    score: Tensor | None,
    arrivals: Arrivals,
    memory: Memory,
    layout: MemoryLayout,
    motion: Motion | None = None,
) -> Memory:
    """Return a memory after new tokens; arguments are those of `attend_in_chunks`."""
    lengths = _chunk_lengths(keys_values, arrivals)
    return [after for _, after in _chunks(keys_values, score, arrivals, memory, layout, motion, lengths)][-1]


def _chunk_lengths(keys_values: Tensor, arrivals: Arrivals) -> list[int] | None:
    """Return how many new tokens are attended to at once; None for all of them, as an exporter's are, of any number."""
    length = keys_values.shape[2]
    if isinstance(length, torch.SymInt):
        return None
    size = length if uses_flex_attention(keys_values) else CHUNK_LENGTH
    ends = {*range(size, length, size), length}
    if arrivals.origin is not None and not is_tracing(
        keys_values
    ):  # the queries of a chunk see every token at one position
        changes = (arrivals.origin.diff(dim=1) != 0).any(0)
        ends |= {end + 1 for end in changes.nonzero()[:, 0].tolist()}
    return None if len(ends) == 1 else [end - start for start, end in pairwise([0, *sorted(ends)])]


def _chunks(
    keys_values: Tensor,
    score: Tensor | None,
    arrivals: Arrivals,
    memory: Memory,
    layout: MemoryLayout,
    motion: Motion | None,
    lengths: list[int] | None,
) -> Iterator[tuple[Chunk, Memory]]:
    """Yield new tokens, some at a time or all of them, and the memory after them."""
    parts: list[Any] = [(keys_values, score, arrivals)]
    if lengths is not None:
        scores = [None] * len(lengths) if score is None else score.split(lengths, dim=2)
        parts = list(zip(keys_values.split(lengths, dim=2), scores, arrivals.split(lengths), strict=True))
    for rows, ranks, arrived in parts:
        if motion is not None and arrived.origin is not None and not is_tracing(rows):
            start = None if arrived.start is None else arrived.start[:, 0]
            memory = motion.move(memory, arrived.origin[:, 0], start)
        chunk, memory = absorb(memory, rows, ranks, arrived, layout)
        yield chunk, memory
