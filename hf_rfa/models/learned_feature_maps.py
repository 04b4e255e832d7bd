"""Feature maps with matrices that attention transfer learns."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from transformers import initialization as init

from .feature_maps import FEATURE_MAPS as FEATURE_MAPS
from .feature_maps import Features, register_feature_map
from .projected_feature_maps import (
    FeatureSpec,
    PositiveMap,
    ProjectedFeatureMap,
    exponential_features,
    rectified_features,
)


@register_feature_map("exponential")
class ExponentialMap(PositiveMap):
    """φ_q(x) = exp(Wx + b), φ_k(x) = exp(W'x + b' − Σ a_i x_i²/2), F = D: positive random features, every part trained.

    Its initial value is that of `PositiveMap` (W' = W, b = b' = 0, a = 1), so that before training it estimates the softmax
    kernel. Of query heads that share a key-value head each has a W and b of its own.
    """

    learned = query_head_matrices = True
    has_random_matrix = False

    key_projection: Tensor
    query_bias: Tensor
    key_bias: Tensor
    norm_weight: Tensor

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
        init.copy_(self.key_projection, self.initial_projection())

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Return W and W'."""
        return self.projection, self.key_projection

    def spec(self, dtype: torch.dtype) -> FeatureSpec:
        """See `ProjectedFeatureMap.spec`."""
        spec = ProjectedFeatureMap.spec(self, dtype)
        return replace(
            spec,
            query_bias=self.query_bias.to(dtype)[:, None, :],
            key_bias=(self.key_bias - self.log_scale[:, None]).to(dtype)[:, None, :],
            key_norm=spec.key_norm * self.norm_weight.to(dtype)[:, :, None],
        )


class LearnedFeatureMap(ProjectedFeatureMap):
    """A map with a learned matrix and bias per head, the same for queries and keys."""

    learned = learns_from_raw = True
    bias: Tensor

    def build(self) -> None:
        """Add W and the bias."""
        super().build()
        self.add("bias", self.num_heads, self.num_features, trainable=True)

    def spec(self, dtype: torch.dtype) -> FeatureSpec:
        """See `ProjectedFeatureMap.spec`."""
        bias = self.bias.to(dtype)[:, None, :]
        return replace(super().spec(dtype), query_bias=bias, key_bias=bias)


@register_feature_map("t2r")
class T2RMap(LearnedFeatureMap):
    """φ(x) = ReLU(Wx + b), F = D, W and b learned (Kasai et al. 2021, eq. 2); W is N(0, 1) at first, b 0."""

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
        window_shift = self.window_shift if self.windowed else None
        features, _ = exponential_features(exponent, key_exponent, least_shift, window_shift)
        return features

    @staticmethod
    def _both_signs(linear: Tensor) -> Tensor:
        return torch.cat([linear, -linear], dim=-1)
