"""The control of every comparison: a softmax model that sees a sliding window and the first tokens, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, and_masks, sdpa_mask

from hf_rfa.errors import InputError
from hf_rfa.models.attention import RFAAttentionMixin


@contextmanager
def window_and_sinks(model: PreTrainedModel, window: int, sinks: int = 4) -> Iterator[None]:
    """Limit every softmax attention layer of a decoder to a window and sinks, for as long as the context lasts.

    The model computes what a cache of ``window + sinks`` tokens would give; it does not save the memory. Positions stay
    those of the whole text.

    Args:
        model: a causal language model that calls attention, and makes its masks, through transformers' interfaces.
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

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key > query - window) | (key < sinks)

    def mask(*, mask_function: Callable, **options: Any) -> Tensor | None:
        options["allow_is_causal_skip"] = False
        return sdpa_mask(mask_function=and_masks(mask_function, seen), **options)

    name, before = f"hf_rfa_window_{window}_sinks_{sinks}", model.config._attn_implementation
    AttentionInterface.register(name, sdpa_attention_forward)
    AttentionMaskInterface.register(name, mask)
    model.set_attn_implementation(name)
    try:
        if model.config._attn_implementation != name:
            raise InputError(f"a window cannot be put on a {model.config.model_type} model: its attention is its own.")
        yield
    finally:
        model.set_attn_implementation(before)
