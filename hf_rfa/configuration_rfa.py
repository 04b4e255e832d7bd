"""The fields that random feature attention adds to a family's configuration, and their validation."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Self

from huggingface_hub.dataclasses import strict
from transformers import GPT2Config

from .cache import RFA_LAYER_TYPE
from .feature_maps import FEATURE_MAPS, LearnedFeatureMap, RandomFeatureMap

STATE_DTYPES = ("float32", "float64")


@dataclass(kw_only=True)
class RFAConfigMixin:
    """Fields of random feature attention, mixed into a family's configuration class.

    Args:
        feature_map: name of the feature map, one of `hf_rfa.feature_maps.FEATURE_MAPS`. Default ``"positive"``.
        num_features: D, rows of W per head (F is D, 2D for ``gaussian`` and ``hedgehog``); None takes the map's default.
        unit_norm: ℓ2-normalise queries and keys, as in Peng et al. 2021, instead of carrying their norm.
        orthogonal: draw W in orthogonal blocks instead of independently.
        trainable_projection: make the random W a parameter instead of a fixed buffer.
        redraw_pool: size of the pool from which training draws a fresh W at every forward pass; 0 keeps W fixed.
            Evaluation always uses the saved W.
        feature_seed: seed of all random matrices.
        gate: multiply the state by a learned gate per head and token (RFA-Gate).
        softmax_layers: indices of layers that stay softmax attention; their cache grows with the text.
        chunk_size: tokens that prefill and training handle at once in the quadratic form.
        state_dtype: dtype of the recurrent state, "float32" or "float64" (at least the model's own precision is kept).
    """

    feature_map: str = "positive"
    num_features: int | None = None
    unit_norm: bool = False
    orthogonal: bool = True
    trainable_projection: bool = False
    redraw_pool: int = 0
    feature_seed: int = 0
    gate: bool = False
    softmax_layers: list[int] = field(default_factory=list)
    chunk_size: int = 64
    state_dtype: str = "float32"

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in the map's default for ``num_features``, so that a checkpoint states its own shape."""
        super().__post_init__(**kwargs)  # type: ignore[misc]
        feature_map = FEATURE_MAPS.get(self.feature_map)
        if self.num_features is None and feature_map is not None:
            head_dim = self.hidden_size // self.num_attention_heads  # type: ignore[attr-defined]
            self.num_features = feature_map.resolve_num_features(None, head_dim)

    @property
    def layer_types(self) -> list[str]:
        """The cache layer of every layer: "rfa", or "full_attention" for the layers that stay softmax."""
        softmax = set(self.softmax_layers)
        return [
            "full_attention" if index in softmax else RFA_LAYER_TYPE
            for index in range(self.num_hidden_layers)  # type: ignore[attr-defined]
        ]

    def validate_layer_type(self) -> None:
        """Check ``softmax_layers``; the layer types themselves are derived and always valid."""
        count = self.num_hidden_layers  # type: ignore[attr-defined]
        wrong = [index for index in self.softmax_layers if not 0 <= index < count]
        if wrong or len(set(self.softmax_layers)) != len(self.softmax_layers):
            raise ValueError(
                f"softmax_layers must be distinct layer indices from 0 to {count - 1}, got {self.softmax_layers}."
            )

    def validate_rfa(self) -> None:
        """Check the fields of random feature attention, alone and together.

        Raises:
            ValueError: naming the field, its value, and what is allowed.
        """
        if self.feature_map not in FEATURE_MAPS:
            raise ValueError(f"feature_map={self.feature_map!r} is unknown. Known: {', '.join(sorted(FEATURE_MAPS))}.")
        feature_map = FEATURE_MAPS[self.feature_map]
        heads = self.num_attention_heads  # type: ignore[attr-defined]
        width = self.hidden_size  # type: ignore[attr-defined]
        if heads < 1 or width % heads:
            raise ValueError(f"{heads} attention heads do not divide the hidden size {width}.")
        feature_map.resolve_num_features(self.num_features, width // heads)
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {self.chunk_size}.")
        if self.state_dtype not in STATE_DTYPES:
            raise ValueError(f"state_dtype must be one of {', '.join(STATE_DTYPES)}, got {self.state_dtype!r}.")
        if self.redraw_pool < 0:
            raise ValueError(f"redraw_pool must be 0 (fixed) or the size of the pool, got {self.redraw_pool}.")
        if not issubclass(feature_map, RandomFeatureMap):
            for name in ("redraw_pool", "trainable_projection"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name}={getattr(self, name)} has no effect with feature_map={self.feature_map!r}, which has no "
                        f"random matrix. Leave it out."
                    )
        if self.redraw_pool and self.trainable_projection:
            raise ValueError("redraw_pool and trainable_projection exclude each other: a matrix is redrawn or trained.")
        if self.unit_norm and issubclass(feature_map, LearnedFeatureMap):
            raise ValueError(
                f"unit_norm does not apply to feature_map={self.feature_map!r}, which learns from raw q and k."
            )

    @classmethod
    def rfa_fields(cls) -> tuple[str, ...]:
        """Return the names of the fields that this mixin adds."""
        return tuple(item.name for item in fields(RFAConfigMixin))

    @classmethod
    def from_parent(cls, config: Any, **options: Any) -> Self:
        """Build this configuration from a softmax parent's, with RFA fields set by ``options``.

        Args:
            config: the parent's configuration; all its fields are kept.
            **options: values for RFA fields, or for fields of the parent that change (say ``n_positions``).

        Raises:
            ValueError: see `validate_rfa`.
        """
        values = config.to_dict()
        for name in ("model_type", "architectures", "transformers_version", "auto_map"):
            values.pop(name, None)
        return cls(**{**values, **options})


@strict
class RFAGPT2Config(RFAConfigMixin, GPT2Config):
    """Configuration of an RFA-GPT-2: all fields of `GPT2Config`, and those of `RFAConfigMixin`."""

    model_type = "rfa_gpt2"
