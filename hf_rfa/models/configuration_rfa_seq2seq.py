"""The fields that a memory of fixed size adds to the configuration of a family with an encoder and a decoder.

This module has no ``from __future__ import annotations``, for the reason that `hf_rfa.models.configuration_rfa` gives.
"""

from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig

from .configuration_rfa import AttentionKind, RFAConfigMixin, make_config_class
from .learned_feature_maps import FEATURE_MAPS
from .no_features import NoFeatures
from .rfa_classes import base_class
from .summary_feature_map import SummaryMap as SummaryMap  # which it registers


@dataclass(kw_only=True)
class RFASeq2SeqConfigMixin(RFAConfigMixin):
    """Fields of memories of fixed size for an encoder and a decoder, whose attention is of three kinds.

    ``num_features`` and ``softmax_layers`` are about the decoder's causal attention. The decoder's cross attention is RFA
    too by default (Peng et al. 2021, section 4.2), the encoder's attention is not.

    Args:
        num_cross_features: D of cross attention; None takes twice the map's default, where the map's D is free.
        num_encoder_features: D of the encoder's attention; None takes the map's default.
        softmax_cross_layers: indices of decoder layers whose cross attention stays softmax.
        softmax_encoder_layers: indices of encoder layers that stay softmax attention; None means all.
        merged_source_length: positions of audio that softmax cross attention keeps; similar neighbours are merged to as many
            (`hf_rfa.models.merged_attention`). 0 keeps all.
    """

    num_cross_features: int | None = None
    num_encoder_features: int | None = None
    softmax_cross_layers: list[Any] = field(default_factory=list)
    softmax_encoder_layers: list[Any] | None = None
    merged_source_length: int = 0

    FEATURE_COUNTS = {"num_features": "causal", "num_cross_features": "cross", "num_encoder_features": "encoder"}
    SOFTMAX_LAYERS = {"softmax_layers": "causal", "softmax_cross_layers": "cross", "softmax_encoder_layers": "encoder"}
    # A decoder that stands alone may come without any layers of an encoder.
    SIZES = {"vocab_size": 1, "d_model": 1, "max_position_embeddings": 1, "decoder_layers": 1, "encoder_layers": 0}
    SIZES |= {"encoder_attention_heads": 1, "decoder_attention_heads": 1}

    loads_features = False  # the modules of its classes import those of features

    def __post_init__(self, **kwargs: Any) -> None:
        """State every default, so that a checkpoint says which of its layers are RFA."""
        feature_map = FEATURE_MAPS.get(self.feature_map)
        if self.num_cross_features is None and feature_map is not None and feature_map.default_num_features is not None:
            # Cross attention is sharper: Peng et al. 2021 (section 4.2) give it twice the features, and so do we.
            self.num_cross_features = 2 * feature_map.default_num_features
        super().__post_init__(**kwargs)
        if self.softmax_encoder_layers is None and self.unusable_size() is None:
            self.softmax_encoder_layers = list(range(self.num_layers_for("encoder")))

    def num_layers_for(self, kind: AttentionKind) -> int:
        """Return the number of layers that have attention of a kind."""
        config: Any = self
        layers = config.encoder_layers if kind == "encoder" else config.decoder_layers
        return layers or 0  # None is refused, but transformers asks before that

    def num_query_heads_for(self, kind: AttentionKind) -> int:
        """Return the number of query heads that attention of a kind has."""
        config: Any = self
        return config.encoder_attention_heads if kind == "encoder" else config.decoder_attention_heads

    def _key_value_heads(self) -> None:
        """Return None: no queries share heads. Whisper has the field as another name of the encoder's heads."""

    def head_dim_for(self, kind: AttentionKind) -> int:
        """Return the width of a head, d."""
        return self.d_model // self.num_query_heads_for(kind)  # type: ignore[attr-defined]

    def base_layer_types(self) -> list[str]:
        """Return the type that every layer's cache has in the base model."""
        return ["full_attention"] * self.num_layers_for("causal")

    @classmethod
    def decoder_names(cls) -> dict[str, str]:
        """Return the other names of fields in the decoder's configuration, as ``attribute_map`` has them.

        Names without ``decoder_`` are the decoder's fields, as in the copy that transformers makes of a configuration with an
        encoder. A decoder that stands alone has such fields too.
        """
        fields = [name for name in cls.__dataclass_fields__ if name.startswith("decoder_")]
        names = super().decoder_names() | {name.removeprefix("decoder_"): name for name in fields}
        return names | {"num_hidden_layers": "decoder_layers", "num_attention_heads": "decoder_attention_heads"}

    def validate_rfa(self) -> None:
        """Check the fields, alone and together; see `RFAConfigMixin.validate_rfa`."""
        super().validate_rfa()
        for kind in ("cross", "encoder"):
            if FEATURE_MAPS.get(self.feature_map, NoFeatures).needs_window and self.any_rfa(kind):
                raise ValueError(
                    f"feature_map={self.feature_map!r} leaves {kind} attention nothing to see, for it has no window. Leave "
                    "all of its layers softmax, or take another feature map."
                )
        if self.merged_source_length < 0:
            raise ValueError(f"merged_source_length must be at least 0, got {self.merged_source_length}.")
        if self.merged_source_length and not (hasattr(self, "num_mel_bins") and self.softmax_layers_for("cross")):
            raise ValueError(
                f"merged_source_length={self.merged_source_length} applies to softmax cross attention to audio, and this "
                "model has none. Leave it out, or leave cross attention softmax."
            )


def __getattr__(name: str) -> Any:
    """Return a family's configuration class by its name: ``RFABartConfig`` from transformers' ``BartConfig``.

    Raises:
        AttributeError: if transformers has no such configuration.
    """
    return seq2seq_config_class(base_class(__name__, name, PreTrainedConfig))


def seq2seq_config_class(base: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """Return the configuration class of RFA models with an encoder: the fields of ``base`` and of `RFASeq2SeqConfigMixin`.

    Raises:
        ValueError: if ``base`` lacks a field that BART's configuration has.
    """
    fields = {*base.attribute_map, *(name for name in RFASeq2SeqConfigMixin.SIZES if hasattr(base, name))}
    missing = [name for name in RFASeq2SeqConfigMixin.SIZES if name not in {*fields, "max_position_embeddings"}]
    if missing:
        raise ValueError(f"{base.__name__} has no {missing[0]}: its models are not built as BART's are.")
    # Positions are the decoder's: an encoder of audio has others.
    names = {} if "max_position_embeddings" in fields else {"max_position_embeddings": "max_target_positions"}
    attribute_map = {**base.attribute_map, **names}
    return make_config_class(globals(), base, RFASeq2SeqConfigMixin, attribute_map=attribute_map)
