"""The feature maps with matrices, one class each: first the random ones, then those that are made to be trained.

Random matrices are drawn per layer and head from a seed, and saved with the model.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import initialization as init

from .feature_maps import Features, register_feature_map
from .projected_feature_maps import (
    FeatureSpec,
    ProjectedFeatureMap,
    exponential_features,
    exponentiate_keys,
    rectified_features,
)


def draw_projection(
    shape: Sequence[int], *, seed: int, layer_idx: int, draw: int = 0, orthogonal: bool = True
) -> Tensor:
    """Return the random matrices of one layer, [H, D, d] in float32; every row is distributed as N(0, I).

    Args:
        shape: [H, D, d]: heads, rows per head, columns.
        seed: the model's seed for random features.
        layer_idx: the layer, so that layers draw different matrices.
        draw: number of the draw, 0 being the one for evaluation and the others the pool for training.
        orthogonal: whether blocks of d rows are orthogonal, with the norms of Gaussian rows (Yu et al. 2016,
            Choromanski et al. 2021), instead of independent.
    """
    num_heads, num_features, head_dim = shape
    # torch's generator for the CPU reads the lowest 32 bits of a seed, and refuses one of more than 64.
    generator = torch.Generator().manual_seed(((seed * 1_000_003 + layer_idx) * 1_000_003 + draw) % 2**32)
    rows = math.ceil(num_features / head_dim) * head_dim if orthogonal else num_features
    gaussian = torch.randn(num_heads, rows, head_dim, generator=generator, dtype=torch.float64)
    if orthogonal:
        blocks, triangle = torch.linalg.qr(gaussian.view(num_heads, -1, head_dim, head_dim))
        # Q is uniformly distributed only if R's diagonal is positive, which LAPACK does not promise.
        blocks = blocks * triangle.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
        norms = torch.randn(num_heads, rows, head_dim, generator=generator, dtype=torch.float64).norm(dim=-1)
        gaussian = blocks.reshape(num_heads, rows, head_dim) * norms[..., None]
    return gaussian[:, :num_features].float()


class RandomFeatureMap(ProjectedFeatureMap):
    """A map with a random matrix, fixed, redrawn in training, or trained from its random initial value."""

    has_sigma = True

    def draw(self, number: int) -> Tensor:
        """Return draw ``number`` of this layer's matrices, [H, D, d]."""
        shape, seed, layer_idx = (self.num_heads, self.num_features, self.head_dim), self.seed, self.layer_idx
        return draw_projection(shape, seed=seed, layer_idx=layer_idx, draw=number, orthogonal=self.orthogonal)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw W, and initialize the rest."""
        super().reset_parameters()
        init.copy_(self.projection, self.draw(0).repeat_interleave(self.num_matrices // self.num_heads, dim=0))

    def matrix(self) -> Tensor:
        """Return W: in training with a pool a fresh draw, chosen by torch's generator, otherwise the saved one."""
        if not (self.training and self.redraw_pool):
            return self.projection
        number = 1 + int(torch.randint(self.redraw_pool, ()))
        return self.draw(number).to(self.projection.device)


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
                exponent = key_input.square().sum(-1, keepdim=True) / 2 - self.log_scale[:, None, None]
                factor, shift = exponentiate_keys(exponent, least_shift)
                key_features = key_features * factor
        offset = None
        if self.windowed and not self.unit_norm:
            constant = self.log_scale[:, None, None] - math.log(self.num_features)
            log_factor = query_input.square().sum(-1, keepdim=True) / 2 + constant
            offset = self.window_shift[:, None, None] - log_factor
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
        return rectified_features(spec, query, key)


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
        """See `ProjectedFeatureMap.spec`: b on both sides, c, and e_i = ½ for keys."""
        spec = super().spec(dtype)
        bias = self.feature_bias.to(dtype)[:, None, :]
        half = torch.full_like(spec.query_scale.transpose(-1, -2), 0.5)
        constant = self.log_scale.to(dtype)[:, None, None]
        return replace(spec, query_bias=bias, key_bias=bias - constant, key_norm=half)

    def features(self, spec: FeatureSpec, query: Tensor, key: Tensor | None, least_shift: Tensor | None) -> Features:
        """See `ProjectedFeatureMap.features`."""
        query_input = spec.query_input(query)
        key_exponent = None if key is None else spec.key_linear(spec.key_input(key))
        window_shift = self.window_shift if self.windowed and self.unit_norm else None
        found, log_scale = exponential_features(spec.query_linear(query_input), key_exponent, least_shift, window_shift)
        if not self.windowed or self.unit_norm:
            return found
        # The offset is ‖q̂‖²/2 − q·μ s + window_shift − c + log D − l, summed in this order: calibration depends on it.
        offset = query_input.square().sum(-1, keepdim=True) / 2
        if self.reparametrizable:  # shifted keys change the kernel by exp(q·μ·s)
            offset = offset - torch.bmm(query, self.scaling * self.key_shift.to(query.dtype)[:, :, None])
        constant = self.window_shift - self.log_scale + math.log(self.num_features)
        return found._replace(offset=offset + constant.to(query.dtype)[:, None, None] - log_scale)


