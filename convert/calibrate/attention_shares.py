"""How much of its attention a converted model gives to the tokens that it keeps, and to the features of all others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_rfa.models.masking import group_queries, split_heads, to_rows

from ..checkpoint.base_model import rfa_layers
from .activations import capture_inputs, layer_activations, lifetimes_of, softmax_weights

#: Tokens of a text whose attention is looked at: the weights take quadratic memory.
LOOKED_AT = 1024


@dataclass(frozen=True)
class AttentionShares:
    """Shares of the attention weights, means over queries, heads and layers.

    Attributes:
        tokens: of the text.
        window: of the last tokens.
        sinks: of the first tokens, where they have left the window.
        slots: of the most important tokens of the others.
        features: of all that is not seen exactly, 0 for a map without features.
        forgotten: what softmax gives to the tokens that are not seen exactly, with the same queries and keys.
    """

    tokens: int
    window: float
    sinks: float
    slots: float
    features: float
    forgotten: float

    def __str__(self) -> str:
        """Say it in words."""
        names = ("window", "sinks", "slots", "features")
        parts = ", ".join(f"{name} {getattr(self, name):.1%}" for name in names)
        return f"{parts}; softmax would give {self.forgotten:.1%} to what is not seen exactly"


@torch.no_grad()
def attention_shares(model: PreTrainedModel, ids: Tensor) -> AttentionShares | None:
    """Return the shares in the causal attention of a model's RFA layers, but of retrieval heads.

    Args:
        model: an RFA model.
        ids: the token ids of a text, [N], of which the first `LOOKED_AT` are read.

    Returns:
        The shares, or None for a model without such layers.
    """
    layers = {name: layer for name, layer in rfa_layers(model).items() if layer.rfa_kind == "causal"}
    ids = ids[: min(LOOKED_AT, getattr(model.config, "max_position_embeddings", None) or LOOKED_AT)]
    if not layers:
        return None
    sums, count = torch.zeros(5, dtype=torch.float64), 0
    for name, inputs in capture_inputs(model, layers, {"input_ids": ids[None]}).items():
        layer, hidden_states = layers[name], inputs.hidden_states
        query, key, value = (part.float() for part in layer.project(hidden_states, **inputs.options))
        _, of_all = layer.attend(query, key, value, hidden_states=hidden_states, output_attentions=True)
        weights, _ = split_heads(group_queries(of_all, key.shape[1]), layer.retrieval_heads)  # [1, H, T G, T]
        activations = layer_activations(layer, inputs, {"causal": None, "encoder": None})[0]
        key = activations.key.float()
        tokens, ordinal = lifetimes_of(layer, layer.memory_layout(key.dtype), key, None, hidden_states)
        near = to_rows(tokens.visible(ordinal), layer.feature_map.groups)
        age = to_rows(ordinal[0, :, None] - ordinal, layer.feature_map.groups)  # [T G, T]
        window = near & (age < layer.window_size)
        sinks = near & ~window & (ordinal < layer.num_sinks)
        forgotten = weights.new_zeros(())
        parts = [(weights * part).sum() for part in (window, sinks, near & ~window & ~sinks, ~near)]
        for target in softmax_weights(layer, activations):
            forgotten += (target.softmax * ~near[:, :, target.rows, : target.softmax.shape[-1]]).sum()
        sums += torch.stack([*parts, forgotten]).double().cpu()
        count += weights.shape[1] * weights.shape[2]
    return AttentionShares(len(ids), *(sums / count).tolist())
