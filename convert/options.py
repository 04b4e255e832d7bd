"""The options of a conversion: from the caller to a configuration, and to a command line."""

from __future__ import annotations

import os
import shlex
import sys
from importlib.machinery import PathFinder
from typing import Any, Literal

from huggingface_hub.errors import StrictDataclassError

from hf_rfa.errors import InputError
from hf_rfa.models.configuration_rfa import AttentionKind
from hf_rfa.models.feature_maps import FEATURE_MAPS, FeatureMap

from .source import Source

#: Indices of the layers to convert, or all of them.
Layers = list[int] | Literal["all"]


def command_of(options: dict[str, Any]) -> str:
    """Return the command line that stands for the arguments of `convert`."""
    flags = {
        "feature_map": "positive",
        "num_features": None,
        "num_cross_features": None,
        "num_encoder_features": None,
        "unit_norm": False,
        "orthogonal": True,
        "trainable_projection": False,
        "redraw_pool": 0,
        "gate": False,
        "window": 0,
        "seed": 0,
        "layers": "all",
        "cross_layers": None,
        "encoder_layers": None,
        "keep_softmax": 0,
        "max_positions": None,
        "calibrate_on": None,
        "dtype": "auto",
        "allow_pickle": False,
    }
    words = ["hf-rfa", "convert", str(options["source"]), str(options["destination"])]
    for name, default in flags.items():
        value = options[name]
        if value == default:
            continue
        flag = {"calibrate_on": "--calibrate", "orthogonal": "--iid"}.get(name, "--" + name.replace("_", "-"))
        words.append(flag)
        if not isinstance(value, bool):
            words.append((",".join(map(str, value)) or "none") if isinstance(value, list) else str(value))
    return shlex.join(words + import_words(options["feature_map"]))


def outside_module(feature_map: str) -> str | None:
    """Return the module that registered a feature map, or None for one of hf-rfa's own (and for one that is unknown)."""
    module = getattr(FEATURE_MAPS.get(feature_map), "__module__", FeatureMap.__module__)
    own = FeatureMap.__module__.rpartition(".")[0]
    return None if module.startswith(f"{own}.") else module


def import_words(feature_map: str) -> list[str]:
    """Return the words of a command line that import a feature map from outside hf-rfa, if a command can."""
    module = outside_module(feature_map)
    if module is None or module == "__main__":
        return []
    if PathFinder.find_spec(module.partition(".")[0]) is not None:
        return ["--import", module]
    return ["--import", os.path.relpath(str(sys.modules[module].__file__))]


def rfa_config(
    source: Source,
    *,
    layers: dict[AttentionKind, Layers | None],
    counts: dict[AttentionKind, int | None],
    max_positions: int | None,
    **options: Any,
) -> Any:
    """Return the RFA configuration, still with the parent's number of positions."""
    config_class = source.family.rfa_config
    names: dict[AttentionKind, tuple[str, str]] = {
        "causal": ("layers", "num_features"),
        "cross": ("cross_layers", "num_cross_features"),
        "encoder": ("encoder_layers", "num_encoder_features"),
    }
    layer_fields = {kind: name for name, kind in config_class.SOFTMAX_LAYERS.items()}
    count_fields = {kind: name for name, kind in config_class.FEATURE_COUNTS.items()}
    for kind, (layers_name, count_name) in names.items():
        for name, value, known in ((layers_name, layers[kind], layer_fields), (count_name, counts[kind], count_fields)):
            if value is not None and kind not in known:
                raise InputError(
                    f"{name}={value} does not apply to {source.config.model_type}, which has no such attention."
                )
    positions = source.config.max_position_embeddings
    if max_positions is not None and max_positions <= positions:
        raise InputError(
            f"max_positions={max_positions} does not extend the {positions} positions that {source.name} has."
        )
    try:
        plain = config_class.from_parent(source.config)
        chosen: dict[str, list[int]] = {}
        for kind, field in layer_fields.items():
            count, wanted = plain.num_layers_for(kind), layers[kind]
            if wanted is None:
                continue
            converted = list(range(count)) if wanted == "all" else wanted
            if any(not 0 <= index < count for index in converted):
                raise InputError(f"{names[kind][0]} to convert must be indices from 0 to {count - 1}, got {wanted}.")
            chosen[field] = [index for index in range(count) if index not in converted]
        options |= {field: counts[kind] for kind, field in count_fields.items()}
        config = config_class.from_parent(source.config, **chosen, **options)
    except InputError:
        raise
    except (ValueError, StrictDataclassError) as error:
        raise InputError(str(error.__cause__ or error)) from error
    if not any(config.any_rfa(kind) for kind in layer_fields):
        raise InputError("no layer is left to convert. Name at least one in layers, cross_layers or encoder_layers.")
    for name in ("gate", "window"):
        if getattr(config, name) and not config.any_rfa("causal"):
            raise InputError(
                f"{name}={options[name]} is of causal attention, and none is converted. Leave it out, or name layers."
            )
    return config
