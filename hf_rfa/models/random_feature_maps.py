"""Feature maps with random matrices: the paper's, and positive random features."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import initialization as init

from .feature_maps import (
    MAX_EXPONENT,
    QUERY_EXPONENT,
    Affine,
    Features,
    ProjectedFeatureMap,
    compute_dtype,
    register_feature_map,
)
from .folded import Folded


def draw_projection(
    *,
    num_heads: int,
    num_features: int,
    head_dim: int,
    seed: int,
    layer_idx: int,
    draw: int = 0,
    orthogonal: bool = True,
) -> Tensor:
    """Draw the random matrices of one layer.

    Args:
        num_heads: H.
        num_features: D, rows per head.
        head_dim: d, columns.
        seed: the model's seed for random features.
        layer_idx: the layer, so that layers draw different matrices.
        draw: number of the draw, 0 being the one for evaluation and the others the pool for training.
        orthogonal: whether blocks of d rows are orthogonal, with the norms of Gaussian rows (Yu et al. 2016,
            Choromanski et al. 2021), instead of independent.

    Returns:
        [H, D, d] in float32; every row is distributed as N(0, I).
    """
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


def draw_for(feature_map: ProjectedFeatureMap, *, draw: int = 0, orthogonal: bool) -> Tensor:
    """Return the random matrix of a map's layer, by its seed (`draw_projection`)."""
    return draw_projection(
        num_heads=feature_map.num_heads,
        num_features=feature_map.num_features,
        head_dim=feature_map.head_dim,
        seed=feature_map.seed,
        layer_idx=feature_map.layer_idx,
        draw=draw,
        orthogonal=orthogonal,
    )


class RandomFeatureMap(ProjectedFeatureMap):
    """A map with a random matrix, fixed, redrawn in training, or trained from its random start."""

    has_sigma = True

    def draw(self, number: int) -> Tensor:
        """Return draw ``number`` of this layer's matrix."""
        return draw_for(self, draw=number, orthogonal=self.orthogonal)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw W, and set the rest to its start."""
        super().reset_parameters()
        init.copy_(self.projection, self.draw(0))

    def matrix(self) -> Tensor:
        """Return W: in training with a pool a fresh draw, chosen by torch's generator, otherwise the saved one."""
        if not (self.training and self.redraw_pool):
            return self.projection
        number = 1 + int(torch.randint(self.redraw_pool, ()))
        return self.draw(number).to(self.projection.device)

    @abstractmethod
    def query(self, query: Tensor, matrix: Tensor | None = None) -> Tensor:
        """Return the features of queries under ``matrix``, or under a matrix of this map's choice."""

    @abstractmethod
    def key(self, key: Tensor, matrix: Tensor | None = None) -> Tensor:
        """Return the features of keys under ``matrix``, or under a matrix of this map's choice."""

    def log_factor(self, query: Tensor, matrix: Tensor | None = None) -> Tensor:
        """See `FeatureMap.log_factor`."""
        if not self.softmax_kernel or self.unit_norm:
            return super().log_factor(query)
        return self.log_normaliser(query, matrix)

    def compute(
        self, query: Tensor, key: Tensor | None, shift: Tensor | None, offset: bool, **given: Tensor
    ) -> Features:
        """Return what `FeatureMap.compute` does, all of it under the same matrix."""
        return super().compute(query, key, shift, offset, matrix=self.matrix())

    def log_normaliser(self, query: Tensor, matrix: Tensor | None = None) -> Tensor:
        """Return the logarithm of the factor that φ(q)·φ(k) leaves out because it cancels, [B, H, T, 1].

        exp(log_normaliser(q)) φ(q)·φ(k) is an unbiased estimate of exp(q·k·s) (of exp(−‖q̂ − k̂‖²/2) for unit norms).

        Raises:
            NotImplementedError: for maps that estimate no softmax kernel.
        """
        raise NotImplementedError(f"feature_map={self.name!r} does not estimate the softmax kernel.")


