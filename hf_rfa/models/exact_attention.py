"""Exact attention to the tokens of a memory, which takes the new ones in: one new token in place, or many.

- One token changes the memory where it lies: decoding.
- Many come some at a time, or all at once: prompts and training. On a GPU torch's FlexAttention computes no block of logits
  that nobody sees.

What queries see, and what leaves, is asked of `hf_rfa.models.lifetimes`. There may be G rows of queries per token,
[B, H, T G, d] (`hf_rfa.models.masking`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention
from transformers.utils.import_utils import is_tracing

from .lifetimes import Arrivals, Lifetimes, Target, arrivals_of, block_mask, lifetimes
from .masking import MASKED_LOGIT, to_rows
from .memory import EMPTY, Memory, MemoryLayout, Places, rows_at
from .positions import Motion, moved_positions

#: New tokens that are attended to at once on a CPU, whose caches hold what that takes.
CHUNK_LENGTH = 96


@dataclass(kw_only=True, slots=True)
class NewTokens:
    """What some new tokens bring to heads that keep tokens in one way.

    Attributes:
        query: rows of the key-value heads, [B, H, T G, d] (`hf_rfa.models.masking`).
        keys_values: keys and values, [B, H, T, d + M].
        is_token: False for padding, [B, T], or None where nothing is padded.
        arrivals: where they stand in their texts; None for heads that keep no token, and for one token with a `Target`.
        score: by which slots rank them, [B, H, T], or None without slots.
        sink_logits: logits of the query heads' learned sinks, [H G], or None. They are in the normalizer, and have no value
            (gpt-oss).
        log_decay: log g of the state, [B, H, T], 0 for padding, or None without a gate.
        input_scale: w of what joins the state, [B, H or 1, T], 0 for padding, or None for ones.
    """

    query: Tensor
    keys_values: Tensor
    is_token: Tensor | None = None
    arrivals: Arrivals | None = None
    score: Tensor | None = None
    sink_logits: Tensor | None = None
    log_decay: Tensor | None = None
    input_scale: Tensor | None = None

    @property
    def length(self) -> int:
        """The number of tokens, T."""
        return self.keys_values.shape[2]

    @property
    def head_dim(self) -> int:
        """The width of a head, d."""
        return self.query.shape[-1]

    def split(self, lengths: list[int] | None) -> list[NewTokens]:
        """Return the tokens some at a time, or all of them for None.

        Each tensor is split once, not sliced: the gradient of a slice is as large as the whole.
        """
        if lengths is None:
            return [self]
        rows = self.query.shape[2] // self.length
        along = {"query": 2, "keys_values": 2, "is_token": 1, "score": 2, "log_decay": 2, "input_scale": 2}
        parts: dict[str, Any] = {field.name: [getattr(self, field.name)] * len(lengths) for field in fields(self)}
        for name, dim in along.items():
            tensor = getattr(self, name)
            if tensor is not None:
                parts[name] = tensor.split(
                    [length * rows for length in lengths] if name == "query" else lengths, dim=dim
                )
        if self.arrivals is not None:
            parts["arrivals"] = self.arrivals.split(lengths)
        return [NewTokens(**dict(zip(parts, part, strict=True))) for part in zip(*parts.values(), strict=True)]

    def with_dropout(self, probability: float) -> NewTokens:
        """Return the tokens with values of which some are dropped."""
        key, value = self.keys_values[..., : self.head_dim], self.keys_values[..., self.head_dim :]
        return replace(self, keys_values=torch.cat([key, F.dropout(value, probability)], dim=-1))

    def with_one_hot_values(self, group: HeadGroup) -> tuple[NewTokens, HeadGroup]:
        """Return tokens and memory with values such that the outputs are the weights of places and of new tokens."""
        (batch, heads, length, _), count, width = self.keys_values.shape, group.layout.places, self.head_dim
        values = torch.eye(count + length, dtype=self.keys_values.dtype, device=self.keys_values.device)
        values = values.expand(batch, heads, -1, -1)
        memory, arrivals = group.memory.in_order(), self.arrivals
        places, state = memory.places, memory.state
        if places is not None:
            if arrivals is None:
                arrivals = arrivals_of(places.count, length, group.layout, self.is_token, None, places)
            keys = places.keys_values[..., :width]
            places = replace(places, keys_values=torch.cat([keys, values[:, :, :count].to(keys.dtype)], dim=-1))
        if state is not None:
            zeros = state.new_zeros(*state.shape[:-1], count + length)
            state = torch.cat([zeros, state[..., -1:]], dim=-1)
        keys_values = torch.cat([self.keys_values[..., :width], values[:, :, count:]], dim=-1)
        new = replace(self, keys_values=keys_values, arrivals=arrivals)
        return new, group._replace(memory=Memory(places, state), target=None)

    def first(self, count: int) -> NewTokens:
        """Return the first tokens."""
        return self.split([count, self.length - count])[0]


class HeadGroup(NamedTuple):
    """Heads of a layer that keep tokens in one way: what they keep, and how new tokens change it.

    Attributes:
        memory: what is kept of the tokens before.
        layout: of the memory.
        target: where a single new token goes that may change the memory in place, or None.
        motion: how the memory's tokens move where an epoch begins, or None where they stay, and beside a ``target``.
    """

    memory: Memory
    layout: MemoryLayout
    target: Target | None
    motion: Motion | None


class Leaving(NamedTuple):
    """The token that leaves with each new one; some other token where none does.

    Attributes:
        keys_values: its key and value, [B, H, T, d + M].
        leaves: whether one does, [B, H or 1, T], or None where one always does.
        position: that by which its key is rotated, [B, H, T].
    """

    keys_values: Tensor
    leaves: Tensor | None
    position: Tensor


def attend_to_places(
    new: NewTokens, group: HeadGroup, *, scaling: float, joined: bool = False
) -> tuple[Tensor, Places, Tensor | None, Leaving | None]:
    """Take new tokens into a memory's places, and attend.

    Args:
        new: the tokens.
        group: heads that keep tokens.
        scaling: s of exp(q·k·s).
        joined: whether something else joins the outputs by their normalizers, so that these are needed, and what leaves.

    Returns:
        The outputs [B, H, T G, M]; the places after the tokens; the logarithms of the normalizers, [B, H, T G, 1], and what
        leaves, or None where nothing joins.
    """
    places = cast(Places, group.memory.places)
    if group.target is not None:
        output, log_total, leaving = _attend_in_place(new, places, group.target, scaling, joined)
        return output, places, log_total, leaving
    outputs, totals, left = [], [], []
    for part, after, tokens, keys_values in _take_in(new, group):
        output, log_total = _read_chunk(part, tokens, keys_values, scaling, joined)
        outputs.append(output)
        if joined:
            left.append(_leaving(part, places, tokens, keys_values, group.layout))
            totals.append(cast(Tensor, log_total))
        places = after
    if not joined:
        return _joined(outputs), places, None, None
    return _joined(outputs), places, _joined(totals), Leaving(*map(_joined, zip(*left, strict=True)))


def _leaving(
    new: NewTokens, before: Places, tokens: Lifetimes, keys_values: Tensor, layout: MemoryLayout
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what leaves with new tokens, whose lifetimes and keys and values come behind those of the places before."""
    arrivals = cast(Arrivals, new.arrivals)
    index = tokens.leaves(before.count, arrivals)
    own = torch.arange(layout.places, keys_values.shape[2], device=index.device)
    chosen = torch.where(index >= 0, index, own)
    number, origin = tokens.arrival.gather(-1, chosen), arrivals.origin
    if arrivals.start is not None:
        number = number - arrivals.start[:, None]
    position = number if origin is None else moved_positions(number, origin[:, None], layout.sinks)
    return keys_values.gather(2, rows_at(chosen, keys_values)), index >= 0, position


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=2)


