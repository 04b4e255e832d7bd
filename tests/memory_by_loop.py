"""What a memory keeps of a text, by adding one token after the other: what hf_rfa/models/memory.py has to give."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def memory_by_loop(
    importance: Tensor,
    recency: Sequence[float],
    *,
    window: int,
    sinks: int = 0,
    slots: int = 0,
    padding: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return which tokens each query sees exactly, [B, H, T, T], and which token is forgotten with each, [B, H, T] or −1.

    Args:
        importance: that of every token when it comes, [B, H, T].
        recency: what it loses with every further token, by head.
        window: number of last tokens.
        sinks: number of first tokens.
        slots: number of most important ones of the others; of equal ones the earlier stay.
        padding: [B, T], 0 for padding, or None.
        starts: [B, T], True where a document starts that sees nothing before it, or None.
    """
    batch, heads, length = importance.shape
    seen = torch.zeros(batch, heads, length, length, dtype=torch.bool)
    forgotten = torch.full((batch, heads, length), -1)
    for row in range(batch):
        tokens = [t for t in range(length) if padding is None or padding[row, t]]
        for head in range(heads):
            values = importance[row, head].tolist()
            first: list[int] = []
            important: list[int] = []
            last: list[int] = []
            arrival: dict[int, int] = {}
            for t in tokens:
                if starts is not None and starts[row, t]:
                    first, important, last, arrival = [], [], [], {}
                arrival[t] = len(arrival)
                if len(first) < sinks:
                    first.append(t)
                else:
                    last.append(t)
                if len(last) > window:
                    important.append(last.pop(0))
                if len(important) > slots:
                    now = {j: values[j] - recency[head] * (arrival[t] - arrival[j]) for j in important}
                    forgotten[row, head, t] = leaves = min(reversed(important), key=lambda j: now[j])
                    important.remove(leaves)
                seen[row, head, t, first + important + last] = True
    return seen, forgotten
