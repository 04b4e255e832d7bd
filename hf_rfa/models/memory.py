"""The exact part of a layer's memory: the first tokens of a text, its most important ones, and its last ones.

Per key-value head a memory holds at most P = S + K + W tokens, each in a place of its own:

- S sinks, the first tokens of a text, for good (Xiao et al. 2024, arXiv 2309.17453);
- a window, the W last tokens, the query's own included;
- K slots, the most important of the tokens that have left the window.

Every other token is forgotten: at most one with every new one, which takes its place. A token is then absorbed by the layer's
state of random features, if it has one (`hf_rfa.models.linear_attention`).

One number per token says all of this. Tokens are counted as they arrive, padding left out, and

    query t sees token j exactly   ⇔   j ≤ t < until_j

**Importance.** That of token j at query t is linear in the layer's input at j, and falls with age:

    i_tj = w·x_j − r (t − j)

All tokens lose the same importance at a step, so that their order never changes, and the score w·x_j + r j stands for it. The
slots hold the first K tokens by score among those that have left the window, and the earlier of two that are equal: what is
kept depends on no split of the text. With W and K, a token's end is

    until_j = W + max(j, the arrival of the K-th token with a higher score)

Choosing tokens by a score of their own that needs no later query follows Devoto et al. 2024 (arXiv 2406.11430), who take the
norm of the key; fitting it to the attention that is received, Huang et al. 2024 (Locret, arXiv 2410.01805).

There may be G rows of queries per token, [B, H, T G, d] (`hf_rfa.models.masking`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.utils.import_utils import is_tracing

from .feature_maps import compute_dtype
from .masking import MASKED_LOGIT, to_rows

#: New tokens that are attended to at once.
CHUNK_LENGTH = 64
#: Arrival of what an empty place holds, and of padding.
EMPTY = -(2**30)
#: What the tensors of an empty memory are filled with, other than 0.
INITIAL = {"score": -math.inf, "arrival": EMPTY}
#: The end of a token that nothing has replaced.
FOREVER = 2**30


@dataclass(frozen=True, kw_only=True)
class MemoryLayout:
    """Shapes and bytes of what some heads of a layer keep of one text: the only place that knows them.

    Attributes:
        heads: H, key-value heads.
        head_dim: d, width of a head.
        window: W, last tokens; 0 for heads that keep no token, which then have neither sinks nor slots.
        sinks: S, first tokens.
        slots: K, most important ones of the others.
        state_rows: rows of the state, F or F + 1 (`hf_rfa.models.linear_attention`); 0 for heads without features.
        dtype: that of keys and values, the model's.
    """

    heads: int
    head_dim: int
    window: int = 0
    sinks: int = 0
    slots: int = 0
    state_rows: int = 0
    dtype: torch.dtype = torch.float32

    @property
    def places(self) -> int:
        """P, the number of tokens that are kept exactly."""
        return self.sinks + self.slots + self.window

    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape, without the batch, and dtype of every tensor of a `Memory` by its name."""
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if self.places:
            shapes["keys_values"] = (self.heads, self.places, 2 * self.head_dim), self.dtype
            shapes["score"] = (self.heads, self.places), torch.float32
            shapes["arrival"] = (self.heads, self.places), torch.int32
        if self.state_rows:
            shapes["state"] = (self.heads, self.state_rows, self.head_dim + 1), compute_dtype(self.dtype)
        return shapes

    def num_bytes(self) -> int:
        """Return the bytes of one text's memory."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.tensors().values())

    def bytes_per_place(self) -> int:
        """Return the bytes that one token takes that is kept exactly, in all heads."""
        row = 2 * self.head_dim * self.dtype.itemsize + torch.float32.itemsize + torch.int32.itemsize
        return self.heads * row


@dataclass
class Memory:
    """What some heads of a layer keep of a batch of texts.

    Attributes:
        keys_values: key and value of the token in every place, [B, H, P, 2d], or None without places.
        score: the tokens' scores, [B, H, P] in float32; +∞ for sinks and −∞ for empty places.
        arrival: how many tokens of the text came before each, [B, H, P] in int32; `EMPTY` for empty places.
        state: [B, H, rows, d + 1] (`hf_rfa.models.linear_attention`), or None: without features, or at the start.
    """

    keys_values: Tensor | None = None
    score: Tensor | None = None
    arrival: Tensor | None = None
    state: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that there are, by name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    def filled(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys and values, scores and arrivals of a memory that has places."""
        return self.keys_values, self.score, self.arrival  # type: ignore[return-value]

    @property
    def count(self) -> Tensor:
        """The number of tokens so far of a memory that has places, [B] in int32: the last of them is always kept."""
        return (cast(Tensor, self.arrival).amax((1, 2)) + 1).clamp_min(0)

    def sinks_held(self) -> Tensor:
        """Return the number of sinks that every row has, [B]: not that of tokens so far, where these began a document."""
        return (cast(Tensor, self.score)[:, 0] == math.inf).sum(-1, dtype=torch.int32)

    def map(self, function: Callable[[Tensor], Tensor]) -> Memory:
        """Return the memory with every tensor replaced by what ``function`` makes of it."""
        return Memory(**{name: function(tensor) for name, tensor in self.tensors().items()})

    def clear(self) -> None:
        """Forget all tokens in place."""
        for name, tensor in self.tensors().items():
            tensor.fill_(INITIAL.get(name, 0))

    def stored_in(self, other: Memory) -> Memory:
        """Return this memory, in the tensors of ``other`` where these have its shapes and gradients do not forbid it."""
        if self is other or torch.is_grad_enabled() or torch.jit.is_tracing():
            return self
        stored = {}
        for name, tensor in self.tensors().items():
            before = getattr(other, name)
            if before is None or before is tensor or before.shape != tensor.shape or before.dtype != tensor.dtype:
                stored[name] = tensor
            else:
                stored[name] = before.copy_(tensor)
        return Memory(**stored)


