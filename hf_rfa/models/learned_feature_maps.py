"""The feature map whose matrices attention transfer learns, and the registry with all maps."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from transformers import initialization as init

from .feature_maps import FEATURE_MAPS as FEATURE_MAPS
from .feature_maps import register_feature_map
from .projected_feature_maps import FeatureSpec, PositiveMap, ProjectedFeatureMap


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
