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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.utils.import_utils import is_tracing

from .feature_maps import compute_dtype

#: Arrival of what an empty place holds, and of padding.
EMPTY = -(2**30)
#: What the tensors of an empty memory are filled with, other than 0.
INITIAL = {"score": -math.inf, "arrival": EMPTY}


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
        max_distance: L, the distance that kept tokens never exceed (`hf_rfa.models.positions`); 0 where they stay in place.
        distance_step: B, the tokens after which old ones move along.
        dtype: that of keys and values, the model's.
    """

    heads: int
    head_dim: int
    window: int = 0
    sinks: int = 0
    slots: int = 0
    state_rows: int = 0
    max_distance: int = 0
    distance_step: int = 0
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
            if self.max_distance:
                shapes["origin"] = (), torch.int32
        if self.state_rows:
            shapes["state"] = (self.heads, self.state_rows, self.head_dim + 1), compute_dtype(self.dtype)
        return shapes

    def num_bytes(self) -> int:
        """Return the bytes of one text's memory, the counter of its origin left out."""
        tensors = self.tensors()
        tensors.pop("origin", None)
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in tensors.values())

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
        origin: eB, what is taken off the positions of keys and off the arrivals that scores count, [B] in int32
            (`hf_rfa.models.positions`), or None where tokens stay in place.
    """

    keys_values: Tensor | None = None
    score: Tensor | None = None
    arrival: Tensor | None = None
    state: Tensor | None = None
    origin: Tensor | None = None

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

    def origin_of_rows(self) -> Tensor:
        """Return the origin of a memory whose tokens move, [B] in int32."""
        return cast(Tensor, self.origin)

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
    """The importance of tokens, in nats: calibrated (`hf_rfa.convert.calibrate.importance`), not trained by gradients.

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
        """Return the tokens' scores, [B, H, T], from what came before each of them since the origin, ``ordinal`` [B, T]."""
        return torch.addcmul(self._importance(hidden_states), self.recency, ordinal.unsqueeze(-1)).transpose(1, 2)

    def _importance(self, hidden_states: Tensor) -> Tensor:
        """Return the importance of tokens when they come, [B, T, H] in float32."""
        hidden_states, weight = hidden_states.detach() if hidden_states.requires_grad else hidden_states, self.weight
        return F.linear(hidden_states.to(weight.dtype), weight)


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
        ordinal: number of tokens before the new one since the origin, [B, 1] in float32, or None without slots.
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
    number = None
    if layout.slots:
        number = ordinal[..., 0]
        if layout.max_distance:
            number = number - torch.stack([memory.origin_of_rows() for memory in memories])[..., None]
        number = number.float()
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
