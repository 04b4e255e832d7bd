"""The configuration of the RFA model that a checkpoint is converted to."""

from __future__ import annotations

import os
import sys
from dataclasses import fields, replace
from difflib import get_close_matches
from importlib.machinery import PathFinder
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from hf_rfa.errors import InputError
from hf_rfa.families import has_rotary_positions, position_count, scale_rotations
from hf_rfa.models.configuration_rfa import AttentionKind, RFAConfigMixin
from hf_rfa.models.importance import IMPORTANCES
from hf_rfa.models.no_features import NoFeatures, feature_map_class

from .checkpoint.source import Checkpoint
from .options import ConversionOptions, Layers
from .presets import RETRIEVAL_WINDOW

#: The options that choose the layers and the number of features, by kind of attention.
OPTIONS_BY_KIND: dict[AttentionKind, tuple[str, str]] = {
    "causal": ("layers", "num_features"),
    "cross": ("cross_layers", "num_cross_features"),
    "encoder": ("encoder_layers", "num_encoder_features"),
}
#: The other options of causal attention.
CAUSAL = ("gate", "window_size", "num_sinks", "num_slots", "retrieval_heads")
NOTHING_TO_CONVERT = "no layer is left to convert. Name at least one in layers, cross_layers or encoder_layers."
#: The options that are named as the configuration's fields.
SAME_NAMES = ("feature_map", "gate", "window_size", "num_sinks", "num_slots")
#: Fields of the configuration that options set under other names, or that are found while converting.
RETRIEVAL = ("retrieval_heads", "retrieval_window", "retrieval_slots")
OTHER_NAMES = ("num_features", *RETRIEVAL, "feature_seed", "softmax_layers")


def rfa_config(checkpoint: Checkpoint, options: ConversionOptions) -> Any:
    """Return the RFA configuration, with the checkpoint's number of positions, by options that leave nothing open.

    Raises:
        InputError: if an option does not fit the model, or has no effect in it.
    """
    config_class = checkpoint.family.rfa_config
    if options.layers == [] and "cross" not in config_class.SOFTMAX_LAYERS.values():
        raise InputError(NOTHING_TO_CONVERT)
    values: dict[str, Any] = {name: getattr(options, name) for name in SAME_NAMES}
    values |= (options.config or {}) | {"feature_seed": options.seed}
    if not options.retrieval_heads or isinstance(options.retrieval_heads, list):  # a number of them is chosen later
        values |= {name: getattr(options, name) or ([] if name == "retrieval_heads" else 0) for name in RETRIEVAL}
    values |= {field: getattr(options, OPTIONS_BY_KIND[kind][1]) for field, kind in config_class.FEATURE_COUNTS.items()}
    if options.merged_source_length is not None:
        if "cross" not in config_class.SOFTMAX_LAYERS.values():
            raise InputError(
                f"merged_source_length={options.merged_source_length} does not apply to {checkpoint.config.model_type}, "
                "which has no cross attention to audio."
            )
        values["merged_source_length"] = options.merged_source_length
    try:
        plain = config_class.from_base(checkpoint.config, **{name: [] for name in config_class.SOFTMAX_LAYERS})
        for field, kind in config_class.SOFTMAX_LAYERS.items():
            layers = getattr(options, OPTIONS_BY_KIND[kind][0])
            if layers is not None:
                values[field] = _softmax_layers(checkpoint, plain, kind, layers)
        config = config_class.from_base(checkpoint.config, **values)
        with torch.device("meta"):  # some attention is found out to be unfit as its modules are made
            checkpoint.family.architectures[checkpoint.architecture][1](config)
    except (ValueError, StrictDataclassError) as error:
        raise InputError(str(error.__cause__ or error)) from error
    _check_layers(checkpoint, config, options)
    _check_retrieval_heads(checkpoint, config, options)
    return config


def check_names(options: ConversionOptions) -> None:
    """Raise an `InputError` for a name in ``config`` that is no field of the configuration, or has an option of its own."""
    names = [field.name for field in fields(RFAConfigMixin) if field.name not in (*SAME_NAMES, *OTHER_NAMES)]
    others = [field.name for field in fields(options) if field.name != "config"]
    for name in options.config or {}:
        if name not in names:
            nearest = get_close_matches(name, [*names, *others], n=1, cutoff=0.0)[0]
            raise InputError(
                f"config names {name!r}, which is not a field; the nearest is {nearest}. The configuration has "
                f"{', '.join(names)}; the options are {', '.join(others)}."
            )