@register_feature_map("exponential")
class ExponentialMap(PositiveMap):
    """φ_q(x) = exp(Wx + b), φ_k(x) = exp(W'x + b' − Σ a_i x_i²/2), F = D: positive random features, every part trained.

    Its initial value is that of `PositiveMap` (W' = W, b = b' = 0, a = 1), so that before training it estimates the softmax
    kernel. Of query heads that share a key-value head each has a W and b of its own.
    """

    query_head_matrices = True

    key_projection: Tensor
    query_bias: Tensor
    key_bias: Tensor
    norm_weight: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "trainable": True})

    def build(self) -> None:
        """Add W, W', b, b' and a."""
        ProjectedFeatureMap.build(self)
        self.add("key_projection", self.num_heads, self.num_features, self.head_dim, trainable=True)
        self.add("query_bias", self.num_matrices, self.num_features, trainable=True)
        self.add("key_bias", self.num_heads, self.num_features, trainable=True)
        self.add("norm_weight", self.num_heads, self.head_dim, initial=1.0, trainable=True)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw W, copy it to W', and set the rest such that φ is that of `PositiveMap`."""
        super().reset_parameters()
        init.copy_(self.key_projection, self.draw(0))

    def spec(self, dtype: torch.dtype) -> FeatureSpec:
        """See `ProjectedFeatureMap.spec`."""
        return replace(
            ProjectedFeatureMap.spec(self, dtype),
            query_bias=self.query_bias.to(dtype)[:, None, :],
            key_weight=self.key_projection.to(dtype).transpose(-1, -2),
            key_bias=(self.key_bias - self.log_scale[:, None]).to(dtype)[:, None, :],
            key_norm=self.norm_weight.to(dtype)[:, :, None] / 2,
        )


class LearnedFeatureMap(ProjectedFeatureMap):
    """A map with a learned matrix and bias per head, the same for queries and keys."""

    bias: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "trainable": True})

    def build(self) -> None:
        """Add W and the bias."""
        super().build()
        self.add("bias", self.num_heads, self.num_features, trainable=True)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set W to `initial_projection`, and initialize the rest."""
        super().reset_parameters()
        init.copy_(self.projection, self.initial_projection())

    @abstractmethod
    def initial_projection(self) -> Tensor:
        """Return the initial value of W, [H, D, d]."""

    def spec(self, dtype: torch.dtype) -> FeatureSpec:
        """See `ProjectedFeatureMap.spec`."""
        bias = self.bias.to(dtype)[:, None, :]
        return replace(super().spec(dtype), query_bias=bias, key_bias=bias)


@register_feature_map("t2r")
class T2RMap(LearnedFeatureMap):
    """φ(x) = ReLU(Wx + b), F = D, W and b learned (Kasai et al. 2021, eq. 2); W is N(0, 1) at first, b 0."""

    def initial_projection(self) -> Tensor:
        """Return independent N(0, 1) entries from the map's seed."""
        return draw_projection(self.projection.shape, seed=self.seed, layer_idx=self.layer_idx, orthogonal=False)

    def features(self, spec: FeatureSpec, query: Tensor, key: Tensor | None, least_shift: Tensor | None) -> Features:
        """See `ProjectedFeatureMap.features`."""
        return rectified_features(spec, query, key)


@register_feature_map("hedgehog")
class HedgehogMap(LearnedFeatureMap):
    """φ(x) = [exp(Wx + b), exp(−Wx − b)], F = 2d, W the identity at first (Zhang et al. 2024, section 4.2)."""

    has_exponent = True
    default_num_features = None

    @property
    def feature_dim(self) -> int:
        """F = 2d."""
        return 2 * self.num_features

    def initial_projection(self) -> Tensor:
        """Return the identity for every head."""
        return torch.eye(self.head_dim).expand(self.num_heads, -1, -1)

    def features(self, spec: FeatureSpec, query: Tensor, key: Tensor | None, least_shift: Tensor | None) -> Features:
        """See `ProjectedFeatureMap.features`."""
        exponent, key_exponent = self._both_signs(spec.query_linear(spec.query_input(query))), None
        if key is not None:
            key_exponent = self._both_signs(spec.key_linear(spec.key_input(key))) - self.log_scale[:, None, None]
        return exponential_features(exponent, key_exponent, least_shift, self.window_shift if self.windowed else None)[
            0
        ]

    @staticmethod
    def _both_signs(linear: Tensor) -> Tensor:
        return torch.cat([linear, -linear], dim=-1)
