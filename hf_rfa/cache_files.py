"""A cache on disk: read a long prompt once, and go on from it in another process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache

from .cache import RFALayer, RFASourceLayer
from .errors import InputError

#: What a file says of itself, so that another kind of file, or a later one, is told apart.
FORMAT = "hf-rfa cache 1"
#: The kinds of cache layers that can be saved, and the tensors that each holds.
TENSORS: dict[str, tuple[str, ...]] = {
    "state": ("state", "window"),
    "source state": ("state",),
    "keys and values": ("keys", "values"),
}


def save_cache(cache: Cache, path: str | Path) -> None:
    """Write a cache of an RFA model to a safetensors file: states, windows, and keys and values of softmax layers.

    Args:
        cache: as a model or `generate` returns it.
        path: the file; replaced if it is there.

    Raises:
        InputError: if the cache has a layer of another kind, or holds nothing yet.
    """
    tensors: dict[str, Tensor] = {}
    about: dict[str, Any] = {}
    for part, layers in _parts(cache).items():
        for index, layer in enumerate(layers):
            kind, facts = _describe(layer)
            about[f"{part}.{index}"] = {"kind": kind, **facts}
            for name in TENSORS[kind]:
                tensor = getattr(layer, name)
                if tensor is not None:
                    tensors[f"{part}.{index}.{name}"] = tensor.detach().cpu().contiguous()
    if not tensors:
        raise InputError("this cache holds nothing yet.")
    path = Path(path)
    beside = path.with_name(f".{path.name}.partial")
    try:
        save_file(tensors, beside, {"format": FORMAT, "layers": json.dumps(about)})
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def load_cache(path: str | Path, model: Any) -> Cache:
    """Read a cache from a file that `save_cache` wrote.

    Args:
        path: the file.
        model: the model that goes on from it, the one that made it; the cache comes to its device.

    Returns:
        The cache, to be passed as ``past_key_values`` with the tokens that follow.

    Raises:
        InputError: if the file is not such a file, or was written of another model.
    """
    try:
        with safe_open(path, "pt", device=str(model.device)) as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dictionary
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read a cache from {path}: {error}") from error
    if metadata.get("format") != FORMAT:
        raise InputError(f"{path} holds no cache of hf-rfa ({metadata.get('format')!r} instead of {FORMAT!r}).")
    about = json.loads(metadata["layers"])
    own = DynamicCache(config=model.config)
    cache: Cache = (
        EncoderDecoderCache(own, DynamicCache(config=model.config))
        if any(name.startswith("cross") for name in about)
        else own
    )
    for part, layers in _parts(cache).items():
        count = sum(name.startswith(f"{part}.") for name in about)
        if count != len(layers):
            raise InputError(f"{path} holds {count} layers of {part} attention, and the model has {len(layers)}.")
        for index in range(count):
            facts = about[f"{part}.{index}"]
            held = {name: tensors.get(f"{part}.{index}.{name}") for name in TENSORS[facts["kind"]]}
            layers[index] = _restore(layers[index], facts, held, f"{path}, layer {index} of {part} attention")
    return cache


def _parts(cache: Cache) -> dict[str, list[Any]]:
    if isinstance(cache, EncoderDecoderCache):
        return {"self": cache.self_attention_cache.layers, "cross": cache.cross_attention_cache.layers}
    return {"self": cache.layers}


def _describe(layer: Any) -> tuple[str, dict[str, Any]]:
    """Return what a layer is, and what it knows beside its tensors."""
    holds = getattr(layer, "holds", None)
    if holds == RFASourceLayer.holds:
        return "source state", {"length": layer.cumulative_length, "rows": layer.rows_per_state}
    if holds == RFALayer.holds:
        return "state", {"length": layer.cumulative_length}
    if type(layer) is DynamicLayer:
        return "keys and values", {}
    raise InputError(f"a cache with a {type(layer).__name__} cannot be saved; one with a DynamicCache can.")


def _restore(layer: Any, facts: dict[str, Any], held: dict[str, Tensor | None], where: str) -> Any:
    """Return a layer with what a file holds of it."""
    if facts["kind"] == "source state":
        layer = RFASourceLayer()
        layer.fill(held["state"], length=facts["length"], rows_per_state=facts["rows"])
        return layer
    kind = "state" if getattr(layer, "holds", None) == RFALayer.holds else "keys and values"
    if kind != facts["kind"]:
        raise InputError(f"{where}: the file has {facts['kind']}, and the model {kind}: it is another model's.")
    for name, tensor in held.items():
        setattr(layer, name, tensor)
    first = next(iter(held.values()))
    if first is not None:
        layer.dtype, layer.device, layer.is_initialized = first.dtype, first.device, True
    if kind == "state":
        layer.cumulative_length = facts["length"]
    return layer
