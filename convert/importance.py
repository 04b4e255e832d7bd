"""Fit the importance of tokens to the attention that they receive in the softmax model, for slots.

The target of a token, per key-value head, is the logarithm of the mean squared weight that it gets from the queries that have
it behind their window. Squares, because an error of the output goes with the weight that is lost, and few large weights count
more than many small ones. The input is the layer's, and the fit linear: ridge regression on some thousand tokens.
"""

from __future__ import annotations

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
#: Added to every mean, relative to their mean, so that weights of nothing have a logarithm.
LEAST_MEAN = 1e-3


@torch.no_grad()
def fit_importance(layer: RFAAttentionMixin, activations: LayerActivations, hidden_states: Tensor) -> None:
    """Set the weight of a layer's importance, and its recency to `RECENCY`, in place.

    Args:
        layer: an RFA layer with slots.
        activations: its queries and keys in the softmax model.
        hidden_states: its input there, [N, T, width].
    """
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
