"""The fields that a memory of fixed size adds to a family's configuration, and their validation.

This module has no ``from __future__ import annotations``: huggingface_hub's strict dataclasses check a field's type only
where the annotation is a type, and not its name.
"""

import copy
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.dynamic_module_utils import get_relative_import_files

from .cache_rfa import RFA_LAYER_TYPE
from .importance import DEFAULT_IMPORTANCE, IMPORTANCES
from .no_features import SUMMARY, NoFeatures, all_feature_maps, feature_map_class
from .rfa_classes import base_class, make_class

#: The modules that a checkpoint loads first: with features, and with the summary.
FEATURES, STATE = "modeling_rfa_features", "modeling_rfa_state"
#: The modules that it takes the place of.
DECODERS = ("configuration_rfa", "modeling_rfa_decoder")
#: Seeds from 0 to this draw different matrices: torch's generator for the CPU reads 32 bits of a seed.
MAX_SEED = 2**32 - 1

#: Types of a base model's layers with attention to all tokens, the only ones that conversion changes.
FULL_ATTENTION = ("full_attention", "attention")
#: Types of a base model's layers that keep the documents of a packed row apart: attention by its mask, and others because
#: they read every token by itself.
KEEPS_DOCUMENTS_APART = (*FULL_ATTENTION, "sliding_attention", "chunked_attention", "mlp", "moe")
#: Ways to scale rotations that give another one to longer texts, so that keys of a cache would be of two kinds.
LENGTH_DEPENDENT = ("dynamic", "longrope")
#: The least default of `RFAConfigMixin.max_distance`.
LEAST_DISTANCE = 1024
#: What an attention layer attends to: the tokens before it, an encoder's output, or all tokens of an encoder's input.
AttentionKind = Literal["causal", "cross", "encoder"]


