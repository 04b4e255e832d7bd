"""Attention of heads with features: a state stands for what their memory has forgotten, under one denominator with the rest.

Heads that keep no token exactly have the state alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache

from .attention import RFAAttentionMixin
from .cache_rfa import RFALayer, layer_at
from .configuration_rfa import AttentionKind
from .exact_attention import HeadGroup, Leaving, NewTokens, attend_to_places, logits_of, put_in_place
from .feature_maps import into
from .gate import Gate
from .lifetimes import Arrivals, Target
from .linear_attention import Absorbed, Tokens, linear_attention, mask_padding, rescale, running_sums
from .masking import MASKED_LOGIT, to_rows
from .memory import Memory, Places, compute_dtype
from .no_features import feature_map_class
from .summary_feature_map import forgotten_after

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


class StateAttentionMixin(RFAAttentionMixin):
    """Attention to a memory of fixed size and a state of features, for a family's attention class.

    Feature map, gate and state are of all heads but the retrieval heads.
    """

    def init_features(self, config: Any, *, heads: int, groups: int, scaling: float) -> None:
        """Add the feature map, and the gate where the configuration asks for one (causal attention only)."""
        kind, self.chunk_size = self.rfa_kind, config.chunk_size
        if config.feature_map == "none":
            super().init_features(config, heads=heads, groups=groups, scaling=scaling)
            return
        self.feature_map = feature_map_class(config.feature_map)(
            num_heads=heads,
            groups=groups,
            head_dim=self.rfa_width,
            num_features=config.num_features_for(kind),
            scaling=scaling,
            unit_norm=config.unit_norm,
            trainable=config.trainable_projection,
            windowed=self.window_size > 0,
            seed=config.feature_seed,
            # A layer's kinds draw apart.
            layer_idx=self.rfa_layer_idx + 100_000 * get_args(AttentionKind).index(kind),
        )
        gated = config.gate and kind == "causal"
        self.gate = Gate(config.hidden_size, heads, config.max_position_embeddings) if gated else None

    def add_scales(self, new: NewTokens, hidden_states: Tensor, document_starts: Tensor | None) -> None:
        """Add to new tokens how the state takes them in: gates, and what is left of it where a document starts."""
        log_decay, input_scale = (None, None) if self.gate is None else self.gate(hidden_states)  # [B, H, T]
        if self.gate is None and self.feature_map.horizon is not None:
            dtype = compute_dtype(new.keys_values.dtype)
            log_decay = new.keys_values.new_full(
                new.keys_values.shape[:3], -1.0 / self.feature_map.horizon, dtype=dtype
            )
        log_decay, input_scale = mask_padding(new.is_token, log_decay, input_scale)
        if document_starts is not None:
            if log_decay is None:
                shape = new.keys_values.shape[:3]
                log_decay = new.keys_values.new_zeros(shape, dtype=compute_dtype(new.keys_values.dtype))
            log_decay = log_decay.masked_fill(document_starts[:, None], MASKED_LOGIT)
        new.log_decay, new.input_scale = log_decay, input_scale

    def attend_group(self, new: NewTokens, group: HeadGroup) -> tuple[Tensor, Memory, Absorbed | None]:
        """Attend with some heads, the retrieval heads without a state; see the base class.

        Features of a long sequence are computed a segment at a time, and again for the gradients.
        """
        if group.layout.places and not group.layout.state_rows:
            return super().attend_group(new, group)
        is_ready = group.target is not None and group.target.forgotten is not None
        if is_ready and new.is_token is None and new.sink_logits is None:
            return self._step(new, group)
        size = SEGMENT_LENGTH if new.query.device.type == "cpu" else ACCELERATOR_SEGMENT_LENGTH
        most, length = size, new.length
        if torch.is_grad_enabled():
            most = max(size, MAX_LENGTH_WITHOUT_SEGMENTS * max(1, FEW_FEATURES // max(1, self.feature_map.feature_dim)))
        whole = length <= most or torch.compiler.is_compiling()
        lengths = None if whole else [min(size, length - start) for start in range(0, length, size)]
        outputs, tokens, memory, shift = [], [], group.memory, None
        for segment in new.split(lengths):
            inputs = segment, group._replace(memory=memory), shift
            if whole or not torch.is_grad_enabled():
                output, memory, shift, absorbed = self._attend_segment(*inputs)
            else:
                output, memory, shift, absorbed = checkpoint(
                    self._attend_segment, *inputs, use_reentrant=False, preserve_rng_state=False
                )
            outputs.append(output)
            tokens.append(absorbed)
        if shift is not None:
            memory = replace(memory, state=rescale(memory.state, shift, None))
        output = torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]
        joined = Tokens.join(tokens) if len(tokens) > 1 else tokens[0]
        return output, memory, Absorbed(joined, self.feature_map.denominator_floor)

    @staticmethod
    def prepare_token(layers: Sequence[Any], cache: Cache | None, device: torch.device) -> None:
        """Find where the next token goes in all memories, and what summaries say to its queries; see the base class."""
        RFAAttentionMixin.prepare_token(layers, cache, device)
        if cache is None or not layers[0].feature_map.reads_means:
            return
        kinds: dict[Any, list[tuple[Any, RFALayer]]] = {}  # of layers whose summaries differ in their heads alone
        for attention in layers:
            layer = layer_at(cache, attention.rfa_layer_idx)
            target = layer.targets[0] if getattr(layer, "targets", None) else None
            is_here = attention.feature_map.key_projection.device == device
            is_plain = attention.gate is None and attention.attention_component == "both"
            if target is not None and layer.memories[0].state is not None and is_here and is_plain:
                key = layer.layouts[0].kind, id(attention.rotation)
                kinds.setdefault(key, []).append((attention, layer))
        for members in kinds.values():
            _add_forgotten(*map(list, zip(*members, strict=True)))

    def _step(self, new: NewTokens, group: HeadGroup) -> tuple[Tensor, Memory, None]:
        """Attend with one new token to places and a summary, in few operations; see `attend_group`."""
        places, target, state = cast(Places, group.memory.places), cast(Target, group.target), group.memory.state
        forgotten, waves = target.forgotten
        query = new.query.to(forgotten.state.dtype)
        visible = put_in_place(new, places, target)
        logits, value = logits_of(query, places.keys_values, visible, self.scaling)
        log_mass, past = self.feature_map.read(self.rotation.turn_by(query, *waves), forgotten)
        share, weights = torch.cat([log_mass, logits], dim=-1).softmax(-1).split([1, logits.shape[-1]], dim=-1)
        output = torch.addcmul(weights @ value, share, past)
        return output, Memory(places, cast(Tensor, state).copy_(forgotten.state)), None

    def _unrotated(
        self, new: NewTokens, group: HeadGroup, query: Tensor, key: Tensor, position: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return queries and keys as they were before they were rotated; ``position`` is that of the keys, [B, H, T]."""
        if group.target is not None:
            at = cast(Tensor, group.target.ordinal)
        else:
            arrivals = cast(Arrivals, new.arrivals)
            at = arrivals.in_document() if arrivals.origin is None else arrivals.in_document() - arrivals.origin
        rows = at if new.length == 1 else to_rows(at, query.shape[2] // new.length, dim=1)
        rows = rows.unsqueeze(1).expand(query.shape[:3])
        both, by = torch.cat([query, key], dim=2), torch.cat([rows, position], dim=2)
        query, key = self.rotation.turn(both, by.neg()).split([query.shape[2], key.shape[2]], dim=2)
        return query, key

    def _attend_segment(
        self, new: NewTokens, group: HeadGroup, shift: Tensor | None
    ) -> tuple[Tensor, Memory, Tensor | None, Tokens]:
        """Attend to some tokens in succession.

        The state takes in what leaves the places, or all tokens where there are none. Its outputs and the exact ones are
        joined under one denominator. ``shift`` is that of the memory's state, None for 0
        (`hf_rfa.models.feature_maps.Features.shift`).

        Returns:
            The output [B, H, T G, M], the memory after the tokens, the shift of its state, and what joined the state:
            features of keys, values, decays and scales.
        """
        memory, feature_map, width = group.memory, self.feature_map, new.head_dim
        query = new.query.to(compute_dtype(new.query.dtype))
        joining, input_scale, exact, log_total, places = new.keys_values, new.input_scale, None, None, memory.places
        if places is not None:
            inputs = replace(new, query=query), group
            exact, places, log_total, leaving = attend_to_places(*inputs, scaling=self.scaling, joined=True)
            joining, leaves, position = cast(Leaving, leaving)
            if leaves is not None:
                scale = leaves.to(query.dtype)
                input_scale = scale if input_scale is None else scale * input_scale
        key, value = joining[..., :width].to(query.dtype), joining[..., width:]
        if feature_map.unrotated:
            query, key = self._unrotated(new, group, query, key, position)
        if feature_map.reads_means:
            key = feature_map.key(key)
            sums = running_sums(key, new.log_decay, input_scale, memory.state, self.chunk_size)
            features = feature_map.reading(query, key, sums)
        else:
            least_shift = feature_map.least_shift(memory.state) if shift is None else shift
            features = feature_map(query, key, least_shift=least_shift, offset=exact is not None)
        beside = None
        if exact is not None:
            log_normalizer = log_total + features.offset
            limits = NORMALIZER_EXPONENTS[log_normalizer.dtype]
            beside = exact, into(into(log_normalizer, "clamp", *limits), "exp")
        tokens = Tokens(features.key, value, new.log_decay, input_scale)
        output, state = linear_attention(
            features.query,
            tokens,
            initial_state=rescale(memory.state, shift, features.shift),
            denominator_floor=feature_map.denominator_floor,
            chunk_size=self.chunk_size,
            beside=beside,
        )
        if exact is not None and self.attention_component == "window":
            output = exact
        return output, Memory(places, state), features.shift, tokens._replace(key=features.unshifted_key())


def _add_forgotten(layers: list[StateAttentionMixin], caches: list[RFALayer]) -> None:
    """Add to the targets of layers what their summaries say, and by which angles its queries are to be turned back."""
    memories, targets = [cache.memories[0] for cache in caches], [cast(Target, cache.targets[0]) for cache in caches]
    pairs = zip(memories, targets, strict=True)
    rows = torch.cat(
        [cast(Places, memory.places).keys_values.gather(2, target.rows) for memory, target in pairs], dim=1
    )
    states = [cast(Tensor, memory.state) for memory in memories]
    key, value = rows[:, :, 0].to(states[0].dtype).chunk(2, dim=-1)
    position = torch.cat([cast(Tensor, target.position) for target in targets], dim=1)
    leaves = None
    if targets[0].leaves is not None:
        leaves = torch.cat([cast(Tensor, target.leaves) for target in targets], dim=1)[..., 0].to(key.dtype)
    rotation = layers[0].rotation
    key = rotation.turn(key, position[..., 0].neg())
    maps = [layer.feature_map for layer in layers]
    waves = rotation.waves(cast(Tensor, targets[0].ordinal).neg()[:, None], key.dtype)
    for cache, target, forgotten in zip(
        caches, targets, forgotten_after(maps, states, key, value, leaves), strict=True
    ):
        cache.targets[0] = target._replace(forgotten=(forgotten, waves))
