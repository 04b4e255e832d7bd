"""The perplexity of a causal language model on a text, under a protocol that is stated with the figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from hf_rfa.convert.calibration_data import BLOCK_LENGTH, Inputs
from hf_rfa.convert.perplexity import IGNORED_LABEL, score_labels
from hf_rfa.errors import InputError


@dataclass(frozen=True)
class Perplexity:
    """A perplexity and how it was measured.

    Attributes:
        perplexity: exp of the mean negative log-likelihood per token counted.
        nats: that mean.
        context_length: most tokens of a window.
        stride: tokens from the start of a window to the start of the next.
        tokens_counted: tokens whose likelihood was counted.
        tokens_total: tokens of the text.
    """

    perplexity: float
    nats: float
    context_length: int
    stride: int
    tokens_counted: int
    tokens_total: int

    @property
    def protocol(self) -> str:
        """The protocol in words."""
        if self.stride == self.context_length:
            windows = f"disjoint windows of {self.context_length} tokens, the first token of each not counted"
        else:
            windows = (
                f"windows of {self.context_length} tokens every {self.stride}; of each window only the tokens that no "
                "window before it held are counted"
            )
        return (
            f"documents joined, each followed by the end-of-text token; {windows}; {self.tokens_counted:,} of "
            f"{self.tokens_total:,} tokens counted"
        )


def perplexity(
    model: PreTrainedModel,
    ids: torch.Tensor,
    *,
    context_length: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    on_batch: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Measure the perplexity of a causal language model on a text.

    Args:
        model: the model, RFA or softmax.
        ids: the text's token ids, [N].
        context_length: tokens per window; None takes the model's positions, but at most 1,024.
        stride: tokens between the starts of windows; None takes ``context_length`` (disjoint windows).
        batch_size: windows at a time.
        on_batch: called with (windows done, windows in all) after each batch.

    Returns:
        The perplexity, with its protocol.

    Raises:
        InputError: for windows that the model or the text cannot have.
    """
    positions = getattr(model.config, "max_position_embeddings", None)
    length = context_length or min(BLOCK_LENGTH, positions or BLOCK_LENGTH)
    stride = stride or length
    if positions is not None and length > positions:
        raise InputError(f"a context of {length} tokens is longer than the model's {positions} positions.")
    if length < 2 or not 1 <= stride <= length:
        raise InputError(f"context_length must be at least 2 and stride from 1 to it, got {length} and {stride}.")
    if len(ids) < 2:
        raise InputError(f"the text has {len(ids)} tokens; at least 2 are needed.")
    vocab_size = int(model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
    if int(ids.max()) >= vocab_size:
        raise InputError(
            f"the tokenizer gives token {int(ids.max())}, but the model's vocabulary has {vocab_size} entries: they do not "
            "belong together."
        )

    overlap = length - stride
    full = ids.unfold(0, length, stride) if len(ids) >= length else ids.new_empty(0, length)  # [windows, length]
    rest = ids[len(full) * stride :][None]  # [1, at most length]
    has_rest = len(full) == 0 or rest.shape[1] > max(1, overlap)
    total = len(full) + has_rest

    def batches() -> Iterator[Inputs]:
        done = 0
        for windows in (*full.split(batch_size), *([rest] if has_rest else [])):
            if len(windows) == 0:
                continue
            labels = windows.clone()
            labels[int(done == 0) :, :overlap] = IGNORED_LABEL  # of the first window all tokens are new
            yield {"input_ids": windows, "labels": labels}
            done += len(windows)
            if on_batch is not None:
                on_batch(done, total)

    found = score_labels(model, batches())
    if not math.isfinite(found.nats):
        raise InputError("the model's likelihoods are not finite: its weights or its dtype are at fault.")
    return Perplexity(found.perplexity, found.nats, length, stride, found.tokens, len(ids))
