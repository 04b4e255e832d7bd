"""Hybrids: leave softmax where converting does most damage, by measurement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_rfa.models.configuration_rfa import AttentionKind

from .calibration_data import Inputs, batches
from .twin import rfa_layers, share_weights


@dataclass(frozen=True)
class Damage:
    """What converting one attention layer, and no other, does to the model's outputs.

    Attributes:
        kind: of attention.
        layer: its index.
        damage: KL(parent ‖ model) of the logits in nats per token; for a model without a head the squared difference of the
            hidden states relative to their squares.
    """

    kind: AttentionKind
    layer: int
    damage: float


def only_rfa(config: Any, chosen: set[tuple[AttentionKind, int]]) -> dict[str, list[int]]:
    """Return the fields of a configuration in which the chosen layers, and no others, are RFA."""
    return {
        field: [index for index in range(config.num_layers_for(kind)) if (kind, index) not in chosen]
        for field, kind in config.SOFTMAX_LAYERS.items()
    }


def num_parts(model: PreTrainedModel, inputs: Inputs) -> int:
    """Return in how many parts `measure_damage` does its work."""
    return len(rfa_layers(model)) * len(batches(inputs))


@torch.no_grad()
def measure_damage(
    model: PreTrainedModel, parent: PreTrainedModel, inputs: Inputs, *, on_part: Callable[[], None]
) -> list[Damage]:
    """Return what each RFA layer does to the outputs if it is the only one, the worst first.

    Args:
        model: the RFA model.
        parent: its softmax parent.
        inputs: what the models are called with.
        on_part: called `num_parts` times.
    """
    config: Any = model.config
    places = [(layer.rfa_kind, layer.rfa_layer_idx) for layer in rfa_layers(model).values()]
    alone = [
        share_weights(model, type(model), type(config).from_parent(config, **only_rfa(config, {place})))
        for place in places
    ]
    sums, counted = [0.0] * len(places), 0.0
    for batch in batches({name: tensor.to(model.device) for name, tensor in inputs.items() if name != "labels"}):
        expected = parent(**batch, use_cache=False)
        mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
        for place, variant in enumerate(alone):
            damage = _difference(variant(**batch, use_cache=False), expected)
            kept = torch.ones_like(damage) if mask is None or mask.shape != damage.shape else mask.to(damage.dtype)
            sums[place] += float((damage * kept).sum())
            on_part()
        counted += float(kept.sum())
    found = [Damage(*place, total / counted) for place, total in zip(places, sums, strict=True)]
    return sorted(found, key=lambda each: -each.damage)


def _difference(found: Any, expected: Any) -> Tensor:
    """Return how far outputs are from the parent's, per token or per row."""
    if "logits" in expected:
        theirs = expected.logits.float().log_softmax(-1)
        return (theirs.exp() * (theirs - found.logits.float().log_softmax(-1))).sum(-1)
    theirs = expected[0].float()
    return (found[0].float() - theirs).square().sum(-1) / theirs.square().sum(-1)


def leave_softmax(model: PreTrainedModel, damages: list[Damage], count: int) -> PreTrainedModel:
    """Return a model that shares all weights with ``model``, whose ``count`` worst layers are softmax."""
    config: Any = model.config
    kept = {(each.kind, each.layer) for each in damages[count:]}
    return share_weights(model, type(model), type(config).from_parent(config, **only_rfa(config, kept)))
