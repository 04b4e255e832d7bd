"""Fit learned features to the output of a layer, beside its exact tokens, by gradient descent.

The loss is the error of the layer's outputs at places past its memory (`far_outputs.py`): features stand for the
tokens that are not seen exactly, in units of the softmax weights of the others. Heads in which they do not lower the error on
held-out rows are closed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_rfa.models.feature_maps import FeatureMap

from .far_outputs import FarText

#: Steps of gradient descent, their learning rate, and the largest norm of a gradient.
STEPS = 300
LEARNING_RATE = 6e-3
MAX_NORM = 1.0
#: Shift of the exact tokens' weights at the beginning, in nats: features begin with a small share.
FIRST_SHIFT = 7.0


@torch.no_grad()
def fit_features(text: FarText, hidden_states: Tensor) -> Tensor:
    """Train a layer's feature map in place, and return the heads in which it helps, [H].

    Args:
        text: queries of the layer in the softmax model.
        hidden_states: the layer's input there, [N, T, width].
    """
    layer, feature_map = text.layer, text.layer.feature_map
    if layer.importance is None:
        score = torch.zeros(text.activations.key.shape[:3], device=hidden_states.device)
    else:
        score = layer.importance.score(hidden_states, text.activations.key, text.is_token.cumsum(1) - 1)

    def held_out_errors(feature_map: FeatureMap | None) -> Tensor:
        errors = [
            queries.errors(queries.shares(score[queries.rows], layer.num_slots), feature_map, text.root)
            for queries in text.rows_held_out()
        ]
        return torch.stack(errors).mean(0)

    without = held_out_errors(None)
    feature_map.window_shift.fill_(FIRST_SHIFT)
    parameters = [*feature_map.parameters()]
    optimizer = torch.optim.Adam(parameters, LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    generator = text.generator()
    for _ in range(STEPS):
        queries = text.draw(generator)
        share = queries.shares(score[queries.rows], layer.num_slots)
        with torch.enable_grad():
            losses = queries.errors(share, feature_map, text.root)
            (losses / without.clamp_min(torch.finfo(losses.dtype).tiny)).sum().backward()
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    if not all(bool(parameter.isfinite().all()) for parameter in parameters):  # a step too far: nothing was learned
        feature_map.reset_parameters()
    return held_out_errors(feature_map) < without
