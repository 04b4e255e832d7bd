"""Long texts block by block: features of one block at a time, forward and backward.

The features of a long text fill more memory than all else, and fresh memory costs more time than computing them. Here a
block's features live only while it is being computed. With gradients a block is computed again when its gradients are due:
memory grows by queries, keys, values and a state per block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

#: Tokens of a block, a multiple of the usual chunk size: what of them fits into a CPU's caches.
BLOCK_LENGTH = 512
#: With gradients texts up to this length are computed at once: that takes more memory, and a fifth less time.
WHOLE_WITH_GRADIENTS = 2048

#: (queries, keys, values, log-gates, weights, state, shift) → (outputs, state, shift), of some tokens in succession.
Run = Callable[..., tuple[Tensor, Tensor, Tensor | None]]


def in_blocks(length: int) -> bool:
    """Return whether a text is computed block by block."""
    if torch.compiler.is_compiling():
        return False
    return length > (WHOLE_WITH_GRADIENTS if torch.is_grad_enabled() else BLOCK_LENGTH)


def blockwise(
    run: Run,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor | None,
    weights: Tensor | None,
    state: Tensor | None,
    shift: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return what ``run`` returns of the whole text, block by block.

    Args:
        run: attends to some tokens; the same arguments have to give the same results again.
        query: [B, H, T, d].
        key: [B, H, T, d].
        value: [B, H, T, d].
        log_gate: [B, H, T] or None.
        weights: [B, H or 1, T] or None.
        state: the state so far, or None.
        shift: that of the state's features (`hf_rfa.models.feature_maps.Features`), or None.
    """
    count = -(-query.shape[-2] // BLOCK_LENGTH)

    def blocks(tensor: Tensor | None, dim: int) -> Sequence[Tensor | None]:
        # Split once, not slice by slice: the gradient of each slice would be as long as the text.
        return [None] * count if tensor is None else tensor.split(BLOCK_LENGTH, dim=dim)

    outputs = []
    rows = (blocks(each, -2) for each in (query, key, value))
    steps = (blocks(each, -1) for each in (log_gate, weights))
    if torch.is_grad_enabled():
        run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
    for block in zip(*rows, *steps, strict=True):
        output, state, shift = run(*block, state, shift)
        outputs.append(output)
    return torch.cat(outputs, dim=-2), cast(Tensor, state), shift
