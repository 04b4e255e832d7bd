"""Texts past the trained length: old tokens move along, whatever the pieces, and up to L nothing changes."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from hf_rfa.models.cache_names import cache_argument
from hf_rfa.models.memory import Importance
from tests.decoders import converted, parent
from tests.stream_by_loop import stream_by_loop

L, B = 12, 5
#: Families form cosines in float32, whatever the dtype.
assert_close = partial(torch.testing.assert_close, atol=2e-5, rtol=1e-4)
SIZES: dict[str, dict[str, Any]] = {
    "window": {"window_size": 3},
    "sinks": {"window_size": 4, "num_sinks": 2},
    "slots": {"window_size": 3, "num_sinks": 2, "num_slots": 4},
    "long window": {"window_size": 10, "num_sinks": 1, "num_slots": 2},
    "retrieval": {
        "window_size": 2,
        "num_sinks": 1,
        "num_slots": 3,
        "retrieval_heads": [[0, 1], [2, 0]],
        "retrieval_window": 6,
    },
}


def models(
    name: str = "llama", sizes: str = "slots", dtype: torch.dtype = torch.float64, **fields: Any
) -> tuple[Any, Any]:
    """Return a softmax model and an RFA model whose slots are chosen by random importance."""
    softmax = parent(name, **fields).to(dtype)
    rfa = converted(softmax, feature_map="none", max_distance=L, distance_step=B, **SIZES[sizes])
    for module in rfa.modules():
        if isinstance(module, Importance):
            module.weight.normal_()
            module.recency.uniform_(0, 0.3)
    return softmax, rfa


def read(model: Any, ids: torch.Tensor, pieces: list[int], mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return the logits of a text in pieces."""
    cache, logits, start = DynamicCache(config=model.config), [], 0
    for piece in pieces:
        stop = start + piece
        part = None if mask is None else mask[:, :stop]
        logits.append(model(ids[:, start:stop], attention_mask=part, **cache_argument(cache)).logits)
        start = stop
    return torch.cat(logits, 1)


@pytest.mark.parametrize("sizes", SIZES)
def test_a_text_past_l_is_read_as_the_definition_says(sizes):
    softmax, rfa = models(sizes=sizes)
    ids = torch.randint(3, 61, (2, 41))
    expected = stream_by_loop(softmax, rfa, ids)
    with torch.no_grad():
        assert_close(rfa(ids, use_cache=False).logits, expected)
        assert_close(read(rfa, ids, [41]), expected)
        assert_close(read(rfa, ids, [1] * 41), expected)
        assert_close(read(rfa, ids, [11, 1, 1, 1, 7, 1, 19]), expected)


@torch.no_grad()
@pytest.mark.parametrize("sizes", ["slots", "retrieval"])
@settings(max_examples=12)
@given(data=st.data())
def test_any_padding_and_any_pieces_are_the_definition(sizes, data):
    softmax, rfa = models(sizes=sizes)
    length = data.draw(st.integers(13, 36))
    ids = torch.randint(3, 61, (2, length), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    mask = torch.ones_like(ids)
    mask[0, : data.draw(st.integers(0, length - 2))] = 0
    mask[1, data.draw(st.integers(1, length - 1)) :][: data.draw(st.integers(0, 4))] = 0
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=8)))
    pieces = [stop - start for start, stop in zip([0, *cuts], [*cuts, length], strict=True)]
    expected = stream_by_loop(softmax, rfa, ids, padding=mask)[mask != 0]
    assert_close(read(rfa, ids, pieces, mask)[mask != 0], expected)
    assert_close(rfa(ids, attention_mask=mask, use_cache=False).logits[mask != 0], expected)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "stablelm"])
def test_packed_documents_each_begin_at_0(name):
    softmax, rfa = models(name)
    ids, lengths = torch.randint(3, 61, (1, 60)), [2, 29, B, L - 1, 13]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    apart = [rfa(part, use_cache=False).logits for part in ids.split(lengths, dim=1)]
    assert_close(rfa(ids, position_ids=positions, use_cache=False).logits, torch.cat(apart, 1))
    if name == "llama":
        assert_close(apart[1], stream_by_loop(softmax, rfa, ids[:, 2:31]))


@torch.no_grad()
def test_up_to_l_nothing_changes():
    _, rfa = models(dtype=torch.float32)
    plain = converted(parent("llama"), feature_map="none", max_distance=100, **SIZES["slots"])
    plain.load_state_dict(rfa.state_dict())
    ids = torch.randint(3, 61, (2, L))
    assert torch.equal(read(rfa, ids, [5, 1, 6]), read(plain, ids, [5, 1, 6]))
    assert not hasattr(rfa.model, "rotations"), "rotations were looked for before they are needed"


@torch.no_grad()
def test_a_text_that_starts_at_position_ten_million_is_as_good():
    _, rfa = models(dtype=torch.float32)
    ids = torch.randint(3, 61, (2, 40))
    expected = rfa(ids, use_cache=False).logits
    start = torch.arange(40)[None] + 10**7
    assert_close(rfa(ids, position_ids=start, use_cache=False).logits, expected)
    cache, logits = DynamicCache(config=rfa.config), []
    for t in range(40):
        logits.append(rfa(ids[:, t : t + 1], position_ids=start[:, t : t + 1], **cache_argument(cache)).logits)
    assert_close(torch.cat(logits, 1), expected)


@torch.no_grad()
def test_token_ten_million_is_as_good_as_token_ten():
    """What a cache holds, counted from 10⁷ tokens on."""
    _, rfa = models(dtype=torch.float32)
    ids, far = torch.randint(3, 61, (2, 60)), 2 * 10**6 * B
    cache = rfa(ids[:, :20], use_cache=True).past_key_values
    expected = read_on(rfa, copy.deepcopy(cache), ids[:, 20:])
    for layer in cache.layers:
        (memory,) = layer.memories
        memory.arrival[memory.arrival >= 0] += far  # sinks too: they are behind all others from here on
        memory.arrival[memory.score == float("inf")] -= far
        memory.origin += far
        layer.cumulative_length += far
        layer.ask_again()
    assert_close(read_on(rfa, cache, ids[:, 20:]), expected)


def read_on(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of tokens that follow what a cache holds, first some at once and then one by one."""
    parts = [ids[:, :17], *ids[:, 17:].split(1, dim=1)]
    return torch.cat([model(part, **cache_argument(cache)).logits for part in parts], 1)
