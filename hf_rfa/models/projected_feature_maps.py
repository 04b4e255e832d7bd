"""Feature maps with a matrix: φ is a nonlinearity of Wq̂ + b. The base classes, then one class for each random map.

Random matrices are drawn per layer and head from a seed, and saved with the model. What turns exponents into features that
never overflow is here too.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import initialization as init

from .feature_maps import (
    MAX_EXPONENT,
    MIN_DIFFERENTIABLE_EXPONENT,
    QUERY_EXPONENT,
    QUERY_EXPONENT_WITH_GRADIENTS,
    FeatureMap,
    Features,
    compute_dtype,
    into,
    least_shift_above,
    register_feature_map,
)


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """The linear part of a map, of which every nonlinearity makes its features, as products with raw queries and keys.

    With Wq̂ + b and W'k̂ + b' of prepared queries and keys (`InputScaling`), the scales are in the weights. Queries and keys
    are by heads, [H, N, d].

    Attributes:
        query_weight: αWᵀ, [H, d, D]; or [H G, d, D], one for each query head of a group.
        query_bias: b, [H, 1, D] or [H G, 1, D].
        key_weight: α'W'ᵀ, [H, d, D]; the same tensor as ``query_weight`` where they are equal, so that it is read once.
        key_bias: b', [H, 1, D].
        query_norm: α²/2, [H, d, 1], by which squares are ‖q̂‖²/2.
        key_norm: e α'²/2, [H, d, 1], by which squares are Σ e_i k̂_i²/2; e is 1 unless it is trained.
        key_mean: μ, [H, 1, d], or None for 0.
        offset: what the offset of all queries has in common, [H, 1, 1], or None without one (`Features.offset`).
        unit_norm: whether queries and keys are normalized first.
    """

    query_weight: Tensor
    query_bias: Tensor
    key_weight: Tensor
    key_bias: Tensor
    query_norm: Tensor
    key_norm: Tensor
    key_mean: Tensor | None = None
    offset: Tensor | None = None
    unit_norm: bool = False

    def query_input(self, query: Tensor) -> Tensor:
        """Return what the products with queries [H, N, d] are of."""
        return F.normalize(query, dim=-1) if self.unit_norm else query

    def key_input(self, key: Tensor) -> Tensor:
        """Return what the products with keys [H, N, d] are of."""
        if self.unit_norm:
            return F.normalize(key, dim=-1)
        return key if self.key_mean is None else key - self.key_mean

    def query_linear(self, query_input: Tensor) -> Tensor:
        """Return Wq̂ + b, [H, N, D]; where W is per query head, row t G + g is of head g."""
        heads = query_input.shape[0]
        if self.query_weight.shape[0] == heads:
            return torch.baddbmm(self.query_bias, query_input, self.query_weight)
        groups = self.query_weight.shape[0] // heads
        by_query_head = query_input.unflatten(1, (-1, groups)).transpose(1, 2).flatten(0, 1)
        linear = torch.baddbmm(self.query_bias, by_query_head, self.query_weight)
        return linear.unflatten(0, (heads, groups)).transpose(1, 2).flatten(1, 2)

    def key_linear(self, key_input: Tensor) -> Tensor:
        """Return W'k̂ + b', [H, N, D]."""
        return torch.baddbmm(self.key_bias, key_input, self.key_weight)

    def contiguous(self) -> FeatureSpec:
        """Return this specification with weights that lie in memory as matrix products read them."""
        weight = self.query_weight.contiguous()
        key_weight = weight if self.key_weight is self.query_weight else self.key_weight.contiguous()
        return replace(self, query_weight=weight, key_weight=key_weight)


class ProjectedFeatureMap(FeatureMap):
    """A map with a matrix W per head, [H, D, d]; ``projection`` in the state dict, parameter or buffer.

    A subclass says its linear part in `spec`, and makes features of it in `features`: see `RandomFeatureMap`.
    """

    #: Whether W is trained whatever the argument ``trainable`` says.
    learned: ClassVar[bool] = False
    #: Whether every query head of a group has a W of its own for its queries, [H G, D, d].
    query_head_matrices: ClassVar[bool] = False
    default_num_features: ClassVar[int | None] = 128
    projection: Tensor

    def build(self) -> None:
        """Add W, and what every map has."""
        super().build()
        self._cached_spec: tuple[Any, FeatureSpec] | None = None
        shape = self.num_matrices, self.num_features, self.head_dim
        self.add("projection", *shape, trainable=self.trainable or self.learned)

    def initial_projection(self) -> Tensor:
        """Return the initial value of W, [H, D, d]: random, unless a subclass has another."""
        shape = self.num_heads, self.num_features, self.head_dim
        return draw_projection(shape, seed=self.seed, layer_idx=self.layer_idx)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set W, and initialize the rest."""
        super().reset_parameters()
        init.copy_(self.projection, self.initial_projection().repeat_interleave(self.num_matrices // self.num_heads, 0))

    @property
    def num_matrices(self) -> int:
        """The number of matrices W: H, or H G."""
        return self.num_heads * (self.groups if self.query_head_matrices else 1)

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Return W and W', which are one tensor unless a subclass has two."""
        return self.projection, self.projection

    def spec(self, dtype: torch.dtype) -> FeatureSpec:
        """Return the linear part of the map in ``dtype``: without biases, unless a subclass has some."""
        scaling, (matrix, key_matrix) = self.input_scaling(dtype), self.matrices()
        ones = matrix.new_ones(self.num_heads, 1, self.head_dim, dtype=dtype)
        query_scale, key_scale = (
            (ones * scale).transpose(-1, -2) for scale in (scaling.query_scale, scaling.key_scale)
        )
        by_matrix = query_scale.repeat_interleave(matrix.shape[0] // self.num_heads, dim=0)
        weight = key_weight = matrix.to(dtype).transpose(-1, -2) * by_matrix
        if key_matrix is not matrix or scaling.key_scale is not scaling.query_scale:
            key_weight = key_matrix.to(dtype).transpose(-1, -2) * key_scale
        bias, offset = weight.new_zeros(self.num_heads, 1, weight.shape[-1]), None
        if self.windowed and self.softmax_kernel and not self.unit_norm:
            offset = (self.window_shift - self.log_scale + math.log(self.num_features)).to(dtype)[:, None, None]
        return FeatureSpec(
            query_weight=weight,
            query_bias=bias,
            key_weight=key_weight,
            key_bias=bias,
            query_norm=query_scale.square() / 2,
            key_norm=key_scale.square() / 2,
            key_mean=scaling.key_mean,
            offset=offset,
            unit_norm=self.unit_norm,
        )

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
        features = self.features(self.current_spec(dtype), to_heads(query.to(dtype)), by_heads, least_shift)
        key_features = features.key if key is None else from_heads(features.key, key)
        offsets = None
        if offset:
            zeros = features.query.new_zeros(*features.query.shape[:-1], 1)
            offsets = self.window_shift[:, None, None] + zeros if features.offset is None else features.offset
            offsets = from_heads(offsets, query)
        return Features(from_heads(features.query, query), key_features, offsets, features.shift)

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
    """Return exp(exponent − l) and l, [H, N, 1], which makes a query's largest feature e^40, with gradients e^20."""
    largest = QUERY_EXPONENT_WITH_GRADIENTS if torch.is_grad_enabled() else QUERY_EXPONENT
    maximum = exponent.detach().amax(dim=-1, keepdim=True) - largest
    return into(into(exponent, "sub", maximum), "exp"), maximum


def exponentiate_keys(exponent: Tensor, least: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return exp(min(exponent, 25) − r) of exponents [H, N, n] and r ≥ ``least``, at which none overflows. None is r = 0."""
    if least is None:
        return into(into(exponent, "clamp", None, MAX_EXPONENT), "exp"), None
    shift = least_shift_above(exponent.detach().amax(dim=1, keepdim=True), least)
    exponent = (exponent - shift).clamp(max=MAX_EXPONENT)  # where r < 0 none reaches it
    exponent = torch.where(exponent < MIN_DIFFERENTIABLE_EXPONENT, exponent.detach(), exponent)
    return exponent.exp(), shift


def draw_projection(shape: Sequence[int], *, seed: int, layer_idx: int) -> Tensor:
    """Return the random matrices of one layer, [H, D, d] in float32; every row is distributed as N(0, I).

    Blocks of d rows are orthogonal, with the norms of Gaussian rows (Yu et al. 2016, Choromanski et al. 2021).

    Args:
        shape: [H, D, d]: heads, rows per head, columns.
        seed: the model's seed for random features.
        layer_idx: the layer, so that layers draw different matrices.
    """
    num_heads, num_features, head_dim = shape
    # torch's generator for the CPU reads the lowest 32 bits of a seed, and refuses one of more than 64.
    generator = torch.Generator().manual_seed((seed * 1_000_003 + layer_idx) * 1_000_003 % 2**32)
    rows = math.ceil(num_features / head_dim) * head_dim
    gaussian = torch.randn(num_heads, rows, head_dim, generator=generator, dtype=torch.float64)
    blocks, triangle = torch.linalg.qr(gaussian.view(num_heads, -1, head_dim, head_dim))
    # Q is uniformly distributed only if R's diagonal is positive, which LAPACK does not promise.
    blocks = blocks * triangle.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
    norms = torch.randn(num_heads, rows, head_dim, generator=generator, dtype=torch.float64).norm(dim=-1)
    projection = blocks.reshape(num_heads, rows, head_dim) * norms[..., None]
    return projection[:, :num_features].float()


class RandomFeatureMap(ProjectedFeatureMap):
    """A map with a random matrix, fixed, or trained from its random initial value."""

    has_sigma = has_random_matrix = True


@register_feature_map("gaussian")
class GaussianMap(RandomFeatureMap):
    """φ(x) = [sin(Wx), cos(Wx)] / √D, F = 2D: random Fourier features (Rahimi and Recht 2007; Peng et al. 2021, eq. 4).

    With unit norms the kernel is exp(−‖q̂ − k̂‖²/2), which is the softmax kernel but for a constant. With the norm carried
    φ(k) gets the factor exp(‖k̂‖²/2 − c). The factor 1/√D cancels.
    """

    denominator_floor = 0.1
    softmax_kernel = True
    has_exponent = True
    default_num_features = 64

    @property
    def feature_dim(self) -> int:
        """F = 2D."""
        return 2 * self.num_features

    def features(self, spec: FeatureSpec, query: Tensor, key: Tensor | None, least_shift: Tensor | None) -> Features:
        """See `ProjectedFeatureMap.features`: one shift for all features of a head."""
        query_input = spec.query_input(query)
        query_features = self._waves(spec.query_linear(query_input))
        key_features, shift = query.new_empty(0), None if self.unit_norm else least_shift
        if key is not None:
            key_input = spec.key_input(key)
            key_features = self._waves(spec.key_linear(key_input))
            if not self.unit_norm:
                exponent = torch.bmm(key_input.square(), spec.key_norm) - self.log_scale[:, None, None]
                factor, shift = exponentiate_keys(exponent, least_shift)
                key_features = key_features * factor
        offset = None
        if spec.offset is not None:
            offset = torch.baddbmm(spec.offset, query_input.square(), spec.query_norm, alpha=-1)
            offset = offset if shift is None else offset - shift
        return Features(query_features, key_features, offset, shift)

    @staticmethod
    def _waves(phase: Tensor) -> Tensor:
        return torch.cat([phase.sin(), phase.cos()], dim=-1)


@register_feature_map("arccos")
class ArcCosMap(RandomFeatureMap):
    """φ(x) = ReLU(Wx) / √D, F = D: the arc-cosine kernel of degree 1 (Cho and Saul 2009; Peng et al. 2021, section 3.1)."""

    def spec(self, dtype: torch.dtype) -> FeatureSpec:
        """See `ProjectedFeatureMap.spec`: W / √D."""
        spec = super().spec(dtype)
        weight = spec.query_weight / math.sqrt(self.num_features)
        return replace(spec, query_weight=weight, key_weight=weight)

    def features(self, spec: FeatureSpec, query: Tensor, key: Tensor | None, least_shift: Tensor | None) -> Features:
        """See `ProjectedFeatureMap.features`."""
        query_features = F.relu(spec.query_linear(spec.query_input(query)))
        key_features = query.new_empty(0) if key is None else F.relu(spec.key_linear(spec.key_input(key)))
        return Features(query_features, key_features, None, None)


@register_feature_map("positive")
class PositiveMap(RandomFeatureMap):
    """φ(x) = exp(Wx + b − ‖x‖²/2) / √D, F = D: positive random features (Choromanski et al. 2021, FAVOR+, lemma 1).

    b is 0 for W as it is drawn. Calibration replaces w by Bw and sets b = wᵀAw, which leaves the kernel as it is and lowers
    its variance on data (dense-exponential random features, Likhosherstov et al. 2023). The factors 1/√D and, of queries,
    exp(−‖x‖²/2) cancel.
    """

    softmax_kernel = True
    has_exponent = True
    feature_bias: Tensor

    def build(self) -> None:
        """Add b, and what every random map has."""
        super().build()
        self.add("feature_bias", self.num_heads, self.num_features)

    def spec(self, dtype: torch.dtype) -> FeatureSpec:
        """See `ProjectedFeatureMap.spec`: b on both sides, and c."""
        bias, constant = (tensor.to(dtype)[:, None] for tensor in (self.feature_bias, self.log_scale[:, None]))
        return replace(super().spec(dtype), query_bias=bias, key_bias=bias - constant)

    def features(self, spec: FeatureSpec, query: Tensor, key: Tensor | None, least_shift: Tensor | None) -> Features:
        """See `ProjectedFeatureMap.features`."""
        key_features, shift, offset = query.new_empty(0), least_shift, None
        if key is not None:
            key_input = spec.key_input(key)
            key_exponent = into(spec.key_linear(key_input), "sub", torch.bmm(key_input.square(), spec.key_norm))
            key_features, shift = exponentiate_keys(key_exponent, least_shift)
        exponent = spec.query_linear(spec.query_input(query))
        if spec.offset is not None:
            # The offset is window_shift − c + log D + ‖q̂‖²/2 − q·μ s − l: shifted keys change the kernel by exp(q·μ·s).
            offset = torch.baddbmm(spec.offset, query.square(), spec.query_norm)
            if spec.key_mean is not None:
                offset = torch.baddbmm(offset, query, spec.key_mean.transpose(-1, -2), alpha=-self.scaling)
        elif self.windowed:  # exact tokens are commensurate with features of queries whose largest one is 1
            offset = self.window_shift[:, None, None] + exponent.detach().amax(dim=-1, keepdim=True)
        features, log_scale = exponentiate_queries(exponent if shift is None else exponent + shift)
        return Features(features, key_features, None if offset is None else offset - log_scale, shift)