def empty_memory(layout: MemoryLayout, batch: int, device: torch.device) -> Memory:
    """Return the memory of ``batch`` texts before their first token; it has no state, which the first tokens bring."""
    if not layout.places:
        return Memory()
    shapes = {name: ((batch, *shape), dtype) for name, (shape, dtype) in layout.tensors().items() if name != "state"}
    return Memory(
        **{
            name: torch.full(shape, INITIAL.get(name, 0), dtype=dtype, device=device)
            for name, (shape, dtype) in shapes.items()
        }
    )


class Importance(nn.Module):
    """The importance of tokens, in nats: calibrated (`hf_rfa.convert.importance`), not trained by gradients.

    Attributes:
        weight: w, [H, width].
        recency: r, [H], the importance that a token loses with every further one.

    Both are zero until calibration; the slots then hold the first tokens that leave the window.
    """

    weight: Tensor
    recency: Tensor

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(num_heads, hidden_size))
        self.register_buffer("recency", torch.zeros(num_heads))

    def reset_parameters(self) -> None:
        """Set both to 0, where no checkpoint has set them."""
        init.zeros_(self.weight)
        init.zeros_(self.recency)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the importance of tokens when they come, [B, H, T] in float32, for hidden states [B, T, width]."""
        return self._importance(hidden_states).transpose(1, 2)

    def score(self, hidden_states: Tensor, ordinal: Tensor) -> Tensor:
        """Return the tokens' scores, [B, H, T], from what came before each of them, ``ordinal`` [B, T]."""
        return torch.addcmul(self._importance(hidden_states), self.recency, ordinal.unsqueeze(-1)).transpose(1, 2)

    def _importance(self, hidden_states: Tensor) -> Tensor:
        """Return the importance of tokens when they come, [B, T, H] in float32."""
        hidden_states, weight = hidden_states.detach() if hidden_states.requires_grad else hidden_states, self.weight
        return F.linear(hidden_states.to(weight.dtype), weight)


