"""Blocks of fixed size that a server keeps, one a sequence, and where the states of the attention layers lie in them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..models.attention import RFAAttentionMixin
from ..models.feature_maps import compute_dtype

#: Bytes that every tensor in a block starts at a multiple of: no dtype is larger.
ALIGNMENT = 16


class Piece(NamedTuple):
    """One tensor of a layer, as it lies in a block: its first byte, its shape and its dtype."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class StateLayout(NamedTuple):
    """The tensors of one layer in a block, as `RFALayer` holds them for one sequence.

    Attributes:
        state: feature sums, [H, F, d + 1], or None without features.
        window: keys and values of sinks, slots and the last tokens, [H, S + K + W, ·], or None without a window.
        retrieval: those of retrieval heads, [R, S + W', ·], or None where there are none.
    """

    state: Piece | None
    window: Piece | None
    retrieval: Piece | None

    @property
    def end(self) -> int:
        """The first byte after all of them."""
        return aligned(max(piece.offset + piece.num_bytes for piece in self if piece is not None))

    def views(self, blocks: Tensor) -> tuple[Tensor | None, ...]:
        """Return the tensors in all blocks, [blocks, H, ·, ·] each, as views of their bytes [blocks, bytes]."""
        return tuple(None if piece is None else _view(blocks, piece) for piece in self)


def _view(blocks: Tensor, piece: Piece) -> Tensor:
    return blocks[:, piece.offset : piece.offset + piece.num_bytes].view(piece.dtype).unflatten(1, piece.shape)


def aligned(offset: int) -> int:
    """Return the first multiple of `ALIGNMENT` that is not below a number of bytes."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def state_layout(attention: RFAAttentionMixin, dtype: torch.dtype, *, offset: int = 0) -> StateLayout:
    """Return where the tensors of an attention layer lie in a block.

    Args:
        attention: the layer; its feature map says how many key-value heads have features.
        dtype: that of the model, in which keys and values come.
        offset: the first byte that is free.

    Raises:
        ValueError: if the layer's retrieval heads see all tokens, so that no size is fixed.
    """
    feature_map, retrieval_heads = attention.feature_map, len(attention.retrieval_heads)
    if retrieval_heads and not attention.retrieval_window:
        raise ValueError("retrieval heads that see all tokens grow with the text: no block of fixed size holds them.")
    heads, width = feature_map.num_heads, feature_map.head_dim
    state_dtype = torch.promote_types(attention.state_dtype, compute_dtype(dtype))
    state = window = retrieval = None
    columns, offset = 2 * width + 1, aligned(offset)
    if feature_map.feature_dim:
        norm_row = feature_map.denominator_floor is not None  # of features with negative entries
        state = Piece(offset, (heads, feature_map.feature_dim + norm_row, width + 1), state_dtype)
        offset = aligned(offset + state.num_bytes)
    if attention.window_size:
        kept = dtype if attention.gate is None else state_dtype
        importance = max(1, torch.float32.itemsize // kept.itemsize) if attention.num_slots else 0
        window = Piece(offset, (heads, sum(attention.window_sizes), columns + importance), kept)
        offset = aligned(offset + window.num_bytes)
    if retrieval_heads:
        retrieval = Piece(offset, (retrieval_heads, sum(attention.retrieval_sizes), columns), dtype)
    return StateLayout(state, window, retrieval)
