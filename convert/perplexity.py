"""Perplexity of labelled batches: the one implementation for conversion, distillation and evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from hf_rfa.families import has_rotary_positions
from hf_rfa.memory import give_back_memory

from ..models.cache_names import cache_argument, returned_cache

#: The label of a position that is not counted, as in transformers.
IGNORED_LABEL = -100
#: Tokens whose losses are computed at once.
SCORED_AT_ONCE = 128
#: Largest mean negative log-likelihood, in nats, whose exponential is taken: e^700 is near the end of float64.
MAX_NATS = 700.0
#: Figures from here on are written as powers of ten.
LARGE = 1e6


@dataclass(frozen=True)
class LabelScore:
    """Mean negative log-likelihood of the labels that count; not finite where the model's logits are not."""

    nats: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """See `perplexity_of`."""
        return perplexity_of(self.nats)


def perplexity_of(nats: float) -> float:
    """Return e to the power of a mean negative log-likelihood: infinity past e^700, and NaN of NaN."""
    return math.inf if nats > MAX_NATS else math.exp(nats)


def shown(figure: float, digits: int = 2) -> str:
    """Return a figure with so many digits after the point, or one past a million as a power of ten."""
    return f"{figure:.{digits}f}" if abs(figure) < LARGE else f"{figure:.{digits}e}"


@torch.no_grad()
def score_labels(
    model: PreTrainedModel, batches: Iterable[dict[str, Tensor]], *, piece_length: int | None = None
) -> LabelScore:
    """Return the mean negative log-likelihood of the labels of some batches, over labels and not over batches.

    Args:
        model: a model with a language model's head, softmax or RFA.
        batches: what the model is called with, on any device, and ``labels`` [N, T]. As in transformers, labels of -100 do
            not count, and a decoder that stands alone predicts label t from the tokens before t.
        piece_length: tokens that are read at a time, as in `logits_of_pieces`; None reads all at once.

    Raises:
        ZeroDivisionError: if no label counts.
    """
    total, tokens = 0.0, 0
    for batch in batches:
        inputs = {name: tensor.to(model.device) for name, tensor in batch.items()}
        labels = inputs.pop("labels")
        if piece_length is None:
            logits = model(**inputs, use_cache=False).logits  # [N, T, V]
        else:
            logits = logits_of_pieces(model, inputs["input_ids"], piece_length)
        if not model.config.is_encoder_decoder:
            logits, labels = logits[:, :-1], labels[:, 1:]
        for row, expected in zip(logits, labels, strict=True):
            # A few tokens at a time: the logarithms of a large vocabulary take as much memory as its logits.
            for few, theirs in zip(row.split(SCORED_AT_ONCE), expected.split(SCORED_AT_ONCE), strict=True):
                losses = F.cross_entropy(few.float(), theirs, ignore_index=IGNORED_LABEL, reduction="none")
                total += float(losses.double().sum())
        tokens += int(labels.ne(IGNORED_LABEL).sum())
        del logits, row, few
        give_back_memory()
    return LabelScore(total / tokens, tokens)


@torch.no_grad()
def logits_of_pieces(model: PreTrainedModel, ids: Tensor, length: int) -> Tensor:
    """Return the logits [N, T, V] of rows [N, T] that are read ``length`` tokens at a time, the state carried on.

    Rotary positions go on as well. All others are counted anew in every piece, so that rows may be longer than their table.
    """
    cache: Any = None
    rotary = has_rotary_positions(model.config)
    found = []
    for first in range(0, ids.shape[1], length):
        piece = ids[:, first : first + length]
        positions = torch.arange(piece.shape[1], device=ids.device) + (first if rotary else 0)
        outputs = model(
            input_ids=piece, position_ids=positions.expand_as(piece), **cache_argument(cache), use_cache=True
        )
        cache = returned_cache(outputs)
        found.append(outputs.logits)
    return torch.cat(found, dim=1)