@register_feature_map("gaussian")
class GaussianMap(RandomFeatureMap):
    """φ(x) = [sin(Wx), cos(Wx)] / √D, F = 2D: random Fourier features (Rahimi and Recht 2007; Peng et al. 2021, eq. 4).

    With unit norms the kernel is exp(−‖q̂ − k̂‖²/2), which is the softmax kernel but for a constant.  With the norm carried
    φ(k) gets the factor exp(‖k̂‖²/2).
    """

    signed = True
    softmax_kernel = True
    has_exponent = True
    floor = 0.1
    default_num_features = 64

    @property
    def feature_dim(self) -> int:
        """F = 2D."""
        return 2 * self.num_features

    def affine_form(self, query: Tensor, key: Tensor) -> Affine | None:
        """See `FeatureMap.affine_form`: cos x = sin(x + π/2)."""
        query, key = self.query_input(query), self.key_input(key)
        matrix = self.matrix().to(query.dtype)
        bias = matrix.new_zeros(self.num_heads, self.feature_dim)
        bias[:, self.num_features :] = math.pi / 2
        weight = torch.cat([matrix, matrix], dim=1)
        scale = None if self.unit_norm else self.key_exponent(key)[..., 0] - self.log_scale[:, None]
        return Affine("sin", query, key, weight, bias, weight, bias, key_log_scale=scale)

    def query(self, query: Tensor, matrix: Tensor | None = None) -> Tensor:
        """Return [sin(Wq̂), cos(Wq̂)]."""
        return self._waves(self.query_input(query), matrix)

    def _waves(self, x: Tensor, matrix: Tensor | None) -> Tensor:
        phase = self.project(x, self.matrix() if matrix is None else matrix)
        return torch.cat([phase.sin(), phase.cos()], dim=-1)

    def key(self, key: Tensor, matrix: Tensor | None = None) -> Tensor:
        """Return [sin(Wk̂), cos(Wk̂)], times exp(min(‖k̂‖²/2 − c, 25)) where the norm is carried."""
        key = self.key_input(key)
        features = self._waves(key, matrix)
        return features if self.unit_norm else features * self.exponentiate_keys(self.key_exponent(key))

    def shifted_keys(self, key: Tensor, least: Tensor | None, **given: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `FeatureMap.shifted_keys`: one shift for all features of a head."""
        if least is None or self.unit_norm:
            return self.key(key, **given), None
        key = self.key_input(key)
        exponent = self.key_exponent(key)
        shift = self.raise_shift(exponent, least)
        return self._waves(key, given["matrix"]) * self.exponentiate_keys(exponent, shift), shift

    def shifted_queries(self, query: Tensor, shift: Tensor | None, **given: Tensor) -> tuple[Tensor, Tensor | float]:
        """See `FeatureMap.shifted_queries`: queries have no exponents, and stay as they are."""
        return self.query(query, **given), 0.0 if shift is None else -shift

    def key_exponent(self, key: Tensor) -> Tensor:
        """Return ‖k̂‖²/2 of prepared keys, [B, H, T, 1]."""
        return key.square().sum(-1, keepdim=True) / 2

    def log_normaliser(self, query: Tensor, matrix: Tensor | None = None) -> Tensor:
        """See `RandomFeatureMap.log_normaliser`."""
        if self.unit_norm:
            return torch.full_like(query[..., :1], -math.log(self.num_features))
        norm = self.query_input(query).square().sum(-1, keepdim=True) / 2
        return norm + self.log_scale[:, None, None] - math.log(self.num_features)


@register_feature_map("arccos")
class ArcCosMap(RandomFeatureMap):
    """φ(x) = ReLU(Wx) / √D, F = D: the arc-cosine kernel of degree 1 (Cho and Saul 2009; Peng et al. 2021, section 3.1)."""

    def affine_form(self, query: Tensor, key: Tensor) -> Affine | None:
        """See `FeatureMap.affine_form`."""
        query, key = self.query_input(query), self.key_input(key)
        weight = self.matrix().to(query.dtype) / math.sqrt(self.num_features)
        zeros = weight.new_zeros(self.num_heads, self.num_features)
        return Affine("relu", query, key, weight, zeros, weight, zeros)

    def _features(self, x: Tensor, matrix: Tensor | None) -> Tensor:
        matrix = self.matrix() if matrix is None else matrix
        return F.relu(self.project(x, matrix)) / math.sqrt(self.num_features)

    def query(self, query: Tensor, matrix: Tensor | None = None) -> Tensor:
        """Return ReLU(Wq̂) / √D."""
        return self._features(self.query_input(query), matrix)

    def key(self, key: Tensor, matrix: Tensor | None = None) -> Tensor:
        """Return ReLU(Wk̂) / √D."""
        return self._features(self.key_input(key), matrix)


@register_feature_map("positive")
class PositiveMap(RandomFeatureMap):
    """φ(x) = exp(Wx + b − ‖x‖²/2) / √D, F = D: positive random features (Choromanski et al. 2021, FAVOR+, lemma 1).

    b is 0 for W as it is drawn.  `shape_projection` replaces w by Bw and sets b = wᵀAw, which leaves the kernel as it is and
    lowers its variance on data (dense-exponential random features, Likhosherstov et al. 2023).
    """

    softmax_kernel = True
    has_exponent = True
    feature_bias: Tensor

    def build(self) -> None:
        """Add b, and what every random map has."""
        super().build()
        self.register_buffer("feature_bias", torch.empty(self.num_heads, self.num_features))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw W, and set the rest to its start."""
        super().reset_parameters()
        init.zeros_(self.feature_bias)

    @property
    def can_be_shaped(self) -> bool:
        """Whether `shape_projection` applies: it does not to unit norms, nor to matrices drawn anew in training."""
        return self.invariant and not self.redraw_pool

    @torch.no_grad()
    def shape_projection(self, second_moment: Tensor) -> None:
        """Fit W to data, so that the logarithm of the kernel's second moment is least on average.

        In the eigenvectors of E[(q̂ + k̂)(q̂ + k̂)ᵀ] with eigenvalues λ, A has the entries
        a = (1 − 2λ − √((2λ + 1)² + 8λ)) / 16 ≤ 0, and B = (1 − 4A)^½ in their directions.

        Args:
            second_moment: E[(q̂ + k̂)(q̂ + k̂)ᵀ] of prepared queries and keys, [H, d, d].
        """
        values, vectors = torch.linalg.eigh(second_moment.double())
        values = values.clamp_min(0.0)[:, None, :]
        entries = (1 - 2 * values - ((2 * values + 1).square() + 8 * values).sqrt()) / 16
        drawn = self.draw(0).to(vectors)
        self._set_projection(
            (drawn * (1 - 4 * entries).sqrt()) @ vectors.transpose(-1, -2),
            (drawn.square() * entries).sum(-1) + (1 - 4 * entries).log().sum(-1) / 4,
        )

    def _set_projection(self, projection: Tensor, bias: Tensor) -> None:
        self.projection.copy_(projection)
        self.feature_bias.copy_(bias)

    def _key_parts(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return what keys have of their own: the matrix, the bias, and a, None for ones."""
        return self.projection, self.feature_bias, None

    def affine_form(self, query: Tensor, key: Tensor) -> Affine | None:
        """See `FeatureMap.affine_form`."""
        query, key = self.query_input(query), self.key_input(key)
        matrix = self.matrix().to(query.dtype)
        key_matrix, bias, weight = self._key_parts()
        key_matrix = matrix if key_matrix is self.projection else key_matrix.to(query.dtype)
        squares = key.square() if weight is None else key.square() * weight[:, None, :]
        return Affine(
            "exp",
            query,
            key,
            matrix,
            self._query_bias().to(query.dtype),
            key_matrix,
            bias.to(query.dtype) - self.log_scale[:, None],
            key_norm=squares.sum(-1) / 2,
        )

    def fold(self, dtype: torch.dtype) -> Folded | None:
        """See `FeatureMap.fold`."""
        if not self.invariant:
            return None
        scale = torch.full_like(self.balance, math.sqrt(self.scaling), dtype=dtype)
        if self.has_sigma:
            scale = scale * self.sigma
        matrix, bias, weight = self._key_parts()
        query_weight = self.projection.to(dtype).transpose(-1, -2).contiguous()
        shared = matrix is self.projection
        return Folded(
            query_scale=(scale * self.balance)[:, None, :],
            query_weight=query_weight,
            query_bias=self._query_bias().to(dtype)[:, None, :],
            key_shift=self.key_shift.to(dtype)[:, None, :],
            key_scale=(scale / self.balance)[:, None, :],
            key_weight=query_weight if shared else matrix.to(dtype).transpose(-1, -2).contiguous(),
            key_bias=(bias.to(dtype) - self.log_scale[:, None].to(dtype))[:, None, :],
            key_norm=(torch.ones_like(scale) if weight is None else weight.to(dtype))[:, :, None] / 2,
            query_shift=self.scaling * self.key_shift.to(dtype)[:, :, None],
            offset_bias=(self.window_shift - self.log_scale + math.log(self.num_features)).to(dtype)[:, None, None]
            if self.windowed
            else None,
        )

    def _query_bias(self) -> Tensor:
        return self.feature_bias

    def compute(
        self, query: Tensor, key: Tensor | None, shift: Tensor | None, offset: bool, **given: Tensor
    ) -> Features:
        """Return what `FeatureMap.compute` does, in fewer operations without gradients."""
        folded = self.folded(query)
        if folded is None:
            return super().compute(query, key, shift, offset, **given)
        dtype = compute_dtype(query.dtype)
        query = query.to(dtype)
        features = folded.query_exponent(query)
        maximum = features.amax(dim=-1, keepdim=True).sub_(QUERY_EXPONENT)
        features.sub_(maximum).exp_()
        keys = query.new_empty(0)
        if key is not None:
            keys = folded.key_exponent(key.to(dtype)).clamp_(max=MAX_EXPONENT).exp_()
        return Features(features, keys, folded.offset(query, maximum) if offset else None, None)

    def query_exponent(self, query: Tensor, matrix: Tensor | None = None) -> Tensor:
        """Return Wq̂ + b of queries, [B, H, T, D]."""
        projected = self.project(self.query_input(query), self.matrix() if matrix is None else matrix)
        return projected + self.feature_bias[:, None, :].to(projected.dtype)

    def query(self, query: Tensor, matrix: Tensor | None = None) -> Tensor:
        """Return exp(Wq̂ + b), its largest entry made e^40."""
        return self.exponentiate_queries(self.query_exponent(query, matrix))

    def key(self, key: Tensor, matrix: Tensor | None = None) -> Tensor:
        """Return exp(min(Wk̂ + b − ‖k̂‖²/2 − c, 25))."""
        return self.exponentiate_keys(self.key_exponent(self.key_input(key), matrix))

    def key_exponent(self, key: Tensor, matrix: Tensor | None = None) -> Tensor:
        """Return Wk̂ + b − ‖k̂‖²/2 of prepared keys, [B, H, T, D]."""
        projected = self.project(key, self.matrix() if matrix is None else matrix)
        bias = self.feature_bias[:, None, :].to(projected.dtype)
        return projected + bias - key.square().sum(-1, keepdim=True) / 2

    def log_normaliser(self, query: Tensor, matrix: Tensor | None = None) -> Tensor:
        """See `RandomFeatureMap.log_normaliser`."""
        maximum = self.query_exponent(query, matrix).detach().amax(dim=-1, keepdim=True)
        norm = self.query_input(query).square().sum(-1, keepdim=True) / 2
        constant = self.log_scale[:, None, None] - math.log(self.num_features)
        if self.invariant:  # shifted keys change the kernel by exp(q·μ·s)
            query = query.to(compute_dtype(query.dtype))
            constant = constant + (query * self.key_shift[:, None, :]).sum(-1, keepdim=True) * self.scaling
        return maximum - QUERY_EXPONENT - norm + constant
