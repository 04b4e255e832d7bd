"""Perplexity: of labelled batches, for conversion, distillation and evaluation, and of a text under a stated protocol."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import InputError
from ..families import has_rotary_positions
from ..inference.loading import check_length, check_tokens, position_limit, shorter_or_longer
from ..io.text_io import BLOCK_LENGTH
from ..models.cache_names import cache_argument, returned_cache
from ..models.cache_rfa import RFA_LAYER_TYPE
from ..models.configuration_rfa import RFAConfigMixin
from ..process_memory import give_back_memory

#: The label of a position that is not counted, as in transformers.
IGNORED_LABEL = -100
#: Tokens whose losses are computed at once.
SCORED_AT_ONCE = 128
#: Largest mean negative log-likelihood, in nats, whose exponential is taken: e^700 is near the end of float64.
MAX_NATS = 700.0
#: Figures from here on are written as powers of ten.
LARGE = 1e6


@dataclass(frozen=True)
class Perplexity:
    """How well a model predicts tokens.

    Attributes:
        nats: mean negative log-likelihood per token; not finite where the model's logits are not.
        tokens: tokens whose likelihood was counted.
        protocol: how it was measured on a text, in words.
    """

    nats: float
    tokens: int
    protocol: str = ""

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
) -> Perplexity:
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
        if not model.config.is_encoder_decoder:
            labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
        if piece_length is None:
            pieces = iter([model(**inputs, use_cache=False).logits])  # [N, T, V]
        else:
            pieces = logits_of_pieces(model, inputs["input_ids"], piece_length)
        for logits, expected in zip(pieces, labels.split(piece_length or labels.shape[1], dim=1), strict=True):
            for row, theirs in zip(logits, expected, strict=True):
                total += float(nats_of_labels(row, theirs).double().sum())
        tokens += int(labels.ne(IGNORED_LABEL).sum())
        del logits, row, pieces
        give_back_memory()
    return Perplexity(total / tokens, tokens)


def nats_of_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the negative log-likelihood of labels [N], and 0 for those that do not count.

    Logits [N, V] are taken a few tokens at a time: the logarithms of a large vocabulary take as much memory as they do.
    """
    pairs = zip(logits.split(SCORED_AT_ONCE), labels.split(SCORED_AT_ONCE), strict=True)
    return torch.cat(
        [F.cross_entropy(few.float(), theirs, ignore_index=IGNORED_LABEL, reduction="none") for few, theirs in pairs]
    )


@torch.no_grad()
def logits_of_pieces(model: PreTrainedModel, ids: Tensor, length: int) -> Iterator[Tensor]:
    """Yield the logits [N, T, V] of rows that are read ``length`` tokens at a time, the state carried on.

    Rotary positions go on as well. All others are counted anew in every piece, so that rows may be longer than their table.
    """
    cache: Any = None
    rotary = has_rotary_positions(model.config)
    for first in range(0, ids.shape[1], length):
        piece = ids[:, first : first + length]
        positions = torch.arange(piece.shape[1], device=ids.device) + (first if rotary else 0)
        outputs = model(
            input_ids=piece, position_ids=positions.expand_as(piece), **cache_argument(cache), use_cache=True
        )
        cache = returned_cache(outputs)
        yield outputs.logits


