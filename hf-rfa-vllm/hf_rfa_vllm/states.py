"""Blocks of fixed size that a server keeps, one a sequence, and where the states of the attention layers lie in them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hf_rfa.models.attention import RFAAttentionMixin

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
    """The tensors of one layer in a block, as `RFALayer.tensors` names them."""

    pieces: dict[str, Piece]

    @property
    def end(self) -> int:
        """The first byte after all of them."""
        return aligned(max(piece.offset + piece.num_bytes for piece in self.pieces.values()))

    def views(self, blocks: Tensor) -> dict[str, Tensor]:
        """Return the tensors in all blocks, [blocks, …] each, as views of their bytes [blocks, bytes]."""
        return {name: _view(blocks, piece) for name, piece in self.pieces.items()}


def _view(blocks: Tensor, piece: Piece) -> Tensor:
    flat = blocks[:, piece.offset : piece.offset + piece.num_bytes].view(piece.dtype)
    return flat.unflatten(1, piece.shape) if piece.shape else flat[:, 0]


def aligned(offset: int) -> int:
    """Return the first multiple of `ALIGNMENT` that is not below a number of bytes."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def state_layout(attention: RFAAttentionMixin, dtype: torch.dtype, *, offset: int = 0) -> StateLayout:
    """Return where the tensors of an attention layer lie in a block.

    Args:
        attention: the layer.
        dtype: that of the model, in which keys and values come.
        offset: the first byte that is free.
    """
    pieces = {}
    for index, layout in enumerate(attention.memory_layouts(dtype)):
        for name, (shape, kind) in layout.tensors().items():
            pieces[f"{index}.{name}"] = piece = Piece(aligned(offset), shape, kind)
            offset = piece.offset + piece.num_bytes
    return StateLayout(pieces)
