"""Exponential features with all that is linear before the exponent folded into few operations.

For use without gradients: a step of decoding is a few small operations instead of a score, most of whose time is overhead.

    Wq̂ + b                       = W(αq) + b
    W'k̂ + b' − Σ a_i k̂_i²/2 − c  = W'κ + b'' − Σ e_i κ_i²       κ = α'(k − μ)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Folded:
    """The matrices of one map.

    Attributes:
        query_scale: α, [H, 1, d].
        query_weight: Wᵀ, [H, d, D].
        query_bias: b, [H, 1, D].
        key_shift: μ, [H, 1, d].
        key_scale: α', [H, 1, d].
        key_weight: W'ᵀ, [H, d, D]; the same tensor as ``query_weight`` where W' = W, so that it is read from memory once.
        key_bias: b'' = b' − c, [H, 1, D].
        key_norm: e, [H, d, 1].
        query_shift: sμ, [H, d, 1], s being the model's scaling.
        offset_bias: what the offset of an exact window has of constants, [H, 1, 1], or None without a window.
    """

    query_scale: Tensor
    query_weight: Tensor
    query_bias: Tensor
    key_shift: Tensor
    key_scale: Tensor
    key_weight: Tensor
    key_bias: Tensor
    key_norm: Tensor
    query_shift: Tensor
    offset_bias: Tensor | None

    def query_exponent(self, query: Tensor) -> Tensor:
        """Return Wq̂ + b of queries [B, H, T, d], as [B, H, T, D]."""
        return _by_heads(query, lambda flat: torch.baddbmm(self.query_bias, flat * self.query_scale, self.query_weight))

    def key_exponent(self, key: Tensor) -> Tensor:
        """Return the exponents of keys [B, H, T, d], c subtracted, as [B, H, T, D]."""

        def exponent(flat: Tensor) -> Tensor:
            scaled = (flat - self.key_shift).mul_(self.key_scale)
            linear = torch.baddbmm(self.key_bias, scaled, self.key_weight)
            return linear.sub_(torch.bmm(scaled.square_(), self.key_norm))

        return _by_heads(key, exponent)

    def offset(self, query: Tensor, maximum: Tensor) -> Tensor:
        """Return the offset of an exact window (`FeatureMap.forward`), [B, H, T, 1].

        Args:
            query: [B, H, T, d].
            maximum: what was subtracted from the queries' exponents, [B, H, T, 1].
        """
        if self.offset_bias is None:
            raise ValueError("this map has no exact window beside it, and so no offset.")
        bias = self.offset_bias

        def rest(flat: Tensor) -> Tensor:
            norm = (flat * self.query_scale).square_().sum(dim=-1, keepdim=True).div_(2)
            return norm.sub_(torch.bmm(flat, self.query_shift)).add_(bias)

        return _by_heads(query, rest) - maximum


def _by_heads(x: Tensor, function: Any) -> Tensor:
    """Apply a function of [H, N, d] to [B, H, T, d]."""
    batch, heads, length, width = x.shape
    flat = x.transpose(0, 1)
    flat = flat.squeeze(2) if length == 1 else flat.reshape(heads, batch * length, width)
    return function(flat).view(heads, batch, length, -1).transpose(0, 1)


def stamp(tensors: Iterable[Tensor], dtype: torch.dtype) -> tuple[Any, ...] | None:
    """Return what changes when one of the tensors does, or None if that cannot be told.

    Writing through ``.data`` escapes it; `FeatureMap` also forgets what it folded on every change of mode or device.
    """
    try:
        return dtype, *[(tensor.data_ptr(), tensor._version) for tensor in tensors]
    except RuntimeError:  # tensors made in inference mode have no version, and some no storage
        return None
