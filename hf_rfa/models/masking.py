"""Padding, packed documents, positions, and the beams of a source, as masks and indices."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor
from transformers.utils.import_utils import is_tracing


def local_padding(attention_mask: Tensor | None, length: int) -> Tensor | None:
    """Return the padding mask of the last ``length`` tokens, [B, length], or None if none of them is padding.

    ``attention_mask`` is None, or [B, tokens so far] with 1 for tokens and 0 for padding.

    Raises:
        ValueError: for any other shape: a recurrence can leave tokens out for all queries, not for some.
    """
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2 or attention_mask.shape[-1] < length:
        raise ValueError(
            "random feature attention takes a padding mask of shape (batch, tokens so far) with 1 for tokens and 0 for "
            f"padding; got shape {tuple(attention_mask.shape)} for {length} new tokens. A mask per query cannot be "
            "honoured, since all queries read one state; leave those layers softmax (softmax_layers)."
        )
    padding = attention_mask[:, attention_mask.shape[-1] - length :]
    if not is_tracing(padding) and bool((padding != 0).all()):
        return None
    return padding


def document_starts(position_ids: Tensor | None) -> Tensor | None:
    """Return where a new document starts in rows that hold several (packed batches), [B, T], or None if none does.

    As transformers has it, a document starts where ``position_ids`` [B, T] do not go on by one.
    """
    if position_ids is None or position_ids.ndim != 2:
        return None
    starts = position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1) != 1
    return starts if is_tracing(starts) or bool(starts.any()) else None


def padding_of_mask(mask: Tensor | None) -> Tensor | None:
    """Return the padding mask [B, S] behind a mask that transformers prepared for cross attention.

    That is None, [B, S], or [B, 1, 1 or T, S] as booleans (True for tokens) or as numbers to add (0 for tokens).
    """
    if mask is None or mask.ndim == 2:
        return mask
    row = mask[:, 0, 0]
    return row if row.dtype == torch.bool else row == 0


def check_positions(last: int, count: int) -> None:
    """Raise a ValueError if a token's position ``last`` is past the ``count`` that a model has."""
    if last >= count:
        raise ValueError(
            f"the text reaches position {last}, but this model has {count} positions (0 to {count - 1}). Convert it with "
            f"--max-positions {last + 1} or more (hf_rfa.convert.convert(..., max_positions=...)), or pass shorter text."
        )


def beams_per_source(encoder_hidden_states: Tensor, padding_mask: Tensor | None) -> int:
    """Return n such that every n rows of a batch in succession are equal, as `generate` repeats a source for its beams.

    The batch is ``encoder_hidden_states`` [B, S, width] with a ``padding_mask`` [B, S] or None.
    """
    if encoder_hidden_states.shape[0] == 1 or is_tracing(encoder_hidden_states):
        return 1
    same = (encoder_hidden_states[1:] == encoder_hidden_states[:-1]).flatten(1).all(1)
    if padding_mask is not None:
        same &= (padding_mask[1:] == padding_mask[:-1]).all(1)
    boundaries = [0, *((~same).nonzero()[:, 0] + 1).tolist(), encoder_hidden_states.shape[0]]
    return math.gcd(*(stop - start for start, stop in pairwise(boundaries)))
