"""Feature maps with a matrix: φ is a nonlinearity of Wq̂ + b, and what turns exponents into features that never overflow."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from .feature_maps import (
    MAX_EXPONENT,
    MIN_DIFFERENTIABLE_EXPONENT,
    QUERY_EXPONENT,
    FeatureMap,
    Features,
    compute_dtype,
    least_shift_above,
)


@dataclass(frozen=True)
class FeatureSpec:
    """The linear part of a map, of which every nonlinearity makes its features: Wq̂ + b, and W'k̂ + b' − Σ e_i k̂_i².

    q̂ = α q and k̂ = α'(k − μ), or with normalized queries and keys in place of q and k − μ.

    Attributes:
        query_scale: α, [H, 1, d].
        query_weight: Wᵀ, [H, d, D]; or [H G, d, D], one for each query head of a group.
        query_bias: b, [H, 1, D] or [H G, 1, D].
        key_scale: α', [H, 1, d].
        key_weight: W'ᵀ, [H, d, D]; the same tensor as ``query_weight`` where W' = W, so that it is read from memory once.
        key_bias: b', [H, 1, D].
        key_mean: μ, [H, 1, d], or None for 0.
        key_norm: e, [H, d, 1], or None for 0.
        unit_norm: whether queries and keys are normalized.
    """

    query_scale: Tensor
    query_weight: Tensor
    query_bias: Tensor
    key_scale: Tensor
    key_weight: Tensor
    key_bias: Tensor
    key_mean: Tensor | None = None
    key_norm: Tensor | None = None
    unit_norm: bool = False

    def query_input(self, query: Tensor) -> Tensor:
        """Return q̂ of queries by heads, [H, N, d]."""
        return (F.normalize(query, dim=-1) if self.unit_norm else query) * self.query_scale

    def key_input(self, key: Tensor) -> Tensor:
        """Return k̂ of keys by heads, [H, N, d]."""
        if self.unit_norm:
            return F.normalize(key, dim=-1) * self.key_scale
        return key * self.key_scale if self.key_mean is None else _into(key - self.key_mean, "mul", self.key_scale)

    def query_linear(self, query_input: Tensor) -> Tensor:
        """Return Wq̂ + b of prepared queries [H, N, d], [H, N, D]; where W is per query head, row t G + g is of head g."""
        heads = query_input.shape[0]
        if self.query_weight.shape[0] == heads:
            return torch.baddbmm(self.query_bias, query_input, self.query_weight)
        groups = self.query_weight.shape[0] // heads
        by_query_head = query_input.unflatten(1, (-1, groups)).transpose(1, 2).flatten(0, 1)
        linear = torch.baddbmm(self.query_bias, by_query_head, self.query_weight)
        return linear.unflatten(0, (heads, groups)).transpose(1, 2).flatten(1, 2)

    def key_linear(self, key_input: Tensor) -> Tensor:
        """Return W'k̂ + b' − Σ e_i k̂_i², [H, N, D]."""
        linear = torch.baddbmm(self.key_bias, key_input, self.key_weight)
        return linear if self.key_norm is None else _into(linear, "sub", torch.bmm(key_input.square(), self.key_norm))

    def contiguous(self) -> FeatureSpec:
        """Return this specification with weights that lie in memory as matrix products read them."""
        weight = self.query_weight.contiguous()
        key_weight = weight if self.key_weight is self.query_weight else self.key_weight.contiguous()
        return replace(self, query_weight=weight, key_weight=key_weight)


class ProjectedFeatureMap(FeatureMap):
    """A map with a matrix W per head, [H, D, d]; ``projection`` in the state dict, parameter or buffer.

    A subclass sets W in `reset_parameters`, says its linear part in `spec`, and makes features of it in `features`.
    `hf_rfa.models.random_feature_maps` has subclasses that draw W, or learn it.
    """

    #: Whether every query head of a group has a W of its own for its queries, [H G, D, d].
    query_head_matrices: ClassVar[bool] = False
    default_num_features: ClassVar[int | None] = 128
    projection: Tensor

    def build(self) -> None:
        """Add W, and what every map has."""
        super().build()
        self._cached_spec: tuple[Any, FeatureSpec] | None = None
        shape = self.num_matrices, self.num_features, self.head_dim
        self.add("projection", *shape, initial=math.nan, trainable=self.trainable)  # a subclass that forgets it shows

    @property
    def num_matrices(self) -> int:
        """The number of matrices W: H, or H G."""
        return self.num_heads * (self.groups if self.query_head_matrices else 1)

    def matrix(self) -> Tensor:
        """Return W."""
        return self.projection

    def spec(self, dtype: torch.dtype) -> FeatureSpec:
        """Return the linear part of the map in ``dtype``: W for both sides and no biases, unless a subclass has others."""
        scale = self.projection.new_ones(self.num_heads, 1, self.head_dim, dtype=dtype)
        if not self.unit_norm:
            scale = scale * math.sqrt(self.scaling)
        if self.has_sigma:
            scale = scale * self.sigma[:, None, :].to(dtype)
        weight = self.matrix().to(dtype).transpose(-1, -2)
        bias = weight.new_zeros(self.num_heads, 1, weight.shape[-1])
        spec = FeatureSpec(scale, weight, bias, scale, weight, bias, unit_norm=self.unit_norm)
        if not self.reparametrizable:
            return spec
        balance, mean = (each[:, None, :].to(dtype) for each in (self.balance, self.key_shift))
        return replace(spec, query_scale=scale * balance, key_scale=scale / balance, key_mean=mean)

    def current_spec(self, dtype: torch.dtype) -> FeatureSpec:
        """Return `spec`; in evaluation without gradients it is kept until a parameter or buffer changes."""
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.spec(dtype)
        # Writing through ``.data`` escapes the versions; `train` and `_apply` also forget what is kept.
        try:
            versions = [(x.data_ptr(), x._version) for x in (*self._parameters.values(), *self._buffers.values())]  # type: ignore[union-attr]
        except RuntimeError:  # tensors made in inference mode have no version, and some no storage
            return self.spec(dtype)
        if self._cached_spec is None or self._cached_spec[0] != (dtype, versions):
            self._cached_spec = (dtype, versions), self.spec(dtype).contiguous()
        return self._cached_spec[1]

    def train(self, mode: bool = True) -> Self:
        """Set the mode."""
        self._cached_spec = None
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        self._cached_spec = None
        return super()._apply(*args, **kwargs)

    @abstractmethod
    def features(self, spec: FeatureSpec, query: Tensor, key: Tensor | None, least_shift: Tensor | None) -> Features:
        """Return features by heads, of queries [H, N, d] and keys [H, N', d] or None; see `forward`."""

    def forward(
        self, query: Tensor, key: Tensor | None = None, *, least_shift: Tensor | None = None, offset: bool = False
    ) -> Features:
        """Return the features of queries and keys; see `FeatureMap.forward`."""
        dtype = compute_dtype(query.dtype)
        by_heads = None if key is None else to_heads(key.to(dtype))
        found = self.features(self.current_spec(dtype), to_heads(query.to(dtype)), by_heads, least_shift)
        key_features = found.key if key is None else from_heads(found.key, key)
        offsets = None
        if offset:
            zeros = found.query.new_zeros(*found.query.shape[:-1], 1)
            offsets = self.window_shift[:, None, None] + zeros if found.offset is None else found.offset
            offsets = from_heads(offsets, query)
        return Features(from_heads(found.query, query), key_features, offsets, found.shift)

    def query(self, query: Tensor) -> Tensor:
        """Return the features of queries [B, H, T, d] as [B, H, T, F]."""
        return self(query).query

    def key(self, key: Tensor) -> Tensor:
        """Return the features of keys [B, H, T, d] as [B, H, T, F]."""
        return self(key, key).key


def to_heads(x: Tensor) -> Tensor:
    """Return [B, H, T, d] as [H, B T, d]."""
    batch, heads, length, width = x.shape
    flat = x.transpose(0, 1)
    return flat.squeeze(2) if length == 1 else flat.reshape(heads, batch * length, width)


def from_heads(flat: Tensor, like: Tensor) -> Tensor:
    """Return [H, B T, n] as [B, H, T, n], with the sizes of ``like`` [B, H, T, d]."""
    batch, heads, length, _ = like.shape
    return flat.view(heads, batch, length, -1).transpose(0, 1)


def exponentiate_queries(exponent: Tensor) -> tuple[Tensor, Tensor]:
    """Return exp(exponent − l) and l, [H, N, 1], which makes a query's largest feature e^40."""
    maximum = exponent.detach().amax(dim=-1, keepdim=True) - QUERY_EXPONENT
    return _into(_into(exponent, "sub", maximum), "exp"), maximum


def exponential_features(
    query: Tensor, key: Tensor | None, least_shift: Tensor | None, window_shift: Tensor | None
) -> tuple[Features, Tensor]:
    """Return features by heads with exponents ``query`` [H, N, F] and ``key`` [H, N', F], and l of `exponentiate_queries`.

    The head's constant is subtracted from ``key`` already, or ``key`` is None. With a ``window_shift`` [H] the features have
    an offset, which follows their shift.
    """
    key_features, shift, offset = query.new_empty(0), least_shift, None
    if key is not None:
        key_features, shift = exponentiate_keys(key, least_shift)
    if shift is not None:
        exponent, query = query.detach(), query + shift
        if window_shift is not None:  # the shift takes a factor from φ(q)·φ(k), as a query's largest feature stays e^40
            change = query.detach().amax(dim=-1, keepdim=True) - exponent.amax(dim=-1, keepdim=True)
            offset = window_shift[:, None, None] - change
    features, log_scale = exponentiate_queries(query)
    return Features(features, key_features, offset, shift), log_scale


def rectified_features(spec: FeatureSpec, query: Tensor, key: Tensor | None) -> Features:
    """Return features of the kind max(0, ·) by heads, of queries [H, N, d] and keys [H, N', d]."""
    query_features = F.relu(spec.query_linear(spec.query_input(query)))
    key_features = query.new_empty(0) if key is None else F.relu(spec.key_linear(spec.key_input(key)))
    return Features(query_features, key_features, None, None)


def exponentiate_keys(exponent: Tensor, least: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return exp(min(exponent, 25) − r) of exponents [H, N, n] and r ≥ ``least``, at which none overflows. None is r = 0."""
    if least is None:
        return _into(_into(exponent, "clamp", None, MAX_EXPONENT), "exp"), None
    shift = least_shift_above(exponent.detach().amax(dim=1, keepdim=True), least)
    exponent = (exponent - shift).clamp(max=MAX_EXPONENT)  # where r < 0 none reaches it
    exponent = torch.where(exponent < MIN_DIFFERENTIABLE_EXPONENT, exponent.detach(), exponent)
    return exponent.exp(), shift


def _into(x: Tensor, operation: str, *args: Any) -> Tensor:
    """Return ``x.operation(*args)``; in place without gradients, since fresh memory costs more time than the arithmetic."""
    return getattr(x, operation if torch.is_grad_enabled() else f"{operation}_")(*args)
