"""How much of its attention a converted model gives to the tokens that it keeps, and to the features of all others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..checkpoint.base_model import rfa_layers
from .activations import capture_inputs, compare_weights, layer_activations
from .attention_weights import tokens_of

#: Tokens of a text whose attention is looked at: the weights take quadratic memory.
LOOKED_AT = 1024


@dataclass(frozen=True)
class AttentionShares:
    """Shares of the attention weights, means over queries, heads and layers.

    Attributes:
        window: of the last tokens.
        sinks: of the first tokens, where they have left the window.
        slots: of the most important tokens of the others.
        features: of all that is not seen exactly, 0 for a map without features.
        forgotten: what softmax gives to the tokens that are not seen exactly, with the same queries and keys.
        tokens: of the text.
    """

    window: float
    sinks: float
    slots: float
    features: float
    forgotten: float
    tokens: int

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
        layer = layers[name]
        activations = layer_activations(layer, inputs, {"causal": None, "encoder": None})
        for target, log_weights, exact in compare_weights(layer, activations, inputs.hidden_states):
            weights = log_weights.exp()
            groups = layer.feature_map.groups
            tokens = tokens_of(target.rows, groups)
            query = torch.arange(tokens.start, tokens.stop, device=weights.device).repeat_interleave(groups)
            key = torch.arange(weights.shape[-1], device=weights.device)
            near = torch.zeros_like(weights, dtype=torch.bool) if exact is None else exact.near(target.rows)
            window = near & (query[:, None] - key < layer.window_size)
            sinks = near & ~window & (key < layer.num_sinks)
            parts = [weights * chosen for chosen in (window, sinks, near & ~window & ~sinks, ~near)]
            parts.append(target.softmax * ~near)
            sums += torch.stack([part.sum() for part in parts]).double().cpu()
            count += weights.shape[1] * weights.shape[2]
    window_share, sinks_share, slots_share, features_share, forgotten = (sums / count).tolist()
    return AttentionShares(window_share, sinks_share, slots_share, features_share, forgotten, len(ids))
