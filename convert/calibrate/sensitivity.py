"""Layer sensitivity: which layers lose most when they are converted, and hybrids that keep those softmax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_rfa.models.configuration_rfa import FULL_ATTENTION, AttentionKind
from hf_rfa.models.masking import read_mask

from ..checkpoint.base_model import rfa_layers, share_weights
from ..inputs import Inputs, batches


@dataclass(frozen=True)
class LayerSensitivity:
    """Effect on the outputs of converting one attention layer and no other.

    ``divergence`` is KL(base model ‖ model) of the logits in nats per token; for a model without a head the squared
    difference of the hidden states relative to their squares.
    """

    kind: AttentionKind
    layer: int
    divergence: float


def _with_rfa_layers(model: PreTrainedModel, chosen: set[tuple[AttentionKind, int]]) -> PreTrainedModel:
    """Return a model that shares all weights with ``model``, in which the chosen layers, and no others, are RFA."""
    config: Any = model.config
    types = config.base_layer_types()
    softmax = {
        field: [
            index
            for index in range(config.num_layers_for(kind))
            if (kind, index) not in chosen and (kind != "causal" or types[index] in FULL_ATTENTION)
        ]
        for field, kind in config.SOFTMAX_LAYERS.items()
    }
    return share_weights(model, type(model), type(config).from_base(config, **softmax))


@torch.no_grad()
def measure_sensitivity(
    model: PreTrainedModel, base_model: PreTrainedModel, inputs: Inputs, *, on_batch: Callable[[], None]
) -> list[LayerSensitivity]:
    """Return the sensitivity of each RFA layer on inputs of both models, the most sensitive first.

    ``on_batch`` is called for every batch (`hf_rfa.convert.inputs.batches`), once per layer.
    """
    layers = [(layer.rfa_kind, layer.rfa_layer_idx) for layer in rfa_layers(model).values()]
    variants = [_with_rfa_layers(model, {layer}) for layer in layers]
    sums, tokens = [0.0] * len(layers), 0.0
    for batch in batches({name: tensor.to(model.device) for name, tensor in inputs.items() if name != "labels"}):
        expected = base_model(**batch, use_cache=False)
        mask = read_mask(batch.get("decoder_attention_mask", batch.get("attention_mask")))
        for index, variant in enumerate(variants):
            divergence = _divergence(variant(**batch, use_cache=False), expected)
            counted = mask if mask is not None and mask.shape == divergence.shape else torch.ones_like(divergence)
            sums[index] += float((divergence * counted).sum())
            on_batch()
        tokens += float(counted.sum())
    sensitivities = [LayerSensitivity(*layer, total / tokens) for layer, total in zip(layers, sums, strict=True)]
    return sorted(sensitivities, key=lambda sensitivity: -sensitivity.divergence)


def _divergence(outputs: Any, expected: Any) -> Tensor:
    """Return how far outputs are from the base model's, per token [N, T], or per row [N] for a classifier."""
    if "logits" in expected:
        log_expected = expected.logits.float().log_softmax(-1)
        return (log_expected.exp() * (log_expected - outputs.logits.float().log_softmax(-1))).sum(-1)
    hidden_states = expected[0].float()
    return (outputs[0].float() - hidden_states).square().sum(-1) / hidden_states.square().sum(-1)


def keep_softmax(model: PreTrainedModel, sensitivities: list[LayerSensitivity], count: int) -> PreTrainedModel:
    """Return a model that shares all weights with ``model``, and whose ``count`` most sensitive layers are softmax."""
    return _with_rfa_layers(model, {(layer.kind, layer.layer) for layer in sensitivities[count:]})
