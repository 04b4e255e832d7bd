"""Attention in which every query sees every key: cross attention, and an encoder's.

Both read a finished state of random features, the sum over all keys (`hf_rfa.models.linear_attention.final_state`).
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.utils.import_utils import is_tracing

from .attention import without_autocast
from .cache_rfa_seq2seq import cross_layer_of
from .feature_maps import Features
from .linear_attention import Tokens, denominator, divide, final_state, mask_padding, rescale, split_norm_row
from .masking import group_queries, ungroup
from .state_attention import StateAttentionMixin


def beams_per_source(encoder_hidden_states: Tensor, padding_mask: Tensor | None) -> int:
    """Return n such that every n rows of a batch in succession are equal, as `generate` repeats a source for its beams.

    The batch is ``encoder_hidden_states`` [B, S, width] with a ``padding_mask`` [B, S] or None.
    """
    if encoder_hidden_states.shape[0] == 1 or is_tracing(encoder_hidden_states):
        return 1
    same = (encoder_hidden_states[1:] == encoder_hidden_states[:-1]).flatten(1).all(1)
    if padding_mask is not None:
        same &= (padding_mask[1:] == padding_mask[:-1]).all(1)
    boundaries = [0, *((~same).nonzero()[:, 0] + 1).tolist(), encoder_hidden_states.shape[0]]
    return math.gcd(*(stop - start for start, stop in pairwise(boundaries)))


def attend_with_state(query: Tensor, state: Tensor, *, denominator_floor: float | None = None) -> Tensor:
    """Return the outputs [B, H, T, d] of queries that read a finished state, unchanged: cross and bidirectional attention.

    Args:
        query: features of the queries, [B, H, T, F].
        state: from `final_state`; each of its N rows serves B / N rows of ``query`` in succession, the beams of a sequence.
        denominator_floor: see `denominator`.
    """
    (batch, heads, length, features), groups = query.shape, state.shape[0]
    if batch != groups:  # the queries of one state row become one longer list of queries
        query = query.view(groups, -1, heads, length, features).transpose(1, 2).reshape(groups, heads, -1, features)
    rows, norms = split_norm_row(state, denominator_floor)
    output = query @ cast(Tensor, rows)
    output = divide(output[..., :-1], denominator(output[..., -1:], query, norms, denominator_floor))
    if batch != groups:
        output = output.view(groups, heads, -1, length, output.shape[-1]).transpose(1, 2)
        output = output.reshape(batch, heads, length, -1)
    return output


def one_hot_values(key: Tensor) -> Tensor:
    """Return values [B, H, T, T] of keys [B, H, T, d] such that the outputs of attention are the attention weights."""
    return torch.eye(key.shape[-2], dtype=key.dtype, device=key.device).expand(*key.shape[:-1], -1)


class RFASeq2SeqAttentionMixin(StateAttentionMixin):
    """Converted attention of an encoder and a decoder: causal attention, and of every query to every key."""

    def project_query(self, hidden_states: Tensor) -> Tensor:
        """Return the queries [B, H_q, T, d] of the layer's input [B, T, width]."""
        raise NotImplementedError

    def project_source(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values [B, H, S, d] of what is attended to, [B, S, width]."""
        raise NotImplementedError

    def project(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, H_q, T, d], and keys and values [B, H, T, d], of the layer's input [B, T, width]."""
        return self.project_query(hidden_states), *self.project_source(hidden_states)

    @without_autocast
    def attend_to_all(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        padding_mask: Tensor | None = None,
        dropout: float = 0.0,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Let every query see every key: queries, keys and values in; output, state and attention weights out.

        Arguments are those of `attend`. One row of keys may serve several rows of queries, as in `attend_with_state`.
        """
        query_heads = query.shape[1]
        query = group_queries(query, key.shape[1])
        features: Features = self.feature_map(query, key, least_shift=self.feature_map.least_shift(None))
        _, input_scale = mask_padding(padding_mask, None, None)
        floor: Any = {"denominator_floor": self.feature_map.denominator_floor}
        keys, attn_weights = Tokens(features.key, value, None, input_scale), None
        if output_attentions:
            sums = final_state(keys._replace(value=one_hot_values(key)), **floor)
            attn_weights = ungroup(attend_with_state(features.query, sums, **floor), query_heads).to(value.dtype)
        state = final_state(keys._replace(value=F.dropout(value, dropout, self.training)), **floor)
        output = ungroup(attend_with_state(features.query, state, **floor), query_heads).to(value.dtype)
        return output, cast(Tensor, rescale(state, features.shift, None)), attn_weights

    @without_autocast
    def _read(self, query: Tensor, state: Tensor) -> Tensor:
        """Return what queries [B, H_q, T, d] read from a finished state."""
        state = state.to(query.device)
        rows = group_queries(query, state.shape[1])
        features: Features = self.feature_map(rows, least_shift=self.feature_map.least_shift(state))
        state = cast(Tensor, rescale(state, None, features.shift))
        floor = self.feature_map.denominator_floor
        output = attend_with_state(features.query, state, denominator_floor=floor)
        return ungroup(output, query.shape[1]).to(query.dtype)

    def attend_to_source(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None,
        *,
        past_key_values: Cache | None = None,
        padding_mask: Tensor | None = None,
        dropout: float = 0.0,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Cross attention: attend to an encoder's output, summed once per sequence and kept in the cache.

        Args:
            hidden_states: the layer's input, [B, T, width].
            encoder_hidden_states: the encoder's output, [B, S, width]; not read again once the cache holds its sums.
            past_key_values: the `EncoderDecoderCache`, or None.
            padding_mask: [B, S], 0 for padding, or None.
            dropout: as for `attend`.
            output_attentions: whether to return the attention weights.

        Returns:
            The output [B, H_q, T, d] in the dtype of the queries, and the weights [B, H_q, T, S] or None.

        Raises:
            ValueError: if there is neither an encoder's output nor a state.
        """
        query = self.project_query(hidden_states)
        layer: Any = None
        if isinstance(past_key_values, EncoderDecoderCache):
            layer = cross_layer_of(past_key_values.cross_attention_cache, self.rfa_layer_idx)
        if layer is not None and layer.state is not None and not output_attentions:
            return self._read(query, layer.state), None
        if encoder_hidden_states is None:
            raise ValueError("cross attention needs encoder_hidden_states, or a cache that has seen them.")
        fills = layer is not None and layer.state is None
        beams = beams_per_source(encoder_hidden_states, padding_mask) if fills else 1
        mask = None if padding_mask is None else padding_mask[::beams]
        key, value = self.project_source(encoder_hidden_states[::beams])
        output, state, attn_weights = self.attend_to_all(query, key, value, mask, dropout, output_attentions)
        if isinstance(past_key_values, EncoderDecoderCache) and fills:
            layer.fill(state, length=encoder_hidden_states.shape[1], rows_per_state=beams)
            past_key_values.is_updated[self.rfa_layer_idx] = True
        return output, attn_weights