def perplexity(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    context_length: int | None = None,
    stride: int | None = None,
    carry_state: bool = False,
    batch_size: int = 8,
    on_batch: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Measure the perplexity of a causal language model on a text.

    Args:
        model: the model, RFA or softmax.
        ids: the text's token ids, [N].
        context_length: tokens per window; None takes the model's positions, but at most 1,024. More than these are for models
            that read texts of any length, piece by piece, and for ``carry_state``.
        stride: tokens between the starts of windows; None takes ``context_length`` (disjoint windows).
        carry_state: read a window as many tokens at a time as the model has positions, and carry the state from piece to
            piece, so that windows may be longer than that. Learned positions are counted anew in every piece. Of a model that
            reads texts of any length nothing changes.
        batch_size: windows at a time.
        on_batch: called with (windows done, windows in all) after each batch.

    Returns:
        The perplexity, with its protocol.

    Raises:
        InputError: for windows that the model or the text cannot have, and if ``carry_state`` is asked of a model that has
            no positions to end at, or keys and values that grow.
    """
    positions = getattr(model.config, "max_position_embeddings", None)
    length = context_length or min(BLOCK_LENGTH, positions or BLOCK_LENGTH)
    stride = stride or length
    limit = position_limit(model)
    never_ends = positions is not None and limit is None
    carry_state = carry_state and not never_ends
    if carry_state:
        _check_carries_state(model, length)
    elif limit is not None and length > limit:
        raise InputError(
            f"a context of {length} tokens is longer than the model's {limit} positions. {shorter_or_longer(model, length)}"
        )
    if length < 2 or not 1 <= stride <= length:
        raise InputError(f"context_length must be at least 2 and stride from 1 to it, got {length} and {stride}.")
    if len(ids) < 2:
        raise InputError(f"the text has {len(ids)} tokens; at least 2 are needed.")
    check_tokens([int(ids.max())], model.config)

    overlap = length - stride
    full = ids.unfold(0, length, stride) if len(ids) >= length else ids.new_empty(0, length)  # [windows, length]
    rest = ids[len(full) * stride :][None]  # [1, at most length]
    if len(full) and rest.shape[1] <= max(1, overlap):
        rest = rest[:0]  # no token of it is new
    chunks = [windows for windows in (*full.split(batch_size), rest) if len(windows)]

    def batches() -> Iterator[dict[str, Tensor]]:
        done = 0
        for windows in chunks:
            labels = windows.clone()
            labels[int(done == 0) :, :overlap] = IGNORED_LABEL  # of the first window all tokens are new
            yield {"input_ids": windows, "labels": labels}
            done += len(windows)
            if on_batch is not None:
                on_batch(done, sum(map(len, chunks)))

    piece_length = positions if carry_state else None
    if never_ends and length > BLOCK_LENGTH:  # no more logits at once than of other models; pieces change nothing
        piece_length = BLOCK_LENGTH
    score = score_labels(model, batches(), piece_length=piece_length)
    if not math.isfinite(score.nats):
        raise InputError("the model's likelihoods are not finite: its weights or its dtype are at fault.")
    if stride == length:
        windows = f"disjoint windows of {length} tokens, the first token of each not counted"
    else:
        windows = (
            f"windows of {length} tokens every {stride}; of each window only the tokens that no window before it held are "
            "counted"
        )
    if carry_state:
        windows += f", read {piece_length} tokens at a time with the state carried from piece to piece"
    protocol = (
        f"documents joined, each followed by the end-of-text token; {windows}; {score.tokens:,} of {len(ids):,} tokens "
        "counted"
    )
    return replace(score, protocol=protocol)


def _check_carries_state(model: PreTrainedModel, length: int) -> None:
    """Raise an `InputError` unless a model has positions to end at, and a state in all layers to carry past them.

    Rotary positions are not counted anew, so that they end where ``length`` is past them.
    """
    config: Any = model.config
    if getattr(config, "max_position_embeddings", None) is None:
        raise InputError(f"carry_state: {config.model_type} has no number of positions, and reads any length at once.")
    growing = "every layer"
    if isinstance(config, RFAConfigMixin):
        growing = ", ".join(str(at) for at, kind in enumerate(config.cache_layer_types()) if kind != RFA_LAYER_TYPE)
    if growing:
        raise InputError(
            f"carry_state: the cache of {config.model_type} grows ({growing}), instead of a state of fixed size. Convert all "
            "layers, or leave carry_state out."
        )
    if has_rotary_positions(config):
        check_length(model, length, what="carry_state: rotary positions go on, and the tokens of a window are")
