"""Random feature attention for every family: features, gate, recurrence and cache between a family's own projections.

A family's attention class projects queries, keys and values; `RFAAttentionMixin` does the rest.
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

from .cache_rfa import RecordedStep, rfa_layer_of, source_layer_of
from .configuration_rfa import AttentionKind
from .feature_maps import FEATURE_MAPS, FeatureMap, Features, compute_dtype
from .linear_attention import (
    MASKED_LOGIT,
    attend_with_state,
    final_state,
    linear_attention,
    mask_padding,
    rescale,
    split_tokens,
)
from .masking import beams_per_source
from .sliding_window import WindowInputs, in_stream_order, sliding_window_attention, stream_of, window_inputs

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
    from a quarter of the model's positions to four times their number (chrono initialization).

    Args:
        hidden_size: width of x.
        num_heads: H.
        max_positions: the model's positions.
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
        longest, shortest = math.log(4.0 * self.max_positions), math.log(max(2.0, self.max_positions / 4.0))
        time_scales = torch.linspace(shortest, longest, self.num_heads).exp()
        if self.weight.is_meta:
            return
        init.zeros_(self.weight)
        init.copy_(self.bias, (time_scales - 1.0).log())

    @torch.no_grad()
    def set_time_scales(self, time_scales: Tensor) -> None:
        """Set the bias such that the heads' time scales 1 / (1 − g) are these, [H], in tokens and above 1, where w·x is 0."""
        self.bias.copy_((time_scales - 1.0).log())

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return (log g, 1 − g) for hidden states [B, T, width], each [B, H, T] in the computing dtype."""
        dtype = compute_dtype(hidden_states.dtype)
        logits = F.linear(hidden_states.to(dtype), self.weight.to(dtype), self.bias.to(dtype)).transpose(1, 2)
        return F.logsigmoid(logits), torch.sigmoid(-logits)


class RFAPreTrainedMixin:
    """The part of every RFA model's base class: initial values of feature maps and gates, which stay in float32.

    Raises:
        ValueError: for a configuration that is not valid; ``from_pretrained(…, window_size=8)`` sets fields after a
            configuration was checked.
    """

    # Feature maps and gates cost few bytes, and rounding them to 16 bits costs accuracy.
    _keep_in_fp32_modules_strict: Any = ["feature_map", "gate"]

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        config.validate_layer_type()
        config.validate_rfa()
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (FeatureMap, Gate)):
            module.reset_parameters()
        else:
            super()._init_weights(module)  # type: ignore[misc]


class CausalState(NamedTuple):
    """State of causal attention between tokens.

    Attributes:
        state: the recurrent state (`hf_rfa.models.linear_attention.state_shape`), or None at the start.
        window: the sliding window [B, H, W, 2d + 1], or None at the start and without a window.
    """

    state: Tensor | None
    window: Tensor | None


class RFAAttentionMixin(nn.Module):
    """Random feature attention for a family's attention class, which projects queries, keys and values."""

    feature_map: FeatureMap
    gate: Gate | None
    rfa_kind: AttentionKind
    scaling: float

    def project_query(self, hidden_states: Tensor) -> Tensor:
        """Return the queries [B, H, T, d] of the layer's input [B, T, width]."""
        raise NotImplementedError

    def project_source(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values [B, H, S, d] of what is attended to, [B, S, width]."""
        raise NotImplementedError

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each [B, H, T, d], of the layer's input [B, T, width] (self-attention)."""
        return self.project_query(hidden_states), *self.project_source(hidden_states)

    def init_rfa(self, config: Any, *, kind: AttentionKind, scaling: float, layer_idx: int) -> None:
        """Add the feature map, and the gate where the configuration asks for one (causal attention only)."""
        heads = config.num_heads_for(kind)
        self.window_size = config.window_size if kind == "causal" else 0
        self.feature_map = FEATURE_MAPS[config.feature_map](
            num_heads=heads,
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
    ) -> tuple[Tensor, Tensor | None]:
        """Self-attention: attend to keys and values, and if causal to those that the cache has seen before.

        Dropout cannot act on single attention weights, which never exist: in training it drops a token's value for all
        queries of a head, and leaves the token in the normalizer, as dropout on softmax weights does.

        Args:
            query: [B, H, T, d].
            key: [B, H, T, d].
            value: [B, H, T, d].
            hidden_states: the layer's input, [B, T, width], which the gate reads.
            cache: the cache whose layer is read and updated, or None.
            padding_mask: [B, T], 0 for padding, or None; it includes tokens before these of which the cache holds keys and
                values (`hf_rfa.models.cache_rfa.unread_length`).
            document_starts: [B, T], True where a document starts that sees nothing before it, or None; only with causal
                attention.
            dropout: probability of dropping a value in training.
            output_attentions: whether to return the attention weights, at quadratic cost.

        Returns:
            The output [B, H, T, d] in the dtype of ``value``, and the weights [B, H, T, T] or None.
        """
        if self.rfa_kind != "causal":
            output, _, attn_weights = self._attend_to_all(query, key, value, padding_mask, dropout, output_attentions)
            return output, attn_weights
        length = query.shape[-2]
        layer, prefix = (None, None) if cache is None else rfa_layer_of(cache, self.rfa_layer_idx)
        if prefix is not None:  # tokens of which nothing but key and value is known: no output, and a gate of zeros
            key, value = (torch.cat(each, dim=-2) for each in zip(prefix, (key, value), strict=True))
            query = F.pad(query, (0, 0, key.shape[-2] - length, 0))
            hidden_states = F.pad(hidden_states, (0, 0, key.shape[-2] - length, 0))
        before = CausalState(None, None) if layer is None else CausalState(*layer.read(query.device))

        log_decay, input_scale = (None, None) if self.gate is None else self.gate(hidden_states)  # [B, H, T]
        log_decay, input_scale = mask_padding(padding_mask, log_decay, input_scale)
        scales = (log_decay, input_scale, padding_mask, document_starts)
        attn_weights = None
        if output_attentions:  # the outputs of one-hot values are the weights
            one_hot = torch.eye(key.shape[-2], dtype=key.dtype, device=key.device).expand(*key.shape[:-1], -1)
            attn_weights, _, _ = self._attend(query, key, one_hot, *scales, self._without_values(before, one_hot))
            attn_weights = attn_weights[..., -length:, -length:].to(value.dtype)
        dropped = F.dropout(value, dropout, self.training)
        recording = layer is not None and layer.record_past
        output, after, recorded = self._attend(query, key, dropped, *scales, before, recording=recording)
        if cache is not None:
            num_tokens = key.shape[-2]
            cache.update(*after, self.rfa_layer_idx, num_tokens=num_tokens, recorded=recorded)  # type: ignore[arg-type]
        return output[..., -length:, :].to(value.dtype), attn_weights

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor | None,
        input_scale: Tensor | None,
        padding_mask: Tensor | None,
        document_starts: Tensor | None,
        before: CausalState,
        *,
        recording: bool = False,
    ) -> tuple[Tensor, CausalState, RecordedStep | None]:
        """Attend causally: the output [B, H, T, M] of values [B, H, T, M], what is kept, and what joined it."""
        floor = self.feature_map.denominator_floor
        plain = not self.window_size and not recording and value.shape[-1] == key.shape[-1]
        if self.backend != "torch" and plain and not torch.compiler.is_compiling():
            found = BACKENDS[self.backend].attend(
                self, query, key, value, log_decay, input_scale, document_starts, before.state
            )
            if found is not None:
                return found[0], CausalState(found[1], None), None
        if document_starts is not None:  # a gate that lets nothing through
            if log_decay is None:
                log_decay = key.new_zeros(key.shape[:-1], dtype=compute_dtype(key.dtype))
            log_decay = log_decay.masked_fill(document_starts[:, None], MASKED_LOGIT)
        if self.window_size and self.attention_component != "linear":
            inputs = window_inputs(
                self._as_state(key),
                value,
                size=self.window_size,
                log_decay=log_decay,
                input_scale=input_scale,
                padding_mask=padding_mask,
            )
            return self._attend_with_window(self._as_state(query), inputs, before, recording=recording)

        state, shift, outputs, key_features = before.state, None, [], []
        whole = (query, key, value, log_decay, input_scale)
        in_segments = self._needs_segments(query)
        for segment in split_tokens(SEGMENT_LENGTH, *whole) if in_segments else (whole,):
            if in_segments and torch.is_grad_enabled():
                found = checkpoint(
                    self._attend_segment, *segment, state, shift, use_reentrant=False, preserve_rng_state=False
                )
            else:
                found = self._attend_segment(*segment, state, shift)
            output, state, features = found
            shift = features.shift
            outputs.append(output)
            if recording:
                key_features.append(features.unshifted_key())
        state = rescale(state, shift, None)
        recorded = None
        if recording:
            recorded = RecordedStep(torch.cat(key_features, dim=-2), value, log_decay, input_scale, floor, None)
        output = torch.cat(outputs, dim=-2) if in_segments else outputs[0]
        return output, CausalState(state, None), recorded

    def _attend_segment(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor | None,
        input_scale: Tensor | None,
        state: Tensor | None,
        shift: Tensor | None,
    ) -> tuple[Tensor, Tensor, Features]:
        """Attend causally to some tokens in succession: output, state, whose shift is that of the features, and features."""
        features = self._features(query, key, self.feature_map.least_shift(state) if shift is None else shift)
        output, state, _ = linear_attention(
            features.query,
            features.key,
            value,
            log_decay=log_decay,
            input_scale=input_scale,
            initial_state=rescale(state, shift, features.shift),
            denominator_floor=self.feature_map.denominator_floor,
            chunk_size=self.chunk_size,
        )
        return output, state, features

    def _attend_with_window(
        self, query: Tensor, inputs: WindowInputs, before: CausalState, *, recording: bool
    ) -> tuple[Tensor, CausalState, RecordedStep | None]:
        """Attend causally to the window, and through features to what has left it; see `_attend`."""
        stream = stream_of(inputs, before.window)  # [B, H, W + T, d + M + 1]
        query = in_stream_order(query, stream)
        features = self._features(query, stream.leaving_keys, self.feature_map.least_shift(before.state), offset=True)
        floor = self.feature_map.denominator_floor
        output, state = sliding_window_attention(
            query,
            stream,
            features,
            scaling=self.scaling,
            initial_state=before.state,
            denominator_floor=floor,
            chunk_size=self.chunk_size,
            window_only=self.attention_component == "window",
        )
        recorded = RecordedStep(features.unshifted_key(), None, None, None, floor, inputs) if recording else None
        return output, CausalState(state, stream.window()), recorded

    def _needs_segments(self, query: Tensor) -> bool:
        """Return whether a sequence is so long that its features are computed a segment at a time."""
        most = MAX_LENGTH_WITHOUT_SEGMENTS if torch.is_grad_enabled() else SEGMENT_LENGTH
        redrawn = self.training and self.feature_map.redraw_pool > 0  # recomputed features would be others
        return not (torch.compiler.is_compiling() or redrawn) and query.shape[-2] > most

    def _without_values(self, before: CausalState, value: Tensor) -> CausalState:
        """Return a state and a window for values of another width, [B, H, T, M], with zeros in place of their own values."""
        state, window = before
        width, d = value.shape[-1], self.feature_map.head_dim
        if state is not None:
            state = torch.cat([state.new_zeros(*state.shape[:-1], width), state[..., -1:]], dim=-1)
        if window is not None:
            zeros = window.new_zeros(*window.shape[:-1], width)
            window = torch.cat([window[..., :d], zeros, window[..., -1:]], dim=-1)
        return CausalState(state, window)

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

        One row of keys may serve several rows of queries, as in `attend_with_state`.
        """
        features = self._features(query, key, self.feature_map.least_shift(None))
        _, input_scale = mask_padding(padding_mask, None, None)
        floor = self.feature_map.denominator_floor
        attn_weights = None
        if output_attentions:  # the outputs of one-hot values are the weights
            one_hot = torch.eye(key.shape[-2], dtype=key.dtype, device=key.device).expand(*key.shape[:-1], -1)
            sums = final_state(features.key, one_hot, input_scale=input_scale, denominator_floor=floor)
            attn_weights = attend_with_state(features.query, sums, denominator_floor=floor).to(value.dtype)
        dropped = F.dropout(value, dropout, self.training)
        state = final_state(features.key, dropped, input_scale=input_scale, denominator_floor=floor)
        output = attend_with_state(features.query, state, denominator_floor=floor).to(value.dtype)
        return output, cast(Tensor, rescale(state, features.shift, None)), attn_weights

    @without_autocast
    def _read(self, query: Tensor, state: Tensor) -> Tensor:
        """Return what queries [B, H, T, d] read from a finished state."""
        state = state.to(query.device)
        features = self._features(query, None, self.feature_map.least_shift(state))
        state = cast(Tensor, rescale(state, None, features.shift))
        floor = self.feature_map.denominator_floor
        return attend_with_state(features.query, state, denominator_floor=floor).to(query.dtype)

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
            dropout: probability of dropping a value in training, see `attend`.
            output_attentions: whether to return the attention weights.

        Returns:
            The output [B, H, T, d] in the dtype of the queries, and the weights [B, H, T, S] or None.

        Raises:
            ValueError: if there is neither an encoder's output nor a state.
        """
        query = self.project_query(hidden_states)
        layer: Any = None
        if isinstance(past_key_values, EncoderDecoderCache):
            layer = source_layer_of(past_key_values.cross_attention_cache, self.rfa_layer_idx)
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