def _softmax_layers(checkpoint: Checkpoint, config: Any, kind: AttentionKind, layers: Layers) -> list[int]:
    """Return the layers whose attention of a kind stays softmax where some are converted.

    ``config`` is of a model of which all layers are converted that can be.
    """
    count = config.num_layers_for(kind)
    possible = [index for index in range(count) if config.is_rfa(kind, index)]
    if count and not possible:
        raise InputError(
            f"no layer of {checkpoint.name} attends to all tokens before it (its layers are "
            f"{', '.join(sorted(set(config.base_layer_types())))}): its cache does not grow, and there is nothing to convert."
        )
    converted = possible if layers == "all" else layers
    if any(index not in possible for index in converted):
        allowed = f"from 0 to {count - 1}" if len(possible) == count else "among " + ", ".join(map(str, possible))
        raise InputError(f"{OPTIONS_BY_KIND[kind][0]} to convert must be indices {allowed}, got {layers}.")
    return [index for index in possible if index not in converted]


def _check_layers(checkpoint: Checkpoint, config: Any, options: ConversionOptions) -> None:
    """Raise an `InputError` for options of attention that the model does not have, or of which no layer is converted."""
    converted = {kind: converted_layers(config, kind) for kind in config.SOFTMAX_LAYERS.values()}
    for kind, names in OPTIONS_BY_KIND.items():
        for name in (*names, *(CAUSAL if kind == "causal" else ())):
            value, layers = getattr(options, name), names[0]
            if kind not in converted and value is not None:
                raise InputError(
                    f"{name}={value} does not apply to {checkpoint.config.model_type}, which has no such attention."
                )
            if value and name != layers and not converted.get(kind):
                raise InputError(
                    f"{name}={value} applies to {kind} attention, and none is converted. Leave it out, or name {layers}."
                )
    if not any(converted.values()):
        raise InputError(NOTHING_TO_CONVERT)


def _check_retrieval_heads(checkpoint: Checkpoint, config: Any, options: ConversionOptions) -> None:
    """Raise an `InputError` where a number of retrieval heads cannot be chosen, or cannot have the window that is named."""
    number, window, positions = options.retrieval_heads, options.retrieval_window, position_count(checkpoint.config)
    if window is not None and window > positions:
        raise InputError(
            f"retrieval_window={window} is more than the {positions} positions of {checkpoint.name}. Leave it out for "
            f"{min(RETRIEVAL_WINDOW, positions)}."
        )
    if isinstance(number, list) or not number:
        return
    if (options.retrieval_slots or 0) > positions:  # which the configuration sees when the heads are chosen
        raise InputError(
            f"retrieval_slots={options.retrieval_slots} is more than the {positions} positions of {checkpoint.name}. Take "
            "fewer."
        )
    if not checkpoint.predicts_tokens:
        raise InputError(
            f"retrieval_heads={number} are chosen by the predictions of a decoder with a language-model head, and "
            f"{checkpoint.name} is a {checkpoint.architecture}. Name the heads (layer.head), or leave them out."
        )
    heads, layers = config.num_heads_for("causal"), converted_layers(config)
    most = layers * (heads - 1)
    if number > most:
        raise InputError(
            f"retrieval_heads={number} are too many: {layers} layers of {heads} key-value heads have at most {most}, for one "
            "of every layer has to be left. Leave layers out instead (layers)."
        )


def converted_layers(config: Any, kind: AttentionKind = "causal") -> int:
    """Return the number of layers whose attention of a kind an RFA configuration converts."""
    return sum(config.is_rfa(kind, index) for index in range(config.num_layers_for(kind)))


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


def outside_modules(config: Any) -> dict[str, str]:
    """Return the modules from outside hf-rfa that a configuration needs, by what they register: ``feature map squares``."""
    own = NoFeatures.__module__.rpartition(".")[0]
    classes = {
        f"feature map {config.feature_map}": feature_map_class(config.feature_map),
        f"rule of importance {config.importance}": IMPORTANCES[config.importance],
    }
    return {name: cls.__module__ for name, cls in classes.items() if not cls.__module__.startswith(f"{own}.")}


def import_words(config: Any) -> list[str]:
    """Return the words of a command line that import what a configuration needs from outside hf-rfa, if a command can."""
    words: list[str] = []
    for module in dict.fromkeys(outside_modules(config).values()):
        if module != "__main__":
            on_path = PathFinder.find_spec(module.partition(".")[0]) is not None
            words += ["--import", module if on_path else os.path.relpath(str(sys.modules[module].__file__))]
    return words
