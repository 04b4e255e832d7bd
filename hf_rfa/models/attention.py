"""Attention to a memory of fixed size for every family: exact tokens, features, gate and cache between its own projections.

A family's attention class projects queries, keys and values; `RFAAttentionMixin` does the rest. There may be more query heads
than key-value heads, H_q = G H (`hf_rfa.models.masking`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache

from .cache_rfa import RecordedStep, next_targets, rfa_layer_of
from .configuration_rfa import AttentionKind
from .exact_attention import Arrivals, Exact, Reading, arrivals_of, attend_in_chunks, attend_in_place
from .feature_maps import FEATURE_MAPS, FeatureMap, Features, compute_dtype, into
from .gate import Gate
from .head_group import HeadGroup
from .linear_attention import Tokens, linear_attention, mask_padding, rescale
from .masking import MASKED_LOGIT, group_queries, join_heads, split_heads, ungroup
from .memory import Importance, Memory, MemoryLayout, Target, empty_memory, in_order
from .positions import NO_ROTATION, Motion

#: Tokens of a segment, a multiple of the usual chunk size: their features fit into a CPU's caches. Features of a long
#: sequence fill more memory than all else, and fresh memory costs more time than computing them.
SEGMENT_LENGTH = 512
#: With gradients sequences up to this length are one segment: that takes more memory, and a fifth less time. With fewer
#: features than `FEW_FEATURES` longer ones are, whose features take no more.
MAX_LENGTH_WITHOUT_SEGMENTS = 2048
FEW_FEATURES = 64
#: Tokens of a segment on an accelerator, with gradients and without: every segment costs dozens of launches of kernels.
ACCELERATOR_SEGMENT_LENGTH = 8192

#: Least and largest logarithm of the normalizer of exact attention, in units of φ(q)·φ(k), by the dtype that it has to fit
#: into, its reciprocal's gradient too. A query's largest feature is e^40, and most keys have features of about 1.
NORMALIZER_EXPONENTS = {torch.float32: (-60.0, 80.0), torch.float64: (-680.0, 700.0)}

#: The components of attention with a sliding window (`hf_rfa.inference.use_attention_component`).
AttentionComponent = Literal["both", "linear", "window"]
#: Every layout once, so that layers with the same one have the same object.
LAYOUTS: dict[MemoryLayout, MemoryLayout] = {}


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


class RFAAttentionMixin(nn.Module):
    """Attention to a memory of fixed size for a family's attention class, which projects queries, keys and values.

    Retrieval heads, if there are any, attend exactly, to all tokens or within a window of their own; feature map, gate,
    importance and state are the other heads'.
    """

    feature_map: FeatureMap
    gate: Gate | None
    importance: Importance | None
    rfa_kind: AttentionKind
    scaling: float
    #: Whether a row of a batch holds tokens of many texts, each with its true position, as a server's does.
    serves_batches = False

    def memory_layout(self, dtype: torch.dtype) -> MemoryLayout:
        """Return the layout of what all heads but the retrieval heads keep, for keys and values in ``dtype``."""
        exact = self.attention_component != "linear"
        return MemoryLayout(
            heads=self.feature_map.num_heads,
            head_dim=self.feature_map.head_dim,
            window=self.window_size if exact else 0,
            sinks=self.num_sinks if exact else 0,
            slots=self.num_slots if exact else 0,
            state_rows=self.feature_map.state_rows,
            max_distance=self.max_distance if exact else 0,
            distance_step=self.distance_step if exact else 0,
            dtype=dtype,
        )

    def retrieval_layout(self, dtype: torch.dtype) -> MemoryLayout | None:
        """Return the layout of what the retrieval heads keep, or None where there are none."""
        if not self.retrieval_heads:
            return None
        return MemoryLayout(
            heads=len(self.retrieval_heads),
            head_dim=self.feature_map.head_dim,
            window=self.retrieval_window,
            sinks=self.num_sinks,
            max_distance=self.max_distance,
            distance_step=self.distance_step,
            dtype=dtype,
        )

    def motions(self) -> list[Motion | None]:
        """Return how the tokens of each of the layer's memories move, or None where they stay."""
        recency = None if self.importance is None else self.importance.recency
        groups = (recency, None) if self.retrieval_heads else (recency,)
        return [Motion(self.rotation, self.num_sinks, part) if self.max_distance else None for part in groups]

    def memory_layouts(self, dtype: torch.dtype) -> list[MemoryLayout]:
        """Return the layouts of the layer's memories: that of all heads but the retrieval heads, and that of these if any."""
        key = dtype, self.attention_component
        if key not in self._layouts:  # asked for at every step
            both = self.memory_layout(dtype), self.retrieval_layout(dtype)
            layouts = [layout for layout in both if layout is not None]
            if torch.compiler.is_compiling():  # which would begin anew when they are there
                return layouts
            self._layouts[key] = [LAYOUTS.setdefault(layout, layout) for layout in layouts]
        return self._layouts[key]

    def project(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, H_q, T, d], and keys and values [B, H, T, d], of the layer's input [B, T, width]."""
        raise NotImplementedError

    def init_rfa(self, config: Any, *, kind: AttentionKind, scaling: float, layer_idx: int, groups: int = 1) -> None:
        """Add the feature map, and the gate where the configuration asks for one (causal attention only).

        ``groups`` is G, the number of query heads that share each of ``config.num_heads_for(kind)`` key-value heads.
        """
        self.retrieval_heads: list[int] = config.retrieval_heads_of(layer_idx) if kind == "causal" else []
        self.retrieval_window: int = config.retrieval_window
        heads = config.num_heads_for(kind) - len(self.retrieval_heads)
        self.window_size: int = config.window_size if kind == "causal" else 0
        self.num_sinks: int = config.num_sinks if kind == "causal" else 0
        self.num_slots: int = config.num_slots if kind == "causal" else 0
        self.max_distance, self.distance_step = config.motion_of(kind)
        self.rotation = NO_ROTATION  # found where the first epoch begins (`hf_rfa.models.streaming`)
        self.feature_map = FEATURE_MAPS[config.feature_map](
            num_heads=heads,
            groups=groups,
            head_dim=config.head_dim_for(kind),
            num_features=config.num_features_for(kind),
            scaling=scaling,
            unit_norm=config.unit_norm,
            trainable=config.trainable_projection,
            windowed=self.window_size > 0,
            seed=config.feature_seed,
            layer_idx=layer_idx + 100_000 * get_args(AttentionKind).index(kind),  # a layer's kinds draw apart
        )
        self.rfa_heads, self.rfa_width = config.num_heads_for(kind), config.head_dim_for(kind)
        gated = config.gate and kind == "causal"
        self.gate = Gate(config.hidden_size, heads, config.max_position_embeddings) if gated else None
        self.importance = Importance(config.hidden_size, heads) if self.num_slots else None
        self._layouts: dict[tuple[torch.dtype, str], list[MemoryLayout]] = {}
        self.rfa_kind = kind
        self.rfa_layer_idx = layer_idx
        self.attention_component: AttentionComponent = "both"
        self.chunk_size = config.chunk_size

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
        """Attend causally to keys and values, and to those that the cache has seen before.

        Args:
            query: [B, H_q, T, d].
            key: [B, H, T, d].
            value: [B, H, T, d].
            hidden_states: the layer's input, [B, T, width], which the gate reads.
            cache: the cache whose layer is read and updated, or None.
            padding_mask: [B, T], 0 for padding, or None.
            document_starts: [B, T], True where a document starts that sees nothing before it, or None.
            dropout: probability, in training, of dropping a token's value for all queries of a head: single attention weights
                never exist. The token stays in the normalizer, as with dropout on softmax weights.
            output_attentions: whether to return the attention weights, at quadratic cost.
            sink_logits: logits of the query heads' learned sinks, [H_q], or None (`hf_rfa.models.memory`). They count
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
        layer = None if cache is None else rfa_layer_of(cache, self.rfa_layer_idx)
        dropout = dropout if self.training else 0.0
        is_token = None if padding_mask is None else padding_mask != 0
        targets: list[Target | None] | None = None
        one_token = key.shape[2] == 1 and document_starts is None
        if cache is not None and layer is not None and one_token and not torch.is_grad_enabled():
            targets = layer.targets or next_targets(cache, layer, self.memory_layouts(key.dtype), key)
            plain = not (output_attentions or layer.record_past or dropout)
            if plain and targets is not None and len(targets) == 1:
                inputs = (query, key, value, hidden_states)
                output = self._step(*inputs, layer.memories[0], layer.layouts[0], targets[0], is_token, sink_logits)
                layer.step_taken(cache, key, value)
                return output, None
        layouts = self.memory_layouts(key.dtype)
        if layer is None:
            memories = [empty_memory(layout, key.shape[0], key.device) for layout in layouts]
        else:
            memories = layer.read(layouts, key.shape[0], key.device)
        groups = self._head_groups(
            group_queries(query, key.shape[1]),
            torch.cat([key, value.to(key.dtype)], dim=-1),
            hidden_states,
            is_token=is_token,
            document_starts=document_starts,
            sink_logits=sink_logits,
            memories=memories,
            layouts=layouts,
            targets=targets or [None] * len(layouts),
            is_fresh=layer is None,
        )
        attn_weights = None
        if output_attentions:
            is_first = layer is None or int(layer.get_seq_length()) == 0
            weights = join_heads([self._weights(group, is_first) for group in groups], self.retrieval_heads)
            attn_weights = ungroup(weights, query.shape[1]).to(value.dtype)
        if dropout:
            groups = [group.with_dropout(dropout) for group in groups]
        recording = layer is not None and layer.record_past
        outputs, memories, recorded = map(list, zip(*(self._attend(group, recording) for group in groups), strict=True))
        if cache is not None:
            cache.update(
                key,
                value,
                self.rfa_layer_idx,
                memories=memories,
                num_tokens=key.shape[-2],
                recorded=recorded if recording else None,
            )
        output = ungroup(join_heads(outputs, self.retrieval_heads), query.shape[1])
        return output.to(value.dtype), attn_weights

    def _step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        hidden_states: Tensor,
        memory: Memory,
        layout: MemoryLayout,
        target: Target | None,
        is_token: Tensor | None,
        sink_logits: Tensor | None,
    ) -> Tensor:
        """Take one token into a memory in place and attend: decoding, where all heads keep tokens in one way.

        Most of what a step costs on a processor is to start small operations, and to run the code around them.
        """
        rows, has_features = group_queries(query, key.shape[1]), layout.state_rows > 0 or target is None
        keys_values = torch.cat([key, value], dim=-1)
        exact = score = None
        if has_features or sink_logits is not None:
            rows = self._as_state(rows)
        if target is not None:
            if target.ordinal is not None:
                score = cast(Importance, self.importance).score(hidden_states, target.ordinal)
            reading = Reading(self.scaling, has_features, sink_logits)
            exact = attend_in_place(rows, keys_values, score, memory, target, reading, is_token)
        if has_features:
            scales = (None, None) if self.gate is None else self.gate(hidden_states)
            log_decay, input_scale = mask_padding(is_token, *scales)
            output, memory.state, *_ = self._attend_to_state(
                rows, keys_values, memory.state, exact, log_decay, input_scale
            )
        else:
            output = cast(Exact, exact).output
        return ungroup(output, query.shape[1]).to(value.dtype)

    def _head_groups(
        self,
        query: Tensor,
        keys_values: Tensor,
        hidden_states: Tensor,
        *,
        is_token: Tensor | None,
        document_starts: Tensor | None,
        sink_logits: Tensor | None,
        memories: list[Memory],
        layouts: list[MemoryLayout],
        targets: list[Target | None],
        is_fresh: bool,
    ) -> list[HeadGroup]:
        """Return the retrieval heads, if there are any, after all other heads; shapes are those of `HeadGroup`.

        ``is_fresh`` says that the memories are empty.
        """
        groups = [(query, keys_values, sink_logits)]
        if self.retrieval_heads:
            parts: list[Any] = [split_heads(tensor, self.retrieval_heads) for tensor in (query, keys_values)]
            sinks: Any = (None, None)
            if sink_logits is not None:
                sinks = split_heads(sink_logits.view(1, keys_values.shape[1], -1), self.retrieval_heads)
                sinks = [logits.flatten() for logits in sinks]
            groups = list(zip(*parts, sinks, strict=True))
        log_decay, input_scale = (None, None) if self.gate is None else self.gate(hidden_states)  # [B, H, T]
        log_decay, input_scale = mask_padding(is_token, log_decay, input_scale)
        has_features = layouts[0].state_rows > 0 or self.attention_component == "linear"
        head_groups = []
        for index, ((queries, rows, logits), memory, layout, target, motion) in enumerate(
            zip(groups, memories, layouts, targets, self.motions(), strict=True)
        ):
            arrivals = score = None
            if layout.places and target is None:
                before = None if is_fresh else memory
                arrivals = arrivals_of(memory.count, rows.shape[2], layout, is_token, document_starts, before)
            if layout.slots:
                ordinal = cast(Arrivals, arrivals).counted() if target is None else cast(Tensor, target.ordinal)
                score = cast(Importance, self.importance).score(hidden_states, ordinal)
            has_state = has_features and index == 0
            group = HeadGroup(
                query=queries,
                keys_values=rows,
                memory=memory,
                layout=layout,
                feature_map=self.feature_map if has_state else None,
                arrivals=arrivals,
                target=target,
                motion=motion,
                is_token=is_token,
                score=score,
                log_decay=log_decay if has_state else None,
                input_scale=input_scale if has_state else None,
                document_starts=document_starts if has_state else None,
                sink_logits=logits,
            )
            head_groups.append(group)
        return head_groups

    def _weights(self, group: HeadGroup, is_first: bool) -> Tensor:
        """Return the attention weights of some heads, [B, H, T G, columns].

        The columns are the new tokens if these are the first ones. Else the places of the memory come before them, in the
        order of arrival; for one new token they are the places after it has taken its own.
        """
        weights, memory, _ = self._attend(group.with_one_hot_values(), False)
        places = group.layout.places
        if is_first or not places:
            return weights[..., places:]
        if group.length > 1:
            return weights
        columns = cast(Tensor, in_order(memory).keys_values)[..., group.head_dim :]
        return weights @ columns.mT.to(weights.dtype)

    def _attend(self, group: HeadGroup, recording: bool) -> tuple[Tensor, Memory, RecordedStep | None]:
        """Attend causally: the output [B, H, T G, M], the memory after the new tokens, and what `RFALayer.crop` needs."""
        feature_map, layout, length = group.feature_map, group.layout, group.length
        memory = group.memory if group.target is not None else in_order(group.memory)
        if group.document_starts is not None:
            log_decay = group.log_decay
            if log_decay is None:
                log_decay = self._as_state(group.keys_values[..., 0]).new_zeros(group.keys_values.shape[:3])
            group = replace(group, log_decay=log_decay.masked_fill(group.document_starts[:, None], MASKED_LOGIT))
        # Features of a long sequence are computed a segment at a time, and again for the gradients.
        size = SEGMENT_LENGTH if group.query.device.type == "cpu" else ACCELERATOR_SEGMENT_LENGTH
        most = size
        if feature_map is not None and torch.is_grad_enabled():
            most = max(size, MAX_LENGTH_WITHOUT_SEGMENTS * max(1, FEW_FEATURES // max(1, feature_map.feature_dim)))
        whole = length <= most or feature_map is None or torch.compiler.is_compiling()
        outputs, absorbed, shift = [], [], None
        for segment in [group] if whole else group.split(size):
            inputs = (segment if memory is segment.memory else replace(segment, memory=memory), shift)
            if whole or not torch.is_grad_enabled():
                output, memory, shift, tokens = self._attend_segment(*inputs)
            else:
                output, memory, shift, tokens = checkpoint(
                    self._attend_segment, *inputs, use_reentrant=False, preserve_rng_state=False
                )
            outputs.append(output)
            absorbed.append(tokens)
        if shift is not None:
            memory = replace(memory, state=rescale(memory.state, shift, None))
        recorded = None
        if recording:
            recorded = RecordedStep(
                keys_values=group.keys_values,
                score=group.score,
                is_token=group.is_token,
                layout=layout,
                motion=group.motion,
                absorbed=None if feature_map is None else Tokens.join(cast(list[Tokens], absorbed)),
                denominator_floor=None if feature_map is None else feature_map.denominator_floor,
            )
        return torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0], memory, recorded

    def _attend_segment(
        self, group: HeadGroup, shift: Tensor | None
    ) -> tuple[Tensor, Memory, Tensor | None, Tokens | None]:
        """Attend to some tokens in succession.

        ``shift`` is that of the memory's state, None for 0 (`hf_rfa.models.feature_maps.Features.shift`).

        Returns:
            The output [B, H, T G, M], the memory after the tokens, the shift of its state, and what joined the state:
            features of keys, values, decays and scales.
        """
        memory, exact = group.memory, None
        query = group.query
        if group.feature_map is not None or group.sink_logits is not None:
            query = self._as_state(query)
        if group.layout.places:
            reading = Reading(self.scaling, group.feature_map is not None, group.sink_logits)
            inputs = (query, group.keys_values, group.score)
            if group.target is not None:
                exact = attend_in_place(*inputs, memory, group.target, reading, group.is_token)
            else:
                arrivals = cast(Arrivals, group.arrivals)
                exact, memory = attend_in_chunks(*inputs, arrivals, memory, group.layout, reading, group.motion)
        if group.feature_map is None:
            return cast(Exact, exact).output, memory, None, None
        output, state, shift, absorbed = self._attend_to_state(
            query, group.keys_values, memory.state, exact, group.log_decay, group.input_scale, shift=shift
        )
        memory = memory if state is memory.state else replace(memory, state=state)
        return output, memory, shift, absorbed

    def _attend_to_state(
        self,
        query: Tensor,
        keys_values: Tensor,
        state: Tensor | None,
        exact: Exact | None,
        log_decay: Tensor | None,
        input_scale: Tensor | None,
        *,
        shift: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tokens]:
        """Attend to a state, which takes in what is forgotten, or all tokens where none is kept.

        Its outputs and the exact ones are joined under one denominator. Arguments are those of `HeadGroup`, with queries in
        the dtype of the state, and results those of `_attend_segment`, with the state in place of the memory.
        """
        if exact is not None:
            keys_values = cast(Tensor, exact.leaving)
            if exact.forgets is not None:
                scale = exact.forgets.to(query.dtype)
                input_scale = scale if input_scale is None else scale * input_scale
        key, value = keys_values[..., : query.shape[-1]].to(query.dtype), keys_values[..., query.shape[-1] :]
        feature_map = self.feature_map
        least_shift = feature_map.least_shift(state) if shift is None else shift
        features: Features = feature_map(query, key, least_shift=least_shift, offset=exact is not None)
        beside = None
        if exact is not None:
            log_normalizer = cast(Tensor, exact.log_total) + cast(Tensor, features.offset)
            limits = NORMALIZER_EXPONENTS[log_normalizer.dtype]
            beside = exact.output, into(into(log_normalizer, "clamp", *limits), "exp")
        tokens = Tokens(features.key, value, log_decay, input_scale)
        output, state = linear_attention(
            features.query,
            tokens,
            initial_state=rescale(state, shift, features.shift),
            denominator_floor=feature_map.denominator_floor,
            chunk_size=self.chunk_size,
            beside=beside,
        )
        if exact is not None and self.attention_component == "window":
            output = exact.output
        return output, state, features.shift, tokens._replace(key=features.unshifted_key())

    def _as_state(self, tensor: Tensor) -> Tensor:
        """Return a tensor in the dtype of the state."""
        return tensor.to(compute_dtype(tensor.dtype))
