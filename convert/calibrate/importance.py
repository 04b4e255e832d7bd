"""Fit the importance of tokens to the attention that they receive in the softmax model, for slots.

First a ridge regression. The target of a token, per key-value head, is the logarithm of the mean squared weight that it gets
from the queries that have it behind their window. Squares, because an error of the output goes with the weight that is lost,
and few large weights count more than many small ones. The input is the layer's.

Then gradient descent on what matters, the error of the layer's outputs (`far_outputs.py`). Which tokens the slots
hold has no gradient, so that token j counts for query t by a share, where θ_t is between the K-th and the next score of those
behind the window:

    p_tj = sigmoid((i_tj − θ_t) / softness)

The softness falls as it goes. A head whose error on held-out rows does not fall keeps its regression. Learning what to keep
by a soft form of it follows TRIM-KV (arXiv 2512.03324), where every token decays at a rate of its own, and predictions are
what is trained on.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from hf_rfa.models.importance import LearnedImportance

from .far_outputs import FarQueries, FarText

#: Ridge penalty, relative to the weight of all tokens and the variance of each input.
RIDGE = 0.005
#: Queries beyond which a token's mean counts no more. A mean of every second query costs 0.14 % of SmolLM2-135M's perplexity
#: at a memory of 256 tokens.
ENOUGH_QUERIES = 96
#: Importance that a token loses with every further one, in nats. With SmolLM2-135M at 64 and 128 tokens, 6 to 12 nats in
#: 1,024 tokens are about as good, 0 is worse, and what each head's attention weights suggest is no better (docs/method.md).
RECENCY = 8 / 1024
#: Gradient descent: steps, learning rate for inputs of variance 1, softness in nats at the beginning and at the end. With
#: three times as many steps SmolLM2-135M's perplexity at 64 tokens is 0.1 to 0.3 % lower, with half as much more text 0.2 to
#: 0.5 %.
STEPS = 36
LEARNING_RATE = 5e-3
SOFTNESS = (0.5, 0.15)
#: Unit in which r is learned, at five times that rate: steps of a larger one, 0.2 nats in 1,024 tokens, find no rest.
RECENCY_UNIT = 1 / 1024
#: Added to every mean, relative to their mean, so that weights of nothing have a logarithm.
LEAST_MEAN = 1e-3


@torch.no_grad()
def regress_importance(text: FarText) -> None:
    """Set the weight of heads' `LearnedImportance` by ridge regression, and its recency to `RECENCY`."""
    importance = cast(LearnedImportance, text.importance)
    target, weight = far_weights(text)
    if not bool(weight.any()):  # no text is longer than the window
        return
    target = (target + LEAST_MEAN * (target * weight).sum((0, 2), keepdim=True) / weight.sum()).clamp_min(1e-30).log()
    rows = weight[:, 0].flatten().nonzero()[:, 0]
    weights = weight[:, 0].flatten()[rows]
    inputs = text.hidden_states.flatten(0, 1)[rows].float()  # [n, width]
    targets = target.transpose(1, 2).flatten(0, 1)[rows]  # [n, H]
    total = weights.sum()
    inputs = inputs - (weights @ inputs) / total
    targets = targets - (weights @ targets) / total
    weighted = inputs * weights[:, None]
    moments = (inputs.T @ weighted).double()
    scale = (moments.diagonal() / total).sqrt().clamp_min(torch.finfo(torch.float32).tiny)  # of the inputs
    moments /= scale[:, None] * scale
    moments.diagonal().add_(RIDGE * total)
    solution = torch.linalg.solve(moments, (weighted.T @ targets).double() / scale[:, None])  # [width, H]
    importance.recency.fill_(RECENCY)
    importance.weight.copy_((solution / scale[:, None]).T)


def far_weights(text: FarText) -> tuple[Tensor, Tensor]:
    """Return the mean squared softmax weight that tokens get from queries beyond the window, and how much it counts.

    Returns:
        The means [N, H, T], and how many queries they are of, up to `ENOUGH_QUERIES` and 0 for padding and sinks, [N, 1, T].
    """
    layout, is_token = text.layout, text.activations.is_token
    counts = torch.zeros_like(is_token, dtype=torch.float32)[:, None]
    sums = counts.repeat(1, text.activations.key.shape[1], 1)
    for row, queries in text.all_rows(layout.window):
        far = (queries.far & queries.is_token[:, :, None])[0].float()  # [Q, tokens]
        stop = far.shape[1]
        counts[row, :, :stop] += far.sum(0)
        sums[row, :, :stop] += (queries.weights[0].square().sum(2) * far).sum(1)
    ordinal = is_token.cumsum(1) - 1
    weight = counts.clamp_max(ENOUGH_QUERIES) * (is_token & (ordinal >= layout.sinks))[:, None]
    return sums / counts.clamp_min(1), weight


def refine_importance(text: FarText) -> None:
    """Change weight and recency by gradient descent where that lowers the error on held-out rows."""
    importance, slots = cast(LearnedImportance, text.importance), text.layout.slots
    hidden_states, is_token = text.hidden_states.float(), text.activations.is_token
    ordinal = is_token.cumsum(1) - 1
    mean = hidden_states[is_token].mean(0)
    scale = hidden_states[is_token].std(0).clamp_min(torch.finfo(torch.float32).tiny)
    inputs = (hidden_states - mean) / scale
    before = importance.weight * scale, importance.recency / RECENCY_UNIT
    weight, recency = (tensor.clone().requires_grad_() for tensor in before)

    def errors(row: int, queries: FarQueries, weight: Tensor, recency: Tensor, softness: float) -> Tensor:
        stop = queries.key.shape[2]
        score = weight @ inputs[row, :stop].T + RECENCY_UNIT * recency[:, None] * ordinal[row, :stop]
        return queries.errors(queries.shares(score[None], slots, softness), root=text.root)

    def held_out_errors(weight: Tensor, recency: Tensor) -> Tensor:
        return torch.stack([errors(*queries, weight, recency, 0.0) for queries in text.rows_held_out()]).mean(0)

    errors_before = held_out_errors(*before)
    groups: list[dict[str, Any]] = [{"params": [weight]}, {"params": [recency], "lr": 5 * LEARNING_RATE}]
    optimizer = torch.optim.Adam(groups, LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    generator = text.generator()
    for number in range(STEPS):
        softness = SOFTNESS[0] * (SOFTNESS[1] / SOFTNESS[0]) ** (number / STEPS)
        for row, queries in text.draw(generator):
            with torch.enable_grad():
                losses = errors(row, queries, weight, recency, softness)
                (losses / errors_before.clamp_min(torch.finfo(losses.dtype).tiny)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    weight, recency = weight.detach(), recency.detach()
    is_better = held_out_errors(weight, recency) < errors_before
    importance.weight.copy_(torch.where(is_better[:, None], weight, before[0]) / scale)
    importance.recency.copy_(torch.where(is_better, recency, before[1]) * RECENCY_UNIT)
