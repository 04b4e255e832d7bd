"""The cache layers of cross attention: finished states of a source."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from .cache_rfa import RFALayer, layer_at
from .memory import Memory


class RFASourceLayer(RFALayer):
    """Holds the finished state of one cross-attention layer: sums over the source, which no later step changes.

    Row n of the state serves ``rows_per_state`` rows of the batch in succession: the beams of a sequence read one state,
    and reordering them moves nothing.
    """

    holds = "RFA source state"
    _layer_type = None  # type: ignore[assignment]  # made by `cross_layer_of`, not from a configuration

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rows_per_state = 1

    def fill(self, state: Tensor, *, length: int, rows_per_state: int) -> None:
        """Store the state [N, H, rows, d + 1] (`hf_rfa.models.linear_attention.final_state`) of ``length`` source tokens.

        The length includes padding; ``rows_per_state`` rows of the batch read one row of the state.
        """
        self.memories = [Memory(state=state)]
        self.lazy_initialization(state, state)
        self.cumulative_length.fill_(length)
        self.rows_per_state = rows_per_state

    @property
    def state(self) -> Tensor | None:
        """The state, or None before `fill`."""
        return self.memories[0].state if self.memories else None

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Raise a TypeError: the state is filled once."""
        raise TypeError("a self-attention layer wrote to the cache layer of RFA cross attention.")

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the batch for beam search: nothing moves as long as every beam stays with its sequence."""
        if self.state is None:
            return
        rows = torch.arange(beam_idx.shape[0], device=beam_idx.device)
        if not torch.equal(beam_idx // self.rows_per_state, rows // self.rows_per_state):
            self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows of the batch, each of which then reads a state of its own."""
        super().batch_select_indices(indices // self.rows_per_state)
        self.rows_per_state = 1

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch: more rows read one state."""
        self.rows_per_state *= repeats

    def reset(self) -> None:
        """Forget the source: the next one may be as long as it likes."""
        super().reset()
        self.memories, self.rows_per_state = [], 1


def cross_layer_of(cache: Cache, layer_idx: int, *, softmax: bool = False) -> Any:
    """Return layer ``layer_idx`` of a cross-attention cache, made one of the right kind before its first use.

    The right kind is an `RFASourceLayer`, or a layer for keys and values where attention is ``softmax``.

    Raises:
        TypeError: if a layer of the other kind is in use.
    """
    layer = layer_at(cache, layer_idx)
    holds = getattr(layer, "holds", None)
    if holds == (None if softmax else RFASourceLayer.holds):
        return layer
    new = DynamicLayer() if softmax else RFASourceLayer()
    if getattr(layer, "is_initialized", False):
        raise TypeError(
            f"layer {layer_idx} of the cross-attention cache is a {type(layer).__name__} in use, but the model needs a "
            f"{type(new).__name__} there: the cache was filled by another model."
        )
    cache.layers[layer_idx] = new
    return new
