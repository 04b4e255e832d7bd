"""Fit the importance of tokens to the attention that they receive in the softmax model, for slots.

First a ridge regression. The target of a token, per key-value head, is the logarithm of the mean squared weight that it gets
from the queries that have it behind their window. Squares, because an error of the output goes with the weight that is lost,
and few large weights count more than many small ones. The input is the layer's.

Then gradient descent on what matters, the error of the heads' outputs. Which tokens the slots hold has no gradient, so that
token j counts for query t by a share, where θ_t is between the K-th and the next score of those behind the window:

    p_tj = sigmoid((i_tj − θ_t) / softness),   o_t = Σ_j p_tj a_tj v_j / Σ_j p_tj a_tj

with a the softmax weights, and p = 1 for sinks and the window. The softness falls as it goes. A text's last rows are held
out, and a head whose error there does not fall keeps its regression. Learning what to keep by a soft form of it follows
TRIM-KV (arXiv 2512.03324), where every token decays at a rate of its own, and predictions are what is trained on.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_rfa.models.attention import RFAAttentionMixin

from .activations import LayerActivations, softmax_weights
from .attention_weights import tokens_of

#: Ridge penalty, relative to the weight of all tokens and the variance of each input.
RIDGE = 0.005
#: Queries beyond which a token's mean counts no more.
ENOUGH_QUERIES = 96
#: Importance that a token loses with every further one, in nats. With SmolLM2-135M at 64 and 128 tokens, 6 to 12 nats in
#: 1,024 tokens are about as good, 0 is worse, and what each head's attention weights suggest is no better (docs/method.md).
RECENCY = 8 / 1024
#: Gradient descent: how often every token of the text is a query, queries of a step and rows that they are of, learning rate
#: for inputs of variance 1, softness in nats at the beginning and at the end, and the share of the rows that is held out.
PASSES = 1.5
STEP_QUERIES, STEP_ROWS = 480, 6
LEARNING_RATE = 5e-3
#: Unit in which r is learned, at five times that rate: steps of a larger one, 0.2 nats in 1,024 tokens, find no rest.
RECENCY_UNIT = 1 / 1024
SOFTNESS = (0.5, 0.15)
HELD_OUT = 1 / 8
#: Tokens of the text from which on there is gradient descent. With 8,192 it was worth 0.3 % of SmolLM2-135M's perplexity at a
#: memory of 64 tokens, and took as long as all else of the conversion.
REFINED_FROM = 16_384
#: Logit or score of what is not seen.
UNSEEN = -1e30
#: Added to every mean, relative to their mean, so that weights of nothing have a logarithm.
LEAST_MEAN = 1e-3


@torch.no_grad()
def fit_importance(layer: RFAAttentionMixin, activations: LayerActivations, hidden_states: Tensor) -> None:
    """Set the weight of a layer's importance and its recency in place.

    Args:
        layer: an RFA layer with slots.
        activations: its queries, keys and values in the softmax model.
        hidden_states: its input there, [N, T, width].
    """
    regress_importance(layer, activations, hidden_states)
    refine_importance(layer, activations, hidden_states)


def regress_importance(layer: RFAAttentionMixin, activations: LayerActivations, hidden_states: Tensor) -> None:
    """Set the weight by ridge regression, and the recency to `RECENCY`; arguments are those of `fit_importance`."""
    target, weight = far_weights(layer, activations)
    if layer.importance is None or not bool(weight.any()):  # no text is longer than the window
        return
    target = (target + LEAST_MEAN * (target * weight).sum((0, 2), keepdim=True) / weight.sum()).clamp_min(1e-30).log()
    rows = weight[:, 0].flatten().nonzero()[:, 0]
    weights = weight[:, 0].flatten()[rows].double()
    inputs = hidden_states.flatten(0, 1)[rows].double()  # [n, width]
    targets = target.transpose(1, 2).flatten(0, 1)[rows].double()  # [n, H]
    total = weights.sum()
    inputs -= (weights @ inputs) / total
    targets -= (weights @ targets) / total
    weighted = inputs * weights[:, None]
    moments = inputs.T @ weighted
    scale = (moments.diagonal() / total).sqrt().clamp_min(torch.finfo(torch.float32).tiny)  # of the inputs
    moments /= scale[:, None] * scale
    moments.diagonal().add_(RIDGE * total)
    solution = torch.linalg.solve(moments, (weighted.T @ targets) / scale[:, None])  # [width, H]
    layer.importance.recency.fill_(RECENCY)
    layer.importance.weight.copy_((solution / scale[:, None]).T)


def far_weights(layer: RFAAttentionMixin, activations: LayerActivations) -> tuple[Tensor, Tensor]:
    """Return the mean squared softmax weight that tokens get from queries beyond the window, and how much it counts.

    Returns:
        The means [N, H, T], and how many queries they are of, up to `ENOUGH_QUERIES` and 0 for padding and sinks, [N, 1, T].
    """
    rows, heads, length, _ = activations.key.shape
    groups = activations.query.shape[2] // length
    mask = activations.key_mask
    mask = torch.ones(rows, length, dtype=torch.bool, device=activations.key.device) if mask is None else mask
    count = mask.cumsum(1)
    total = torch.zeros(rows, heads, length, device=count.device)
    for target in softmax_weights(layer, activations):
        tokens, keys = tokens_of(target.rows, groups), target.softmax.shape[-1]
        far = count[:, tokens, None] - count[:, None, :keys] >= layer.window_size
        far = far & mask[:, tokens, None]
        squares = target.softmax.square().unflatten(2, (-1, groups)).sum(3)
        total[..., :keys] += squares.mul_(far[:, None]).sum(2)
    queries = (count[:, -1:] - count - layer.window_size + 1).clamp_min(0)
    weight = queries.clamp_max(ENOUGH_QUERIES) * (mask & (count > layer.num_sinks))
    return total / queries[:, None].clamp_min(1), weight[:, None].float()


class Far(NamedTuple):
    """Some queries of some rows of a text, and what they see.

    Attributes:
        weights: softmax weights, [n, H, Q, G, T].
        near: sinks and the tokens of the window, [n, Q, T].
        far: those behind the window, [n, Q, T].
        values: [n, H, T, d].
        outputs: the softmax layer's, [n, H, Q G, d].
        is_token: False where the query is padding, [n, Q].
    """

    weights: Tensor
    near: Tensor
    far: Tensor
    values: Tensor
    outputs: Tensor
    is_token: Tensor

    def errors(self, score: Tensor, slots: int, softness: float) -> Tensor:
        """Return the mean squared error of every head's outputs with the slots' tokens in place of all, [H].

        Args:
            score: of all tokens, [n, H, T].
            slots: K.
            softness: that of the choice, in nats; 0 chooses as the memory does.
        """
        scores = score[:, :, None].masked_fill(~self.far[:, None], UNSEEN)  # [n, H, Q, T]
        best = scores.topk(slots + 1, dim=-1).values[..., -2:]
        above = scores - best.mean(-1, keepdim=True)
        share = torch.sigmoid(above / softness) if softness else (above > 0).to(scores.dtype)
        share = torch.where(self.far[:, None], share, self.near[:, None].to(scores.dtype))
        weights = (self.weights * share[:, :, :, None]).flatten(2, 3)
        mass = weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
        squares = (weights @ self.values / mass - self.outputs).square().sum(-1)  # [n, H, Q G]
        squares = squares.unflatten(2, (self.near.shape[1], -1)).sum(-1) * self.is_token[:, None]
        return squares.sum((0, 2)) / self.is_token.sum().clamp_min(1)


def far_queries(layer: RFAAttentionMixin, activations: LayerActivations, places: Tensor) -> Far:
    """Return the queries at some places, [Q], of all rows of activations."""
    rows, _, length, _ = activations.key.shape
    mask = activations.key_mask
    is_token = torch.ones(rows, length, dtype=torch.bool, device=places.device) if mask is None else mask
    ordinal = is_token.cumsum(1) - 1
    age = ordinal[:, places, None] - ordinal[:, None]
    seen = (places[:, None] >= torch.arange(length, device=places.device)) & is_token[:, None]
    near = seen & ((age < layer.window_size) | (ordinal[:, None] < layer.num_sinks))
    query = activations.query.unflatten(2, (length, -1))[:, :, places].float() * layer.scaling  # [n, H, Q, G, d]
    logits = (query.flatten(2, 3) @ activations.key.float().mT).unflatten(2, query.shape[2:4])
    weights, values = logits.masked_fill_(~seen[:, None, :, None], UNSEEN).softmax(-1), activations.value.float()
    return Far(weights, near, seen & ~near, values, weights.flatten(2, 3) @ values, is_token[:, places])


def refine_importance(layer: RFAAttentionMixin, activations: LayerActivations, hidden_states: Tensor) -> None:
    """Change weight and recency by gradient descent where that helps; arguments are those of `fit_importance`."""
    rows, _, length, _ = activations.key.shape
    first = layer.window_size + layer.num_sinks + layer.num_slots  # the first token whose query misses one
    held_out = math.ceil(rows * HELD_OUT)
    mask = activations.key_mask
    is_token = torch.ones(rows, length, dtype=torch.bool, device=hidden_states.device) if mask is None else mask
    if layer.importance is None or length <= first or rows <= held_out or int(is_token.sum()) < REFINED_FROM:
        return
    ordinal = is_token.cumsum(1) - 1
    mean = hidden_states[is_token].float().mean(0)
    scale = hidden_states[is_token].float().std(0).clamp_min(torch.finfo(torch.float32).tiny)
    inputs = (hidden_states.float() - mean) / scale
    before = layer.importance.weight * scale, layer.importance.recency / RECENCY_UNIT
    weight, recency = (tensor.clone().requires_grad_() for tensor in before)

    def score(chosen: Tensor, weight: Tensor, recency: Tensor) -> Tensor:
        age = RECENCY_UNIT * recency[:, None] * ordinal[chosen, None]
        return (inputs[chosen] @ weight.T).transpose(1, 2) + age

    def queries(chosen: Tensor, start: int, step: int) -> Far:
        places = torch.arange(start, length, step, device=hidden_states.device)
        parts = {name: part[chosen] for name, part in vars(activations).items() if part is not None}
        return far_queries(layer, LayerActivations(**parts), places)

    def held_out_errors(weight: Tensor, recency: Tensor) -> Tensor:
        errors = [
            queries(row, first, step).errors(score(row, weight, recency), layer.num_slots, 0.0)
            for row in torch.arange(rows - held_out, rows, device=hidden_states.device).split(1)
        ]
        return torch.stack(errors).mean(0)

    step_rows = min(STEP_ROWS, rows - held_out)
    step = max(1, step_rows * (length - first) // STEP_QUERIES)
    errors_before = held_out_errors(*before)
    groups: list[dict[str, Any]] = [{"params": [weight]}, {"params": [recency], "lr": 5 * LEARNING_RATE}]
    optimizer = torch.optim.Adam(groups, LEARNING_RATE)
    steps = math.ceil(PASSES * rows * length / STEP_QUERIES)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(layer.rfa_layer_idx)
    for number in range(steps):
        softness = SOFTNESS[0] * (SOFTNESS[1] / SOFTNESS[0]) ** (number / steps)
        chosen = torch.randperm(rows - held_out, generator=generator)[:step_rows].to(hidden_states.device)
        far = queries(chosen, first + int(torch.randint(step, (), generator=generator)), step)
        with torch.enable_grad():
            errors = far.errors(score(chosen, weight, recency), layer.num_slots, softness)
            (errors / errors_before.clamp_min(torch.finfo(errors.dtype).tiny)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    weight, recency = weight.detach(), recency.detach()
    is_better = held_out_errors(weight, recency) < errors_before
    layer.importance.weight.copy_(torch.where(is_better[:, None], weight, before[0]) / scale)
    layer.importance.recency.copy_(torch.where(is_better, recency, before[1]) * RECENCY_UNIT)