class Arrivals(NamedTuple):
    """Where some new tokens stand in their texts.

    Attributes:
        ordinal: number of tokens before each, [B, T] in int32; padding has that of the token before it.
        is_token: False for padding, [B, T], or None where nothing is padded.
        is_sink: whether a token is one of the first S of its document, [B, T].
        document_end: ordinal of the first token of the next document, [B, T], or None where no document starts.
        previous_end: the same of the token before each, [B, T], or None.
    """

    ordinal: Tensor
    is_token: Tensor | None
    is_sink: Tensor
    document_end: Tensor | None = None
    previous_end: Tensor | None = None

    def split(self, size: int) -> list[Arrivals]:
        """Return the arrivals of ``size`` tokens at a time."""
        count = -(-self.ordinal.shape[1] // size)
        parts = ([None] * count if each is None else each.split(size, dim=1) for each in self)
        return [Arrivals(*part) for part in zip(*parts, strict=True)]


def arrivals_of(
    count: Tensor,
    length: int,
    sinks: int,
    padding_mask: Tensor | None,
    document_starts: Tensor | None,
    sinks_held: Tensor | None = None,
) -> Arrivals:
    """Return where some new tokens stand in texts.

    Args:
        count: number of tokens of each text that have been seen, [B].
        length: T, the number of new ones.
        sinks: S.
        padding_mask: [B, T], 0 for padding, or None.
        document_starts: [B, T], True where a text begins that sees nothing before it, or None.
        sinks_held: number of sinks that each text has (`Memory.sinks_held`), [B]; None for as many as it can have.
    """
    is_token = None if padding_mask is None else padding_mask != 0
    if is_token is None:
        ordinal = count[:, None] + torch.arange(length, dtype=torch.int32, device=count.device)
    else:
        ordinal = count[:, None] + is_token.cumsum(1, dtype=torch.int32) - 1
    # Numbers of the tokens in their documents, but for one that has all of its sinks.
    number = ordinal if sinks_held is None else ordinal - (count - sinks_held)[:, None]
    if document_starts is None:
        return Arrivals(ordinal, is_token, number < sinks)
    start = torch.where(document_starts, ordinal, 0).cummax(1).values
    number = torch.where(document_starts.cumsum(1) > 0, ordinal - start, number)
    # The next start after each token: the least of all later ones.
    later = torch.where(document_starts, ordinal, FOREVER)
    later = F.pad(later[:, 1:], (0, 1), value=FOREVER)
    document_end = later.flip(1).cummin(1).values.flip(1)
    first = torch.where(document_starts[:, :1], ordinal[:, :1], document_end[:, :1])
    previous_end = torch.cat([first, document_end[:, :-1]], dim=1)
    return Arrivals(ordinal, is_token, number < sinks, document_end, previous_end)


def ends_of(score: Tensor, arrival: Tensor, layout: MemoryLayout, document: Tensor | None = None) -> Tensor:
    """Return the ordinal of the first query that does not see a token any more, until, [B, H, N] in int32.

    It is `FOREVER` for a token that none of the others replaces. Later tokens may still replace it.

    Args:
        score: of the tokens, in the order of their arrival, [B, H, N]; +∞ for sinks.
        arrival: [B, H, N]; `EMPTY` for places without a token.
        layout: says W and K.
        document: what tells the documents of tokens apart, [B, H, N], or None where there is one.
    """
    if layout.slots:
        ranked = (score < math.inf) & (arrival >= 0)
        number = score.shape[-1]
        earlier = torch.ones(number, number, dtype=torch.bool, device=score.device).tril(-1)
        ours, theirs = score[..., :, None], score[..., None, :]
        better = ((theirs > ours) | ((theirs == ours) & earlier)) & ranked[..., None, :]
        if document is not None:
            better = better & (document[..., :, None] == document[..., None, :])
        place = (better.cumsum(-1, dtype=torch.int32) < layout.slots).sum(-1)  # that of the K-th better one
        beaten = arrival.gather(-1, place.clamp_max(number - 1))
        end = torch.where(place < number, torch.maximum(arrival, beaten) + layout.window, FOREVER)
    else:
        end = arrival + layout.window
    return torch.where(score == math.inf, FOREVER, end)


class Chunk(NamedTuple):
    """Some new tokens behind those of a memory, N = P + C in all.

    Attributes:
        keys_values: keys and values, [B, H, N, 2d].
        visible: which of them the new tokens' queries see, [B, H or 1, C, N].
        leaves: which of them is forgotten with each new token, [B, H, C]; the new token's own number where none is.
        forgets: whether one is, [B, H, C].
    """

    keys_values: Tensor
    visible: Tensor
    leaves: Tensor
    forgets: Tensor


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
    ordinal, is_token, is_sink, document_end, previous_end = arrivals
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
    end = ends_of(score, arrival, layout, document)
    # What a new document ends is not forgotten to the state, which begins anew as well.
    forgotten = end if document is None else end.masked_fill(end >= document, FOREVER)
    end = end if document is None else torch.minimum(end, document)
    end = end.masked_fill(arrival < 0, 0)

    now = ordinal[:, None, :, None]
    visible = (arrival[:, :, None] <= now) & (now < end[:, :, None])
    if is_token is not None:  # padding sees something, so that nothing is divided by 0
        visible = visible | ~is_token[:, None, :, None]

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
    )
    return Chunk(keys_values, visible, leaves, forgets), new


