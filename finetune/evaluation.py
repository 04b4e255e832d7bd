"""Evaluation: the perplexity of a text, under a protocol that is stated with the figure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from hf_rfa.errors import InputError


@dataclass(frozen=True)
class Perplexity:
    """A perplexity and how it was measured.

    Attributes:
        perplexity: exp of the mean negative log-likelihood per token counted.
        nats: that mean.
        context: most tokens that a window holds.
        stride: tokens from the start of a window to the start of the next.
        tokens_counted: tokens whose likelihood was counted.
        tokens_total: tokens of the text.
    """

    perplexity: float
    nats: float
    context: int
    stride: int
    tokens_counted: int
    tokens_total: int

    @property
    def protocol(self) -> str:
        """The protocol in words."""
        if self.stride == self.context:
            windows = f"disjoint windows of {self.context} tokens, the first token of each not counted"
        else:
            windows = (
                f"windows of {self.context} tokens every {self.stride}; of each window only the tokens that no window "
                "before it held are counted"
            )
        return (
            f"documents joined, each followed by the end-of-text token; {windows}; {self.tokens_counted:,} of "
            f"{self.tokens_total:,} tokens counted"
        )


@torch.no_grad()
def perplexity(
    model: PreTrainedModel,
    ids: torch.Tensor,
    *,
    context: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    on_batch: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Measure the perplexity of a causal language model on a text.

    Args:
        model: the model, RFA or softmax.
        ids: the text's token ids, [N].
        context: tokens per window; None takes the model's positions, but at most 1,024.
        stride: tokens between the starts of windows; None takes ``context`` (disjoint windows).
        batch_size: windows at a time.
        on_batch: called with (windows done, windows in all) after each batch.

    Returns:
        The perplexity, with its protocol.

    Raises:
        InputError: for windows that the model or the text cannot have.
    """
    positions = getattr(model.config, "max_position_embeddings", None)
    context = context or min(1024, positions or 1024)
    stride = stride or context
    if positions is not None and context > positions:
        raise InputError(f"a context of {context} tokens is longer than the model's {positions} positions.")
    if context < 2 or not 1 <= stride <= context:
        raise InputError(f"context must be at least 2 and stride from 1 to context, got {context} and {stride}.")
    if len(ids) < 2:
        raise InputError(f"the text has {len(ids)} tokens; at least 2 are needed.")
    vocab_size = int(model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
    if int(ids.max()) >= vocab_size:
        raise InputError(
            f"the tokenizer gives token {int(ids.max())}, but the model's vocabulary has {vocab_size} entries: they do not "
            "belong together."
        )

    windows = [ids[start : start + context] for start in range(0, max(1, len(ids) - (context - stride)), stride)]
    windows = [window for window in windows if len(window) > 1]
    total, counted, done = 0.0, 0, 0
    while done < len(windows):
        batch = [windows[done]]
        while len(batch) < batch_size and done + len(batch) < len(windows):
            if len(windows[done + len(batch)]) != len(batch[0]):
                break  # the last window may be shorter
            batch.append(windows[done + len(batch)])
        inputs = torch.stack(batch).to(model.device)
        logits = model(inputs, use_cache=False).logits[:, :-1].float()
        losses = F.cross_entropy(logits.transpose(1, 2), inputs[:, 1:], reduction="none")
        for row, loss in enumerate(losses):
            new = loss if done + row == 0 or stride == context else loss[context - stride - 1 :]
            total += float(new.double().sum())
            counted += len(new)
        done += len(batch)
        if on_batch is not None:
            on_batch(done, len(windows))
    if not math.isfinite(total):
        raise InputError("the model's likelihoods are not finite: its weights or its dtype are at fault.")
    nats = total / counted
    return Perplexity(math.exp(min(nats, 700.0)), nats, context, stride, counted, len(ids))
