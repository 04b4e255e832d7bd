"""Texts of any length: what a decoder's stack does between calls, and before each, so that positions stay below L.

The rule is that of `hf_rfa.models.positions`. Here positions of new tokens are counted from their epoch's origin, and what
caches hold is turned where an epoch begins. A token costs nothing for it: until the next epoch nobody asks.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.utils.import_utils import is_tracing

from .cache_names import cache_name
from .cache_rfa import RFALayer
from .lifetimes import arrivals_of
from .masking import can_ask, check_positions
from .positions import NO_ROTATION, Rotation, origins, tokens_left

#: Keys by layer, while `find_rotations` looks at them.
SEEN_KEYS: ContextVar[dict[int, Tensor] | None] = ContextVar("SEEN_KEYS", default=None)


def seen_keys() -> dict[int, Tensor] | None:
    """Return where attention layers are to put their keys, instead of computing anything, or None."""
    return None if torch.compiler.is_compiling() else SEEN_KEYS.get()


#: What is said of a compiled call in which an epoch would begin.
TOO_LONG_TO_COMPILE = (
    "a compiled call reads {0} tokens at once, and old tokens move along after max_distance={1}, which no "
    "compiled call does. Read at most so many at a time, raise max_distance, or do not compile this call."
)
#: What is said of a compiled call whose cache nobody has moved.
EPOCH_IS_DUE = (
    "a compiled call reads past max_distance, where old tokens move along, and nothing has moved them. Let generate call "
    "it, call create_masks_for_generate of the model's decoder before every step, as generate does, or do not compile."
)
#: Tokens by which rotations are found.
PROBE_LENGTH = 4
#: How far apart they are read where no tokens move.
PROBE_DISTANCE = 64


def find_rotations(stack: Any) -> dict[int, Rotation] | None:
    """Find how every attention layer of a stack rotates keys by their position, from the keys that it makes.

    A short text is read from position 0, and from a later one. Whatever the family's own code does in between: if keys turn
    by the angles of one of the stack's tables of frequencies, in one of the two orders of columns, that is the rotation. A
    layer whose keys stay as they are has no positions.

    Returns:
        The rotations by the layers' numbers, sliding softmax layers included; None if some layer's keys do not turn so.
    """
    config = stack.config
    by = min(config.motion_of("causal")[1] or PROBE_DISTANCE, config.trained_positions() - PROBE_LENGTH)
    if by < 1:
        return None
    device, count = stack.get_input_embeddings().weight.device, config.vocab_size
    ids = (torch.arange(PROBE_LENGTH, device=device) * max(1, count // PROBE_LENGTH) + 1)[None].expand(2, -1) % count
    positions = torch.arange(PROBE_LENGTH, device=device) + torch.tensor([[0], [by]], device=device)
    cache, was_training = DynamicCache(config=config), stack.training
    keys: dict[int, Tensor] = {}
    token = SEEN_KEYS.set(keys)
    stack.eval()
    try:
        with torch.inference_mode(False), torch.no_grad():
            stack(ids, position_ids=positions, use_cache=True, **{cache_name(stack.reads_inputs): cache})
    finally:
        SEEN_KEYS.reset(token)
        stack.train(was_training)
    layers: list[Any] = cache.layers
    for index, layer in enumerate(layers):
        if index not in keys and isinstance(getattr(layer, "keys", None), Tensor) and layer.keys.numel():
            keys[index] = layer.keys
    frequencies = [
        buffer.detach().float().clone()
        for name, buffer in stack.named_buffers()
        if name.endswith("inv_freq") and "original" not in name and buffer.ndim == 1
    ]
    rotations: dict[int, Rotation] = {}
    known: list[Rotation] = []  # layers that turn alike have one object
    for index, rows in keys.items():
        rotation = _rotation_of(rows, by, known, frequencies)
        if rotation is None:
            return None
        known = known if rotation in known else [*known, rotation]
        rotations[index] = rotation
    return rotations


def _rotation_of(keys: Tensor, by: int, known: list[Rotation], frequencies: list[Tensor]) -> Rotation | None:
    """Return the rotation by which keys [2, H, T, d] of the second text are those of the first, ``by`` positions further."""
    before, after = keys.double()
    tolerance = 64 * torch.finfo(keys.dtype).eps + 1e-6 * by
    candidates = [*known, NO_ROTATION]
    for table in frequencies:
        if 2 * table.shape[0] <= keys.shape[-1]:
            candidates += [Rotation(sign * table, order) for order in (False, True) for sign in (1, -1)]
    for rotation in candidates:
        turned = rotation.turn(before, before.new_tensor(by))
        if bool((turned - after).abs().amax() <= tolerance * after.abs().amax()):
            return rotation
    return None


def find_out_rotations(stack: Any, tokens: Tensor) -> None:
    """Find how a stack with features of queries and keys without rotation rotates them, before its first call.

    Raises:
        ValueError: if its keys turn in no way that can be found, or a compiler asks first.
    """
    if hasattr(stack, "rotations") and stack.rotations is not None:
        return
    if is_tracing(tokens):
        raise ValueError(
            f"feature_map={stack.config.feature_map!r} has to see how this model rotates keys before it is compiled. Call "
            "the model once on a few tokens, then compile it."
        )
    if not can_move(stack):
        raise ValueError(
            f"feature_map={stack.config.feature_map!r} reads keys without their rotation, and those of a "
            f"{stack.config.model_type} model turn in no way that could be found. Convert with another map, or with none."
        )


def can_move(stack: Any) -> bool:
    """Return whether a stack's old tokens can move along; the first call finds how its layers rotate keys."""
    if not hasattr(stack, "rotations"):
        stack.rotations = find_rotations(stack)
        for module in stack.rfa_attention if stack.rotations is not None else ():
            module.rotation = stack.rotations[module.rfa_layer_idx]
    return stack.rotations is not None