def take_in(new: NewTokens, group: HeadGroup) -> Places:
    """Return a memory's places after new tokens."""
    return [after for _, after, *_ in _take_in(new, group)][-1]


def _attend_in_place(
    new: NewTokens, places: Places, target: Target, scaling: float, joined: bool
) -> tuple[Tensor, Tensor | None, Leaving | None]:
    """Take one new token into its place, in place, and attend. Padding changes nothing."""
    left = None
    if joined:
        keys_values, leaves = places.keys_values.gather(2, target.rows), target.leaves
        if new.is_token is not None:
            is_new = new.is_token[:, None]
            leaves = is_new if leaves is None else leaves & is_new
        left = Leaving(keys_values, leaves, cast(Tensor, target.position))
    visible = put_in_place(new, places, target)
    output, log_total = read_tokens(new.query, places.keys_values, visible, scaling, joined, new.sink_logits)
    return output, log_total, left


def put_in_place(new: NewTokens, places: Places, target: Target) -> Tensor | None:
    """Put one new token into its place, and return which places its queries see, as for `read_tokens`.

    Most of what a step costs on a CPU is to start small operations.
    """
    keys_values, score, is_token, visible = new.keys_values, new.score, new.is_token, target.visible
    if score is None and target.is_sink is not None:
        score = torch.zeros_like(target.place, dtype=torch.float32)
    if score is not None and target.is_sink is not None:
        score = score.float().masked_fill(target.is_sink, math.inf)
    keys_values, arrival = keys_values.to(places.keys_values.dtype), target.arrival
    if is_token is not None:
        is_new = is_token[:, None]
        keys_values = torch.where(is_new[..., None], keys_values, places.keys_values.gather(2, target.rows))
        arrival = torch.where(is_new, arrival, places.arrival.gather(-1, target.place))
        score = None if score is None else torch.where(is_new, score, places.score.gather(-1, target.place))
        # Padding sees something, so that nothing is divided by 0.
        visible = None if visible is None else visible | ~is_new[..., None]
    places.keys_values.scatter_(2, target.rows, keys_values)
    places.arrival.scatter_(-1, target.place, arrival)
    if score is not None:  # else a token of the window is replaced by one, whose score is 0 as well
        places.score.scatter_(-1, target.place, score.float())
    return visible