@dataclass(kw_only=True)
class RFAConfigMixin:
    """Fields of a memory of fixed size, mixed into the configuration class of a decoder.

    Its layers may be of several types. Those of another type than full attention stay as they are: a sliding window, say, or
    a recurrence, whose caches do not grow either.

    Args:
        feature_map: name of the feature map, one of `hf_rfa.models.feature_maps.FEATURE_MAPS`. Default ``"positive"``.
        num_features: D, rows of W per head (F is D, 2D for ``gaussian``); None takes the map's default.
        unit_norm: ℓ2-normalize queries and keys, as in Peng et al. 2021, instead of carrying their norm.
        trainable_projection: make the random W a parameter instead of a fixed buffer.
        feature_seed: seed of all random matrices, from 0 to 2³² − 1.
        gate: multiply the state by a learned gate per head and token (RFA-Gate).
        window_size: N, the number of last tokens (the query's own included) that causal attention sees exactly, by softmax
            under one normalizer with the features of all tokens before them; 0 for features alone, at most the model's
            positions. The cache holds their keys and values next to the state.
        num_sinks: S, the number of first tokens that causal attention with a window keeps exactly for good.
        num_slots: K, the number of most important tokens before the window that it keeps exactly as well.
        importance: name of the rule by which slots rank tokens, one of `hf_rfa.models.importance.IMPORTANCES`.
        retrieval_heads: [layer, key-value head] of every retrieval head: one that attends exactly, without features, to the
            sinks, and to a window and slots of its own. A layer has to have other heads too.
        retrieval_window: the number of last tokens that retrieval heads see.
        retrieval_slots: the number of most important tokens before that window that they keep exactly as well.
        max_distance: L, the distance that kept tokens never exceed where positions are rotary: old ones move along with
            the text (`hf_rfa.models.positions`). None for an eighth of the positions that the model was trained for,
            but at least 1,024 and four windows, and at most all positions.
        distance_step: B, from 1 to L − 1: the number of tokens after which old ones move along; None for half of L.
        softmax_layers: indices of layers that stay softmax attention; their cache grows with the text.
        chunk_size: tokens that prefill and training handle at once in the quadratic form.
    """

    feature_map: str = "positive"
    num_features: int | None = None
    unit_norm: bool = False
    trainable_projection: bool = False
    feature_seed: int = 0
    gate: bool = False
    window_size: int = 0
    num_sinks: int = 0
    num_slots: int = 0
    importance: str = DEFAULT_IMPORTANCE
    retrieval_heads: list[Any] = field(default_factory=list)
    retrieval_window: int = 0
    retrieval_slots: int = 0
    max_distance: int | None = None
    distance_step: int | None = None
    softmax_layers: list[Any] = field(default_factory=list)  # `validate_rfa` says more than a type would
    chunk_size: int = 64

    #: What is called when the first configuration of a class is made.
    ON_FIRST_USE: ClassVar[dict[type, Callable[[], None]]] = {}
    #: What is called before anybody gets the fields: other libraries ask for these first.
    BEFORE_FIELDS: ClassVar[list[Callable[[], None]]] = []
    #: Where transformers finds the classes of this family in a checkpoint that holds their code, by auto class.
    AUTO_MAP: ClassVar[dict[str, str]] = {}
    #: The fields that count features, and the attention that each is for.
    FEATURE_COUNTS: ClassVar[dict[str, AttentionKind]] = {"num_features": "causal"}
    #: The fields that list layers which stay softmax attention, and the attention that each is for.
    SOFTMAX_LAYERS: ClassVar[dict[str, AttentionKind]] = {"softmax_layers": "causal"}
    #: transformers 5.17 would build one of defaults, whose feature map's code a checkpoint with another does not carry.
    has_no_defaults_at_init: ClassVar[bool] = True
    #: The base model's fields that attention is built from, and the least that each may be.
    SIZES: ClassVar[dict[str, int]] = dict.fromkeys(
        ("vocab_size", "hidden_size", "max_position_embeddings", "num_hidden_layers", "num_attention_heads"), 1
    )

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in the map's default for ``num_features``, so that a checkpoint states its own shape."""
        super().__post_init__(**kwargs)  # type: ignore[misc]
        if (register := self.ON_FIRST_USE.pop(type(self), None)) is not None:
            register()
        feature_map = feature_map_class(self.feature_map)
        if feature_map is None or self.unusable_size() is not None:  # `validate_rfa` says so
            return
        for name, kind in self.FEATURE_COUNTS.items():
            if getattr(self, name) is None:
                setattr(self, name, feature_map.resolve_num_features(None, self.head_dim_for(kind)))

    def streams(self) -> bool:
        """Return whether old tokens move along with the text, so that it may be of any length.

        They do with rotary positions, where all that every full-attention layer keeps is exact tokens, and features without
        rotation.
        """
        rotary = bool(getattr(self, "rope_parameters", None)) and self.max_position_embeddings > 1  # type: ignore[attr-defined]
        feature_map = feature_map_class(self.feature_map)
        unrotated = self.window_size > 0 and feature_map is not None and feature_map.unrotated
        return rotary and unrotated and not any(kind in FULL_ATTENTION for kind in self.cache_layer_types())

    def trained_positions(self) -> int:
        """Return the number of positions up to which rotations are the same for texts of any length."""
        positions: int = self.max_position_embeddings  # type: ignore[attr-defined]
        rotations = getattr(self, "rope_parameters", None) or {}
        parts = (
            [rotations] if "rope_type" in rotations else [part for part in rotations.values() if isinstance(part, dict)]
        )
        changing = [part for part in parts if part.get("rope_type") in LENGTH_DEPENDENT]
        return min([positions, *(part.get("original_max_position_embeddings") or positions for part in changing)])

    def motion_of(self, kind: AttentionKind) -> tuple[int, int]:
        """Return L and B of attention of a kind, zeros where tokens stay in place."""
        if kind != "causal" or not self.streams():
            return 0, 0
        trained = self.trained_positions()
        wanted = max(trained // 8, LEAST_DISTANCE, 4 * max(self.window_size, self.retrieval_window))
        distance = min(trained, wanted) if self.max_distance is None else self.max_distance
        return distance, max(1, distance // 2) if self.distance_step is None else self.distance_step

    def num_layers_for(self, kind: AttentionKind) -> int:
        """Return the number of layers that have attention of a kind."""
        return self.num_hidden_layers  # type: ignore[attr-defined]

    def num_query_heads_for(self, kind: AttentionKind) -> int:
        """Return the number of query heads that attention of a kind has."""
        return self.num_attention_heads  # type: ignore[attr-defined]

    def num_heads_for(self, kind: AttentionKind) -> int:
        """Return H, the number of key-value heads that attention of a kind has; each has a state."""
        return self._key_value_heads() or self.num_query_heads_for(kind)

    def _key_value_heads(self) -> int | None:
        """Return the field with the number of key-value heads; None where the base model has no such field (OPT)."""
        has_them = _has_key_value_heads(base_config_class(type(self)))
        return getattr(self, "num_key_value_heads", None) if has_them else None

    def head_dim_for(self, kind: AttentionKind) -> int:
        """Return the width of a head, d."""
        config: Any = self
        return getattr(self, "head_dim", None) or config.hidden_size // self.num_query_heads_for(kind)

    def num_features_for(self, kind: AttentionKind) -> int:
        """Return D for attention of a kind."""
        return getattr(self, {of: name for name, of in self.FEATURE_COUNTS.items()}[kind])

    def softmax_layers_for(self, kind: AttentionKind) -> list[int]:
        """Return the layers whose attention of a kind stays softmax."""
        return getattr(self, {of: name for name, of in self.SOFTMAX_LAYERS.items()}[kind])

    def is_rfa(self, kind: AttentionKind, layer_idx: int) -> bool:
        """Return whether attention of a kind is RFA in a layer."""
        if kind not in self.SOFTMAX_LAYERS.values() or layer_idx in self.softmax_layers_for(kind):
            return False
        return kind != "causal" or self.base_layer_types()[layer_idx] in FULL_ATTENTION

    def any_rfa(self, kind: AttentionKind) -> bool:
        """Return whether attention of a kind is RFA in some layer."""
        return any(self.is_rfa(kind, index) for index in range(self.num_layers_for(kind)))

    def base_layer_types(self) -> list[str]:
        """Return the type that every layer's cache has in the base model.

        A sliding window that is not shorter than the positions hides nothing: such layers are as those of full attention.
        """
        types = getattr(self, "layer_types", None) or getattr(self, "layers_block_type", None)
        limits = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
        sizes = {name: getattr(self, field, None) for name, field in limits.items()}
        if types is None:
            types = [name for name, size in sizes.items() if size] or ["full_attention"]
            types = types[:1] * self.num_layers_for("causal")
        positions: int = self.max_position_embeddings  # type: ignore[attr-defined]
        all_seen = {name for name, size in sizes.items() if size and size >= positions}
        return ["full_attention" if name in all_seen else name for name in types]

    def types_that_read_on(self) -> list[str]:
        """Return the types of layers, convolutions and recurrences, that read on from one document of a row to the next."""
        return sorted(set(self.base_layer_types()) - set(KEEPS_DOCUMENTS_APART))

    def retrieval_heads_of(self, layer_idx: int) -> list[int]:
        """Return the retrieval heads of a layer."""
        return sorted(head for layer, head in self.retrieval_heads if layer == layer_idx)

    def cache_layer_types(self) -> list[str]:
        """Return the type of every layer's cache: "rfa", or that of the base model where nothing is RFA."""
        types = enumerate(self.base_layer_types())
        return [RFA_LAYER_TYPE if self.is_rfa("causal", index) else base_type for index, base_type in types]

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> Any:
        """Return the configuration of one side, as `PreTrainedConfig.get_text_config` does.

        That of the decoder alone, which caches are built by, is this one under another class, whose ``layer_types`` are
        `cache_layer_types`: what is written to it is written to this one.
        """
        if encoder or not decoder:
            return super().get_text_config(decoder=decoder, encoder=encoder)  # type: ignore[misc]
        cls: Any = type(self)
        return self if hasattr(cls, "model_config_class") else _under_class(self, _decoder_class(cls))

    @classmethod
    def decoder_names(cls) -> dict[str, str]:
        """Return the other names of fields in the decoder's configuration, as ``attribute_map`` has them."""
        names: dict[str, str] = cls.attribute_map  # type: ignore[attr-defined]
        return {name: own for name, own in names.items() if name != "layer_types"}  # which Bamba has for another field

    def unusable_size(self) -> str | None:
        """Return what is wrong with the base model's sizes, by which attention is built, or None."""
        for name, least in self.SIZES.items():
            value = getattr(self, name)
            if value is None or value < least:
                base_name = self.attribute_map.get(name, name)  # type: ignore[attr-defined]
                return f"{base_name} must be at least {least}, got {value}."
        heads, shared = self.num_query_heads_for("causal"), self._key_value_heads()
        if shared is not None and (shared < 1 or heads % shared):
            return f"num_key_value_heads must divide the {heads} attention heads, got {shared}."
        return None

    def validate_layer_type(self) -> None:
        """Check the base model's layer types where it has some; those of caches are derived and always valid."""
        types = vars(self).get("layer_types")
        if types is not None:
            super().validate_layer_type()  # type: ignore[misc]
            vars(self)["layer_types"] = types  # transformers 5.17 renames LFM2's "conv", by which its own forward goes

    def check_causal(self) -> None:
        """Raise a ValueError for the fields by which transformers' models make a decoder's attention bidirectional."""
        for name, causal in (("is_causal", True), ("use_bidirectional_attention", False)):
            value = getattr(self, name, causal)
            if bool(value) != causal:
                raise ValueError(
                    f"{name}={value!r} makes attention bidirectional: tokens see those after them, of which a memory of the "
                    "tokens before holds nothing. Pass a causal model: one that was trained without this field."
                )

    def validate_rfa(self) -> None:
        """Check the fields, alone and together.

        Raises:
            ValueError: naming the field, its value, and what is allowed.
        """
        if problem := self.unusable_size():
            raise ValueError(problem)
        self.check_causal()
        feature_map = feature_map_class(self.feature_map)
        if feature_map is None:
            names = ", ".join(sorted([NoFeatures.name, *all_feature_maps()]))
            raise ValueError(
                f"feature_map={self.feature_map!r} is unknown. Known: {names}. For a map of your own, import its module "
                "first: in Python, or with --import MODULE on the command line."
            )
        for name, kind in self.FEATURE_COUNTS.items():
            feature_map.resolve_num_features(getattr(self, name), self.head_dim_for(kind), name=name)
        if self.importance not in IMPORTANCES:
            raise ValueError(
                f"importance={self.importance!r} is unknown. Known: {', '.join(sorted(IMPORTANCES))}. For a rule of your "
                "own, import its module first: in Python, or with --import MODULE on the command line."
            )
        if self.importance != DEFAULT_IMPORTANCE and not (self.num_slots or self.retrieval_slots):
            raise ValueError(
                f"importance={self.importance!r} has no effect without slots. Leave it out, or set num_slots."
            )
        positions = self.max_position_embeddings  # type: ignore[attr-defined]
        exact = ("window_size", "num_sinks", "num_slots", "retrieval_window", "retrieval_slots")
        ranges = {"chunk_size": (1, torch.iinfo(torch.int64).max), **dict.fromkeys(exact, (0, positions))}
        ranges["feature_seed"] = (0, MAX_SEED)
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            if not least <= value <= most:
                limit = ", the model's number of positions" if name in exact else ""
                raise ValueError(f"{name} must be from {least} to {most}{limit}, got {value}.")
        for name, kind in self.SOFTMAX_LAYERS.items():
            count, layers = self.num_layers_for(kind), getattr(self, name)
            valid = all(type(index) is int and 0 <= index < count for index in layers)
            if not valid or len(set(layers)) < len(layers):
                allowed = f"distinct layer indices from 0 to {count - 1}" if count else "empty, for there are no layers"
                raise ValueError(f"{name} must be {allowed}, got {layers}.")
        self._check_retrieval_heads()
        self._check_motion()
        needs_window: dict[str, Any] = {"num_sinks": self.num_sinks, "num_slots": self.num_slots}
        if feature_map.needs_window:
            needs_window["feature_map"] = self.feature_map
        for name, value in needs_window.items():
            if value and not self.window_size:
                raise ValueError(f"{name}={value!r} must come with a sliding window: set window_size to 1 or more.")
        no_matrix = f"has no effect with feature_map={self.feature_map!r}, which has no random matrix that stays"
        raw = f"does not apply to feature_map={self.feature_map!r}, which learns from raw q and k"
        for name, refused, problem in (
            ("trainable_projection", not feature_map.has_random_matrix, no_matrix),
            ("unit_norm", feature_map.learns_from_raw, raw),
            ("unit_norm", feature_map is NoFeatures, "has no effect without features"),
            ("gate", feature_map is NoFeatures, "has no effect without features: there is no state to decay"),
        ):
            if refused and getattr(self, name):
                raise ValueError(f"{name}=True {problem}. Leave it out.")

    def _check_motion(self) -> None:
        """Check the distance that kept tokens never exceed, and its steps."""
        if not self.streams():
            for name in ("max_distance", "distance_step"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name}={getattr(self, name)} has no effect: kept tokens move along in models with rotary "
                        "positions, a window, no features and no full-attention layer that stays softmax. Leave it out."
                    )
            return
        trained = self.trained_positions()
        distance, step = self.motion_of("causal")
        if not 2 <= distance <= trained:
            raise ValueError(
                f"max_distance must be from 2 to {trained}, the positions it was trained for, got {distance}."
            )
        if not 1 <= step < distance:
            raise ValueError(f"distance_step must be from 1 to {distance - 1}, below max_distance, got {step}.")

    def _check_retrieval_heads(self) -> None:
        """Check the retrieval heads and their window."""
        pairs, window, problem = self.retrieval_heads, self.retrieval_window, None
        layers, heads = self.num_layers_for("causal"), self.num_heads_for("causal")
        for pair in pairs:
            fits = isinstance(pair, list | tuple) and len(pair) == 2 and all(type(index) is int for index in pair)
            if not fits or not (0 <= pair[0] < layers and 0 <= pair[1] < heads):
                raise ValueError(
                    f"retrieval_heads must be pairs [layer, head] of {layers} layers of {heads} key-value heads, counted "
                    f"from 0, got {pairs}."
                )
            if not self.is_rfa("causal", pair[0]):
                problem = f"names layer {pair[0]}, whose attention is not RFA. Leave it out"
            elif len(self.retrieval_heads_of(pair[0])) == heads:
                problem = f"names all {heads} heads of layer {pair[0]}. Leave one out, or keep the layer softmax"
        if len({tuple(pair) for pair in pairs}) < len(pairs):
            problem = "names a head twice. Leave it out once"
        elif pairs and not window and problem is None:
            problem = "must have a window of their own: set retrieval_window to the number of last tokens that they see"
        if problem is not None:
            raise ValueError(f"retrieval_heads={pairs} {problem}.")
        for name in ("retrieval_window", "retrieval_slots"):
            if getattr(self, name) and not pairs:
                raise ValueError(f"{name}={getattr(self, name)} has no effect without retrieval_heads. Leave it out.")

    def save_pretrained(self, save_directory: str | PathLike, *args: Any, **kwargs: Any) -> None:
        """Save the configuration, and with it the code of its class; arguments as for `PreTrainedConfig.save_pretrained`."""
        if self.AUTO_MAP:
            self.auto_map = dict(self.AUTO_MAP)
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        if self.loads_features and getattr(self, "auto_map", None):
            entry = Path(__file__).with_name(f"{self.entry()}.py")
            for path in (entry, *map(Path, get_relative_import_files(entry))):
                shutil.copyfile(path, Path(save_directory, path.name))

    @property
    def loads_features(self) -> bool:
        """Whether a checkpoint's code begins with the module of features, which imports those of all decoders."""
        return self.feature_map != NoFeatures.name

    def entry(self) -> str:
        """Return the module that a checkpoint's code begins with where it `loads_features`."""
        return STATE if self.feature_map == SUMMARY else FEATURES

    def to_dict(self) -> dict[str, Any]:
        """Return the fields; where there are features, the code of the classes begins with theirs."""
        for tell in self.BEFORE_FIELDS:
            tell()
        fields: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        if self.loads_features and fields.get("auto_map"):
            names = {auto: name.split(".") for auto, name in fields["auto_map"].items()}
            fields["auto_map"] |= {
                auto: f"{self.entry()}.{cls}" for auto, (module, cls) in names.items() if module in DECODERS
            }
        return fields

    @classmethod
    def from_base(cls, config: Any, **options: Any) -> Self:
        """Build this configuration from a softmax model's, with RFA fields set by ``options``.

        Args:
            config: the base model's configuration, all of whose fields are kept but those of RFA's names: its model knows
                nothing of them.
            **options: values for RFA fields, or for fields of the base model that change (say ``n_positions``).

        Raises:
            ValueError: see `validate_rfa`; also if the base model caps its logits.
        """
        unread = {*cls.__dataclass_fields__} - {*type(config).__dataclass_fields__, *config.attribute_map}
        unread |= {"model_type", "architectures", "transformers_version", "auto_map"}
        values = {name: value for name, value in config.to_dict().items() if name not in unread} | options
        for name in (name for name in values if name not in options):  # some parts refuse what their own `to_dict` says
            if isinstance(part := getattr(config, name, None), PreTrainedConfig):
                values[name] = copy.deepcopy(part)
        if (capped := values.get("attn_logit_softcapping")) is not None:
            raise ValueError(
                f"attn_logit_softcapping={capped}: capped logits are no function of q·k that features stand for. Models with "
                "them are not supported."
            )
        return cls(**values)


def base_config_class(config_class: type) -> Any:
    """Return the configuration class of the softmax models of a class with RFA fields."""
    return next(cls for cls in config_class.__mro__ if not issubclass(cls, RFAConfigMixin))


@cache
def _has_key_value_heads(base_config: Any) -> bool:
    """Return whether a base model's configuration has a number of key-value heads of its own: files may hold any field."""
    return hasattr(base_config(), "num_key_value_heads")


def _under_class(config: Any, cls: Any) -> Any:
    """Return a configuration of a class whose fields are those of ``config``: what is written to one is in both."""
    shared = cls.__new__(cls)
    object.__setattr__(shared, "__dict__", vars(config))
    return shared


@cache
def _decoder_class(base: type[RFAConfigMixin]) -> type:
    """Return the class of what `RFAConfigMixin.get_text_config` returns for the decoder of a configuration."""

    def layer_types(config: Any) -> list[str]:
        return _under_class(config, base).cache_layer_types()

    def set_layer_types(config: Any, types: list[str]) -> None:
        _under_class(config, base).layer_types = types

    body = {"layer_types": property(layer_types, set_layer_types), "model_config_class": base}
    decoder: Any = type(base.__name__, (base,), {"__module__": base.__module__, "__doc__": base.__doc__, **body})
    decoder.attribute_map = base.decoder_names()  # set after the class is made, which joins those of its bases
    return decoder


def __getattr__(name: str) -> Any:
    """Return a family's configuration class by its name: ``RFALlamaConfig`` from transformers' ``LlamaConfig``.

    Raises:
        AttributeError: if transformers has no such configuration.
    """
    return decoder_config_class(base_class(__name__, name, PreTrainedConfig))


def decoder_config_class(base: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """Return the configuration class of a decoder's RFA models: the fields of ``base`` and of `RFAConfigMixin`."""
    return make_config_class(globals(), base, RFAConfigMixin)


def make_config_class(
    namespace: dict[str, Any], base: type[PreTrainedConfig], mixin: type, **attributes: Any
) -> type[PreTrainedConfig]:
    """Return the RFA class of a configuration class.

    Args:
        namespace: as for `hf_rfa.models.rfa_classes.make_class`.
        base: the softmax models' class.
        mixin: what holds the added fields.
        **attributes: class attributes.
    """
    text = f"Configuration of an RFA model: all fields of `{base.__name__}`, and those of `{mixin.__name__}`."
    # Another model_type than the base model's, so that nothing loads a converted checkpoint as softmax by accident.
    body = {"model_type": f"rfa_{base.model_type}", **attributes}
    return make_class(namespace, base, (mixin,), text, finish=strict, **body)
