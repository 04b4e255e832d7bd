"""What slots hold against a loop over tokens, for texts that come in pieces of any length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_rfa.models import exact_attention
from hf_rfa.models.exact_attention import Chunk, arrivals_of
from hf_rfa.models.memory import Memory, MemoryLayout, empty_memory
from tests.memory_by_loop import memory_by_loop

ROWS, HEADS = 2, 2


def take_piece(
    memory: Memory,
    layout: MemoryLayout,
    start: int,
    importance: Tensor,
    padding: Tensor | None = None,
    starts: Tensor | None = None,
) -> list[tuple[Chunk, Memory]]:
    """Take tokens in, a chunk at a time, whose only key and value is their number in the text, counted from 1."""
    length = importance.shape[2]
    number = torch.arange(start, start + length, dtype=torch.float32) + 1
    keys_values = number[:, None].expand(ROWS, HEADS, -1, 2)
    arrivals = arrivals_of(memory.count, length, layout, padding, starts, memory)
    lengths = exact_attention._chunk_lengths(keys_values, arrivals)
    return list(exact_attention._chunks(keys_values, importance, arrivals, memory, layout, None, lengths))


@settings(max_examples=60, deadline=None)
@given(
    window=st.integers(1, 5),
    sinks=st.integers(0, 3),
    slots=st.integers(1, 14),
    pieces=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    chunk_length=st.integers(1, 16),
    most=st.sampled_from([2, 1000]),  # scores up to 2 are often equal
    is_padded=st.booleans(),
    is_packed=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_a_text_in_pieces_is_seen_and_forgotten_as_by_a_loop_over_its_tokens(
    window, sinks, slots, pieces, chunk_length, most, is_padded, is_packed, seed
):
    generator = torch.Generator().manual_seed(seed)
    length = sum(pieces)
    importance = torch.randint(most, (ROWS, HEADS, length), generator=generator).float()
    padding = (torch.rand(ROWS, length, generator=generator) < 0.7).long() if is_padded else None
    starts = torch.rand(ROWS, length, generator=generator) < 0.1 if is_packed else None
    if starts is not None and padding is not None:
        starts = starts & (padding != 0)
    sizes = {"window": window, "sinks": sinks, "slots": slots}
    seen, forgotten = memory_by_loop(importance, [0.0] * HEADS, padding=padding, starts=starts, **sizes)
    layout = MemoryLayout(heads=HEADS, head_dim=1, **sizes)
    memory, start = empty_memory(layout, ROWS, torch.device("cpu")), 0
    for piece in pieces:
        stop = start + piece
        now, begins = (None if mask is None else mask[:, start:stop] for mask in (padding, starts))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exact_attention, "CHUNK_LENGTH", chunk_length)
            taken = take_piece(memory, layout, start, importance[:, :, start:stop], now, begins)
        for chunk, after in taken:
            memory, stop = after, start + chunk.leaves.shape[-1]
            number = chunk.keys_values[..., 0].long()
            by_number = torch.zeros(ROWS, HEADS, stop - start, length + 1, dtype=torch.bool)
            places = number[:, :, None].expand(-1, -1, stop - start, -1)
            by_number.scatter_reduce_(-1, places, chunk.visible(), "amax")
            differs = by_number[..., 1:] != seen[:, :, start:stop]
            if padding is not None:
                differs &= (padding[:, start:stop] != 0)[:, None, :, None]
            assert not differs.any(), f"tokens {differs.nonzero().tolist()} from {start} on"
            leaves = number.gather(-1, chunk.leaves) - 1
            assert torch.equal(leaves.masked_fill(~chunk.forgets, -1), forgotten[:, :, start:stop])
            start = stop


def test_a_piece_shorter_than_the_slots_is_compared_with_those_it_can_push_out(monkeypatch: pytest.MonkeyPatch):
    """With many slots all tokens of a memory would be compared with each other at every piece."""
    sizes: list[int] = []
    compare = exact_attention._ends_among

    def counted(score: Tensor, *arguments: Any) -> Tensor:
        sizes.append(score.shape[-1])
        return compare(score, *arguments)

    monkeypatch.setattr(exact_attention, "_ends_among", counted)
    layout = MemoryLayout(heads=HEADS, head_dim=1, window=6, sinks=2, slots=700)
    memory = empty_memory(layout, ROWS, torch.device("cpu"))
    for start in range(0, 800, 10):
        ((_, memory),) = take_piece(memory, layout, start, torch.rand(ROWS, HEADS, 10))
    assert set(sizes) == {6 + 10 + 10}