def _take_in(new: NewTokens, group: HeadGroup) -> Iterator[tuple[NewTokens, Places, Lifetimes, Tensor]]:
    """Yield new tokens some at a time, and the places after them, which are in the order of arrival.

    With them come the lifetimes of C new tokens behind those of the memory, N = P + C in all, and the keys and values of
    these, [B, H, N, d + M].
    """
    places, motion = cast(Places, group.memory.places).in_order(), group.motion
    for part in new.split(_chunk_lengths(new)):
        arrivals = cast(Arrivals, part.arrivals)
        if motion is not None and arrivals.origin is not None and not is_tracing(part.keys_values):
            start = None if arrivals.start is None else arrivals.start[:, 0]
            places = motion.move(places, arrivals.origin[:, 0], start)
        places, tokens, keys_values = absorb(part, places, group.layout)
        yield part, places, tokens, keys_values


def absorb(new: NewTokens, places: Places, layout: MemoryLayout) -> tuple[Places, Lifetimes, Tensor]:
    """Take C new tokens into places that are in the order of arrival, without moving these.

    Returns:
        The places after the tokens: what the last query sees. The lifetimes of all N = P + C tokens, and their keys and
        values, [B, H, N, d + M].
    """
    (batch, heads, length, _), count = new.keys_values.shape, layout.places
    ordinal, is_token, is_sink, document_end, previous_end, *_ = cast(Arrivals, new.arrivals)
    score = new.score
    score = new.keys_values.new_zeros(batch, heads, length, dtype=torch.float32) if score is None else score.float()
    arrival = ordinal if is_token is None else ordinal.masked_fill(~is_token, EMPTY)
    score = torch.cat([places.score, score.masked_fill(is_sink[:, None], math.inf)], dim=2)
    arrival = torch.cat([places.arrival, arrival[:, None].expand(-1, heads, -1)], dim=2)
    keys_values = torch.cat([places.keys_values, new.keys_values], dim=2)
    document = None
    if document_end is not None and previous_end is not None:  # a memory's tokens are all of one document
        document = torch.cat([previous_end[:, :1].expand(-1, count), document_end], dim=1)
        document = document[:, None].expand(-1, heads, -1)
    few = None if isinstance(length, torch.SymInt) else length
    tokens = lifetimes(score, arrival, layout, document, new=few)
    stays = (tokens.until > ordinal[:, -1:, None]) & (arrival >= 0)
    chosen = (~stays).byte().argsort(dim=-1, stable=True)[..., :count]
    stays = stays.gather(-1, chosen)
    after = replace(
        places,
        keys_values=keys_values.gather(2, rows_at(chosen, keys_values)),
        score=score.gather(-1, chosen).masked_fill(~stays, -math.inf),
        arrival=arrival.gather(-1, chosen).masked_fill(~stays, EMPTY),
    )
    return after, tokens, keys_values


