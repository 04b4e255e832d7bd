"""The control of every comparison: a softmax model that sees a sliding window and the first tokens, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from hf_rfa.errors import InputError
from hf_rfa.models.attention import RFAAttentionMixin

#: Name of the attention in transformers' interface.
NAME = "hf_rfa_window_and_sinks"
#: (window, sinks) of every attention module whose view is limited.
_limits: WeakKeyDictionary[nn.Module, tuple[int, int]] = WeakKeyDictionary()


def window_and_sinks_mask(query_length: int, key_length: int, window: int, sinks: int) -> Tensor:
    """Return which keys the last queries of a sequence see, [queries, keys].

    Query t sees keys t − window + 1 … t, and always keys 0 … sinks − 1 up to t.

    Args:
        query_length: number of queries, which are the last tokens.
        key_length: number of keys, those of all tokens.
        window: the query's own position included.
        sinks: number of first tokens that every later one sees.
    """
    query = torch.arange(key_length - query_length, key_length)[:, None]
    key = torch.arange(key_length)
    return (key <= query) & ((key > query - window) | (key < sinks))


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
    window, sinks = _limits[module]
    seen = window_and_sinks_mask(query.shape[2], key.shape[2], window, sinks).to(query.device)
    mask = seen[None, None] if mask is None else mask[..., : key.shape[2]] & seen
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def window_and_sinks(model: PreTrainedModel, window: int, sinks: int = 4) -> Iterator[None]:
    """Limit every softmax attention layer of a decoder to a window and sinks, for as long as the context lasts.

    The model computes what a cache of ``window + sinks`` tokens would give; it does not save the memory. Positions stay
    those of the whole text.

    Args:
        model: a causal language model that calls attention through transformers' interface.
        window: tokens that a query sees, its own included, at least 1.
        sinks: first tokens that every later one sees, at least 0.

    Raises:
        InputError: for numbers out of range, or a model whose attention cannot be replaced.
    """
    if window < 1 or sinks < 0:
        raise InputError(f"the window must be at least 1 and the sinks at least 0, got {window} and {sinks}.")
    if any(isinstance(module, RFAAttentionMixin) for module in model.modules()):
        raise InputError(
            "a window is put on softmax attention, and this model is converted. Name its teacher (--teacher)."
        )
    layers = [module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)]
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        if model.config._attn_implementation != NAME:
            raise InputError(f"a window cannot be put on a {model.config.model_type} model: its attention is its own.")
        _limits.update({layer: (window, sinks) for layer in layers})
        yield
    finally:
        model.set_attn_implementation(before)
