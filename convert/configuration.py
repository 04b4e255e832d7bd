"""The configuration of the RFA model that a checkpoint is converted to."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from importlib.machinery import PathFinder
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError

from hf_rfa.errors import InputError
from hf_rfa.families import Family, has_rotary_positions, position_count, scale_rotations
from hf_rfa.io.text_io import BLOCK_LENGTH
from hf_rfa.models.configuration_rfa import FULL_ATTENTION, AttentionKind
from hf_rfa.models.feature_maps import FEATURE_MAPS, FeatureMap

from .checkpoint import Checkpoint
from .options import ConversionOptions

#: The options that choose the layers and the number of features, by kind of attention.
OPTIONS_BY_KIND: dict[AttentionKind, tuple[str, str]] = {
    "causal": ("layers", "num_features"),
    "cross": ("cross_layers", "num_cross_features"),
    "encoder": ("encoder_layers", "num_encoder_features"),
}
#: The options that are named as the configuration's fields.
SAME_NAMES = (
    "feature_map",
    "unit_norm",
    "orthogonal",
    "trainable_projection",
    "redraw_pool",
    "gate",
    "window_size",
    "num_sinks",
    "num_slots",
)
#: First tokens that causal attention keeps exactly by default.
SINKS = 4
#: Last tokens that retrieval heads see by default: as many as the texts have that they are chosen on.
RETRIEVAL_WINDOW = BLOCK_LENGTH
#: What it keeps by default, in as many bytes as 128 features of `positive` take: features in half of them where these were
#: found to pay (`Family.features_by_default`), and exact tokens alone elsewhere.
WITH_FEATURES = {"num_features": 64, "window_size": 14, "num_sinks": SINKS, "num_slots": 14}
WITHOUT_FEATURES = {"window_size": 31, "num_sinks": SINKS, "num_slots": 28}
#: What is trained after a conversion: features by attention transfer, or the whole model end to end.
Trained = Literal["features", "model"]


def with_defaults(
    family: Family, options: ConversionOptions, trained: Trained | None = None, *, positions: int | None = None
) -> ConversionOptions:
    """Return options with a value for each that was left to the family and to what is ``trained``.

    Without an option of features, window, sinks or slots, and where features are not trained, the default is taken as a
    whole, as far as the model has ``positions``. Otherwise what is not named is left out, but for features where the family
    has them by default, for sinks beside a window where it has none, and for the window of retrieval heads.
    """
    names = ("feature_map", "num_features", "unit_norm", "trainable_projection", "redraw_pool", "gate", "memory")
    asked = trained == "features" or not options.orthogonal or any(getattr(options, name) for name in names)
    features = asked or family.features_by_default
    sizes = ("window_size", "num_sinks", "num_slots")
    defaults = dict.fromkeys(sizes, 0)
    if not asked and options.layers != [] and all(getattr(options, name) is None for name in sizes):
        defaults = dict(WITH_FEATURES if features else WITHOUT_FEATURES)
    elif not features and options.window_size:
        defaults["num_sinks"] = SINKS
    if positions is not None:
        defaults |= {name: min(defaults[name], positions) for name in sizes}
    chosen: dict[str, Any] = {name: value for name, value in defaults.items() if getattr(options, name) is None}
    trains = trained is not None and options.memory is None
    if options.feature_map is None:
        chosen["feature_map"] = ("exponential" if trains else "positive") if features else "none"
    options = replace(options, **chosen)
    if options.retrieval_heads and options.retrieval_window is None:
        window = RETRIEVAL_WINDOW if positions is None else min(RETRIEVAL_WINDOW, positions)
        options = replace(options, retrieval_window=window)
    if options.gate is None:
        gate = trains and options.feature_map != "none" and not options.window_size and options.layers != []
        options = replace(options, gate=gate)
    return options


def rfa_config(checkpoint: Checkpoint, options: ConversionOptions) -> Any:
    """Return the RFA configuration, with the checkpoint's number of positions; an `InputError` if an option does not fit."""
    options = with_defaults(checkpoint.family, options, positions=position_count(checkpoint.config))
    _check_options(checkpoint, options)
    config_class = checkpoint.family.rfa_config
    values: dict[str, Any] = {name: getattr(options, name) for name in SAME_NAMES}
    values["feature_seed"] = options.seed
    if isinstance(options.retrieval_heads, list) and options.retrieval_heads:  # a number of them is chosen later
        values |= {name: getattr(options, name) for name in ("retrieval_heads", "retrieval_window")}
    values |= {field: getattr(options, OPTIONS_BY_KIND[kind][1]) for field, kind in config_class.FEATURE_COUNTS.items()}
    try:
        plain = config_class.from_base(checkpoint.config, **{name: [] for name in config_class.SOFTMAX_LAYERS})
        for field, kind in config_class.SOFTMAX_LAYERS.items():
            name, count = OPTIONS_BY_KIND[kind][0], plain.num_layers_for(kind)
            wanted = getattr(options, name)
            if wanted is None:
                continue
            types = plain.base_layer_types() if kind == "causal" else FULL_ATTENTION[:1] * count
            possible = [index for index in range(count) if types[index] in FULL_ATTENTION]
            if count and not possible:
                raise InputError(
                    f"no layer of {checkpoint.name} attends to all tokens before it (its layers are "
                    f"{', '.join(sorted(set(types)))}): its cache does not grow, and there is nothing to convert."
                )
            converted = possible if wanted == "all" else wanted
            if any(index not in possible for index in converted):
                allowed = (
                    f"from 0 to {count - 1}" if len(possible) == count else "among " + ", ".join(map(str, possible))
                )
                raise InputError(f"{name} to convert must be indices {allowed}, got {wanted}.")
            values[field] = [index for index in possible if index not in converted]
        config = config_class.from_base(checkpoint.config, **values)
        with torch.device("meta"):  # some attention is found out to be unfit as its modules are made
            checkpoint.family.architectures[checkpoint.architecture][1](config)
    except (ValueError, StrictDataclassError) as error:
        raise InputError(str(error.__cause__ or error)) from error
    if not any(map(config.any_rfa, config_class.SOFTMAX_LAYERS.values())):
        raise InputError("no layer is left to convert. Name at least one in layers, cross_layers or encoder_layers.")
    for name in ("gate", "window_size", "num_sinks", "num_slots", "retrieval_heads"):
        value = getattr(options, name)
        if value and not config.any_rfa("causal"):
            raise InputError(
                f"{name}={value} is of causal attention, and none is converted. Leave it out, or name layers."
            )
    if isinstance(options.retrieval_heads, int) and options.retrieval_heads:
        _check_number_of_heads(checkpoint, config, options.retrieval_heads)
    return config