def _chunk_lengths(new: NewTokens) -> list[int] | None:
    """Return how many new tokens are attended to at once; None for all of them, as an exporter's are, of any number."""
    length, origin = new.length, cast(Arrivals, new.arrivals).origin
    if isinstance(length, torch.SymInt):
        return None
    size = length if uses_flex_attention(new.keys_values) else CHUNK_LENGTH
    ends = {*range(size, length, size), length}
    if origin is not None and not is_tracing(origin):  # the queries of a chunk see every token at one position
        changes = (origin.diff(dim=1) != 0).any(0)
        ends |= {end + 1 for end in changes.nonzero()[:, 0].tolist()}
    return None if len(ends) == 1 else [end - start for start, end in pairwise([0, *sorted(ends)])]


def read_tokens(
    query: Tensor,
    keys_values: Tensor,
    visible: Tensor | None,
    scaling: float,
    joined: bool = False,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend to tokens by softmax.

    Args:
        query: [B, H, C G, d].
        keys_values: [B, H, N, d + M].
        visible: which of them each token's queries see, [B, H, C, N], or None for all.
        scaling: s of exp(q·k·s).
        joined: whether something else joins the outputs by their normalizers.
        sink_logits: as in `NewTokens`.

    Returns:
        The outputs [B, H, C G, M], and the logarithms of their normalizers, [B, H, C G, 1], if joined or with sinks.
    """
    width, mask = query.shape[-1], visible
    if visible is not None and visible.shape[2] > 1:
        mask = to_rows(visible, query.shape[2] // visible.shape[2])
    if not joined and sink_logits is None:
        key, value = keys_values[..., :width], keys_values[..., width:]
        query = query.to(key.dtype)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling), None
    logits, value = logits_of(query, keys_values, mask, scaling)
    weights = logits.softmax(dim=-1)
    # Of one weight: on a CPU logsumexp takes longer than all the rest.
    highest, place = logits.max(dim=-1, keepdim=True)
    return _with_sinks(weights @ value, highest - weights.gather(-1, place).log(), sink_logits)


def logits_of(query: Tensor, keys_values: Tensor, mask: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
    """Return the logits of tokens, [B, H, C G, N], and their values, in the dtype of the queries; see `read_tokens`."""
    key, value = keys_values.to(query.dtype).split([query.shape[-1], keys_values.shape[-1] - query.shape[-1]], dim=-1)
    logits = (query * scaling) @ key.mT
    return (logits if mask is None else logits.masked_fill(~mask, MASKED_LOGIT)), value


def _read_chunk(
    new: NewTokens, tokens: Lifetimes, keys_values: Tensor, scaling: float, joined: bool
) -> tuple[Tensor, Tensor | None]:
    """Attend to a memory's tokens and the new ones behind them; results are those of `read_tokens`."""
    ordinal, is_token = cast(Arrivals, new.arrivals)[:2]
    query, sink_logits = new.query, new.sink_logits
    if not uses_flex_attention(keys_values):
        visible = tokens.visible(ordinal)
        if is_token is not None:  # padding sees all, so that nothing is divided by 0
            visible = visible | ~is_token[:, None, :, None]
        return read_tokens(query, keys_values, visible, scaling, joined, sink_logits)
    key, value = keys_values[..., : query.shape[-1]], keys_values[..., query.shape[-1] :]
    mask = block_mask(tokens, ordinal, query.shape[2] // ordinal.shape[1])
    attend = partial(_flex_attention(), query.to(key.dtype), key, value, block_mask=mask, scale=scaling)
    if not joined and sink_logits is None:
        return attend(), None
    output, about = attend(return_aux=AuxRequest(lse=True))
    return _with_sinks(output.to(query.dtype), about.lse[..., None].to(query.dtype), sink_logits)


def _with_sinks(output: Tensor, log_total: Tensor, sink_logits: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return outputs and logarithms of normalizers with learned sinks in these, if there are any."""
    if sink_logits is None:
        return output, log_total
    log_sink = sink_logits.to(log_total.dtype).view(output.shape[1], -1)
    log_sink = log_sink.repeat(1, output.shape[2] // log_sink.shape[1])[..., None]
    return output * torch.sigmoid(log_total - log_sink), torch.logaddexp(log_total, log_sink)


def uses_flex_attention(keys_values: Tensor) -> bool:
    """Return whether new tokens are attended to at once by FlexAttention: on GPUs, for whose kernels 64 bits are too many."""
    return keys_values.device.type in ("cuda", "xpu") and keys_values.dtype != torch.float64


def _flex_attention() -> Callable[..., Any]:
    """Return FlexAttention, compiled with what is around it or by itself: torch's form that is not holds all logits."""
    return cast(Any, flex_attention) if torch.compiler.is_compiling() else _compiled_flex_attention()


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(flex_attention)
