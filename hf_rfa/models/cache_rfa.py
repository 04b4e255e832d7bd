"""The cache layer of random feature attention: one state of fixed size, instead of keys and values that grow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers.cache_utils import (
    STATIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    EncoderDecoderCache,
)

from .cache_names import CACHE_NAME
from .linear_attention import Tokens, final_state
from .sliding_window import WindowSizes, first_to_leave, stream_of, with_room

#: Name of the layer type in ``config.layer_types``; `DynamicCache` makes one `RFALayer` for each entry of that name.
RFA_LAYER_TYPE = "rfa"
#: That of layers with retrieval heads that see all tokens: `RFAGrowingLayer`.
GROWING_LAYER_TYPE = "rfa_growing"

#: Most steps that are recorded, so that a recording that nobody crops stays small. No assistant drafts as many tokens.
MAX_RECORDED_STEPS = 512


class Held(NamedTuple):
    """What some heads of a layer keep of the tokens so far.

    Attributes:
        state: [B, H, F, d + 1] (`hf_rfa.models.linear_attention`), or None for heads without features.
        window: [B, H, S + K + W, ·] (`hf_rfa.models.sliding_window`), or None for heads without a window.
    """

    state: Tensor | None = None
    window: Tensor | None = None

    def with_zeros_for_values(self, width: int, head_dim: int) -> Held:
        """Return the same for values of another width than that of keys, ``head_dim``: zeros in place of their own."""
        state, window = self
        if state is not None:
            state = torch.cat([state.new_zeros(*state.shape[:-1], width), state[..., -1:]], dim=-1)
        if window is not None:
            zeros = window.new_zeros(*window.shape[:-1], width)
            window = torch.cat([window[..., :head_dim], zeros, window[..., 2 * head_dim :]], dim=-1)
        return Held(state, window)


class RecordedStep(NamedTuple):
    """Additions of one step to what some heads hold, of which `RFALayer.crop` can add a part again.

    Attributes:
        tokens: the tokens of the step; keys are not read without a window.
        key_features: φ(k) of the tokens that joined the state, [B, H, T, F], or None for heads without features.
        denominator_floor: that of the feature map.
        sizes: those of the window; a window of 0 is none, or where there are no features one that grows.
        window_dtype: that of the window as it is kept.
    """

    tokens: Tokens
    key_features: Tensor | None
    denominator_floor: float | None
    sizes: WindowSizes
    window_dtype: torch.dtype

    def replay(self, count: int, held: Held) -> Held:
        """Return what is held after the first ``count`` tokens."""
        tokens, key_features, sizes, (state, window) = self.tokens.part(0, count), self.key_features, self.sizes, held
        if key_features is None and not sizes.window:
            window, size = with_room(window, count)
            sizes = WindowSizes(size)
        if sizes.window:
            stream = stream_of(tokens, window, sizes, dtype=self.window_dtype)
            tokens, window = stream.leaving(), stream.window()
        if key_features is None:
            return Held(state, window)
        if sizes.window:
            key_features = first_to_leave(key_features, count, self.tokens.padding_mask)
        tokens = tokens._replace(key=key_features[..., :count, :])
        return Held(final_state(tokens, initial_state=state, denominator_floor=self.denominator_floor), window)


class RFALayer(CacheLayerMixin):
    """Holds the state and the window of one attention layer (`Held`), and counts its tokens.

    Retrieval heads, which those two leave out, have a window of their own. All take the same memory after ten tokens and
    after a million.

    Earlier states are gone, so that nothing can be cropped, unless the layer records: after `activate_past_recording` it
    keeps a copy of the state and what each step added to it, until `crop` says how many tokens stay. Assisted decoding does
    so in every round.
    """

    _layer_type = RFA_LAYER_TYPE
    #: What the layer holds. Compare this tag instead of the class: a checkpoint may bring its own copy of the class.
    holds = "RFA state"
    # Like a sliding window's, its size does not follow the sequence: masks for softmax layers next to it are not made by it.
    is_sliding = True
    # After the first tokens a step updates the state in place, so that a compiled step may be run again and again. In a
    # static cache this also makes transformers mask the slots of softmax layers that hold nothing yet.
    is_compileable = True
    is_croppable = True  # by what was recorded
    supports_early_init = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.state: Tensor | None = None
        self.window_cache: Tensor | None = None
        self.retrieval_cache: Tensor | None = None
        self.cumulative_length = 0
        self.record_past = False
        self.sinks_held = False  # whether the window is known to have all sinks
        self._forget()

    def _forget(self) -> None:
        """Drop what was recorded."""
        self._before: tuple[Held, Held] = (Held(), Held())
        self._steps: list[tuple[tuple[RecordedStep, ...], int]] = []

    def activate_past_recording(self) -> None:
        """Keep what `crop` needs to remove tokens that come from now on."""
        self.record_past = True

    def tensors(self) -> list[Tensor]:
        """Return what the layer holds."""
        held = (self.state, self.window_cache, self.retrieval_cache)
        return [tensor for tensor in held if tensor is not None]

    def _change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by what ``function`` makes of it."""
        self.state = None if self.state is None else function(self.state)
        self.window_cache = None if self.window_cache is None else function(self.window_cache)
        self.retrieval_cache = None if self.retrieval_cache is None else function(self.retrieval_cache)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Set the device; the first `update` brings the state."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def read(self, device: torch.device) -> tuple[Held, Held]:
        """Return what the heads with features and the retrieval heads hold, on a device; a step may change it in place."""
        self._change(lambda tensor: tensor.to(device))
        if len(self._steps) == MAX_RECORDED_STEPS:
            self._forget()
        held = (Held(self.state, self.window_cache), Held(None, self.retrieval_cache))
        if self.record_past and not self._steps:
            first, second = (Held(*(None if each is None else each.clone() for each in part)) for part in held)
            self._before = first, second
        return held

    def update(  # type: ignore[override]
        self,
        state: Tensor | None,
        window: Tensor | None,
        *args: Any,
        num_tokens: int | None = None,
        retrieval: Tensor | None = None,
        recorded: tuple[RecordedStep, ...] = (),
        sinks_held: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Store what the heads with features and the retrieval heads hold after some tokens.

        Args:
            state: the state, or None without features.
            window: the window, or None without one.
            *args: what transformers adds.
            num_tokens: number of the tokens since `read`, padding included.
            retrieval: the window of retrieval heads, or None without any.
            recorded: what these tokens added, by groups of heads, while the layer records.
            sinks_held: whether the window is known to have all sinks now.
            **kwargs: what transformers adds.

        Raises:
            TypeError: if an attention layer that is not RFA writes keys and values to this layer.
        """
        if num_tokens is None:
            raise TypeError(
                "a softmax attention layer wrote to an RFA cache layer. Build the cache with "
                "DynamicCache(config=model.config) of the model that uses it."
            )
        self.state, self.window_cache, self.retrieval_cache = state, window, retrieval
        if not self.is_initialized:
            first = self.tensors()[0]
            self.lazy_initialization(first, first)
        if recorded:
            self._steps.append((recorded, num_tokens))
        self.cumulative_length += num_tokens
        self.sinks_held |= sinks_held
        return state, window

    def get_seq_length(self) -> int:
        """Return the number of tokens seen, padding included."""
        return self.cumulative_length

    def get_max_length(self) -> int:
        """Return −1: there is no maximum."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (number of keys, offset) as a growing layer would, for the masks of the model's softmax layers."""
        return self.cumulative_length + query_length, 0

    def offload(self) -> None:
        """Move the state to the CPU."""
        self._change(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move the state back to its device."""
        self._change(lambda tensor: tensor.to(self.device, non_blocking=True))

    def reset(self) -> None:
        """Forget all tokens."""
        self.state = self.window_cache = self.retrieval_cache = None
        self.cumulative_length, self.sinks_held = 0, False
        self._forget()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows of the batch."""
        self._forget()
        self._change(lambda tensor: tensor.index_select(0, indices.to(tensor.device)))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the batch for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch."""
        self._forget()
        self._change(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, and keep the others for good.

        Args:
            tokens_to_remove: minus the number of tokens, at most those that were recorded; 0 keeps all.

        Raises:
            ValueError: if that many tokens were not recorded, since a recurrent state does not hold its past.
        """
        count = -tokens_to_remove
        recorded = sum(length for _, length in self._steps)
        if not 0 <= count <= recorded:
            raise ValueError(
                f"cannot crop an RFA state by {tokens_to_remove}: it keeps no past states, and {recorded} tokens were "
                "recorded. Call activate_past_recording() before the tokens that may have to go, and pass minus their "
                "number; or copy the cache (copy.deepcopy) before them."
            )
        if count:
            held, kept = list(self._before), recorded - count
            for steps, length in self._steps:
                if kept > 0:
                    for index, step in enumerate(steps):
                        held[index] = step.replay(min(length, kept), held[index])
                kept -= length
            (self.state, self.window_cache), (_, self.retrieval_cache) = held
            self.cumulative_length -= count
            self.sinks_held = False
        self._forget()


class RFAGrowingLayer(RFALayer):
    """A layer with retrieval heads that see all tokens: what these hold grows with the text."""

    _layer_type = GROWING_LAYER_TYPE
    is_compileable = False


class RFASourceLayer(RFALayer):
    """Holds the finished state of one cross-attention layer: sums over the source, which no later step changes.

    Row n of the state serves ``rows_per_state`` rows of the batch in succession: the beams of a sequence read one state,
    and reordering them moves nothing.
    """

    holds = "RFA source state"
    _layer_type = None  # type: ignore[assignment]  # made by `cross_layer_of`, not from a configuration

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rows_per_state = 1

    def fill(self, state: Tensor, *, length: int, rows_per_state: int) -> None:
        """Store the state [N, H, rows, d + 1] (`hf_rfa.models.linear_attention.final_state`) of ``length`` source tokens.

        The length includes padding; ``rows_per_state`` rows of the batch read one row of the state.
        """
        self.lazy_initialization(state, state)
        self.state, self.cumulative_length, self.rows_per_state = state, length, rows_per_state

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Raise a TypeError: the state is filled once."""
        raise TypeError("a self-attention layer wrote to the cache layer of RFA cross attention.")

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the batch for beam search: nothing moves as long as every beam stays with its sequence."""
        if self.state is None:
            return
        rows = torch.arange(beam_idx.shape[0], device=beam_idx.device)
        if not torch.equal(beam_idx // self.rows_per_state, rows // self.rows_per_state):
            self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows of the batch, each of which then reads a state of its own."""
        super().batch_select_indices(indices // self.rows_per_state)
        self.rows_per_state = 1

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch: more rows read one state."""
        self.rows_per_state *= repeats

    def reset(self) -> None:
        """Forget the source."""
        super().reset()
        self.rows_per_state = 1


def _no_static_layer(**kwargs: Any) -> RFALayer:
    """Raise a ValueError: softmax layers of a static cache would be masked wrongly beside a layer that grows."""
    raise ValueError(
        "a static cache has one size, and retrieval heads of this model see all tokens, so that theirs grows. Set "
        "retrieval_window in its configuration and growing_heads to 0, or use a dynamic cache."
    )


# The state has one size from the start: it serves `StaticCache` as it serves `DynamicCache`.
STATIC_LAYER_TYPE_MAPPING[RFA_LAYER_TYPE] = RFALayer
STATIC_LAYER_TYPE_MAPPING[GROWING_LAYER_TYPE] = _no_static_layer  # type: ignore[assignment]


def rfa_layer_of(cache: Cache, layer_idx: int) -> tuple[RFALayer, tuple[Tensor, Tensor] | None]:
    """Return layer ``layer_idx`` of a cache, made an `RFALayer` if need be, and the keys and values that it held until then.

    A cache built without a configuration, or with a softmax model's, has layers for keys and values; PEFT's prefix tuning
    fills them with those of virtual tokens.

    Raises:
        TypeError: if the layer is of a kind that cannot be replaced.
    """
    layer = _layer_at(cache, layer_idx)
    if cache.offloading:  # what was fetched may be on its way
        torch.accelerator.current_stream().wait_stream(cache.prefetch_stream)
    if getattr(layer, "holds", None) == RFALayer.holds:
        return layer, None
    if type(layer) is not DynamicLayer:
        raise TypeError(
            f"layer {layer_idx} of this {type(cache).__name__} is a {type(layer).__name__}, but the model's attention needs "
            "an RFALayer there. Build the cache with DynamicCache(config=model.config), or let the model build it."
        )
    cache.layers[layer_idx] = new = RFALayer()
    return new, (cast(Tensor, layer.keys), cast(Tensor, layer.values)) if layer.get_seq_length() else None


def cross_layer_of(cache: Cache, layer_idx: int, *, softmax: bool = False) -> Any:
    """Return layer ``layer_idx`` of a cross-attention cache, made one of the right kind before its first use.

    Both caches of an `EncoderDecoderCache` are built from the layer types of self-attention. The right kind is an
    `RFASourceLayer`, or a layer for keys and values where attention is ``softmax``.

    Raises:
        TypeError: if a layer of the other kind is in use.
    """
    layer = _layer_at(cache, layer_idx)
    holds = getattr(layer, "holds", None)
    if holds == (None if softmax else RFASourceLayer.holds):
        return layer
    new = DynamicLayer() if softmax else RFASourceLayer()
    if getattr(layer, "is_initialized", False):
        raise TypeError(
            f"layer {layer_idx} of the cross-attention cache is a {type(layer).__name__} in use, but the model needs a "
            f"{type(new).__name__} there: the cache was filled by another model."
        )
    cache.layers[layer_idx] = new
    return new


def _layer_at(cache: Cache, layer_idx: int) -> Any:
    """Return a layer of a cache, which gets layers up to it if it was built without a configuration."""
    while len(cache.layers) <= layer_idx:
        cache.layers.append(DynamicLayer())
    return cache.layers[layer_idx]


def unread_length(cache: Cache | None, config: Any) -> int:
    """Return the number of tokens of which RFA layers have yet to read the keys and values (`rfa_layer_of`)."""
    own = self_attention_cache(cache)
    layers = enumerate([] if own is None else own.layers)
    unread = [layer for index, layer in layers if type(layer) is DynamicLayer and config.is_rfa("causal", index)]
    return max([0, *[layer.get_seq_length() for layer in unread]])


def past_length(cache: Cache | None) -> int:
    """Return the number of tokens that a cache has seen.

    Raises:
        TypeError: if it is not a cache: tuples of keys and values, say, as transformers 4 had them.
    """
    if cache is None:
        return 0
    if not isinstance(cache, Cache):
        raise TypeError(
            f"{CACHE_NAME} is a {type(cache).__name__}, and has to be a cache. Build it with "
            "DynamicCache(config=model.config), or let the model build it (use_cache=True)."
        )
    return cache.get_seq_length()


def self_attention_cache(cache: Cache | None) -> Cache | None:
    """Return the part of a cache that self-attention uses."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
