"""Random feature attention for every family: features, gate, recurrence and cache between a family's own projections.

A family's attention class projects queries, keys and values; `RFAAttentionMixin` does the rest. There may be more query heads
than key-value heads, H_q = G H (`hf_rfa.models.masking`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import initialization as init
from transformers.cache_utils import Cache, EncoderDecoderCache

from .cache_rfa import Held, RecordedStep, cross_layer_of, rfa_layer_of
from .configuration_rfa import AttentionKind
from .feature_maps import FEATURE_MAPS, FeatureMap, Features, compute_dtype
from .linear_attention import (
    MASKED_LOGIT,
    Tokens,
    attend_with_state,
    final_state,
    linear_attention,
    mask_padding,
    rescale,
    split_tokens,
)
from .masking import beams_per_source, group_queries, join_heads, split_heads, ungroup
from .sinks_and_slots import Importance, sinks_are_held
from .sliding_window import (
    WindowSizes,
    exact_attention,
    in_stream_order,
    sliding_window_attention,
    stream_of,
)

#: Added to a layer's index where its random matrices are drawn, so that cross attention has others than causal attention.
DRAW_OFFSET: dict[AttentionKind, int] = {"causal": 0, "cross": 100_000, "encoder": 200_000}
#: Tokens of a segment, a multiple of the usual chunk size: their features fit into a CPU's caches. Features of a long
#: sequence fill more memory than all else, and fresh memory costs more time than computing them.
SEGMENT_LENGTH = 512
#: With gradients sequences up to this length are one segment: that takes more memory, and a fifth less time.
MAX_LENGTH_WITHOUT_SEGMENTS = 2048

#: The components of attention with a sliding window (`hf_rfa.inference.use_attention_component`).
AttentionComponent = Literal["both", "linear", "window"]
#: Modules that compute causal attention without a window in place of torch, by name; `hf_rfa.backends` registers its own.
BACKENDS: dict[str, Any] = {}


def without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method of (query, …): run it with autocast disabled."""

    @wraps(function)
    def run(self: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        device = query.device.type
        if not torch.is_autocast_enabled(device):
            return function(self, query, *args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(self, query, *args, **kwargs)

    return run


class Gate(nn.Module):
    """The recency gate g = sigmoid(w·x + b), one per head and token (Peng et al. 2021, eq. 6).

    Not a linear layer: it returns two things, in float32, and what adapts or quantizes linear layers has to pass it by.

    Its initial value does not depend on x, and spreads the heads' time scales 1 / (1 − g) evenly on a logarithmic scale
    from a quarter of the model's ``max_positions`` to four times their number (chrono initialization).
    """

    def __init__(self, hidden_size: int, num_heads: int, max_positions: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.max_positions = max_positions
        self.weight = nn.Parameter(torch.empty(num_heads, hidden_size))
        self.bias = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to 0 and the bias by the time scales, where no checkpoint has set them."""
        if self.weight.is_meta:
            return
        longest, shortest = math.log(4.0 * self.max_positions), math.log(max(2.0, self.max_positions / 4.0))
        time_scales = torch.linspace(shortest, longest, self.num_heads).exp()
        init.zeros_(self.weight)
        init.copy_(self.bias, (time_scales - 1.0).log())

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return (log g, 1 − g) for hidden states [B, T, width], each [B, H, T] in the computing dtype."""
        dtype = compute_dtype(hidden_states.dtype)
        logits = F.linear(hidden_states.to(dtype), self.weight.to(dtype), self.bias.to(dtype)).transpose(1, 2)
        return F.logsigmoid(logits), torch.sigmoid(-logits)


def one_hot_values(key: Tensor) -> Tensor:
    """Return values [B, H, T, T] of keys [B, H, T, d] such that the outputs of attention are the attention weights."""
    return torch.eye(key.shape[-2], dtype=key.dtype, device=key.device).expand(*key.shape[:-1], -1)


class HeadGroup(NamedTuple):
    """Heads of a layer that keep tokens in one way, and their inputs: the heads with features, or the retrieval heads.

    Attributes:
        query: rows of the key-value heads, [B, H, T G, d] (`hf_rfa.models.masking.group_queries`).
        tokens: keys, values and what else there is of the tokens.
        sink_logits: logits of the query heads' learned sinks, [H G], or None.
        held: what is kept of the tokens before.
        sizes: numbers of tokens that the heads see exactly; without features a window of 0 is one of all tokens.
        feature_map: φ, or None without features.
    """

    query: Tensor
    tokens: Tokens
    sink_logits: Tensor | None
    held: Held
    sizes: WindowSizes
    feature_map: FeatureMap | None

    def with_one_hot_values(self) -> HeadGroup:
        """Return the group with values such that the outputs are the attention weights."""
        key = self.tokens.key
        held = self.held.with_zeros_for_values(key.shape[-2], key.shape[-1])
        return self._replace(tokens=self.tokens._replace(value=one_hot_values(key)), held=held)

    def with_dropout(self, probability: float) -> HeadGroup:
        """Return the group with values of which some are dropped."""
        return self._replace(tokens=self.tokens._replace(value=F.dropout(self.tokens.value, probability)))


class RFAAttentionMixin(nn.Module):
    """Random feature attention for a family's attention class, which projects queries, keys and values.

    Retrieval heads, if there are any, attend exactly, to all tokens or within a window of their own; feature map, gate,
    importance and state are the other heads'.
    """

    feature_map: FeatureMap
    gate: Gate | None
    importance: Importance | None
    rfa_kind: AttentionKind
    scaling: float

    @property
    def window_sizes(self) -> WindowSizes:
        """Numbers of tokens that causal attention sees exactly."""
        return WindowSizes(self.window_size, self.num_sinks, self.num_slots)

    @property
    def retrieval_sizes(self) -> WindowSizes:
        """The same of retrieval heads; 0 for a window of all tokens."""
        return WindowSizes(self.retrieval_window, self.num_sinks if self.retrieval_window else 0)

    def project_query(self, hidden_states: Tensor) -> Tensor:
        """Return the queries [B, H_q, T, d] of the layer's input [B, T, width]."""
        raise NotImplementedError

    def project_source(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values [B, H, S, d] of what is attended to, [B, S, width]."""
        raise NotImplementedError

    def project(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, H_q, T, d], and keys and values [B, H, T, d], of the layer's input [B, T, width]."""
        return self.project_query(hidden_states), *self.project_source(hidden_states)

    def init_rfa(self, config: Any, *, kind: AttentionKind, scaling: float, layer_idx: int, groups: int = 1) -> None:
        """Add the feature map, and the gate where the configuration asks for one (causal attention only).

        ``groups`` is G, the number of query heads that share each of ``config.num_heads_for(kind)`` key-value heads.
        """
        self.retrieval_heads: list[int] = config.retrieval_heads_of(layer_idx) if kind == "causal" else []
        self.retrieval_window: int = config.retrieval_window_of(layer_idx) if self.retrieval_heads else 0
        heads = config.num_heads_for(kind) - len(self.retrieval_heads)
        self.window_size: int = config.window_size if kind == "causal" else 0
        self.num_sinks: int = config.num_sinks if kind == "causal" else 0
        self.num_slots: int = config.num_slots if kind == "causal" else 0
        self.feature_map = FEATURE_MAPS[config.feature_map](
            num_heads=heads,
            groups=groups,
            head_dim=config.head_dim_for(kind),
            num_features=config.num_features_for(kind),
            scaling=scaling,
            unit_norm=config.unit_norm,
            orthogonal=config.orthogonal,
            trainable=config.trainable_projection,
            redraw_pool=config.redraw_pool,
            windowed=self.window_size > 0,
            seed=config.feature_seed,
            layer_idx=layer_idx + DRAW_OFFSET[kind],
        )
        gated = config.gate and kind == "causal"
        self.gate = Gate(config.hidden_size, heads, config.max_position_embeddings) if gated else None
        self.importance = Importance(config.hidden_size, heads) if self.num_slots else None
        self.rfa_kind = kind
        self.rfa_layer_idx = layer_idx
        self.attention_component: AttentionComponent = "both"
        self.backend = "torch"
        self.chunk_size = config.chunk_size
        self.state_dtype = getattr(torch, config.state_dtype)

    @without_autocast
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        hidden_states: Tensor,
        cache: Cache | None = None,
        padding_mask: Tensor | None = None,
        document_starts: Tensor | None = None,
        dropout: float = 0.0,
        output_attentions: bool = False,
        sink_logits: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Self-attention: attend to keys and values, and if causal to those that the cache has seen before.

        Args:
            query: [B, H_q, T, d].
            key: [B, H, T, d].
            value: [B, H, T, d].
            hidden_states: the layer's input, [B, T, width], which the gate reads.
            cache: the cache whose layer is read and updated, or None.
            padding_mask: [B, T], 0 for padding, or None; it includes tokens before these of which the cache holds keys and
                values (`hf_rfa.models.cache_rfa.unread_length`).
            document_starts: [B, T], True where a document starts that sees nothing before it, or None; causal attention only.
            dropout: probability, in training, of dropping a token's value for all queries of a head: single attention weights
                never exist. The token stays in the normalizer, as with dropout on softmax weights.
            output_attentions: whether to return the attention weights, at quadratic cost.
            sink_logits: logits of the query heads' learned sinks, [H_q], or None (`hf_rfa.models.sliding_window`). They count
                to the window: attention to features alone (`attention_component`) has none.

        Returns:
            The output [B, H_q, T, d] in the dtype of ``value``, and the weights [B, H_q, T, T] or None.

        Raises:
            ValueError: if there are ``sink_logits`` without a window, whose weights they are commensurate with.
        """
        if sink_logits is not None and not self.window_size:
            raise ValueError(
                "sink_logits need a sliding window (window_size of at least 1), which this attention lacks."
            )
        if self.rfa_kind != "causal":
            output, _, attn_weights = self._attend_to_all(query, key, value, padding_mask, dropout, output_attentions)
            return output, attn_weights
        query_heads, length = query.shape[1:3]
        layer, prefix = (None, None) if cache is None else rfa_layer_of(cache, self.rfa_layer_idx)
        if prefix is not None:  # tokens of which nothing but key and value is known: no output, and a gate of zeros
            key, value = (torch.cat(each, dim=-2) for each in zip(prefix, (key, value), strict=True))
            query = F.pad(query, (0, 0, key.shape[-2] - length, 0))
            hidden_states = F.pad(hidden_states, (0, 0, key.shape[-2] - length, 0))
        held = (Held(), Held()) if layer is None else layer.read(query.device)
        rows = group_queries(query, key.shape[1])  # [B, H, T G, d]
        groups = self._head_groups(rows, key, value, hidden_states, padding_mask, sink_logits, held)
        attn_weights = None
        if output_attentions:
            found = [self._attend(group.with_one_hot_values(), document_starts)[0] for group in groups]
            attn_weights = ungroup(join_heads(found, self.retrieval_heads), query_heads)
            attn_weights = attn_weights[..., -length:, -length:].to(value.dtype)
        if dropout and self.training:
            groups = [group.with_dropout(dropout) for group in groups]
        sinks_held, recording = (False, False) if layer is None else (layer.sinks_held, layer.record_past)
        known: Any = {"sinks_held": sinks_held, "recording": recording}
        outputs, now_held, recorded = zip(
            *(self._attend(each, document_starts, **known) for each in groups), strict=True
        )
        if cache is not None:
            (state, window), *others = now_held
            facts: Any = {"num_tokens": key.shape[-2], "retrieval": others[0].window if others else None}
            if window is not None and key.shape[-2] > 1 and not sinks_held:  # asked once: the answer is waited for
                facts["sinks_held"] = sinks_are_held(window, self.num_sinks, self.feature_map.head_dim)
            facts["recorded"] = recorded if recording else ()
            cache.update(state, window, self.rfa_layer_idx, **facts)
        output = ungroup(join_heads(outputs, self.retrieval_heads), query_heads)
        return output[..., -length:, :].to(value.dtype), attn_weights

    def _head_groups(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        hidden_states: Tensor,
        padding_mask: Tensor | None,
        sink_logits: Tensor | None,
        held: tuple[Held, Held],
    ) -> list[HeadGroup]:
        """Return the heads with features, and the retrieval heads if there are any; shapes are those of `HeadGroup`."""
        log_decay, input_scale = (None, None) if self.gate is None else self.gate(hidden_states)  # [B, H, T]
        importance, recency = (None, None) if self.importance is None else self.importance(hidden_states)
        log_decay, input_scale = mask_padding(padding_mask, log_decay, input_scale)
        recency, is_token = mask_padding(padding_mask, recency, None)
        more = (log_decay, input_scale, padding_mask, importance, recency)
        has_features = self.feature_map.feature_dim > 0 or self.attention_component == "linear"
        kept = self.window_sizes, self.feature_map if has_features else None
        if not self.retrieval_heads:
            return [HeadGroup(query, Tokens(key, value, *more), sink_logits, held[0], *kept)]
        inputs = [split_heads(each, self.retrieval_heads) for each in (query, key, value)]
        sinks: Any = (None, None)
        if sink_logits is not None:
            sinks = split_heads(sink_logits.view(1, key.shape[1], -1), self.retrieval_heads)
            sinks = tuple(each.flatten() for each in sinks)
        (query, exact_query), (key, exact_key), (value, exact_value) = inputs
        exact_tokens = Tokens(exact_key, exact_value, None, is_token, padding_mask)
        return [
            HeadGroup(query, Tokens(key, value, *more), sinks[0], held[0], *kept),
            HeadGroup(exact_query, exact_tokens, sinks[1], held[1], self.retrieval_sizes, None),
        ]

    def _attend(
        self,
        group: HeadGroup,
        document_starts: Tensor | None,
        *,
        sinks_held: bool = False,
        recording: bool = False,
    ) -> tuple[Tensor, Held, RecordedStep | None]:
        """Attend causally: output [B, H, T G, M], what the heads hold now, and if recording what `RFALayer.crop` needs."""
        query, tokens, held, sizes, feature_map = group.query, group.tokens, group.held, group.sizes, group.feature_map
        if feature_map is None or (sizes.window and self.attention_component != "linear"):
            return self._attend_with_window(group, document_starts, sinks_held, recording)
        plain = not sizes.window and not recording and tokens.value.shape[-1] == tokens.key.shape[-1]
        if self.backend != "torch" and plain and not torch.compiler.is_compiling():
            grouped = query.shape != tokens.key.shape  # which no backend knows
            inputs = (query, *tokens[:4], document_starts, held.state)
            found = None if grouped else BACKENDS[self.backend].attend(self, *inputs)
            if found is not None:
                output, state = found
                return output, Held(state), None
        tokens = self._apart(tokens, document_starts)
        output, state, key_features = self._attend_to_past(query, tokens, held.state, recording)
        recorded = None
        if recording:
            recorded = RecordedStep(
                tokens, key_features, feature_map.denominator_floor, WindowSizes(0), tokens.key.dtype
            )
        return output, Held(state), recorded

    def _apart(self, tokens: Tokens, document_starts: Tensor | None) -> Tokens:
        """Return tokens whose decays let nothing through where a document starts."""
        if document_starts is None:
            return tokens
        log_decay = tokens.log_decay
        if log_decay is None:
            log_decay = tokens.key.new_zeros(tokens.key.shape[:-1], dtype=compute_dtype(tokens.key.dtype))
        return tokens._replace(log_decay=log_decay.masked_fill(document_starts[:, None], MASKED_LOGIT))

    def _attend_with_window(
        self, group: HeadGroup, document_starts: Tensor | None, sinks_held: bool, recording: bool
    ) -> tuple[Tensor, Held, RecordedStep | None]:
        """Attend to a window, and to features of the tokens before it if there are any; see `_attend`."""
        query, tokens, sink_logits, (state, window), sizes, feature_map = group
        decays = tokens.log_decay is not None  # 16 bits would round what is left of a token
        dtype = self._as_state(tokens.key).dtype if decays else tokens.key.dtype
        query, tokens = self._as_state(query), tokens._replace(key=self._as_state(tokens.key))
        kept: Any = {"dtype": dtype, "chunk_size": self.chunk_size, "sinks_held": sinks_held}
        attended: Any = {"scaling": self.scaling, "sink_logits": sink_logits}
        if feature_map is None:
            output, window = exact_attention(query, tokens, window, sizes, document_starts, **kept, **attended)
            recorded = RecordedStep(tokens, None, None, sizes, dtype) if recording else None
            return output, Held(None, window), recorded
        tokens = self._apart(tokens, document_starts)
        stream = stream_of(tokens, window, sizes, document_starts, **kept)
        query, leaving = in_stream_order(query, stream), stream.leaving()
        features = self._features(query, leaving.key, feature_map.least_shift(state), offset=True)
        output, state = sliding_window_attention(
            query,
            stream,
            leaving,
            features,
            initial_state=state,
            denominator_floor=feature_map.denominator_floor,
            chunk_size=self.chunk_size,
            window_only=self.attention_component == "window",
            **attended,
        )
        recorded = None
        if recording:
            recorded = RecordedStep(tokens, features.unshifted_key(), feature_map.denominator_floor, sizes, dtype)
        return output, Held(state, stream.window()), recorded

    def _attend_to_past(
        self, query: Tensor, tokens: Tokens, state: Tensor | None, recording: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Attend causally through features: the output [B, H, T G, M], the new state, and φ(k) if recording.

        Features of a long sequence are computed a segment at a time, and again for the gradients.
        """
        most = MAX_LENGTH_WITHOUT_SEGMENTS if torch.is_grad_enabled() else SEGMENT_LENGTH
        redrawn = self.training and self.feature_map.redraw_pool > 0  # recomputed features would be others
        if torch.compiler.is_compiling() or redrawn or tokens.key.shape[-2] <= most:
            output, state, features = self._attend_segment(query, tokens, state, None)
            key_features = features.unshifted_key() if recording else None
            return output, cast(Tensor, rescale(state, features.shift, None)), key_features
        shift, outputs, keys = None, [], []
        for queries, segment in split_tokens(SEGMENT_LENGTH, query, tokens):
            inputs = (queries, segment, state, shift)
            if torch.is_grad_enabled():
                found = checkpoint(self._attend_segment, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                found = self._attend_segment(*inputs)
            output, state, features = found
            shift = features.shift
            outputs.append(output)
            if recording:
                keys.append(features.unshifted_key())
        state = cast(Tensor, rescale(state, shift, None))
        return torch.cat(outputs, dim=-2), state, torch.cat(keys, dim=-2) if recording else None

    def _attend_segment(
        self, query: Tensor, tokens: Tokens, state: Tensor | None, shift: Tensor | None
    ) -> tuple[Tensor, Tensor, Features]:
        """Attend causally to some tokens in succession: output, state, whose shift is that of the features, and features."""
        least_shift = self.feature_map.least_shift(state) if shift is None else shift
        features = self._features(query, tokens.key, least_shift)
        output, state, _ = linear_attention(
            features.query,
            tokens._replace(key=features.key),
            initial_state=rescale(state, shift, features.shift),
            denominator_floor=self.feature_map.denominator_floor,
            chunk_size=self.chunk_size,
        )
        return output, state, features

    def _as_state(self, tensor: Tensor) -> Tensor:
        """Return a tensor in the dtype of the state."""
        return tensor.to(torch.promote_types(self.state_dtype, tensor.dtype))

    def _features(
        self, query: Tensor, key: Tensor | None, least_shift: Tensor | None, *, offset: bool = False
    ) -> Features:
        """Return the features of queries and keys in the dtype of the state."""
        found: Features = self.feature_map(query, key, least_shift=least_shift, offset=offset)
        return Features._make(None if each is None else self._as_state(each) for each in found)

    @without_autocast
    def _attend_to_all(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        padding_mask: Tensor | None,
        dropout: float,
        output_attentions: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Let every query see every key: queries, keys and values in; output, state and attention weights out.

        The shapes are those of `attend`. One row of keys may serve several rows of queries, as in `attend_with_state`.
        """
        query_heads = query.shape[1]
        query = group_queries(query, key.shape[1])
        features = self._features(query, key, self.feature_map.least_shift(None))
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
        features = self._features(rows, None, self.feature_map.least_shift(state))
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
        output, state, attn_weights = self._attend_to_all(query, key, value, mask, dropout, output_attentions)
        if isinstance(past_key_values, EncoderDecoderCache) and fills:
            layer.fill(state, length=encoder_hidden_states.shape[1], rows_per_state=beams)
            past_key_values.is_updated[self.rfa_layer_idx] = True
        return output, attn_weights
