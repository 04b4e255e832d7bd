"""Attention to a memory of fixed size for every family: a layer's heads, what they keep, and its cache.

A family's attention class projects queries, keys and values; `RFAAttentionMixin` does the rest, but for the state of heads
with features (`hf_rfa.models.state_attention`). There may be more query heads than key-value heads, H_q = G H
(`hf_rfa.models.masking`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from .cache_rfa import RFALayer, find_targets, rfa_layer_of
from .configuration_rfa import AttentionKind
from .exact_attention import HeadGroup, NewTokens, attend_to_places
from .importance import IMPORTANCES, Importance
from .lifetimes import Arrivals, Target, arrivals_of, targets_of
from .masking import group_queries, join_heads, split_heads, ungroup
from .memory import Memory, MemoryLayout, Places, compute_dtype, empty_memory, updates_in_place
from .no_features import NoFeatures
from .positions import NO_ROTATION, Motion

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

    Retrieval heads, if there are any, attend exactly, to the sinks, and to a window and slots of their own; all else that
    is said here is of the other heads. These forget for good what leaves their memory, unless
    `hf_rfa.models.state_attention` gives them features.
    """

    feature_map: Any
    gate: Any
    importance: Importance | None
    retrieval_importance: Importance | None
    rfa_kind: AttentionKind
    scaling: float
    #: Whether a row of a batch holds tokens of many texts, each with its true position, as a server's does.
    serves_batches = False

    def init_rfa(self, config: Any, *, kind: AttentionKind, scaling: float, layer_idx: int, groups: int = 1) -> None:
        """Add what the configuration asks for of attention of a kind.

        ``groups`` is G, the number of query heads that share each of ``config.num_heads_for(kind)`` key-value heads.
        """
        self.rfa_kind, self.rfa_layer_idx = kind, layer_idx
        self.rfa_heads, self.rfa_width = config.num_heads_for(kind), config.head_dim_for(kind)
        causal = kind == "causal"
        self.retrieval_heads: list[int] = config.retrieval_heads_of(layer_idx) if causal else []
        self.retrieval_window: int = config.retrieval_window
        self.retrieval_slots: int = config.retrieval_slots if self.retrieval_heads else 0
        self.window_size: int = config.window_size if causal else 0
        self.num_sinks: int = config.num_sinks if causal else 0
        self.num_slots: int = config.num_slots if causal else 0
        self.max_distance, self.distance_step = config.motion_of(kind)
        self.rotation = NO_ROTATION  # found where the first epoch begins (`hf_rfa.models.streaming`)
        heads = self.rfa_heads - len(self.retrieval_heads)
        rule, sizes = IMPORTANCES[config.importance], {"hidden_size": config.hidden_size, "head_dim": self.rfa_width}
        self.importance = rule(num_heads=heads, **sizes) if self.num_slots else None
        self.retrieval_importance = None
        if self.retrieval_slots:
            self.retrieval_importance = rule(num_heads=len(self.retrieval_heads), **sizes)
        self.attention_component: AttentionComponent = "both"
        self._layouts: dict[tuple[torch.dtype, str], list[MemoryLayout]] = {}
        self.init_features(config, heads=heads, groups=groups, scaling=scaling)

    def init_features(self, config: Any, *, heads: int, groups: int, scaling: float) -> None:
        """Add the feature map of the heads, which is none, and no gate.

        Raises:
            ValueError: if the configuration asks for features, for which a class has to mix in `StateAttentionMixin`.
        """
        if config.feature_map != "none":
            raise ValueError(
                f"{type(self).__name__} has heads without features, and feature_map={config.feature_map!r} asks for some. "
                "Mix StateAttentionMixin of hf_rfa.models.state_attention into it."
            )
        self.gate = None
        self.feature_map = NoFeatures(num_heads=heads, head_dim=self.rfa_width, groups=groups, seed=config.feature_seed)

    def memory_layouts(self, dtype: torch.dtype) -> list[MemoryLayout]:
        """Return the layouts of what all heads but the retrieval heads keep, and of what these keep if there are any.

        Keys and values are in ``dtype``.
        """
        key = dtype, self.attention_component
        if key in self._layouts:  # asked for at every step
            return self._layouts[key]
        layout = MemoryLayout(heads=self.feature_map.num_heads, head_dim=self.rfa_width, dtype=dtype)
        places = replace(layout, sinks=self.num_sinks, max_distance=self.max_distance, distance_step=self.distance_step)
        if self.attention_component != "linear":
            layout = replace(places, window=self.window_size, slots=self.num_slots)
        layouts = [replace(layout, state_rows=self.feature_map.state_rows)]
        if self.retrieval_heads:
            theirs = replace(places, window=self.retrieval_window, slots=self.retrieval_slots)
            layouts.append(replace(theirs, heads=len(self.retrieval_heads)))
        if not torch.compiler.is_compiling():  # which would begin anew when they are there
            self._layouts[key] = layouts
        return layouts

    def memory_layout(self, dtype: torch.dtype) -> MemoryLayout:
        """Return the layout of what all heads but the retrieval heads keep, for keys and values in ``dtype``."""
        return self.memory_layouts(dtype)[0]

    def motions(self) -> list[Motion | None]:
        """Return how the tokens of each of the layer's memories move, or None where they stay."""
        rules = self.importances()
        if not self.max_distance:
            return [None] * len(rules)
        return [Motion(self.rotation, self.num_sinks, None if rule is None else rule.recency) for rule in rules]

    def importances(self) -> list[Importance | None]:
        """Return by what the slots of each of the layer's memories rank tokens, or None without slots."""
        return [self.importance, self.retrieval_importance] if self.retrieval_heads else [self.importance]

    def project(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, H_q, T, d], and keys and values [B, H, T, d], of the layer's input [B, T, width]."""
        raise NotImplementedError

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
            hidden_states: the layer's input, [B, T, width], which importance and gate read.
            cache: the cache whose layer is read and updated, or None.
            padding_mask: [B, T], 0 for padding, or None.
            document_starts: [B, T], True where a document starts that sees nothing before it, or None.
            dropout: probability, in training, of dropping a token's value for all queries of a head: single attention weights
                never exist. The token stays in the normalizer, as with dropout on softmax weights.
            output_attentions: whether to return the attention weights, at quadratic cost.
            sink_logits: logits of the query heads' learned sinks, [H_q], or None (`hf_rfa.models.exact_attention`). They
                count to the window: attention to features alone (`attention_component`) has none.

        Returns:
            The output [B, H_q, T, d] in the dtype of ``value``, and the weights [B, H_q, T, T] or None.

        Raises:
            ValueError: if there are ``sink_logits`` without a window, whose weights they are commensurate with.
        """
        if sink_logits is not None and not self.window_size:
            raise ValueError(
                "sink_logits need a sliding window (window_size of at least 1), which this attention lacks."
            )
        # 1. What each group of heads keeps of the tokens before, and where a single new one goes.
        layer = None if cache is None else rfa_layer_of(cache, self.rfa_layer_idx)
        in_place = layer is not None and key.shape[2] == 1 and document_starts is None and updates_in_place()
        groups = self._head_groups(layer, key, in_place)
        # 2. What the new tokens bring to it.
        inputs = (group_queries(query, key.shape[1]), torch.cat([key, value.to(key.dtype)], dim=-1), sink_logits)
        is_token = None if padding_mask is None else padding_mask != 0
        parts = self._new_tokens(groups, *inputs, hidden_states, is_token, document_starts, is_fresh=layer is None)
        weights = self._weights(groups, parts, layer) if output_attentions else None
        if dropout and self.training:
            parts = [new.with_dropout(dropout) for new in parts]
        # 3. It reads its memory, which takes the tokens in.
        read = [self.attend_group(new, group) for new, group in zip(parts, groups, strict=True)]
        outputs, memories, absorbed = zip(*read, strict=True)
        # 4. The cache after them, and all heads in order.
        if cache is not None and layer is not None:
            recorded = list(zip(parts, absorbed, strict=True)) if layer.record_past else None
            layer.take(cache, key, value, memories=list(memories), recorded=recorded, in_place=in_place)
        output = ungroup(join_heads(outputs, self.retrieval_heads), query.shape[1])
        return output.to(value.dtype), weights if weights is None else ungroup(weights, query.shape[1]).to(value.dtype)

    @staticmethod
    def prepare_token(layers: Sequence[Any], cache: Cache | None, device: torch.device) -> None:
        """Find what a single new token meets in all layers at once: where it goes in their memories."""
        find_targets(cache, device)

    def _head_groups(self, layer: RFALayer | None, key: Tensor, in_place: bool) -> list[HeadGroup]:
        """Return all heads but the retrieval heads, and these if there are any, before new tokens with keys [B, H, T, d].

        Args:
            layer: of the cache, or None.
            key: of the new tokens.
            in_place: whether there is one of them, which may change the memories in place.
        """
        if layer is not None and in_place and layer.targets:
            return [HeadGroup(*group, None) for group in zip(layer.memories, layer.layouts, layer.targets, strict=True)]
        layouts, motions = self.memory_layouts(key.dtype), self.motions()
        if layer is None:
            memories = [empty_memory(layout, key.shape[0], key.device) for layout in layouts]
        else:
            memories = layer.read(layouts, motions, key.shape[0], key.device)
        targets: list[Target | None] = [None] * len(layouts)
        if in_place:
            pairs = zip(memories, layouts, strict=True)
            targets = [
                None if memory.places is None else targets_of([memory.places], [layout])[0] for memory, layout in pairs
            ]
        return [HeadGroup(*group) for group in zip(memories, layouts, targets, motions, strict=True)]

    def _new_tokens(
        self,
        groups: list[HeadGroup],
        query: Tensor,
        keys_values: Tensor,
        sink_logits: Tensor | None,
        hidden_states: Tensor,
        is_token: Tensor | None,
        document_starts: Tensor | None,
        *,
        is_fresh: bool,
    ) -> list[NewTokens]:
        """Return what new tokens bring to each group of heads; shapes are those of `NewTokens` and `attend`.

        ``is_fresh`` says that the memories are empty.
        """
        logits: Any = [sink_logits] * len(groups)
        if sink_logits is not None:
            query = query.to(compute_dtype(query.dtype))
        rows, pairs = [query], [keys_values]
        if self.retrieval_heads:
            rows, pairs = (list(split_heads(tensor, self.retrieval_heads)) for tensor in (query, keys_values))
            if sink_logits is not None:
                by_head = sink_logits.view(1, self.rfa_heads, -1)
                logits = [part.flatten() for part in split_heads(by_head, self.retrieval_heads)]
        parts = []
        for index, (memory, layout, target, _) in enumerate(groups):
            new = NewTokens(query=rows[index], keys_values=pairs[index], is_token=is_token, sink_logits=logits[index])
            places = memory.places
            if places is not None and target is None:
                before = None if is_fresh else places
                new.arrivals = arrivals_of(places.count, new.length, layout, is_token, document_starts, before)
            if layout.slots:
                ordinal = (
                    cast(Arrivals, new.arrivals).since_origin() if target is None else cast(Tensor, target.ordinal)
                )
                key = new.keys_values[..., : new.head_dim]
                new.score = cast(Importance, self.importances()[index]).score(hidden_states, key, ordinal)
            parts.append(new)
        self.add_scales(parts[0], hidden_states, document_starts)
        return parts

    def add_scales(self, new: NewTokens, hidden_states: Tensor, document_starts: Tensor | None) -> None:
        """Add to new tokens how a state takes them in: there is none."""

    def attend_group(self, new: NewTokens, group: HeadGroup) -> tuple[Tensor, Memory, Any]:
        """Attend with some heads.

        Returns:
            The output [B, H, T G, M], the memory after the tokens, and what joined its state
            (`hf_rfa.models.linear_attention.Absorbed`): None here.
        """
        output, places, *_ = attend_to_places(new, group, scaling=self.scaling)
        return output, Memory(places), None

    def _weights(self, groups: list[HeadGroup], parts: list[NewTokens], layer: RFALayer | None) -> Tensor:
        """Return the attention weights, [B, H, T G, columns].

        The columns are the new tokens if these are the first ones. Else the places of the memory come before them, in the
        order of arrival; for one new token they are the places after it has taken its own.
        """
        is_first = layer is None or int(layer.get_seq_length()) == 0
        weights = []
        for group, new in zip(groups, parts, strict=True):
            places, columns = group.layout.places, new.with_one_hot_values(group)
            output, memory, _ = self.attend_group(*columns)
            if is_first or not places:
                output = output[..., places:]
            elif new.length == 1:
                at_place = cast(Places, memory.places).in_order().keys_values[..., new.head_dim :]
                output = output @ at_place.mT.to(output.dtype)
            weights.append(output)
        return join_heads(weights, self.retrieval_heads)


def rfa_layers(stack: nn.Module) -> tuple[RFAAttentionMixin, ...]:
    """Return the modules of causal RFA attention of a stack, in order."""
    modules = (module for module in stack.modules() if isinstance(module, RFAAttentionMixin))
    return tuple(module for module in modules if module.rfa_kind == "causal")
