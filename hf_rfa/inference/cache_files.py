"""Caches: their size, and caches on disk, so that a long prompt is read once and continued in another process."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache

from ..errors import InputError
from ..io.atomic_io import check_file, folder_beside
from ..models.cache_rfa import RFALayer
from ..models.cache_rfa_seq2seq import RFASourceLayer
from ..models.configuration_rfa import AttentionKind, RFAConfigMixin

#: What a file says of itself, so that another kind of file, or a later one, is told apart.
FORMAT = "hf-rfa cache 4"


def save_cache(cache: Cache, path: str | Path, *, notes: dict[str, Any] | None = None) -> None:
    """Write a cache of an RFA model to a safetensors file: states, windows, and keys and values of softmax layers.

    Args:
        cache: as a model or `generate` returns it.
        path: the file; replaced if it is there. Of a link the file that it leads to is.
        notes: what the file holds beside it, for `read_notes`: what JSON can hold.

    Raises:
        InputError: if the cache has a layer of another kind, or holds nothing yet and there are no notes; if what is at the
            path is no file, such as a folder or a device, or its folder cannot be written to.
    """
    check_file(Path(path))
    path = Path(path).resolve()
    tensors: dict[str, Tensor] = {}
    about: dict[str, Any] = {}
    for layer_name, layer in _layers(cache).items():
        about[layer_name] = _facts(layer)
        for name, tensor in _tensors(layer).items():
            tensors[f"{layer_name}.{name}"] = tensor.detach().cpu().contiguous()
    if not tensors and notes is None:
        raise InputError("this cache holds nothing yet.")
    texts = {"layers": json.dumps(about), "notes": json.dumps(notes)}
    with folder_beside(path) as folder:
        save_file(tensors, folder / path.name, {"format": FORMAT, **texts, "checksum": _checksum(tensors, texts)})
        (folder / path.name).replace(path)


def check_can_be_saved(model: Any) -> None:
    """Raise an `InputError` if `save_cache` would refuse the caches of a model."""
    for layer in DynamicCache(config=model.config).layers:
        _facts(layer)


def read_notes(path: str | Path) -> Any:
    """Return the notes that `save_cache` put into a file, which is one that `load_cache` has read; None without any."""
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["notes"])


def load_cache(path: str | Path, model: Any) -> Cache:
    """Read a cache from a file that `save_cache` wrote.

    Args:
        path: the file.
        model: the model that goes on from it, the one that made it; the cache comes to its device.

    Returns:
        The cache, to be passed with the tokens that follow (`hf_rfa.models.cache_names.cache_argument`).

    Raises:
        InputError: if the file is not such a file, is damaged, or was written of another model.
    """
    try:
        with safe_open(path, "pt", device=str(model.device)) as file:
            metadata = file.metadata() or {}
            # Copies: where a file's tensors lie in memory changes the rounding of what reads them.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  # not a dictionary
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read a cache from {path}: {error}") from error
    if metadata.get("format") != FORMAT:
        raise InputError(f"{path} holds no cache of hf-rfa ({metadata.get('format')!r} instead of {FORMAT!r}).")
    if metadata["checksum"] != _checksum(tensors, metadata):
        raise InputError(f"{path} is damaged: its content is not what was written.")
    about = json.loads(metadata["layers"])
    caches = {"self": DynamicCache(config=model.config)}
    if any(name.startswith("cross.") for name in about):
        caches["cross"] = DynamicCache(config=model.config)
    for part, cache in caches.items():
        count = sum(name.startswith(f"{part}.") for name in about)
        if count != len(cache.layers):
            raise InputError(f"{path} holds {count} layers of {part} attention, and the model has {len(cache.layers)}.")
        for index in range(count):
            facts, prefix = about[f"{part}.{index}"], f"{part}.{index}."
            of_layer = {name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)}
            if of_layer:  # or the model has not used this layer yet
                kind = _kind(model.config, part, index)
                if kind != facts["kind"]:
                    raise InputError(
                        f"{path}, layer {index} of {part} attention: the file has {facts['kind']}, and the model {kind}: it "
                        "is another model's."
                    )
                cache.layers[index] = _restore(facts, of_layer)
    # Only now: it looks at what its caches hold.
    return EncoderDecoderCache(*caches.values()) if "cross" in caches else caches["self"]


def _checksum(tensors: dict[str, Tensor], texts: dict[str, str]) -> str:
    """Return a checksum of what a file holds."""
    digest = hashlib.blake2b((texts["layers"] + texts["notes"]).encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].cpu().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _kind(config: Any, part: str, index: int) -> str:
    """Return the kind of cache layer that a model's attention uses."""
    attention: AttentionKind = "cross" if part == "cross" else "causal"
    if not isinstance(config, RFAConfigMixin) or not config.is_rfa(attention, index):
        return "keys and values"
    return "source state" if part == "cross" else "state"


def _layers(cache: Cache) -> dict[str, Any]:
    """Return the layers of a cache by the names that a file has for them, such as ``self.0`` and ``cross.0``."""
    parts = {"self": cache}
    if isinstance(cache, EncoderDecoderCache):
        parts = {"self": cache.self_attention_cache, "cross": cache.cross_attention_cache}
    return {f"{name}.{index}": layer for name, part in parts.items() for index, layer in enumerate(part.layers)}


def _facts(layer: Any) -> dict[str, Any]:
    """Return what a file says of a layer in addition to its tensors."""
    if hasattr(layer, "holds"):
        length, rows = int(layer.cumulative_length), getattr(layer, "rows_per_state", 1)
        return {"kind": layer.holds.removeprefix("RFA "), "length": length, "rows": rows}
    if type(layer) is DynamicLayer:
        return {"kind": "keys and values"}
    raise InputError(f"a cache with a {type(layer).__name__} cannot be saved; one with a DynamicCache can.")


def _tensors(layer: Any) -> dict[str, Tensor]:
    """Return what a layer of a cache holds, by name."""
    if hasattr(layer, "holds"):
        return layer.tensors()
    return {name: getattr(layer, name) for name in ("keys", "values") if getattr(layer, name, None) is not None}


def _restore(facts: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    """Return a layer with what a file holds of it."""
    if facts["kind"] == "keys and values":
        dynamic = DynamicLayer()
        dynamic.update(tensors["keys"], tensors["values"])
        return dynamic
    layer = RFASourceLayer() if facts["kind"] == "source state" else RFALayer()
    layer.restore(tensors, facts["length"])
    if isinstance(layer, RFASourceLayer):
        layer.rows_per_state = facts["rows"]
    return layer


def cache_num_bytes(cache: Cache | None) -> int:
    """Return the bytes that a cache's tensors take: RFA states, keys and values, and states of recurrent layers."""
    layers = {} if cache is None else _layers(cache)
    return sum(attention_num_bytes(layer) + recurrent_num_bytes(layer) for layer in layers.values())


def attention_num_bytes(layer: Any) -> int:
    """Return the bytes of what attention keeps in a layer of a cache: an RFA state, or keys and values."""
    return sum(tensor.nbytes for name, tensor in _tensors(layer).items() if not name.endswith(".origin"))  # a counter


def recurrent_num_bytes(layer: Any) -> int:
    """Return the bytes of the states that linear attention, recurrences and convolutions keep in a layer of a cache."""
    named = (getattr(layer, name, None) for name in ("conv_states", "recurrent_states"))
    # By number, or a single one in an older transformers.
    states = (state for each in named for state in (each.values() if isinstance(each, dict) else [each]))
    return sum(state.nbytes for state in states if state is not None)
