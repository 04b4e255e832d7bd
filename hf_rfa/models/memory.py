"""What a layer keeps of a text: tokens in places, and a state. Their shapes, bytes and order.

Per key-value head a memory holds at most P = S + K + N tokens exactly, each in a place of its own:

- S sinks, the first tokens of a text, for good (Xiao et al. 2024, arXiv 2309.17453);
- a window, the N last tokens, the query's own included;
- K slots, the most important of the tokens that have left the window.

Every other token is forgotten: at most one with every new one, which takes its place. A token is then absorbed by the layer's
state of features, if it has one (`hf_rfa.models.linear_attention`). Which token is seen when, and which one leaves, is the
matter of `hf_rfa.models.lifetimes`; what makes a token important, that of `hf_rfa.models.importance`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

#: Arrival of what an empty place holds, and of padding.
EMPTY = -(2**30)
#: What the tensors of an empty memory are filled with, other than 0.
INITIAL = {"score": -math.inf, "arrival": EMPTY}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that phases, features, gates and states of a model in ``dtype`` are computed in."""
    return torch.promote_types(dtype, torch.float32)


def updates_in_place() -> bool:
    """Return whether one token may change a memory in place: not with gradients, nor in torch's old tracer."""
    # ``torch.onnx.export(…, dynamo=False)`` uses that tracer, which loses such updates.
    return not (torch.is_grad_enabled() or torch.jit.is_tracing())


@dataclass(frozen=True, kw_only=True)
class MemoryLayout:
    """Shapes and bytes of what some heads of a layer keep of one text: the only place that knows them.

    Attributes:
        heads: H, key-value heads.
        head_dim: d, width of a head.
        window: N, last tokens; 0 for heads that keep no token, which then have neither sinks nor slots.
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

    @property
    def kind(self) -> tuple[Any, ...]:
        """What is the same of layouts that differ in their heads alone."""
        sizes = (self.head_dim, self.window, self.sinks, self.slots, self.state_rows)
        return (*sizes, self.max_distance, self.distance_step, self.dtype)

    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape, without the batch, and dtype of every tensor of a `Memory` by its name."""
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if self.places:
            shapes["keys_values"] = (self.heads, self.places, 2 * self.head_dim), self.dtype
            shapes["score"] = (self.heads, self.places), torch.float32
            shapes["arrival"] = (self.heads, self.places), torch.int32
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
class Places:
    """The tokens of a batch of texts that some heads keep exactly, in any order.

    Attributes:
        keys_values: key and value of the token in every place, [B, H, P, 2d].
        score: the tokens' scores, [B, H, P] in float32; +∞ for sinks and −∞ for empty places.
        arrival: how many tokens of the text came before each, [B, H, P] in int32; `EMPTY` for empty places.
        origin: eB, what is taken off the positions of keys and off the arrivals that scores count, [B] in int32
            (`hf_rfa.models.positions`); 0 where tokens stay in place.
    """

    keys_values: Tensor
    score: Tensor
    arrival: Tensor
    origin: Tensor

    @property
    def count(self) -> Tensor:
        """The number of tokens of each text so far, [B] in int32: the last of them is always kept."""
        return (self.arrival.amax((1, 2)) + 1).clamp_min(0)

    def num_sinks(self) -> Tensor:
        """Return how many sinks each text already has, [B]. A text that began within a document may have fewer than S."""
        return (self.score[:, 0] == math.inf).sum(-1, dtype=torch.int32)

    def in_order(self) -> Places:
        """Return the same places in the order of their tokens' arrival, empty ones first: steps fill them in any order."""
        order = self.arrival.argsort(dim=-1)
        return replace(
            self,
            keys_values=self.keys_values.gather(2, rows_at(order, self.keys_values)),
            score=self.score.gather(-1, order),
            arrival=self.arrival.gather(-1, order),
        )


@dataclass
class Memory:
    """What some heads of a layer keep of a batch of texts.

    Attributes:
        places: the tokens that are kept exactly, or None for heads that keep none.
        state: [B, H, rows, d + 1] (`hf_rfa.models.linear_attention`), or None: without features, or at the start.
    """

    places: Places | None = None
    state: Tensor | None = None

    @staticmethod
    def of(tensors: dict[str, Tensor]) -> Memory:
        """Return the memory of tensors by the names of `tensors`."""
        places = {name: tensor for name, tensor in tensors.items() if name != "state"}
        return Memory(Places(**places) if places else None, tensors.get("state"))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that there are, by name."""
        state = {} if self.state is None else {"state": self.state}
        return state if self.places is None else {**vars(self.places), **state}

    def in_order(self) -> Memory:
        """Return the memory with its places in the order of arrival."""
        return self if self.places is None else replace(self, places=self.places.in_order())

    def map(self, function: Callable[[Tensor], Tensor]) -> Memory:
        """Return the memory with every tensor replaced by what ``function`` makes of it."""
        return Memory.of({name: function(tensor) for name, tensor in self.tensors().items()})

    def clear(self) -> None:
        """Forget all tokens in place."""
        for name, tensor in self.tensors().items():
            tensor.fill_(INITIAL.get(name, 0))

    def stored_in(self, other: Memory) -> Memory:
        """Return this memory, in the tensors of ``other`` where these have its shapes and gradients do not forbid it."""
        if self is other or not updates_in_place():
            return self
        before, stored = other.tensors(), {}
        for name, tensor in self.tensors().items():
            old = before.get(name)
            if old is None or old is tensor or old.shape != tensor.shape or old.dtype != tensor.dtype:
                stored[name] = tensor
            else:
                stored[name] = old.copy_(tensor)
        return Memory.of(stored)


def empty_memory(layout: MemoryLayout, batch: int, device: torch.device) -> Memory:
    """Return the memory of ``batch`` texts before their first token; it has no state, which the first tokens bring."""
    shapes = {name: ((batch, *shape), dtype) for name, (shape, dtype) in layout.tensors().items() if name != "state"}
    return Memory.of(
        {
            name: torch.full(shape, INITIAL.get(name, 0), dtype=dtype, device=device)
            for name, (shape, dtype) in shapes.items()
        }
    )


def rows_at(places: Tensor, rows: Tensor) -> Tensor:
    """Return places [B, H, n] as an index of ``rows`` [B, H, N, ·] for `torch.gather` and `torch.scatter`."""
    return places[..., None].expand(*places.shape, rows.shape[-1])
