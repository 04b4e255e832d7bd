"""What slots hold against a loop over tokens, for texts that come in pieces of any length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_rfa.models import lifetimes
from hf_rfa.models.exact_attention import NewTokens, absorb
from hf_rfa.models.lifetimes import arrivals_of
from hf_rfa.models.memory import MemoryLayout, Places, empty_memory
from tests.memory_by_loop import memory_by_loop

ROWS, HEADS = 2, 2


def take_piece(
    places: Places,
    layout: MemoryLayout,
    start: int,
    importance: Tensor,
    padding: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Places, Tensor, Tensor, Tensor]:
    """Take tokens in whose only key and value is their number in the text, counted from 1.

    Returns the places after them; which tokens they see, [B, H, T, N]; the numbers of these, [B, H, N]; and which token
    leaves with each of them, counted from 0, [B, H, T], or −1.
    """
    length = importance.shape[2]
    number = torch.arange(start, start + length, dtype=torch.float32) + 1
    keys_values = number[:, None].expand(ROWS, HEADS, -1, 2)
    arrivals = arrivals_of(places.count, length, layout, padding, starts, places)
    new = NewTokens(query=keys_values, keys_values=keys_values, arrivals=arrivals, score=importance)
    after, tokens, rows = absorb(new, places, layout)
    leaves = tokens.leaves(places.count, arrivals)
    visible = tokens.visible(arrivals.ordinal)
    left = torch.where(leaves < 0, -1, rows[..., 0].gather(-1, leaves.clamp_min(0)).long() - 1)
    return after, visible, rows[..., 0].long(), left


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
    places, start = empty_memory(layout, ROWS, torch.device("cpu")).places, 0
    lengths = [min(chunk_length, piece - done) for piece in pieces for done in range(0, piece, chunk_length)]
    for count in lengths:
        stop = start + count
        now, begins = (None if mask is None else mask[:, start:stop] for mask in (padding, starts))
        places, visible, number, left = take_piece(places, layout, start, importance[:, :, start:stop], now, begins)
        by_number = torch.zeros(ROWS, HEADS, count, length + 1, dtype=torch.bool)
        by_number.scatter_reduce_(-1, number[:, :, None].expand(-1, -1, count, -1), visible, "amax")
        differs = by_number[..., 1:] != seen[:, :, start:stop]
        if padding is not None:
            differs &= (padding[:, start:stop] != 0)[:, None, :, None]
        assert not differs.any(), f"tokens {differs.nonzero().tolist()} from {start} on"
        assert torch.equal(left, forgotten[:, :, start:stop])
        places, start = places.in_order(), stop


def test_a_piece_shorter_than_the_slots_is_compared_with_those_it_can_push_out(monkeypatch: pytest.MonkeyPatch):
    """With many slots all tokens of a memory would be compared with each other at every piece."""
    sizes: list[int] = []
    compare = lifetimes._until_among

    def counted(score: Tensor, *arguments: Any) -> Tensor:
        sizes.append(score.shape[-1])
        return compare(score, *arguments)

    monkeypatch.setattr(lifetimes, "_until_among", counted)
    layout = MemoryLayout(heads=HEADS, head_dim=1, window=6, sinks=2, slots=700)
    places = empty_memory(layout, ROWS, torch.device("cpu")).places
    for start in range(0, 800, 10):
        places, *_ = take_piece(places, layout, start, torch.rand(ROWS, HEADS, 10))
    assert set(sizes) == {6 + 10 + 10}