def in_order(memory: Memory) -> Memory:
    """Return a memory with its places in the order of arrival, empty ones first: steps fill them in any order."""
    if memory.keys_values is None:
        return memory
    rows, score, arrival = memory.filled()
    order = arrival.argsort(dim=-1)
    return replace(
        memory,
        keys_values=rows.gather(2, rows_at(order, rows)),
        score=score.gather(-1, order),
        arrival=arrival.gather(-1, order),
    )


class Target(NamedTuple):
    """The place that the next token of a text takes, and what follows from it: nothing here depends on the token.

    Attributes:
        place: an empty one, or that of the token that is forgotten with the new one, [B, H, 1].
        row: the place as an index of keys and values, [B, H, 1, 2d].
        ordinal: number of tokens before the new one, [B, 1] in float32, or None without slots.
        arrival: the same in int32, [B, H, 1].
        is_sink: whether the new one is one of the first S, [B, H, 1], or None where it is known that it is not.
        forgets: whether a token is forgotten with it, [B, H, 1], or None where it is known that one is, or nobody asks.
        visible: which places hold a token then, [B, H, 1, P], or None where it is known that all of them do.
    """

    place: Tensor
    row: Tensor
    ordinal: Tensor | None
    arrival: Tensor
    is_sink: Tensor | None
    forgets: Tensor | None
    visible: Tensor | None


def targets_of(memories: Sequence[Memory], layout: MemoryLayout) -> list[Target]:
    """Return the targets of memories of one layout: many layers at once, since each operation costs as much for one."""
    score = torch.stack([cast(Tensor, memory.score) for memory in memories])
    arrival = torch.stack([cast(Tensor, memory.arrival) for memory in memories])
    ordinal = (arrival.amax((2, 3), keepdim=True) + 1).clamp_min_(0)
    ranked = score.masked_fill(arrival > ordinal - layout.window, math.inf)  # the window's are not forgotten
    worse = ranked != ranked.amin(-1, keepdim=True)
    place = arrival.masked_fill(worse, -(2**31)).argmax(-1, keepdim=True)  # of several, the last to come
    arrived = ordinal.expand_as(place)
    is_sink = forgets = visible = None
    if not _is_known(arrival >= 0):
        is_sink = (score == math.inf).sum(-1, keepdim=True) < layout.sinks
        visible = (arrival.scatter(-1, place, arrived) >= 0)[..., None, :]
        forgets = arrival.gather(-1, place) >= 0 if layout.state_rows else None
    row = place[..., None].expand(*place.shape, 2 * layout.head_dim)
    number = ordinal[..., 0].float() if layout.slots else None
    tensors = (place, row, number, arrived, is_sink, forgets, visible)
    split = ([None] * len(memories) if tensor is None else tensor.unbind() for tensor in tensors)
    return [Target(*parts) for parts in zip(*split, strict=True)]


def _is_known(condition: Tensor) -> bool:
    """Return whether a condition is known to hold everywhere, where asking makes nobody wait for a device."""
    return condition.device.type == "cpu" and not is_tracing(condition) and bool(condition.all())


