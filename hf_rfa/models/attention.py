"""Random feature attention for every family: features, gate, recurrence and cache between a family's own projections.

A family's attention class projects queries, keys and values; `RFAAttentionMixin` does the rest. There may be more query heads
than key-value heads, H_q = G H (`hf_rfa.models.masking`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import initialization as init
from transformers.cache_utils import Cache, EncoderDecoderCache

from .cache_rfa import RecordedStep, cross_layer_of, rfa_layer_of
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
from .sliding_window import (
    WindowSizes,
    exact_attention,
    in_stream_order,
    sinks_are_held,
    sliding_window_attention,
    stream_of,
)
from .slots import Importance

#: Added to a layer's index where its random matrices are drawn, so that cross attention has others than causal attention.
DRAW_OFFSET: dict[AttentionKind, int] = {"causal": 0, "cross": 100_000, "encoder": 200_000}
#: Tokens of a segment, a multiple of the usual chunk size: their features fit into a CPU's caches. Features of a long
#: sequence fill more memory than all else, and fresh memory costs more time than computing them.
SEGMENT_LENGTH = 512
#: With gradients sequences up to this length are one segment: that takes more memory, and a fifth less time.
MAX_LENGTH_WITHOUT_SEGMENTS = 2048

#: Queries, keys, values and logits of learned sinks of some heads.
HeadInputs = tuple[Tensor, Tensor, Tensor, Tensor | None]
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


#: The parts of RFA attention that softmax attention does not have.
OWN_PARTS = ("feature_map", "gate", "importance")


def own_prefixes(model: nn.Module) -> tuple[str, ...]:
    """Return how the names of those tensors of a model begin that its softmax model does not have.

    Experts may have gates too. A checkpoint may bring its own copy of the classes: an attribute tells RFA attention.
    """
    layers = [name for name, module in model.named_modules() if hasattr(module, "rfa_kind")]
    return tuple(f"{name}.{part}." for name in layers for part in OWN_PARTS)


class RFAPreTrainedMixin:
    """The part of every RFA model's base class: initial values of feature maps and gates, which stay in float32.

    Fields are checked once more here: ``from_pretrained(…, window_size=8)`` sets them after the configuration was made.
    """

    _keep_in_fp32_modules_strict: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        config.validate_layer_type()
        config.validate_rfa()
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]

    def post_init(self) -> None:
        """Finish the model as transformers does, and keep RFA's own parts in float32."""
        super().post_init()  # type: ignore[misc]
        self.keep_own_in_float32()

    def keep_own_in_float32(self) -> None:
        """Let `from_pretrained` keep feature maps and gates in float32: they are small, and rounding them costs accuracy."""
        patterns = {re.escape(prefix) for prefix in own_prefixes(cast(nn.Module, self))}
        self._keep_in_fp32_modules_strict = set(self._keep_in_fp32_modules_strict or ()) | patterns

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Set the initial values of all that no checkpoint has set, features and gates first.

        They are not left to `_init_weights`, which transformers calls on the part that holds a module: a body, say, which
        is of the base model's class.
        """
        for module in self.modules():  # type: ignore[attr-defined]
            if isinstance(module, (FeatureMap, Gate, Importance)) and not getattr(module, "_is_hf_initialized", False):
                module.reset_parameters()
                module._is_hf_initialized = True  # type: ignore[assignment]
        super().initialize_weights()  # type: ignore[misc]

    def create_masks_for_generate(self, *, attention_mask: Tensor | None, **kwargs: Any) -> Tensor | None:
        """Return the padding mask for `generate`, which prepares none of T × T entries: `forward` makes what is needed."""
        return attention_mask


def one_hot_values(key: Tensor) -> Tensor:
    """Return values [B, H, T, T] of keys [B, H, T, d] such that the outputs of attention are the attention weights."""
    return torch.eye(key.shape[-2], dtype=key.dtype, device=key.device).expand(*key.shape[:-1], -1)


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
        query = group_queries(query, key.shape[1])
        state, window, retrieval = (None, None, None) if layer is None else layer.read(query.device)
        exact = None
        if self.retrieval_heads:
            (query, key, value, sink_logits), exact = self._retrieval_apart(query, key, value, sink_logits)
        log_decay, input_scale = (None, None) if self.gate is None else self.gate(hidden_states)  # [B, H, T]
        importance, recency = (None, None) if self.importance is None else self.importance(hidden_states)
        scales = mask_padding(padding_mask, log_decay, input_scale)
        tokens = Tokens(key, value, *scales, padding_mask, importance, mask_padding(padding_mask, recency, None)[0])
        attn_weights = None
        if output_attentions:
            one_hot = tokens._replace(value=one_hot_values(key))
            held = self._without_values(key.shape[-2], state, window)
            attn_weights = self._attend(query, one_hot, document_starts, *held, sink_logits)[0]
            if exact is not None:
                hot = *exact[:2], one_hot_values(exact[1]), exact[3]
                held = self._without_values(key.shape[-2], None, retrieval)
                found, _, _ = self.retrieve(*hot, padding_mask, document_starts, held[1])
                attn_weights = join_heads(attn_weights, found, self.retrieval_heads)
            attn_weights = ungroup(attn_weights, query_heads)[..., -length:, -length:].to(value.dtype)
        tokens = tokens._replace(value=F.dropout(value, dropout, self.training))
        known: Any = {"sinks_held": layer is not None and layer.sinks_held}
        recording = layer is not None and layer.record_past
        output, state, window, recorded = self._attend(
            query, tokens, document_starts, state, window, sink_logits, recording=recording, **known
        )
        if exact is not None:
            values = F.dropout(exact[2], dropout, self.training)
            found, retrieval, tokens = self.retrieve(
                *exact[:2], values, exact[3], padding_mask, document_starts, retrieval, **known
            )
            output = join_heads(output, found, self.retrieval_heads)
            if recorded is not None:
                recorded = recorded._replace(retrieval=tokens, retrieval_sizes=self.retrieval_sizes)
        if cache is not None:
            facts: Any = {"num_tokens": key.shape[-2], "retrieval": retrieval, "recorded": recorded}
            if (
                window is not None and key.shape[-2] > 1 and not known["sinks_held"]
            ):  # asked once: the answer is waited for
                facts["sinks_held"] = sinks_are_held(window, self.num_sinks, self.feature_map.head_dim)
            cache.update(state, window, self.rfa_layer_idx, **facts)  # type: ignore[arg-type]
        return ungroup(output, query_heads)[..., -length:, :].to(value.dtype), attn_weights

    def _retrieval_apart(
        self, query: Tensor, key: Tensor, value: Tensor, sink_logits: Tensor | None
    ) -> tuple[HeadInputs, HeadInputs]:
        """Return queries [B, H, T G, d], keys, values and sink logits of the heads with features, and of retrieval heads."""
        sinks: Any = None, None
        if sink_logits is not None:
            by_head = split_heads(sink_logits.view(1, key.shape[1], -1), self.retrieval_heads)
            sinks = by_head[0].flatten(), by_head[1].flatten()
        queries, keys, values = (split_heads(each, self.retrieval_heads) for each in (query, key, value))
        return (queries[0], keys[0], values[0], sinks[0]), (queries[1], keys[1], values[1], sinks[1])

    @without_autocast
    def retrieve(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink_logits: Tensor | None,
        padding_mask: Tensor | None,
        document_starts: Tensor | None,
        window: Tensor | None,
        sinks_held: bool = False,
    ) -> tuple[Tensor, Tensor, Tokens]:
        """Attend exactly, as retrieval heads do, to a window of ``retrieval_window`` tokens or to all.

        Args:
            query: rows of the R heads, [B, R, T G, d] (`hf_rfa.models.masking.group_queries`).
            key: [B, R, T, d].
            value: [B, R, T, M].
            sink_logits: logits of their query heads' learned sinks, [R G], or None.
            padding_mask: [B, T], 0 for padding, or None.
            document_starts: [B, T], or None; see `attend`.
            window: what they hold of the tokens before, or None at the start.
            sinks_held: whether the window is known to have all sinks.

        Returns:
            The output [B, R, T G, M], what they hold now, and the tokens.
        """
        scale = mask_padding(padding_mask, None, None)[1]
        tokens = Tokens(self._as_state(key), value, None, scale, padding_mask)
        output, window = exact_attention(
            self._as_state(query),
            tokens,
            window,
            self.retrieval_sizes,
            document_starts,
            scaling=self.scaling,
            dtype=key.dtype,
            chunk_size=self.chunk_size,
            sink_logits=sink_logits,
            sinks_held=sinks_held,
        )
        return output, window, tokens

    def _attend(
        self,
        query: Tensor,
        tokens: Tokens,
        document_starts: Tensor | None,
        state: Tensor | None,
        window: Tensor | None,
        sink_logits: Tensor | None,
        *,
        recording: bool = False,
        sinks_held: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None, RecordedStep | None]:
        """Attend causally: the output [B, H, T G, M], the new state and window, and what `RFALayer.crop` needs, if recording.

        Queries are rows [B, H, T G, d] of the key-value heads (`group_queries`), here and in all that this calls.
        """
        feature_map, log_decay = self.feature_map, tokens.log_decay
        plain = not self.window_size and not recording and tokens.value.shape[-1] == tokens.key.shape[-1]
        if self.backend != "torch" and plain and not torch.compiler.is_compiling():
            grouped = query.shape != tokens.key.shape  # which no backend knows
            found = None if grouped else BACKENDS[self.backend].attend(self, query, *tokens[:4], document_starts, state)
            if found is not None:
                return *found, None, None
        if document_starts is not None:  # a gate that lets nothing through
            if log_decay is None:
                log_decay = tokens.key.new_zeros(tokens.key.shape[:-1], dtype=compute_dtype(tokens.key.dtype))
            tokens = tokens._replace(log_decay=log_decay.masked_fill(document_starts[:, None], MASKED_LOGIT))

        if self.window_size and self.attention_component != "linear":
            dtype = tokens.key.dtype if self.gate is None else self._as_state(tokens.key).dtype
            sizes, tokens = self.window_sizes, tokens._replace(key=self._as_state(tokens.key))
            known: Any = {"dtype": dtype, "chunk_size": self.chunk_size, "sinks_held": sinks_held}
            stream = stream_of(tokens, window, sizes, document_starts, **known)
            query = in_stream_order(self._as_state(query), stream)
            least_shift = feature_map.least_shift(state)
            leaving = features = None
            if recording or feature_map.feature_dim:
                leaving = stream.leaving()
                features = self._features(query, leaving.key, least_shift, offset=True)
            output, state = sliding_window_attention(
                query,
                stream,
                leaving,
                features,
                scaling=self.scaling,
                initial_state=state,
                denominator_floor=feature_map.denominator_floor,
                chunk_size=self.chunk_size,
                window_only=self.attention_component == "window",
                sink_logits=sink_logits,
            )
            window, key_features = (
                stream.window(),
                features.unshifted_key() if recording and features is not None else None,
            )
        else:
            sizes, dtype, window = WindowSizes(0), tokens.key.dtype, None
            output, state, key_features = self._attend_to_past(query, tokens, state, recording)
        recorded = None
        if key_features is not None:
            recorded = RecordedStep(tokens, key_features, feature_map.denominator_floor, sizes, dtype)
        return output, state, window, recorded

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

    def _without_values(
        self, width: int, state: Tensor | None, window: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return a state and a window for values of another width, with zeros in place of their own values."""
        d = self.feature_map.head_dim
        if state is not None:
            state = torch.cat([state.new_zeros(*state.shape[:-1], width), state[..., -1:]], dim=-1)
        if window is not None:
            zeros = window.new_zeros(*window.shape[:-1], width)
            window = torch.cat([window[..., :d], zeros, window[..., 2 * d :]], dim=-1)
        return state, window

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
