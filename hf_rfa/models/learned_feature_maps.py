"""Feature maps that are made to be trained: those of the conversion literature, and `exponential`, which starts random."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .feature_maps import Affine, ProjectedFeatureMap, register_feature_map
from .random_feature_maps import PositiveMap, RandomFeatureMap, draw_for


@register_feature_map("exponential")
class ExponentialMap(PositiveMap):
    """φ_q(x) = exp(Wx + b), φ_k(x) = exp(W'x + b' − Σ a_i x_i²/2), F = D: positive random features, every part trained.

    It starts as `PositiveMap` does (W' = W, b = b' = 0, a = 1), so that before training it estimates the softmax kernel.
    """

    key_projection: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "trainable": True})

    def build(self) -> None:
        """Add W, W', b, b' and a."""
        ProjectedFeatureMap.build(self)
        self.key_projection = nn.Parameter(torch.empty(self.num_heads, self.num_features, self.head_dim))
        self.query_bias = nn.Parameter(torch.empty(self.num_heads, self.num_features))
        self.key_bias = nn.Parameter(torch.empty(self.num_heads, self.num_features))
        self.norm_weight = nn.Parameter(torch.empty(self.num_heads, self.head_dim))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw W, copy it to W', and set the rest to where φ is that of `PositiveMap`."""
        RandomFeatureMap.reset_parameters(self)
        init.copy_(self.key_projection, self.draw(0))
        init.zeros_(self.query_bias)
        init.zeros_(self.key_bias)
        init.ones_(self.norm_weight)

    def _set_projection(self, projection: Tensor, bias: Tensor) -> None:
        for matrix in (self.projection, self.key_projection):
            matrix.copy_(projection)
        for vector in (self.query_bias, self.key_bias):
            vector.copy_(bias)

    def _key_parts(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.key_projection, self.key_bias, self.norm_weight

    def _query_bias(self) -> Tensor:
        return self.query_bias

    def query_exponent(self, query: Tensor, matrix: Tensor | None = None) -> Tensor:
        """Return Wq̂ + b of queries, [B, H, T, D]."""
        projected = self.project(self.query_input(query), self.matrix() if matrix is None else matrix)
        return projected + self.query_bias[:, None, :].to(projected.dtype)

    def key_exponent(self, key: Tensor, matrix: Tensor | None = None) -> Tensor:
        """Return W'k̂ + b' − Σ a_i k̂_i²/2 of prepared keys, [B, H, T, D]."""
        norm = (key.square() * self.norm_weight[:, None, :]).sum(-1, keepdim=True) / 2
        return self.project(key, self.key_projection) + self.key_bias[:, None, :] - norm

    def log_factor(self, query: Tensor, matrix: Tensor | None = None) -> Tensor:
        """Return the factor of `PositiveMap`, with the trained matrix and bias: exact before training."""
        return super().log_normaliser(query, matrix)

    def log_normaliser(self, query: Tensor, matrix: Tensor | None = None) -> Tensor:
        """Raise NotImplementedError: once it is trained, this map estimates no kernel."""
        raise NotImplementedError(f"feature_map={self.name!r} is trained away from the softmax kernel.")


class LearnedFeatureMap(ProjectedFeatureMap):
    """A map with a learned matrix and bias per head, the same for queries and keys."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "trainable": True})

    def build(self) -> None:
        """Add W and the bias."""
        super().build()
        self.bias = nn.Parameter(torch.empty(self.num_heads, self.num_features))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set W to `initial_projection` and the bias to 0."""
        super().reset_parameters()
        init.copy_(self.projection, self.initial_projection())
        init.zeros_(self.bias)

    @abstractmethod
    def initial_projection(self) -> Tensor:
        """Return the start of W, [H, D, d]."""

    def affine(self, x: Tensor) -> Tensor:
        """Return Wx + b."""
        return self.project(x, self.projection) + self.bias[:, None, :].to(x.dtype)


@register_feature_map("t2r")
class T2RMap(LearnedFeatureMap):
    """φ(x) = ReLU(Wx + b), F = D, W and b learned (Kasai et al. 2021, eq. 2); W starts as N(0, 1), b as 0."""

    def initial_projection(self) -> Tensor:
        """Return independent N(0, 1) entries from the map's seed."""
        return draw_for(self, orthogonal=False)

    def affine_form(self, query: Tensor, key: Tensor) -> Affine | None:
        """See `FeatureMap.affine_form`."""
        query, key = self.query_input(query), self.key_input(key)
        weight, bias = self.projection.to(query.dtype), self.bias.to(query.dtype)
        return Affine("relu", query, key, weight, bias, weight, bias)

    def query(self, query: Tensor) -> Tensor:
        """Return ReLU(Wq̂ + b)."""
        return F.relu(self.affine(self.query_input(query)))

    def key(self, key: Tensor) -> Tensor:
        """Return ReLU(Wk̂ + b)."""
        return F.relu(self.affine(self.key_input(key)))


@register_feature_map("hedgehog")
class HedgehogMap(LearnedFeatureMap):
    """φ(x) = [exp(Wx + b), exp(−Wx − b)], F = 2d, W starting as the identity (Zhang et al. 2024, section 4.2)."""

    has_exponent = True
    default_num_features = None

    @property
    def feature_dim(self) -> int:
        """F = 2d."""
        return 2 * self.num_features

    def initial_projection(self) -> Tensor:
        """Return the identity for every head."""
        return torch.eye(self.head_dim).expand(self.num_heads, -1, -1)

    def affine_form(self, query: Tensor, key: Tensor) -> Affine | None:
        """See `FeatureMap.affine_form`."""
        query, key = self.query_input(query), self.key_input(key)
        matrix, bias = self.projection.to(query.dtype), self.bias.to(query.dtype)
        weight, both = torch.cat([matrix, -matrix], dim=1), torch.cat([bias, -bias], dim=1)
        return Affine("exp", query, key, weight, both, weight, both - self.log_scale[:, None])

    def query(self, query: Tensor) -> Tensor:
        """Return [exp(Wq̂ + b), exp(−Wq̂ − b)], the largest made e^40."""
        return self.exponentiate_queries(self.query_exponent(query))

    def query_exponent(self, query: Tensor) -> Tensor:
        """Return ±(Wq̂ + b) of queries, [B, H, T, 2d]."""
        return self.key_exponent(self.query_input(query))

    def key(self, key: Tensor) -> Tensor:
        """Return exp(min(±(Wk̂ + b) − c, 25))."""
        return self.exponentiate_keys(self.key_exponent(self.key_input(key)))

    def key_exponent(self, key: Tensor) -> Tensor:
        """Return ±(Wk̂ + b) of prepared keys, [B, H, T, 2d]."""
        exponent = self.affine(key)
        return torch.cat([exponent, -exponent], dim=-1)
