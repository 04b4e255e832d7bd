"""Feature maps with learned matrices: by attention transfer, or on a text at conversion (`hf_rfa.convert.calibrate`)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
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


@register_feature_map("mlp")
class MLPMap(ProjectedFeatureMap):
    """φ_q(x) = exp(Wx + b + U gelu(Vx)), φ_k(x) the same with W', b', U', V', F = D: small states, learned on a text.

    V has as many rows as a head is wide. W, U and V are small random numbers at first, which estimate nothing. The map sees
    queries and keys without the softmax scaling. For what a cache drops: LESS (Dong et al. 2024, arXiv 2402.09398).
    """

    learned = needs_text = True
    uses_scaling = False
    has_exponent = True
    default_num_features = 8
    #: Standard deviations of the initial W, V and U, relative to 1 / √d.
    INITIAL_SCALES: ClassVar[tuple[float, float, float]] = (0.1, 1.0, 0.3)
    key_projection: Tensor
    query_bias: Tensor
    key_bias: Tensor
    query_hidden: Tensor
    key_hidden: Tensor
    query_output: Tensor
    key_output: Tensor

    def build(self) -> None:
        """Add all matrices and biases."""
        super().build()
        heads, width, features = self.num_heads, self.head_dim, self.num_features
        self.add("key_projection", heads, features, width, trainable=True)
        for side in ("query", "key"):
            self.add(f"{side}_bias", heads, features, trainable=True)
            self.add(f"{side}_hidden", heads, width, width, trainable=True)
            self.add(f"{side}_output", heads, features, width, trainable=True)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw every matrix, and set the biases to 0."""
        super().reset_parameters()
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.layer_idx) * 1_000_003 % 2**32)
        linear, hidden, output = (scale / math.sqrt(self.head_dim) for scale in self.INITIAL_SCALES)
        names = {"projection": linear, "key_projection": linear, "query_hidden": hidden, "key_hidden": hidden}
        for name, deviation in (names | {"query_output": output, "key_output": output}).items():
            tensor = getattr(self, name)
            init.copy_(tensor, deviation * torch.randn(tensor.shape, generator=generator))

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Return W and W'."""
        return self.projection, self.key_projection

    def spec(self, dtype: torch.dtype) -> FeatureSpec:
        """See `ProjectedFeatureMap.spec`: both biases, and c."""
        key_bias = (self.key_bias - self.log_scale[:, None]).to(dtype)[:, None]
        return replace(super().spec(dtype), query_bias=self.query_bias.to(dtype)[:, None], key_bias=key_bias)

    def features(self, spec: FeatureSpec, query: Tensor, key: Tensor | None, least_shift: Tensor | None) -> Features:
        """See `ProjectedFeatureMap.features`."""
        query = spec.query_input(query)
        query_exponent = spec.query_linear(query) + self._nonlinear(query, self.query_hidden, self.query_output)
        key_exponent = None if key is None else self.key_exponents(spec, key)
        features, log_scale = exponential_features(query_exponent, key_exponent, least_shift, None)
        if not self.windowed:
            return features
        # exp(q·k·s) beside exp(exponents): what is divided by is divided by there too.
        constant = (self.window_shift - self.log_scale).to(log_scale.dtype)
        return features._replace(offset=constant[:, None, None] - log_scale)

    def key_exponents(self, spec: FeatureSpec, key: Tensor) -> Tensor:
        """Return W'x + b' + U' gelu(V'x) − c of keys by heads, [H, N, D]."""
        key = spec.key_input(key)
        return spec.key_linear(key) + self._nonlinear(key, self.key_hidden, self.key_output)

    def _nonlinear(self, x: Tensor, hidden: Tensor, output: Tensor) -> Tensor:
        """Return U gelu(Vx) of queries or keys by heads, [H, N, d]."""
        return torch.bmm(F.gelu(torch.bmm(x, hidden.to(x.dtype).mT)), output.to(x.dtype).mT)


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
