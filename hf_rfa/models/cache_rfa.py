"""The cache layers: what attention keeps of a text, of one size, instead of keys and values that grow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

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
from .exact_attention import HeadGroup, NewTokens, take_in
from .lifetimes import Target, arrivals_of, targets_of
from .memory import Memory, MemoryLayout, Places, empty_memory, updates_in_place
from .positions import Motion

#: Name of the layer type in ``config.layer_types``; `DynamicCache` makes one `RFALayer` for each entry of that name.
RFA_LAYER_TYPE = "rfa"

#: Most steps that are recorded, so that a recording that nobody crops stays small. No assistant drafts as many tokens.
MAX_RECORDED_STEPS = 512


class RFALayer(CacheLayerMixin):
    """Holds what one attention layer keeps of a batch of texts (`hf_rfa.models.memory`), and counts its tokens.

    It takes the same memory after ten tokens and after a million, at the same addresses: a step changes tensors in place, and
    a compiled one can be run again and again.

    Earlier states are gone, so that nothing can be cropped, unless the layer records: after `activate_past_recording` it
    keeps a copy of the memory and the tokens that came since, until `crop` says how many of them stay. Assisted decoding does
    so in every round.

    Attributes:
        memories: that of the layer's heads, and that of its retrieval heads where it has some; empty before the first token.
        layouts: those of the memories.
        motions: how the tokens of each memory move where an epoch begins; None for those that stay.
        targets: where the next token goes in each memory, None for those without places; empty where `find_targets` was not
            called since the last token, or no step may change the memories in place.
        cumulative_length: number of tokens seen, padding included: a tensor, so that no compiler takes it for a constant.
        tokens_left: tokens that may follow before it has to be asked again where a text's positions stand
            (`hf_rfa.models.streaming`); read of a cache's first layer alone, and a number, so that nobody waits for a device.
        steps_left: the same before `hf_rfa.models.streaming.prepare_step` has to ask.
        shift: what is taken off the positions of these, [B, 1], or None for 0.
    """

    _layer_type = RFA_LAYER_TYPE
    #: What the layer holds. Compare this tag instead of the class: a checkpoint may bring its own copy of the class.
    holds = "RFA state"
    # Like a sliding window's, its size does not follow the sequence: masks for softmax layers next to it are not made by it.
    is_sliding = True
    # In a static cache this also makes transformers mask the slots of softmax layers that hold nothing yet.
    is_compileable = True
    is_croppable = True  # by what was recorded
    supports_early_init = False
    cumulative_length: Any

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.cumulative_length = torch.tensor(0)
        self.memories = []
        self.layouts: list[MemoryLayout] = []
        self.motions: list[Motion | None] = []
        self.record_past = False
        self.ask_again()
        self._forget()

    def ask_again(self) -> None:
        """Forget where the texts' positions stand: the texts are other ones."""
        self.tokens_left = self.steps_left = 0
        self.shift: Tensor | None = None

    @property
    def memories(self) -> list[Memory]:
        """See the class."""
        return self._memories

    @memories.setter
    def memories(self, memories: list[Memory]) -> None:
        self._memories = memories
        self.targets: list[Target | None] = []
        # As transformers' static caches do, so that CUDA graphs take the addresses as they are.
        for tensor in () if torch.compiler.is_compiling() else (*self.tensors().values(), self.cumulative_length):
            if tensor.is_cuda:
                torch._dynamo.mark_static_address(tensor)

    def _forget(self) -> None:
        """Drop what was recorded."""
        self._before: list[Memory] = []
        self._steps: list[tuple[list[tuple[NewTokens, Any]], int]] = []

    def activate_past_recording(self) -> None:
        """Keep what `crop` needs to remove tokens that come from now on."""
        self.record_past = True

    def tensors(self) -> dict[str, Tensor]:
        """Return what the layer holds by name, such as ``0.keys_values``: the memory's number and the tensor's name."""
        return {
            f"{index}.{name}": tensor
            for index, memory in enumerate(self.memories)
            for name, tensor in memory.tensors().items()
        }

    def restore(self, tensors: dict[str, Tensor], length: int) -> None:
        """Hold tensors by the names of `tensors`, after ``length`` tokens."""
        parts: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            index, attribute = name.split(".")
            parts.setdefault(int(index), {})[attribute] = tensor
        self.ask_again()
        self.memories = [Memory.of(parts[index]) for index in sorted(parts)]
        first = next(iter(tensors.values()))
        self.lazy_initialization(first, first)
        self.cumulative_length.fill_(length)

    def _change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by what ``function`` makes of it."""
        self.ask_again()
        self.memories = [memory.map(function) for memory in self.memories]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Set the device; the first tokens bring the memory."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.cumulative_length = self.cumulative_length.to(self.device)
        self.is_initialized = True

    def read(
        self, layouts: list[MemoryLayout], motions: list[Motion | None], batch: int, device: torch.device
    ) -> list[Memory]:
        """Return what the layer's memories of some layouts hold, on a device; a step may change them in place."""
        tensors = list(self.tensors().values())
        if not tensors or (
            tensors[0].shape[0] != batch and not bool(self.cumulative_length)
        ):  # after `reset` any batch
            self.memories = [empty_memory(layout, batch, device) for layout in layouts]
            self.ask_again()
        elif not self.is_usable(device):
            self._change(lambda tensor: _usable(tensor, device))
            self.cumulative_length = _usable(self.cumulative_length, device)
        self.layouts, self.motions = layouts, motions
        if not self.is_initialized:
            first = torch.empty(0, dtype=layouts[0].dtype, device=device)
            self.lazy_initialization(first, first)
        if len(self._steps) == MAX_RECORDED_STEPS:
            self._forget()
        if self.record_past and not self._steps:
            self._before = [memory.map(torch.clone) for memory in self.memories]
        return self.memories

    def is_usable(self, device: torch.device) -> bool:
        """Return whether the memories are on a device and can be changed in place there: one tensor goes with all others."""
        for memory in self.memories:
            tensor = memory.state if memory.places is None else memory.places.arrival
            if tensor is not None and not _is_usable(tensor, device):
                return False
        return True

    def take(
        self,
        cache: Cache,
        key: Tensor,
        value: Tensor,
        *,
        memories: list[Memory],
        recorded: list[tuple[NewTokens, Any]] | None,
        in_place: bool,
    ) -> None:
        """Hold memories after new tokens, as a layer of ``cache``.

        Args:
            cache: the cache.
            key: of the new tokens, [B, H, T, d]; only device and length matter.
            value: of the new tokens.
            memories: those of `read`, after the tokens.
            recorded: the tokens for every memory, and what joined its state with them
                (`hf_rfa.models.linear_attention.Absorbed`) or None, while the layer records.
            in_place: whether the memories are those of `read` themselves.
        """
        if in_place and recorded is None and not cache.offloading:
            for before, after in zip(self.memories, memories, strict=True):
                before.places, before.state = after.places, after.state
            self.targets = []
            self.cumulative_length.add_(1)
        else:
            index = cache.layers.index(self)
            cache.update(key, value, index, memories=memories, num_tokens=key.shape[-2], recorded=recorded)

    def update(
        self,
        key_states: Any,
        value_states: Any,
        *args: Any,
        memories: list[Memory] | None = None,
        num_tokens: int = 0,
        recorded: list[tuple[NewTokens, Any]] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """Store the memories after some tokens.

        Args:
            key_states: not read: transformers' name for what other layers store.
            value_states: not read.
            *args: what transformers adds.
            memories: those of `read`, after the tokens.
            num_tokens: number of the tokens since `read`, padding included.
            recorded: as for `take`.
            **kwargs: what transformers adds.

        Raises:
            TypeError: if an attention layer that is not RFA writes keys and values to this layer.
        """
        if memories is None:
            raise TypeError(
                "a softmax attention layer wrote to an RFA cache layer. Build the cache with "
                "DynamicCache(config=model.config) of the model that uses it."
            )
        self.memories = [memory.stored_in(before) for memory, before in zip(memories, self.memories, strict=True)]
        if recorded is not None:
            self._steps.append((recorded, num_tokens))
        self.cumulative_length.add_(num_tokens)
        return key_states, value_states

    def get_seq_length(self) -> Any:
        """Return the number of tokens seen, padding included: 0 at the start, then a tensor without dimensions."""
        return self.cumulative_length.clone() if self.is_initialized else 0

    def get_max_length(self) -> int:
        """Return −1: there is no maximum."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (number of keys, offset) as a growing layer would, for the masks of the model's softmax layers."""
        return self.get_seq_length() + query_length, 0

    def offload(self) -> None:
        """Move the state to the CPU."""
        self._change(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move the state back to its device."""
        self._change(lambda tensor: tensor.to(self.device, non_blocking=True))

    def reset(self) -> None:
        """Forget all tokens; every tensor stays where it lies."""
        for memory in self.memories:
            memory.clear()
        self.targets = []
        self.cumulative_length.zero_()
        self.ask_again()
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
            memories, remaining = self._before, recorded - count
            for steps, length in self._steps:
                if remaining > 0:
                    memories = self._replayed(steps, min(length, remaining), memories)
                remaining -= length
            # Sliding softmax layers stay in the epoch that they are in.
            origin = None if self.memories[0].places is None else self.memories[0].places.origin
            memories = [_moved(memory, motion, origin) for memory, motion in zip(memories, self.motions, strict=True)]
            self.memories = [memory.stored_in(before) for memory, before in zip(memories, self.memories, strict=True)]
            self.cumulative_length.sub_(count)
            self.ask_again()
        self._forget()

    def _replayed(self, steps: list[tuple[NewTokens, Any]], count: int, memories: list[Memory]) -> list[Memory]:
        """Return memories after the first ``count`` tokens of a recorded step."""
        after = []
        for (new, absorbed), memory, layout, motion in zip(steps, memories, self.layouts, self.motions, strict=True):
            places, state = memory.places, memory.state
            if places is not None:
                first = new.first(count)
                first.arrivals = arrivals_of(places.count, count, layout, first.is_token, None, places)
                places = take_in(first, HeadGroup(memory, layout, None, motion))
            if absorbed is not None:
                state = absorbed.state_after(count, state)
            after.append(Memory(places, state))
        return after

    def move(self, origin: Tensor, motions: list[Motion | None]) -> None:
        """Move the memories' tokens to where an epoch has them, in place where that may be.

        Args:
            origin: eB of the epoch, [B] (`hf_rfa.models.positions`).
            motions: of the memories.
        """
        moved = [_moved(memory, motion, origin) for memory, motion in zip(self.memories, motions, strict=True)]
        if all(_is_usable(tensor, tensor.device) for tensor in self.tensors().values()):
            moved = [memory.stored_in(before) for memory, before in zip(moved, self.memories, strict=True)]
        self.memories = moved


# The state has one size from the start: it serves `StaticCache` as it serves `DynamicCache`.
STATIC_LAYER_TYPE_MAPPING[RFA_LAYER_TYPE] = RFALayer


def rfa_layer_of(cache: Cache, layer_idx: int) -> RFALayer:
    """Return layer ``layer_idx`` of a cache, made an `RFALayer` if it is an unused one for keys and values.

    A cache built without a configuration, or with a softmax model's, has such layers.

    Raises:
        TypeError: if the layer is of another kind, or in use.
    """
    layer = layer_at(cache, layer_idx)
    if cache.offloading:  # what was fetched may be on its way
        torch.accelerator.current_stream().wait_stream(cache.prefetch_stream)
    if getattr(layer, "holds", None) == RFALayer.holds:
        return layer
    if type(layer) is not DynamicLayer or layer.get_seq_length():
        raise TypeError(
            f"layer {layer_idx} of this {type(cache).__name__} is a {type(layer).__name__} with {layer.get_seq_length()} "
            "tokens, but the model's attention needs an RFALayer there. Build the cache with "
            "DynamicCache(config=model.config), or let the model build it. Keys and values of another model or of virtual "
            "tokens (prefix tuning) have no place in a memory: pass the tokens themselves, or train another adapter."
        )
    cache.layers[layer_idx] = new = RFALayer()
    return new


def find_targets(cache: Cache | None, device: torch.device) -> None:
    """Find where the next token goes in all memories of a cache at once: one operation costs as much for one.

    Layers that record, or whose memories lie elsewhere, are left out; attention asks `hf_rfa.models.lifetimes.targets_of`
    for these itself. A stack of layers calls it before each of its steps.
    """
    kinds: dict[Any, list[tuple[RFALayer, int]]] = {}
    layers: list[Any] = [] if cache is None or not updates_in_place() else cache.layers
    for layer in layers:
        if getattr(layer, "holds", None) == RFALayer.holds:
            usable = bool(layer.layouts) and not layer.record_past and layer.is_usable(device)
            layer.targets = [None] * len(layer.memories) if usable else []
            for index, layout in enumerate(layer.layouts if usable else []):
                if layout.places:
                    kinds.setdefault(layout.kind, []).append((layer, index))
    for members in kinds.values():
        places = [cast(Places, layer.memories[index].places) for layer, index in members]
        targets = targets_of(places, [layer.layouts[index] for layer, index in members])
        for (layer, index), target in zip(members, targets, strict=True):
            layer.targets[index] = target


def layer_at(cache: Cache, layer_idx: int) -> Any:
    """Return a layer of a cache, which gets layers up to it if it was built without a configuration."""
    while len(cache.layers) <= layer_idx:
        cache.layers.append(DynamicLayer())
    return cache.layers[layer_idx]


def _moved(memory: Memory, motion: Motion | None, origin: Tensor | None) -> Memory:
    """Return a memory with its tokens where an epoch has them, [B], if they move."""
    if memory.places is None or motion is None or origin is None:
        return memory
    return Memory(motion.move(memory.places, origin), memory.state)


def _is_usable(tensor: Tensor, device: torch.device) -> bool:
    """Return whether a tensor is on a device and can be changed in place: not outside of the inference mode that made it."""
    if torch.compiler.is_compiling():  # which knows of no inference mode
        return True
    return tensor.device == device and (torch.is_inference_mode_enabled() or not tensor.is_inference())


def _usable(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor, or a copy of it if it has to be elsewhere or cannot be changed in place."""
    return tensor if _is_usable(tensor, device) else tensor.to(device, copy=True)


def past_length(cache: Cache | None) -> int:
    """Return the number of tokens that a cache has seen.

    Raises:
        TypeError: if it is not a cache: tuples of keys and values, say, as transformers 4 had them.
    """
    if cache is None:
        return 0
    if not isinstance(cache, Cache):
        raise TypeError(
            f"{CACHE_NAME} is a {type(cache).__name__}, and must be a cache. Build it with "
            "DynamicCache(config=model.config), or let the model build it (use_cache=True)."
        )
    return cache.get_seq_length()


def self_attention_cache(cache: Cache | None) -> Cache | None:
    """Return the part of a cache that self-attention uses."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