def move_caches(stack: Any, cache: Cache, origin: Tensor, *, memories: bool = True) -> None:
    """Move what a cache holds to where an epoch has it.

    Args:
        stack: whose cache it is.
        cache: with RFA layers in use, and sliding softmax layers beside them or none.
        origin: eB of the epoch, [B].
        memories: whether to move those of RFA layers too, or sliding layers' keys alone.
    """
    modules = {module.rfa_layer_idx: module for module in stack.rfa_attention}
    layers: list[Any] = cache.layers
    before = layers[min(modules)].memories[0].places.origin.clone()
    for index, layer in enumerate(layers):
        if index in modules:
            if memories:
                layer.move(origin, modules[index].motions())
        elif isinstance(getattr(layer, "keys", None), Tensor) and layer.keys.numel():
            by = (before - origin)[:, None, None].to(layer.keys.device)
            turned = stack.rotations[index].turn(layer.keys, by)
            layer.keys = turned if isinstance(layer, DynamicLayer) else layer.keys.copy_(turned)


def _first_layer(stack: Any, cache: Cache | None) -> RFALayer | None:
    """Return the cache layer of a stack's first RFA layer, or None before its first tokens."""
    index = stack.rfa_attention[0].rfa_layer_idx
    if cache is None or len(cache.layers) <= index:
        return None
    layer: Any = cache.layers[index]
    return layer if getattr(layer, "holds", None) == RFALayer.holds and layer.memories else None


def prepare_step(stack: Any, cache: Cache | None) -> None:
    """Move what a cache holds to where the epoch of the next token has it, before a step that may be compiled.

    Args:
        stack: of a configuration that `streams`.
        cache: that of self-attention, or None.
    """
    layer = _first_layer(stack, cache)
    if cache is None or layer is None:
        return
    if layer.steps_left < 1:
        places: Any = layer.memories[0].places
        layout = stack.rfa_attention[0].memory_layout(torch.float32)
        origin = origins(places.count, layout)
        layer.steps_left = 1 + tokens_left(places.count + 1, layout)
        if bool((origin != places.origin).any()) and can_move(stack):
            move_caches(stack, cache, origin)
    layer.steps_left -= 1


