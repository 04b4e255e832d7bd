"""Feature maps φ with exp(q·k·s) ≈ φ(q)·φ(k): the base classes and the registry.

A map sees the queries and keys of one attention layer, [B, H, T, d], and returns features [B, H, T, F] in float32 (float64
for float64 input). Both sides are multiplied by √s first, s being the model's scaling, so that q̂·k̂ = q·k·s; or they are
ℓ2-normalized, as in Peng et al. 2021, and then s plays no part. Only ``elu`` sees them as they are.

Factors that a query, or all keys of a head, share cancel between numerator and normalizer of the attention. The maps leave
them out, or choose them so that nothing overflows: a query's largest feature is made e^40, and a key's features are divided
by one calibrated constant per head. No running maximum has to be part of the state.

Gradients need more room than values: where all keys that a query has seen are light, the gradient of their features is as
large as their features are small. With gradients the maps therefore move a factor e^r per feature from the queries to the
keys, such that the largest key at hand has a feature of e^24 (`Features.shift`). φ(q)·φ(k) stays what it is.

Where query heads share key-value heads, queries have G rows per token (`hf_rfa.models.masking`), and what a map
learns is per key-value head. A map may have a matrix for each query head (`ProjectedFeatureMap.query_head_matrices`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .memory import compute_dtype

#: Largest exponent of a key's feature relative to the head's constant: e^25 ≈ 7e10 leaves float32 room to sum over.
MAX_EXPONENT = 25.0
#: A query's largest feature is e^40, so that products with the features of light keys do not underflow.
QUERY_EXPONENT = 40.0
#: The same with gradients, which are divided by sums of products with keys of up to e^24: of a mean over many tokens they
#: would underflow if these sums were larger.
QUERY_EXPONENT_WITH_GRADIENTS = 20.0
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


def into(x: Tensor, operation: str, *args: Any) -> Tensor:
    """Return ``x.operation(*args)``; in place without gradients, since fresh memory costs more time than the arithmetic."""
    return getattr(x, operation if torch.is_grad_enabled() else f"{operation}_")(*args)


def least_shift_above(largest: Tensor, least: Tensor) -> Tensor:
    """Return the least `Features.shift`, not below ``least``, at which exponents of up to ``largest`` do not overflow."""
    # One below the bound, so that rounding takes no key to it, where it would lose its gradient.
    return torch.maximum(largest - (MAX_EXPONENT - 1.0), least).clamp(max=0.0)


class Features(NamedTuple):
    """Features of some queries and keys of one layer. Within a map they are by heads: [H, N, ·] in place of [B, H, T, ·].

    Attributes:
        query: φ(q), [B, H, T, F].
        key: φ(k), [B, H, T', F]; empty without keys.
        offset: o, [B, H, T, 1], which makes exp(q·k·s + o) commensurate with φ(q)·φ(k); None unless asked for, and by heads
            where it is ``window_shift``.
        shift: r ≤ 0, [H, 1, F], or [H, 1, 1] where a head's features share one: the key features are e^−r times those that
            a state holds. None for r = 0, always so without gradients.
    """

    query: Tensor
    key: Tensor
    offset: Tensor | None
    shift: Tensor | None

    def unshifted_key(self) -> Tensor:
        """Return φ(k) as states hold it, [B, H, T', F]."""
        return self.key if self.shift is None else self.key * self.shift.exp()


@dataclass(frozen=True, kw_only=True)
class InputScaling:
    """What a map makes of queries and keys first: q̂ = α q and k̂ = α'(k − μ), with ``unit_norm`` of normalized ones.

    Shapes are those of [H, N, d] or [B, H, T, d].

    Attributes:
        query_scale: α, [H, 1, d] or a number.
        key_scale: α', [H, 1, d] or a number.
        key_mean: μ, [H, 1, d], or None for 0, always so with ``unit_norm``.
        unit_norm: whether queries and keys are normalized.
    """

    query_scale: Tensor | float
    key_scale: Tensor | float
    key_mean: Tensor | None = None
    unit_norm: bool = False

    def query_input(self, query: Tensor) -> Tensor:
        """Return q̂."""
        return (F.normalize(query, dim=-1) if self.unit_norm else query) * self.query_scale

    def key_input(self, key: Tensor) -> Tensor:
        """Return k̂."""
        if self.unit_norm:
            key = F.normalize(key, dim=-1)
        return key * self.key_scale if self.key_mean is None else into(key - self.key_mean, "mul", self.key_scale)


class FeatureMap(nn.Module, ABC):
    """Base class of feature maps: prepares queries and keys, and leaves φ to the subclass.

    Args:
        num_heads: H, heads.
        head_dim: d, width of a head.
        num_features: D, the number of rows of W; see ``feature_dim`` for F.
        scaling: s, the model's scaling of q·k.
        unit_norm: ℓ2-normalize queries and keys per head (Peng et al. 2021, section 3.1) instead of multiplying by √s.
        trainable: whether W is a parameter instead of a buffer.
        windowed: whether a sliding window comes with the features (`hf_rfa.models.memory`).
        seed: of the random matrices.
        layer_idx: the layer, so that layers draw different matrices.
        groups: G, the number of query heads that share each of the H key-value heads.

    Attributes:
        sigma: learned scale σ of W per head and dimension, [H, d], where the map has one (Peng et al. 2021, W = σ∘W̃).
        balance: a of (q̂∘a, k̂/a), [H, d]: softmax attention does not see it, the variance of random features does.
        key_shift: μ of k − μ, [H, d]: softmax attention does not see it either.
        log_scale: c, [H]: subtracted from the exponents of a head's keys.
        window_shift: what is learned of the offset of a window, [H], where there is one (`Features.offset`).
    """

    name: ClassVar[str]
    #: Smallest cosine of φ(q) and z that is divided by (`hf_rfa.models.linear_attention.denominator`), for maps whose
    #: features have negative entries; None for all others.
    denominator_floor: ClassVar[float | None] = None
    #: Whether φ(q)·φ(k) estimates exp(q·k·s) without bias when the norm is carried.
    softmax_kernel: ClassVar[bool] = False
    has_sigma: ClassVar[bool] = False
    has_exponent: ClassVar[bool] = False
    uses_scaling: ClassVar[bool] = True
    #: Whether the map has a random matrix that stays as it is, unless ``trainable`` makes it a parameter.
    has_random_matrix: ClassVar[bool] = False
    #: Whether the map learns from queries and keys as they are, so that they cannot be normalized.
    learns_from_raw: ClassVar[bool] = False
    #: Whether the features stand for nothing before conversion has fitted them to a text.
    needs_text: ClassVar[bool] = False
    #: Whether the map stands for what a window has left alone.
    needs_window: ClassVar[bool] = False
    #: Whether the map sees queries and keys without their rotation, so that it reads the same at any distance.
    unrotated: ClassVar[bool] = False
    #: Whether features of queries depend on the means of what is forgotten (`hf_rfa.models.summary_feature_map`).
    reads_means: ClassVar[bool] = False
    #: Tokens after which the state has 1/e of what joined it, where there is no gate; None where it never decays.
    horizon: ClassVar[float | None] = None
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
        trainable: bool = False,
        windowed: bool = False,
        seed: int = 0,
        layer_idx: int = 0,
        groups: int = 1,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.unit_norm = num_heads, head_dim, unit_norm
        self.groups = groups
        self.scaling = scaling if self.uses_scaling else 1.0
        self.num_features = self.resolve_num_features(num_features, head_dim)
        self.trainable, self.windowed, self.seed, self.layer_idx = trainable, windowed, seed, layer_idx
        self._initial_values: dict[str, float] = {}
        self.build()
        if not any(tensor.is_meta for tensor in self.state_dict().values()):
            self.reset_parameters()

    def build(self) -> None:
        """Add this map's parameters and buffers (`add`)."""
        if self.has_sigma:
            self.add("sigma", self.num_heads, self.head_dim, initial=1.0, trainable=True)
        if self.reparametrizable:
            self.add("balance", self.num_heads, self.head_dim, initial=1.0)
            self.add("key_shift", self.num_heads, self.head_dim)
        if self.has_exponent:
            self.add("log_scale", self.num_heads)
        if self.windowed:
            self.add("window_shift", self.num_heads, trainable=True)

    def add(self, name: str, *shape: int, initial: float = 0.0, trainable: bool = False) -> None:
        """Add a parameter, or a buffer if it is not trainable, whose entries `reset_parameters` sets to ``initial``."""
        if trainable:
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        else:
            self.register_buffer(name, torch.empty(shape))
        self._initial_values[name] = initial

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize every parameter and buffer that no checkpoint has set."""
        for name, value in self._initial_values.items():
            init.constant_(getattr(self, name), value)

    @classmethod
    def resolve_num_features(cls, num_features: int | None, head_dim: int, *, name: str = "num_features") -> int:
        """Return D: ``num_features``, or the map's default.

        Raises:
            ValueError: if D < 1, or if the map's D follows from the head's width and is another; ``name`` is the number's.
        """
        default = cls.default_num_features
        if default is None and num_features not in (None, head_dim):
            raise ValueError(
                f"{name}={num_features} does not fit feature_map={cls.name!r}, which has one feature map row "
                f"per dimension of the head ({head_dim}). Leave {name} out, or take another feature map."
            )
        if num_features is None:
            return head_dim if default is None else default
        if num_features < 1:
            raise ValueError(f"{name} must be at least 1, got {num_features}.")
        return num_features

    @property
    def signed(self) -> bool:
        """Whether features can be negative."""
        return self.denominator_floor is not None

    @property
    def reparametrizable(self) -> bool:
        """Whether the map has ``balance`` and ``key_shift``, which change its variance and not its kernel.

        Signed features have neither: their variance does not fall when queries and keys are centered on each other.
        """
        return self.softmax_kernel and not self.signed and not self.unit_norm

    @property
    def feature_dim(self) -> int:
        """F, the number of features."""
        return self.num_features

    @property
    def state_rows(self) -> int:
        """Rows of a head's state: one a feature, and one more with the mass of signed ones; 0 without features."""
        return self.feature_dim + self.signed if self.feature_dim else 0

    def input_scaling(self, dtype: torch.dtype) -> InputScaling:
        """Return how queries and keys in ``dtype`` are prepared."""
        scale: Any = 1.0 if self.unit_norm else math.sqrt(self.scaling)
        if self.has_sigma:
            scale = self.sigma[:, None, :].to(dtype) * scale
        if not self.reparametrizable:
            return InputScaling(query_scale=scale, key_scale=scale, unit_norm=self.unit_norm)
        balance, mean = self.balance[:, None, :].to(dtype), self.key_shift[:, None, :].to(dtype)
        return InputScaling(query_scale=scale * balance, key_scale=scale / balance, key_mean=mean)

    def query_input(self, query: Tensor) -> Tensor:
        """Return q̂ of queries [B, H, T, d] in the computing dtype."""
        dtype = compute_dtype(query.dtype)
        return self.input_scaling(dtype).query_input(query.to(dtype))

    def key_input(self, key: Tensor) -> Tensor:
        """Return k̂ of keys [B, H, T, d] in the computing dtype."""
        dtype = compute_dtype(key.dtype)
        return self.input_scaling(dtype).key_input(key.to(dtype))

    @abstractmethod
    def query(self, query: Tensor) -> Tensor:
        """Return the features of queries [B, H, T, d] as [B, H, T, F]."""

    @abstractmethod
    def key(self, key: Tensor) -> Tensor:
        """Return the features of keys [B, H, T, d] as [B, H, T, F]."""

    def forward(
        self, query: Tensor, key: Tensor | None = None, *, least_shift: Tensor | None = None, offset: bool = False
    ) -> Features:
        """Return the features of queries and keys.

        Args:
            query: [B, H, T, d].
            key: [B, H, T', d], or None.
            least_shift: what `least_shift` returns of the state that the features meet. None for features without a shift,
                whose gradients may overflow.
            offset: also return the offset, for a map that comes with a sliding window.
        """
        keys = query.new_empty(0) if key is None else self.key(key)
        features = self.query(query)
        zeros = features.new_zeros(*features.shape[:-1], 1)
        return Features(features, keys, self.window_shift[:, None, None] + zeros if offset else None, None)

    def least_shift(self, state: Tensor | None) -> Tensor | None:
        """Return the least `Features.shift` at which a state does not overflow, or None where nothing is to be shifted.

        The state is the one that the features meet (`hf_rfa.models.linear_attention`), or None at the start.
        """
        if not (self.has_exponent and torch.is_grad_enabled()):
            return None
        if state is None:
            return torch.tensor(MIN_SHIFT)
        mass = state[..., -1:, -1:] if self.signed else state[..., -1:]
        largest = mass.detach().amax(dim=0).log().transpose(-1, -2)
        return least_shift_above(largest, torch.tensor(MIN_SHIFT))

    def extra_repr(self) -> str:
        """Describe the map in a model's printout."""
        return f"heads={self.num_heads}, d={self.head_dim}, F={self.feature_dim}, unit_norm={self.unit_norm}"


@register_feature_map("elu")
class EluMap(FeatureMap):
    """φ(x) = elu(x) + 1, F = d: the Linear Transformer's map (Katharopoulos et al. 2020, eq. 7).

    As published it acts on q and k without the softmax scaling, which it does not need: it estimates no softmax kernel.
    """

    uses_scaling = False

    def query(self, query: Tensor) -> Tensor:
        """Return elu(q̂) + 1."""
        return F.elu(self.query_input(query)) + 1

    def key(self, key: Tensor) -> Tensor:
        """Return elu(k̂) + 1."""
        return F.elu(self.key_input(key)) + 1
