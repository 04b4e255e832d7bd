"""What a model keeps of the tokens that it has read: bytes by kind, measured on its cache, and their worth in tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from hf_rfa.cache_files import recurrent_num_bytes
from hf_rfa.models.cache_rfa import RFALayer

from ..models.cache_names import cache_argument

#: Tokens after which the growth of a cache is measured.
SHORT, LONG = 8, 16


@dataclass(frozen=True)
class CacheMemory:
    """Bytes of a model's cache for one sequence, in the precision that it runs in.

    Attributes:
        state: recurrent states of all layers.
        window: keys, values and weights of the sliding windows.
        sinks: those of the sinks.
        slots: those of the slots.
        retrieval: those of retrieval heads with a window.
        per_token: keys and values that softmax layers, and retrieval heads that see all tokens, add with every token.
        sliding: (bytes a token, most tokens) of every layer of the base model that has a sliding window.
        recurrent: states of its recurrent layers.
        layers: (state, window, sinks, slots, retrieval) of every layer; empty where there is none of these.
    """

    state: int
    window: int
    sinks: int
    per_token: int
    layers: tuple[tuple[int, int, int, int, int], ...] = ()
    slots: int = 0
    retrieval: int = 0
    sliding: tuple[tuple[int, int], ...] = ()
    recurrent: int = 0

    @property
    def fixed(self) -> int:
        """Bytes of RFA layers that do not grow."""
        return self.state + self.window + self.sinks + self.slots + self.retrieval

    def after(self, tokens: int) -> int:
        """Return the bytes after some tokens."""
        sliding = sum(size * min(tokens, most) for size, most in self.sliding)
        return self.fixed + self.per_token * tokens + sliding + self.recurrent

    def worth(self, other: CacheMemory, tokens: int) -> float:
        """Return how many tokens of another model's growing cache the bytes after some tokens would hold.

        Sliding and recurrent layers, which conversion leaves as they are, are not counted.
        """
        return (self.fixed + self.per_token * tokens) / other.per_token


@torch.no_grad()
def cache_memory(model: PreTrainedModel) -> CacheMemory:
    """Return the memory of a causal model's cache, by reading `LONG` tokens with it."""
    cache = DynamicCache(config=model.config)
    ids = torch.zeros(1, LONG, dtype=torch.long, device=model.device)
    model(ids[:, :SHORT], **cache_argument(cache), use_cache=True)
    before = _growing_bytes(cache)
    model(ids[:, SHORT:], **cache_argument(cache), use_cache=True)
    config: Any = model.config
    sizes = [getattr(config, name, 0) for name in ("window_size", "num_sinks", "num_slots")]
    found = []
    layers: list[Any] = cache.layers
    for index, layer in enumerate(layers):
        if getattr(layer, "holds", None) == RFALayer.holds:
            row = _bytes(layer.window_cache) // max(1, sum(sizes))
            window, sinks, slots = (size * row for size in sizes)
            retrieval = _bytes(layer.retrieval_cache) if config.retrieval_window_of(index) else 0
            found.append((_bytes(layer.state), window, sinks, slots, retrieval))
    state, window, sinks, slots, retrieval = (sum(each) for each in zip(*found, strict=True)) if found else (0,) * 5
    per_token = (_growing_bytes(cache) - before) // (LONG - SHORT)
    sliding = tuple(
        (2 * _bytes(layer.keys) // layer.keys.shape[-2], layer.sliding_window - 1)
        for layer in layers
        if _is_sliding(layer)
    )
    others: dict[str, Any] = {
        "slots": slots,
        "retrieval": retrieval,
        "sliding": sliding,
        "recurrent": recurrent_num_bytes(cache),
    }
    return CacheMemory(state, window, sinks, per_token, tuple(found), **others)


def _is_sliding(layer: Any) -> bool:
    """Return whether a cache layer keeps the keys and values of the last tokens alone."""
    return bool(getattr(layer, "is_sliding", False)) and getattr(layer, "keys", None) is not None


def _growing_bytes(cache: DynamicCache) -> int:
    """Return the bytes of keys and values, and those of retrieval heads, which have one size where they have a window."""
    names = ("keys", "values", "retrieval_cache")
    growing = [layer for layer in cache.layers if not _is_sliding(layer)]
    return sum(_bytes(getattr(layer, name, None)) for layer in growing for name in names)


def _bytes(tensor: Any) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()
