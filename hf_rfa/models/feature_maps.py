"""Feature maps φ with exp(q·k·s) ≈ φ(q)·φ(k), one class each, behind one registry.

A map sees the queries and keys of one attention layer, [B, H, T, d], and returns features [B, H, T, F] in float32
(float64 for float64 input).  Both sides are multiplied by √s first, s being the model's scaling, so that q̂·k̂ = q·k·s; or
they are ℓ2-normalised, as in Peng et al. 2021, and then s plays no part.  Only ``elu`` sees them as they are.

Factors that a query, or all keys of a head, share cancel between numerator and normaliser of the attention.  The maps
leave them out, or choose them so that nothing overflows: a query's largest feature is made e^40, and a key's features are
divided by one calibrated constant per head.  No running maximum has to live in the recurrent state.

Gradients need more room than values: where all keys that a query has seen are light, the gradient of their features is as
large as their features are small.  With gradients the maps therefore move a factor e^r per feature from the queries to the
keys, such that the largest key at hand has a feature of e^24 (`Features.shift`).  φ(q)·φ(k) stays what it is.

Random matrices are drawn per layer and head from a seed, and saved with the model.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .folded import Folded, stamp

#: Largest exponent of a key's feature relative to the head's constant: e^25 ≈ 7e10 leaves float32 room to sum over.
MAX_EXPONENT = 25.0
#: A query's largest feature is e^40, so that products with the features of light keys do not underflow.
QUERY_EXPONENT = 40.0
#: Least `Features.shift`: half of it can be exponentiated in float32.
MIN_SHIFT = -150.0
#: No gradient flows to key features below e^−60, whose gradients could overflow.
MIN_DIFFERENTIABLE_EXPONENT = -60.0

FEATURE_MAPS: dict[str, type[FeatureMap]] = {}


def register_feature_map(name: str) -> Callable[[type[FeatureMap]], type[FeatureMap]]:
    """Class decorator: make a `FeatureMap` available as ``feature_map=name``."""

    def register(cls: type[FeatureMap]) -> type[FeatureMap]:
        cls.name = name
        FEATURE_MAPS[name] = cls
        return cls

    return register


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that phases, features, gates and states of a model in ``dtype`` are computed in."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class Affine:
    """Features as f(A q + a) and w f(A'k + a' − n), for kernels that compute them where they are used.

    Attributes:
        kind: f, "exp" (as `FeatureMap.exponentiate_keys` and `exponentiate_queries`), "sin", "relu", or
            "elu", to which 1 is added.
        query: prepared queries, [B, H, T, d].
        key: prepared keys, [B, H, T, d].
        query_weight: A, [H, F, d].
        query_bias: a, [H, F].
        key_weight: A', [H, F, d].
        key_bias: a', [H, F].
        key_norm: n, [B, H, T], or None for 0.
        key_log_scale: log w, [B, H, T], to be kept under 25, or None for 0.
    """

    kind: str
    query: Tensor
    key: Tensor
    query_weight: Tensor
    query_bias: Tensor
    key_weight: Tensor
    key_bias: Tensor
    key_norm: Tensor | None = None
    key_log_scale: Tensor | None = None


def least_shift_above(largest: Tensor, least: Tensor) -> Tensor:
    """Return the least `Features.shift`, not below ``least``, at which exponents of up to ``largest`` do not overflow."""
    # One below the bound, so that rounding takes no key to it, where it would lose its gradient.
    return torch.maximum(largest - (MAX_EXPONENT - 1.0), least).clamp(max=0.0)


class Features(NamedTuple):
    """Features of some queries and keys of one layer.

    Attributes:
        query: φ(q), [B, H, T, F].
        key: φ(k), [B, H, T', F]; empty without keys.
        offset: o, [B, H, T, 1], which makes exp(q·k·s + o) commensurate with φ(q)·φ(k); None unless asked for.
        shift: r ≤ 0, [H, 1, F], or [H, 1, 1] where a head's features share one: the key features are e^−r times those that
            a state holds. None for r = 0, always so without gradients.
    """

    query: Tensor
    key: Tensor
    offset: Tensor | None
    shift: Tensor | None


class FeatureMap(nn.Module, ABC):
    """Base class: prepares queries and keys, and leaves φ to the subclass.

    Class attributes say what a map is: ``signed`` whether features can be negative, ``softmax_kernel`` whether φ(q)·φ(k)
    estimates exp(q·k·s) without bias when the norm is carried.

    Args:
        num_heads: H, heads.
        head_dim: d, width of a head.
        num_features: D, the number of rows of W; see ``feature_dim`` for F.
        scaling: s, the model's scaling of q·k.
        unit_norm: ℓ2-normalise queries and keys per head (Peng et al. 2021, section 3.1) instead of multiplying by √s.
        orthogonal: draw W in orthogonal blocks (`hf_rfa.models.random_feature_maps.draw_projection`).
        trainable: whether W is a parameter instead of a buffer.
        redraw_pool: number of matrices to draw from, anew at every forward pass in training; 0 keeps W fixed.
        windowed: whether an exact window stands beside the features (`hf_rfa.models.sliding_window`).
        seed: of the random matrices.
        layer_idx: the layer, so that layers draw different matrices.

    Attributes:
        sigma: learned scale σ of W per head and dimension, [H, d], where the map has one (Peng et al. 2021, W = σ∘W̃).
        balance: a of (q̂∘a, k̂/a), [H, d]: softmax attention does not see it, the variance of random features does.
        key_shift: μ of k − μ, [H, d]: likewise.
        log_scale: c, [H]: subtracted from the exponents of a head's keys.
        window_shift: what is learned of the offset of an exact window, [H], where there is one (`Features.offset`).
    """

    name: ClassVar[str]
    signed: ClassVar[bool] = False
    softmax_kernel: ClassVar[bool] = False
    has_sigma: ClassVar[bool] = False
    has_exponent: ClassVar[bool] = False
    uses_scaling: ClassVar[bool] = True
    #: Smallest cosine of φ(q) and z that signed features divide by (`hf_rfa.models.linear_attention.denominator`).
    floor: ClassVar[float] = 0.0
    #: None where D follows from the head's width.
    default_num_features: ClassVar[int | None] = None

    sigma: Tensor
    balance: Tensor
    key_shift: Tensor
    log_scale: Tensor
    window_shift: Tensor

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        num_features: int | None = None,
        scaling: float = 1.0,
        unit_norm: bool = False,
        orthogonal: bool = True,
        trainable: bool = False,
        redraw_pool: int = 0,
        windowed: bool = False,
        seed: int = 0,
        layer_idx: int = 0,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.unit_norm = num_heads, head_dim, unit_norm
        self.scaling = scaling if self.uses_scaling else 1.0
        self.num_features = self.resolve_num_features(num_features, head_dim)
        self.orthogonal, self.trainable, self.redraw_pool = orthogonal, trainable, redraw_pool
        self.windowed, self.seed, self.layer_idx = windowed, seed, layer_idx
        self._fold: tuple[Any, Folded | None] | None = None
        self.build()
        if not any(tensor.is_meta for tensor in self.state_dict().values()):
            self.reset_parameters()

    def build(self) -> None:
        """Add this map's parameters and buffers; `reset_parameters` sets them."""
        shape = (self.num_heads, self.head_dim)
        if self.has_sigma:
            self.sigma = nn.Parameter(torch.empty(shape))
        if self.invariant:
            self.register_buffer("balance", torch.empty(shape))
            self.register_buffer("key_shift", torch.empty(shape))
        if self.has_exponent:
            self.register_buffer("log_scale", torch.empty(self.num_heads))
        if self.windowed:
            self.window_shift = nn.Parameter(torch.empty(self.num_heads))

    @classmethod
    def resolve_num_features(cls, num_features: int | None, head_dim: int, *, name: str = "num_features") -> int:
        """Return D: ``num_features``, or the map's default.

        Raises:
            ValueError: if D < 1, or if the map's D follows from the head's width and another one is asked for; it calls the
                number ``name``.
        """
        if cls.default_num_features is None:
            if num_features not in (None, head_dim):
                raise ValueError(
                    f"{name}={num_features} does not fit feature_map={cls.name!r}, which has one feature map row "
                    f"per dimension of the head ({head_dim}). Leave {name} out, or take another feature map."
                )
            return head_dim
        if num_features is None:
            return cls.default_num_features
        if num_features < 1:
            raise ValueError(f"{name} must be at least 1, got {num_features}.")
        return num_features

    @property
    def invariant(self) -> bool:
        """Whether the map has ``balance`` and ``key_shift``, which change its variance and not its kernel.

        Signed features have neither: their variance does not fall when queries and keys are centred on each other.
        """
        return self.softmax_kernel and not self.signed and not self.unit_norm

    @property
    def feature_dim(self) -> int:
        """F, the number of features."""
        return self.num_features

    def query_input(self, query: Tensor) -> Tensor:
        """Return q̂: scaled (or normalised) queries in the computing dtype."""
        query = query.to(compute_dtype(query.dtype))
        query = F.normalize(query, dim=-1) if self.unit_norm else query * math.sqrt(self.scaling)
        if self.invariant:
            query = query * self.balance[:, None, :]
        return query * self.sigma[:, None, :] if self.has_sigma else query

    def key_input(self, key: Tensor) -> Tensor:
        """Return k̂: scaled (or normalised) keys in the computing dtype."""
        key = key.to(compute_dtype(key.dtype))
        if self.invariant:
            key = (key - self.key_shift[:, None, :]) / self.balance[:, None, :]
        key = F.normalize(key, dim=-1) if self.unit_norm else key * math.sqrt(self.scaling)
        return key * self.sigma[:, None, :] if self.has_sigma else key

    def key_exponent(self, key: Tensor) -> Tensor:
        """Return the exponents, before c, of prepared keys (`key_input`): for maps with ``has_exponent``."""
        raise NotImplementedError(f"feature_map={self.name!r} has no exponents.")

    def query_exponent(self, query: Tensor) -> Tensor:
        """Return the exponents of queries, [B, H, T, F]: for maps whose query features are exponentials."""
        raise NotImplementedError(f"feature_map={self.name!r} has no exponents of queries.")

    def exponentiate_keys(self, exponent: Tensor, shift: Tensor | None = None) -> Tensor:
        """Return exp(min(exponent − c, 25) − r) of exponents [B, H, T, F or 1]; r is ``shift``, None for 0."""
        constant = self.log_scale[:, None, None]
        if shift is None:
            return (exponent - constant).clamp(max=MAX_EXPONENT).exp()
        exponent = (exponent - (constant + shift)).clamp(max=MAX_EXPONENT)  # where r < 0 none reaches it
        return torch.where(exponent < MIN_DIFFERENTIABLE_EXPONENT, exponent.detach(), exponent).exp()

    def raise_shift(self, exponent: Tensor, least: Tensor) -> Tensor:
        """Return the least `Features.shift` at which no key of some exponents overflows, and which is at least ``least``."""
        largest = exponent.detach().amax(dim=(0, 2)) - self.log_scale[:, None]
        return least_shift_above(largest[:, None], least)

    def least_shift(self, state: Tensor | None) -> Tensor | None:
        """Return the least `Features.shift` at which a state does not overflow, or None where nothing is to be shifted.

        Args:
            state: the state that the features meet (`hf_rfa.models.linear_attention.state_shape`), or None at the start.
        """
        if not (self.has_exponent and torch.is_grad_enabled()):
            return None
        if state is None:
            return torch.tensor(MIN_SHIFT)
        mass = state[..., -1:, -1:] if self.signed else state[..., -1:]
        largest = mass.detach().amax(dim=0).log().transpose(-1, -2)
        return least_shift_above(largest, torch.tensor(MIN_SHIFT))

    def fold(self, dtype: torch.dtype) -> Folded | None:
        """Return the map's matrices with all that is linear folded into them, in ``dtype``; None for a map that has none."""
        return None

    def folded(self, x: Tensor) -> Folded | None:
        """Return `fold` for inputs such as ``x`` where it may be used: in evaluation, without gradients, not while compiling.

        It is computed once, and again when a parameter or buffer has changed.
        """
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        dtype = compute_dtype(x.dtype)
        now = stamp(chain(self._parameters.values(), self._buffers.values()), dtype)  # type: ignore[arg-type]
        if now is None:
            return None
        if self._fold is None or self._fold[0] != now:
            self._fold = now, self.fold(dtype)
        return self._fold[1]

    def train(self, mode: bool = True) -> Self:
        """Set the mode."""
        self._fold = None
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        self._fold = None
        return super()._apply(*args, **kwargs)

    @staticmethod
    def exponentiate_queries(exponent: Tensor) -> Tensor:
        """Return exp(exponent) times a factor per query, which makes its largest feature e^40."""
        return (exponent - exponent.detach().amax(dim=-1, keepdim=True) + QUERY_EXPONENT).exp()

    @abstractmethod
    def query(self, query: Tensor) -> Tensor:
        """Return the features of queries [B, H, T, d] as [B, H, T, F]."""

    @abstractmethod
    def key(self, key: Tensor) -> Tensor:
        """Return the features of keys [B, H, T, d] as [B, H, T, F]."""

    def affine_form(self, query: Tensor, key: Tensor) -> Affine | None:
        """Return the features of queries and keys in the form of `Affine`, or None for a map that has no such form."""
        return None

    def log_factor(self, query: Tensor) -> Tensor:
        """Return the logarithm of the factor by which exp(q·k·s) exceeds φ(q)·φ(k), as far as it is known, [B, H, T, 1]."""
        return query.new_zeros(*query.shape[:-1], 1, dtype=compute_dtype(query.dtype))

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        *,
        least_shift: Tensor | None = None,
        offset: bool = False,
        affine: bool = False,
    ) -> Any:
        """Return the `Features` of queries and keys.

        Models come in here and nowhere else: the hooks that bring offloaded weights act on calls of a module.

        Args:
            query: [B, H, T, d].
            key: [B, H, T', d], or None.
            least_shift: what `least_shift` returns of the state that the features meet. None for features without a shift,
                whose gradients may overflow.
            offset: also return the offset, for a map with an exact window beside it.
            affine: return `affine_form` instead.
        """
        if affine:
            return self.affine_form(query, cast(Tensor, key))
        return self.compute(query, key, least_shift, offset)

    def compute(
        self, query: Tensor, key: Tensor | None, shift: Tensor | None, offset: bool, **given: Tensor
    ) -> Features:
        """Return `forward`'s features; ``given`` is what `query` and `key` take besides."""
        keys = query.new_empty(0)
        if key is not None:
            keys, shift = self.shifted_keys(key, shift, **given)
        queries, change = self.shifted_queries(query, shift, **given)
        if not offset:
            return Features(queries, keys, None, shift)
        return Features(
            queries, keys, self.window_shift[:, None, None] - self.log_factor(query, **given) + change, shift
        )

    def shifted_keys(self, key: Tensor, least: Tensor | None, **given: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return φ(k) and its shift, at least ``least``."""
        if least is None:
            return self.key(key, **given), None
        exponent = self.key_exponent(self.key_input(key), **given)
        shift = self.raise_shift(exponent, least)
        return self.exponentiate_keys(exponent, shift), shift

    def shifted_queries(self, query: Tensor, shift: Tensor | None, **given: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return φ(q), and the logarithm of the factor by which the shift changes φ(q)·φ(k), [B, H, T, 1]."""
        if shift is None:
            return self.query(query, **given), 0.0
        exponent = self.query_exponent(query, **given)
        shifted = exponent + shift
        change = exponent.detach().amax(-1, keepdim=True) - shifted.detach().amax(-1, keepdim=True)
        return self.exponentiate_queries(shifted), change

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set every parameter and buffer that no checkpoint has set to its start."""
        if self.has_sigma:
            init.ones_(self.sigma)
        if self.invariant:
            init.ones_(self.balance)
            init.zeros_(self.key_shift)
        if self.has_exponent:
            init.zeros_(self.log_scale)
        if self.windowed:
            init.zeros_(self.window_shift)

    def extra_repr(self) -> str:
        """Describe the map in a model's printout."""
        return f"heads={self.num_heads}, d={self.head_dim}, F={self.feature_dim}, unit_norm={self.unit_norm}"


class ProjectedFeatureMap(FeatureMap):
    """A map with a matrix W per head, [H, D, d]; ``projection`` in the state dict, parameter or buffer."""

    default_num_features: ClassVar[int | None] = 128
    projection: Tensor

    def build(self) -> None:
        """Add W, and what every map has."""
        super().build()
        projection = torch.empty(self.num_heads, self.num_features, self.head_dim)
        if self.trainable:
            self.projection = nn.Parameter(projection)
        else:
            self.register_buffer("projection", projection)

    def matrix(self) -> Tensor:
        """Return W."""
        return self.projection

    def project(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Return W x for [B, H, T, d] as [B, H, T, D]."""
        return torch.einsum("bhtd,hfd->bhtf", x, matrix.to(x.dtype))


@register_feature_map("elu")
class EluMap(FeatureMap):
    """φ(x) = elu(x) + 1, F = d: the Linear Transformer's map (Katharopoulos et al. 2020, eq. 7).

    As published it acts on q and k without the softmax scaling, which it does not need: it estimates no softmax kernel.
    """

    uses_scaling = False

    def affine_form(self, query: Tensor, key: Tensor) -> Affine | None:
        """See `FeatureMap.affine_form`."""
        query, key = self.query_input(query), self.key_input(key)
        unit = torch.eye(self.head_dim, dtype=query.dtype, device=query.device).expand(self.num_heads, -1, -1)
        zeros = unit.new_zeros(self.num_heads, self.head_dim)
        return Affine("elu", query, key, unit, zeros, unit, zeros)

    def query(self, query: Tensor) -> Tensor:
        """Return elu(q̂) + 1."""
        return F.elu(self.query_input(query)) + 1

    def key(self, key: Tensor) -> Tensor:
        """Return elu(k̂) + 1."""
        return F.elu(self.key_input(key)) + 1