def put(
    memory: Memory, target: Target, keys_values: Tensor, score: Tensor | None, is_token: Tensor | None = None
) -> None:
    """Put one new token into its place, in place.

    Args:
        memory: changed in place; its places are in any order.
        target: of the memory.
        keys_values: key and value of the new token, [B, H, 1, 2d].
        score: of the new token, [B, H, 1], or None without slots.
        is_token: False where there is padding in place of a token, which changes nothing, [B, 1]; None for tokens alone.
    """
    rows, scores, arrivals = memory.filled()
    score = torch.zeros_like(scores[..., :1]) if score is None else score.to(scores.dtype)
    score = score if target.is_sink is None else score.masked_fill(target.is_sink, math.inf)
    keys_values, arrival = keys_values.to(rows.dtype), target.arrival
    if is_token is not None:
        is_new = is_token[:, None]
        keys_values = torch.where(is_new[..., None], keys_values, rows.gather(2, target.row))
        score = torch.where(is_new, score, scores.gather(-1, target.place))
        arrival = torch.where(is_new, arrival, arrivals.gather(-1, target.place))
    rows.scatter_(2, target.row, keys_values)
    scores.scatter_(-1, target.place, score)
    arrivals.scatter_(-1, target.place, arrival)


def rows_at(places: Tensor, rows: Tensor) -> Tensor:
    """Return places [B, H, n] as an index of ``rows`` [B, H, N, ·] for `torch.gather` and `torch.scatter`."""
    return places[..., None].expand(*places.shape, rows.shape[-1])


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
        if self.sink_logits is None:
            return output, log_total
        log_sink = self.sink_logits.to(log_total.dtype).view(query.shape[1], -1)
        log_sink = log_sink.repeat(1, query.shape[2] // log_sink.shape[1])[..., None]
        return output * torch.sigmoid(log_total - log_sink), torch.logaddexp(log_total, log_sink)


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
) -> tuple[Exact, Memory]:
    """Take new tokens into a memory, `CHUNK_LENGTH` at a time, and attend: prompts and training.

    The memory's places have to be in the order of arrival (`in_order`). Arguments are those of `absorb` and `Reading`.
    """
    heads, groups = query.shape[1], query.shape[2] // keys_values.shape[2]
    parts, start = [], 0
    for chunk, after in _chunks(keys_values, score, arrivals, memory, layout):
        memory = after
        stop = start + chunk.visible.shape[2] * groups
        rows, start = query[:, :, start:stop], stop
        output, log_total = reading(rows, chunk.keys_values, chunk.visible.expand(-1, heads, -1, -1))
        leaving = chunk.keys_values.gather(2, rows_at(chunk.leaves, chunk.keys_values)) if reading.joined else None
        parts.append(Exact(output, log_total, leaving, chunk.forgets if reading.joined else None))
    if len(parts) == 1:
        return parts[0], memory
    joined: Any = (None if each[0] is None else torch.cat(each, dim=2) for each in zip(*parts, strict=True))
    return Exact(*joined), memory


def take_in(
    keys_values: Tensor, score: Tensor | None, arrivals: Arrivals, memory: Memory, layout: MemoryLayout
) -> Memory:
    """Return a memory after new tokens; arguments are those of `attend_in_chunks`."""
    return [after for _, after in _chunks(keys_values, score, arrivals, memory, layout)][-1]


def _chunks(
    keys_values: Tensor, score: Tensor | None, arrivals: Arrivals, memory: Memory, layout: MemoryLayout
) -> Iterator[tuple[Chunk, Memory]]:
    """Yield new tokens `CHUNK_LENGTH` at a time, and the memory after them."""
    length = keys_values.shape[2]
    if isinstance(length, torch.SymInt) or length <= CHUNK_LENGTH:  # an exporter that leaves it open has no other parts
        yield absorb(memory, keys_values, score, arrivals, layout)
        return
    rows, parts = keys_values.split(CHUNK_LENGTH, dim=2), arrivals.split(CHUNK_LENGTH)
    scores = [None] * len(rows) if score is None else score.split(CHUNK_LENGTH, dim=2)
    for row, ranks, arrived in zip(rows, scores, parts, strict=True):
        chunk, memory = absorb(memory, row, ranks, arrived, layout)
        yield chunk, memory
