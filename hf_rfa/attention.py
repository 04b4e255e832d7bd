"""The attention module: projections in, φ, gate, recurrence, cache, projections out.

What is the same in every family is in `RFAAttentionMixin`; a family's attention class brings its projections.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.utils.import_utils import is_tracing

from .cache import layer_of
from .feature_maps import FEATURE_MAPS, FeatureMap, compute_dtype
from .kernels import attend_with_state, implied_weights, mask_padding, rfa_attention


def build_feature_map(config: Any, *, num_heads: int, head_dim: int, scaling: float, layer_idx: int) -> FeatureMap:
    """Build the feature map of one attention layer from a configuration with the fields of `RFAConfigMixin`."""
    return FEATURE_MAPS[config.feature_map](
        num_heads=num_heads,
        head_dim=head_dim,
        num_features=config.num_features,
        scaling=scaling,
        unit_norm=config.unit_norm,
        orthogonal=config.orthogonal,
        trainable=config.trainable_projection,
        redraw_pool=config.redraw_pool,
        seed=config.feature_seed,
        layer_idx=layer_idx,
    )


class Gate(nn.Linear):
    """g = sigmoid(w·x + b), one per head and token (Peng et al. 2021, eq. 6).

    The start does not depend on x, and spreads the heads' spans 1 / (1 − g) evenly on a logarithmic scale from a quarter
    of the model's positions to four times as many.

    Args:
        hidden_size: width of x.
        num_heads: H.
        max_positions: the model's positions.
    """

    def __init__(self, hidden_size: int, num_heads: int, max_positions: int) -> None:
        self.max_positions = max_positions
        super().__init__(hidden_size, num_heads)

    def reset_parameters(self) -> None:
        """Set the weight to 0 and the bias to the spans, where no checkpoint has set them."""
        longest, shortest = math.log(4.0 * self.max_positions), math.log(max(2.0, self.max_positions / 4.0))
        spans = torch.linspace(shortest, longest, self.out_features).exp()
        if self.weight.is_meta:
            return
        init.zeros_(self.weight)
        init.copy_(self.bias, (spans - 1.0).log())

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return (log g, 1 − g) for hidden states [B, T, width], each [B, H, T] in the computing dtype."""
        dtype = compute_dtype(hidden_states.dtype)
        logits = F.linear(hidden_states.to(dtype), self.weight.to(dtype), self.bias.to(dtype)).transpose(1, 2)
        return F.logsigmoid(logits), torch.sigmoid(-logits)


def local_padding(attention_mask: Tensor | None, length: int) -> Tensor | None:
    """Return the padding mask of the last ``length`` tokens, [B, length], or None if none of them is padding.

    Args:
        attention_mask: [B, past + length], 1 for tokens and 0 for padding, or None.
        length: number of tokens in this forward pass.

    Raises:
        ValueError: for any other shape: a recurrence can leave tokens out for all queries, not for some.
    """
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2 or attention_mask.shape[-1] < length:
        raise ValueError(
            "random feature attention takes a padding mask of shape (batch, tokens so far) with 1 for tokens and 0 for "
            f"padding; got shape {tuple(attention_mask.shape)} for {length} new tokens. A mask per query cannot be "
            "honoured, since all queries read one state; leave those layers softmax (softmax_layers)."
        )
    padding = attention_mask[:, attention_mask.shape[-1] - length :]
    if not is_tracing(padding) and bool((padding != 0).all()):
        return None
    return padding


def padding_of_mask(mask: Tensor | None) -> Tensor | None:
    """Return the padding mask [B, S] behind a mask that transformers prepared for cross attention.

    Args:
        mask: None, [B, S], or [B, 1, 1 or T, S] as booleans (True for tokens) or as numbers to add (0 for tokens).
    """
    if mask is None or mask.ndim == 2:
        return mask
    row = mask[:, 0, 0]
    return row if row.dtype == torch.bool else row == 0


class RFAAttentionMixin(nn.Module):
    """Random feature attention for a family's attention class, which projects queries, keys and values."""

    feature_map: FeatureMap
    gate: Gate | None
    rfa_causal: bool
    scaling: float

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each [B, H, T, d], of the layer's input [B, T, width] (self-attention)."""
        raise NotImplementedError

    def init_rfa(
        self, config: Any, *, num_heads: int, head_dim: int, scaling: float, layer_idx: int, causal: bool
    ) -> None:
        """Add the feature map, and the gate where the configuration asks for one (causal attention only)."""
        self.feature_map = build_feature_map(
            config, num_heads=num_heads, head_dim=head_dim, scaling=scaling, layer_idx=layer_idx
        )
        positions = config.max_position_embeddings
        width = config.hidden_size
        self.gate = Gate(width, num_heads, positions) if config.gate and causal else None
        self.rfa_causal = causal
        self.rfa_layer_idx = layer_idx
        self.chunk_size = config.chunk_size
        self.state_dtype = getattr(torch, config.state_dtype)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        hidden_states: Tensor,
        cache: Cache | None = None,
        padding: Tensor | None = None,
        dropout: float = 0.0,
        output_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to keys and values, after those that the cache has seen.

        Dropout cannot act on single attention weights, which never exist: in training it drops a token's value for all
        queries of a head, and leaves the token in the normaliser, as dropout on softmax weights does.

        Args:
            query: [B, H, Tq, d].
            key: [B, H, Tk, d].
            value: [B, H, Tk, d].
            hidden_states: the layer's input, [B, Tk, width], which the gate reads.
            cache: the cache whose layer is read and updated, or None.
            padding: [B, Tk], 0 for padding, or None.
            dropout: probability of dropping a value in training.
            output_weights: whether to return the implied attention weights, at quadratic cost.

        Returns:
            The output [B, H, Tq, d] in the dtype of ``value``, and the weights [B, H, Tq, Tk] or None.
        """
        features = self.feature_map(query, key)
        log_gate, weights = (None, None) if self.gate is None else self.gate(hidden_states)
        log_gate, weights = mask_padding(padding, log_gate, weights)
        if self.state_dtype != features[0].dtype:
            dtype = torch.promote_types(self.state_dtype, features[0].dtype)
            features = (features[0].to(dtype), features[1].to(dtype))
        shared: dict[str, Any] = {
            "log_gate": log_gate,
            "weights": weights,
            "causal": self.rfa_causal,
            "signed": self.feature_map.signed,
            "floor": self.feature_map.floor,
        }
        values = F.dropout(value, dropout, self.training)

        implied: Tensor | None = None

        def step(state: Tensor | None) -> tuple[Tensor, Tensor]:
            nonlocal implied
            if output_weights:
                implied = implied_weights(*features, state=state, **shared).to(value.dtype)
            query_features, key_features = features
            return rfa_attention(
                query_features, key_features, values, state=state, chunk_size=self.chunk_size, **shared
            )

        if cache is None:
            output, _ = step(None)
        else:
            layer_of(cache, self.rfa_layer_idx)
            output, _ = cache.update(features[1], values, self.rfa_layer_idx, step=step)
        return output.to(value.dtype), implied

    def attend_cached(self, query: Tensor, cache: Cache) -> Tensor:
        """Attend with a finished state (cross attention after its first step): [B, H, T, d] in, the same out."""
        state = layer_of(cache, self.rfa_layer_idx).state
        if state is None:
            raise ValueError(f"the cross-attention cache of layer {self.rfa_layer_idx} holds no state yet.")
        features = self.feature_map.query(query).to(state.dtype)
        signed, floor = self.feature_map.signed, self.feature_map.floor
        return attend_with_state(features, state, signed=signed, floor=floor).to(query.dtype)
