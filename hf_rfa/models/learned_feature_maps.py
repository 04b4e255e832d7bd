"""Feature maps that are made to be trained: those of the conversion literature, and `exponential`, first random."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import initialization as init

from .feature_maps import (
    Features,
    FeatureSpec,
    ProjectedFeatureMap,
    exponential_features,
    rectified_features,
    register_feature_map,
)
from .random_feature_maps import PositiveMap, draw_projection


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