def prepare_positions(
    stack: Any,
    cache: Cache | None,
    tokens: Tensor,
    length: int,
    position_ids: Tensor | None,
    *,
    padding_mask: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the positions of a call's tokens, counted from their epochs' origins, and move what the cache holds to there.

    Args:
        stack: of a configuration that `streams`.
        cache: that of self-attention, or None.
        tokens: ids or embeddings of the call, [B, T, …].
        length: T.
        position_ids: [B or 1, T], or None for those that follow what the cache has seen.
        padding_mask: of the new tokens, [B, T], or None.
        starts: where documents start, [B, T], or None.

    Returns:
        The positions, or None for those that the stack takes by itself; and how many positions further RFA layers are to turn
        queries and keys, [B, T], or None: sliding softmax layers beside them see all tokens of a call from one origin.

    Raises:
        ValueError: if the text goes past the positions that the model was trained for, and its keys are not turned by them.
    """
    if seen_keys() is not None:
        return position_ids, None
    if stack.rfa_attention[0].serves_batches:  # attention moves what each text keeps
        if position_ids is None or not can_move(stack):
            return position_ids, None
        return position_ids - origins(position_ids, stack.rfa_attention[0].memory_layout(torch.float32)), None
    layer = _first_layer(stack, cache)
    past: Any = 0 if cache is None else cache.get_seq_length()

    def given() -> Tensor:
        return past + torch.arange(length, device=tokens.device)[None] if position_ids is None else position_ids

    if is_tracing(tokens):  # epochs begin between calls (`prepare_step`)
        if layer is None:
            most = stack.rfa_attention[0].max_distance
            torch._check(length <= most, lambda: TOO_LONG_TO_COMPILE.format(length, most))
            return position_ids, None
        places: Any = layer.memories[0].places
        taken_off = places.origin
        if not torch.compiler.is_exporting():
            ahead = places.count + length - taken_off
            torch._assert_async((ahead <= stack.rfa_attention[0].max_distance).all(), EPOCH_IS_DUE)
        return given() - taken_off[:, None], None
    if layer is not None and length <= layer.tokens_left:
        layer.tokens_left -= length
        return (position_ids, None) if layer.shift is None else (given() - layer.shift, None)

    config, layout = stack.config, stack.rfa_attention[0].memory_layout(torch.float32)
    most = config.max_position_embeddings
    # Features without rotation count from the beginning of a text: there its positions are to begin at 0.
    from_zero = position_ids is not None and stack.reads_unrotated
    is_far = from_zero or (position_ids is not None and can_ask(position_ids) and int(position_ids.max()) >= most)
    if layer is None and length <= layout.max_distance and not is_far:
        return position_ids, None
    before = None if layer is None else layer.memories[0].places
    count = tokens.new_zeros(tokens.shape[0], dtype=torch.int32) if before is None else before.count
    arrivals = arrivals_of(count, length, layout, padding_mask, starts, before)
    number = arrivals.in_document()
    origin, turns, shift = arrivals.origin, None, None
    if is_far:  # a text that starts there: its positions' differences are all that matters
        ahead = given() - number
        ahead = ahead if arrivals.is_token is None else ahead.masked_fill(~arrivals.is_token, 0)
        ahead = ahead.amax(-1, keepdim=True)
        shift = torch.where(ahead >= (1 if from_zero else most), ahead, 0)
    if origin is not None:
        if not can_move(stack):
            check_positions(int((given() if shift is None else given() - shift).max()), most)
        else:
            base = origin[:, -1:] if stack.has_sliding_layers else origin
            turns = base - origin if stack.has_sliding_layers else None
            shift = base if shift is None else base + shift
        if cache is not None and layer is not None:
            is_step = length == 1
            if is_step or (stack.rotations is not None and stack.has_sliding_layers):
                move_caches(stack, cache, origin[:, -1], memories=is_step)
    if layer is not None:
        layer.tokens_left = tokens_left(arrivals.ordinal[:, -1] + 1, layout)
        layer.shift = None if shift is None else shift[:, -1:]
    if turns is not None and not bool(turns.any()):
        turns = None
    return (position_ids if shift is None else given() - shift), turns
