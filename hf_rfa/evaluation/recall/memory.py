"""What a model keeps of the tokens that it has read: bytes by kind, measured on its cache, and their worth in tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from hf_rfa.inference.cache_files import recurrent_num_bytes
from hf_rfa.models.attention import RFAAttentionMixin
from hf_rfa.models.cache_names import cache_argument

#: Tokens after which the growth of a cache is measured.
SHORT, LONG = 8, 16


@dataclass(frozen=True)
class CacheMemory:
    """Bytes of a model's cache for one sequence, in the precision that it runs in.

    Attributes:
        state: recurrent states of all RFA layers.
        window: keys, values and scores of the last tokens.
        sinks: those of the sinks.
        slots: those of the slots.
        retrieval: those of retrieval heads.
        per_token: keys and values that softmax layers add with every token.
        sliding: (bytes a token, most tokens) of every layer of the base model that has a sliding window.
        recurrent: states of its recurrent layers.
    """

    state: int = 0
    window: int = 0
    sinks: int = 0
    slots: int = 0
    retrieval: int = 0
    per_token: int = 0
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
    sliding: list[Any] = [layer for layer in cache.layers if _is_sliding(layer)]
    per_token = (_growing_bytes(cache) - before) // (LONG - SHORT)
    parts = dict.fromkeys(("state", "window", "sinks", "slots", "retrieval"), 0)
    for layer in model.modules():
        if isinstance(layer, RFAAttentionMixin) and layer.rfa_kind == "causal":
            layout, *retrieval = layer.memory_layouts(model.dtype)
            state = replace(layout, window=0, sinks=0, slots=0).num_bytes()
            sinks, slots = (count * layout.bytes_per_place() for count in (layout.sinks, layout.slots))
            parts["state"] += state
            parts["window"] += layout.num_bytes() - state - sinks - slots
            parts["sinks"] += sinks
            parts["slots"] += slots
            parts["retrieval"] += sum(memory.num_bytes() for memory in retrieval)
    return CacheMemory(
        **parts,
        per_token=per_token,
        sliding=tuple((2 * layer.keys.nbytes // layer.keys.shape[-2], layer.sliding_window - 1) for layer in sliding),
        recurrent=recurrent_num_bytes(cache),
    )


def _is_sliding(layer: Any) -> bool:
    """Return whether a cache layer keeps the keys and values of the last tokens alone."""
    return bool(getattr(layer, "is_sliding", False)) and getattr(layer, "keys", None) is not None


def _growing_bytes(cache: DynamicCache) -> int:
    """Return the bytes of keys and values of layers that see all tokens."""
    growing = [layer for layer in cache.layers if not _is_sliding(layer)]
    stored = (getattr(layer, name, None) for layer in growing for name in ("keys", "values"))
    return sum(tensor.nbytes for tensor in stored if tensor is not None)
