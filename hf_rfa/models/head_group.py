"""Heads of a layer that keep tokens in one way, with their inputs of one call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .exact_attention import Arrivals, arrivals_of
from .feature_maps import FeatureMap
from .memory import Memory, MemoryLayout, Target, in_order
from .positions import Motion


@dataclass(kw_only=True)
class HeadGroup:
    """Heads of a layer that keep tokens in one way, and their inputs: retrieval heads, or all others.

    Attributes:
        query: rows of the key-value heads, [B, H, T G, d] (`hf_rfa.models.masking`).
        keys_values: keys and values of the new tokens, [B, H, T, d + M].
        memory: what is kept of the tokens before.
        layout: of the memory.
        feature_map: φ, or None for heads without features.
        arrivals: where the new tokens stand in their texts, or None for heads that keep no token, and beside a ``target``.
        target: where the new token goes, of which there is one, if it may change the memory in place.
        motion: how the memory's tokens move where an epoch begins, or None where they stay.
        is_token: False for padding, [B, T], or None where nothing is padded.
        score: of the new tokens, [B, H, T], or None without slots.
        log_decay: log g of the state, [B, H, T], 0 for padding, or None without a gate.
        input_scale: w of what joins the state, [B, H or 1, T], 0 for padding, or None for ones.
        document_starts: [B, T], True where a document starts whose state begins anew, or None.
        sink_logits: logits of the query heads' learned sinks, [H G], or None.
    """

    query: Tensor
    keys_values: Tensor
    memory: Memory
    layout: MemoryLayout
    feature_map: FeatureMap | None
    arrivals: Arrivals | None = None
    target: Target | None = None
    motion: Motion | None = None
    is_token: Tensor | None = None
    score: Tensor | None = None
    log_decay: Tensor | None = None
    input_scale: Tensor | None = None
    document_starts: Tensor | None = None
    sink_logits: Tensor | None = None

    @property
    def length(self) -> int:
        """The number of new tokens, T."""
        return self.keys_values.shape[2]

    @property
    def head_dim(self) -> int:
        """The width of a head, d."""
        return self.query.shape[-1]

    def with_one_hot_values(self) -> HeadGroup:
        """Return the group with values such that the outputs are the attention weights of places and of new tokens."""
        layout, length = self.layout, self.length
        ones = torch.eye(layout.places + length, dtype=self.keys_values.dtype, device=self.keys_values.device)
        ones = ones.expand(*self.keys_values.shape[:2], -1, -1)
        keys_values = torch.cat([self.keys_values[..., : self.head_dim], ones[:, :, layout.places :]], dim=-1)
        memory = in_order(self.memory)
        if memory.keys_values is not None:
            keys = memory.keys_values[..., : self.head_dim]
            memory = replace(memory, keys_values=torch.cat([keys, ones[:, :, : layout.places].to(keys.dtype)], dim=-1))
        if memory.state is not None:
            zeros = memory.state.new_zeros(*memory.state.shape[:-1], ones.shape[-1])
            memory = replace(memory, state=torch.cat([zeros, memory.state[..., -1:]], dim=-1))
        arrivals = self.arrivals
        if self.target is not None:
            before = self.memory
            arrivals = arrivals_of(before.count, 1, layout, self.is_token, None, before)
        return replace(self, keys_values=keys_values, memory=memory, arrivals=arrivals, target=None)

    def split(self, size: int) -> Iterator[HeadGroup]:
        """Yield the group of ``size`` tokens at a time, each with the memory before them all."""
        rows = size * self.query.shape[2] // self.length
        count = -(-self.length // size)
        scales = (self.score, self.log_decay, self.input_scale)
        parts = ([None] * count if scale is None else scale.split(size, dim=-1) for scale in scales)
        lengths = [min(size, self.length - start) for start in range(0, self.length, size)]
        arrivals = [None] * count if self.arrivals is None else self.arrivals.split(lengths)
        tensors = self.query.split(rows, dim=2), self.keys_values.split(size, dim=2)
        for query, keys_values, arrived, score, log_decay, input_scale in zip(*tensors, arrivals, *parts, strict=True):
            yield replace(
                self,
                query=query,
                keys_values=keys_values,
                arrivals=arrived,
                score=score,
                log_decay=log_decay,
                input_scale=input_scale,
            )

    def with_dropout(self, probability: float) -> HeadGroup:
        """Return the group with values of which some are dropped."""
        key, value = self.keys_values[..., : self.head_dim], self.keys_values[..., self.head_dim :]
        return replace(self, keys_values=torch.cat([key, F.dropout(value, probability)], dim=-1))