def _check_number_of_heads(checkpoint: Checkpoint, config: Any, number: int) -> None:
    """Raise an `InputError` where a number of retrieval heads cannot be chosen."""
    if config.is_encoder_decoder or not predicts_tokens(checkpoint):
        raise InputError(
            f"retrieval_heads={number} are chosen by what a decoder with a language-model head predicts, and "
            f"{checkpoint.name} is a {checkpoint.architecture}. Name the heads (layer.head), or leave them out."
        )
    heads, layers = config.num_heads_for("causal"), converted_layers(config)
    most = layers * (heads - 1)
    if number > most:
        raise InputError(
            f"retrieval_heads={number} are too many: {layers} layers of {heads} key-value heads have at most {most}, for one "
            "of every layer has to be left. Keep layers softmax instead (keep_softmax)."
        )


def converted_layers(config: Any) -> int:
    """Return the number of layers whose causal attention an RFA configuration converts."""
    return sum(config.is_rfa("causal", index) for index in range(config.num_layers_for("causal")))


def predicts_tokens(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint's model has a language-model head."""
    return checkpoint.architecture.endswith(("LMHeadModel", "ForCausalLM"))


def _check_options(checkpoint: Checkpoint, options: ConversionOptions) -> None:
    """Raise an `InputError` for attention that a checkpoint does not have, and for a window of no heads or too long."""
    window, positions = options.retrieval_window or 0, position_count(checkpoint.config)
    if window and not options.retrieval_heads:
        raise InputError(
            f"retrieval_window={window} has no effect without retrieval_heads. Leave it out, or name heads."
        )
    if window > positions:
        raise InputError(
            f"retrieval_window={window} is more than the {positions} positions of {checkpoint.name}. Leave it out for "
            f"{min(RETRIEVAL_WINDOW, positions)}."
        )
    present = checkpoint.family.rfa_config.SOFTMAX_LAYERS.values()
    for name in (name for kind, names in OPTIONS_BY_KIND.items() if kind not in present for name in names):
        value = getattr(options, name)
        if value is not None:
            raise InputError(
                f"{name}={value} does not apply to {checkpoint.config.model_type}, which has no such attention."
            )


def with_more_positions(checkpoint: Checkpoint, options: ConversionOptions) -> Checkpoint:
    """Return the checkpoint, with rotations for the number of positions that is asked for where it has rotary positions.

    Raises:
        InputError: if there are that many positions already, or if the rotations cannot be scaled.
    """
    if options.max_positions is None:
        return checkpoint
    config: Any = checkpoint.config
    if options.max_positions <= position_count(config):
        raise InputError(
            f"max_positions={options.max_positions} does not extend the {position_count(config)} positions that "
            f"{checkpoint.name} has."
        )
    if not has_rotary_positions(config):  # tables are made longer after the calibration
        return checkpoint
    try:
        return replace(checkpoint, config=scale_rotations(config, options.max_positions))
    except ValueError as error:
        raise InputError(f"cannot extend the positions of {checkpoint.name}: {error}") from error


def outside_module(feature_map: str | None) -> str | None:
    """Return the module that registered a feature map, or None for one of hf-rfa's own (and for one that is unknown)."""
    if feature_map is None:
        return None
    module = getattr(FEATURE_MAPS.get(feature_map), "__module__", FeatureMap.__module__)
    own = FeatureMap.__module__.rpartition(".")[0]
    return None if module.startswith(f"{own}.") else module


def import_words(feature_map: str | None) -> list[str]:
    """Return the words of a command line that import a feature map from outside hf-rfa, if a command can."""
    module = outside_module(feature_map)
    if module is None or module == "__main__":
        return []
    if PathFinder.find_spec(module.partition(".")[0]) is not None:
        return ["--import", module]
    return ["--import", os.path.relpath(str(sys.modules[module].__file__))]
