"""The exact part of a memory against a loop over tokens: any sizes, split, padding and documents, in chunks and in steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from hf_rfa.models.memory import (
    EMPTY,
    Exact,
    Importance,
    Memory,
    MemoryLayout,
    Reading,
    arrivals_of,
    attend_in_chunks,
    attend_in_place,
    empty_memory,
    ends_of,
    in_order,
    targets_of,
)
from tests.memory_by_loop import memory_by_loop

SCALING, WIDTH = 0.6, 4


@dataclass
class Case:
    """Some tokens of a batch of texts, and a layout of what is kept of them."""

    layout: MemoryLayout
    query: Tensor
    keys_values: Tensor
    score: Tensor
    padding: Tensor | None
    starts: Tensor | None

    @property
    def length(self) -> int:
        return self.keys_values.shape[2]

    def loop(self) -> tuple[Tensor, Tensor]:
        sizes = {"window": self.layout.window, "sinks": self.layout.sinks, "slots": self.layout.slots}
        recency = [0.0] * self.layout.heads
        return memory_by_loop(self.score, recency, **sizes, padding=self.padding, starts=self.starts)

    def softmax(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Return softmax attention to what is seen, in float64, and the logarithms of its normalizers."""
        key, value = self.keys_values.double().split(WIDTH, dim=-1)
        seen = seen.repeat_interleave(self.query.shape[2] // self.length, dim=2)
        logits = (self.query.double() @ key.mT * SCALING).masked_fill(~seen, -math.inf)
        return logits.softmax(-1) @ value, logits.logsumexp(-1, keepdim=True)

    def empty(self) -> Memory:
        return empty_memory(self.layout, self.score.shape[0], self.score.device)

    def pieces(self, cuts):
        """Yield query, keys and values, score, padding and document starts from cut to cut."""
        groups = self.query.shape[2] // self.length
        for start, stop in pairwise((0, *cuts, self.length)):
            masks = (None if each is None else each[:, start:stop] for each in (self.padding, self.starts))
            inputs = (self.query[:, :, start * groups : stop * groups], self.keys_values[:, :, start:stop])
            yield *inputs, self.score[:, :, start:stop], *masks

    def in_chunks(self, cuts=(), *, joined: bool = True) -> tuple[Exact, Memory]:
        memory, outputs, reading = self.empty(), [], Reading(scaling=SCALING, joined=joined)
        for query, keys_values, score, padding, starts in self.pieces(cuts):
            arrivals = arrivals_of(memory.count, keys_values.shape[2], self.layout.sinks, padding, starts)
            output, memory = attend_in_chunks(query, keys_values, score, arrivals, memory, self.layout, reading)
            outputs.append(output)
        return Exact(
            *(None if each[0] is None else torch.cat(each, dim=2) for each in zip(*outputs, strict=True))
        ), memory

    def in_steps(self) -> tuple[Exact, Memory]:
        memory, outputs, reading = self.empty(), [], Reading(scaling=SCALING, joined=True)
        for query, keys_values, score, padding, _ in self.pieces(range(1, self.length)):
            is_token = None if padding is None else padding != 0
            target = targets_of([memory], replace(self.layout, state_rows=1))[0]  # what is forgotten is told to a state
            output = attend_in_place(query, keys_values, score, memory, target, reading, is_token)
            forgets = torch.ones(score.shape, dtype=torch.bool) if output.forgets is None else output.forgets
            outputs.append(output._replace(forgets=forgets.expand(score.shape)))
        return Exact(*(torch.cat(each, dim=2) for each in zip(*outputs, strict=True))), memory

    def assert_found(self, found: Exact) -> None:
        """Compare outputs, normalizers and what is forgotten with the loop, but for padding, whose own are nobody's."""
        seen, forgotten = self.loop()
        groups = self.query.shape[2] // self.length
        is_token = torch.ones_like(forgotten, dtype=torch.bool)
        if self.padding is not None:
            is_token &= self.padding[:, None] != 0
        rows = is_token.repeat_interleave(groups, dim=2)
        output, log_total = self.softmax(seen)
        assert_close(found.output[rows].double(), output[rows], rtol=1e-4, atol=1e-5)
        if found.log_total is None:
            return
        assert_close(found.log_total[rows].double(), log_total[rows], rtol=1e-4, atol=1e-5)
        assert torch.equal(found.forgets, forgotten >= 0)
        which = forgotten.clamp_min(0)[..., None].expand(-1, -1, -1, 2 * WIDTH)
        assert torch.equal(found.leaving[found.forgets], self.keys_values.gather(2, which)[found.forgets])


@st.composite
def cases(draw, packed: bool = True) -> Case:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    batch, heads, groups, length = (draw(st.integers(1, most)) for most in (3, 3, 3, 40))
    window, sinks, slots = draw(st.integers(1, 9)), draw(st.integers(0, 5)), draw(st.integers(0, 7))
    layout = MemoryLayout(heads=heads, head_dim=WIDTH, window=window, sinks=sinks, slots=slots)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    score = some(batch, heads, length)
    if draw(st.booleans()):
        score = score.round()  # many are equal
    padding = starts = None
    if draw(st.booleans()):
        padding = (torch.rand(batch, length, generator=generator) > draw(st.sampled_from([0.1, 0.5, 0.9]))).long()
    if packed and draw(st.booleans()):
        starts = torch.rand(batch, length, generator=generator) < draw(st.sampled_from([0.05, 0.3]))
        starts = starts if padding is None else starts & (padding != 0)
    rows = some(batch, heads, length * groups, WIDTH), some(batch, heads, length, 2 * WIDTH)
    return Case(layout, *rows, score, padding, starts)


def cuts_of(data, case: Case) -> list[int]:
    """Return where a text is cut into pieces; several documents come at once, as models read them without a cache."""
    most = 4 if case.starts is None else 0
    return sorted(data.draw(st.sets(st.integers(1, max(1, case.length - 1)), max_size=most)) - {case.length})


def assert_same_memory(found: Memory, expected: Memory) -> None:
    """Of the tokens that are kept; what stands in empty places is nobody's."""
    found, expected = in_order(found), in_order(expected)
    assert torch.equal(found.count, expected.count)
    assert torch.equal(found.arrival, expected.arrival)
    filled = expected.arrival >= 0
    assert torch.equal(found.score[filled], expected.score[filled])
    assert torch.equal(found.keys_values[filled], expected.keys_values[filled])


@given(data=st.data())
@settings(max_examples=50)
def test_in_chunks_however_cut_queries_see_and_forget_what_the_loop_says(data):
    case = data.draw(cases())
    cuts, length = cuts_of(data, case), data.draw(st.integers(1, 20))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_rfa.models.memory.CHUNK_LENGTH", length)
        found, memory = case.in_chunks(cuts)
        case.assert_found(found)
        case.assert_found(case.in_chunks(cuts, joined=False)[0])
    assert_same_memory(memory, case.in_chunks()[1])


@given(data=st.data())
@settings(max_examples=40)
@torch.no_grad()
def test_a_step_in_place_is_a_chunk_of_one_token(data):
    case = data.draw(cases(packed=False))
    found, memory = case.in_steps()
    case.assert_found(found)
    assert_same_memory(memory, case.in_chunks()[1])


@given(data=st.data())
@settings(max_examples=40)
def test_the_memory_holds_what_the_next_query_would_see(data):
    case = data.draw(cases())
    seen, _ = case.loop()
    memory = in_order(case.in_chunks()[1])
    for row in range(len(seen)):
        tokens = [t for t in range(case.length) if case.padding is None or case.padding[row, t]]
        for head in range(case.layout.heads):
            expected = [n for n, t in enumerate(tokens) if seen[row, head, tokens[-1], t]]
            assert [each for each in memory.arrival[row, head].tolist() if each != EMPTY] == expected
        assert int(memory.count[row]) == len(tokens)


@given(data=st.data())
@settings(max_examples=40)
def test_a_token_is_seen_up_to_its_end(data):
    """One number says which queries see a token: j ≤ t < until."""
    case = data.draw(cases(packed=False))
    case.padding = None
    seen, _ = case.loop()
    places = torch.arange(case.length).expand_as(case.score)
    score = case.score.masked_fill(places < case.layout.sinks, math.inf)
    until = ends_of(score, places, case.layout)
    now = torch.arange(case.length)[:, None]
    assert torch.equal((places[:, :, None] <= now) & (now < until[:, :, None]), seen)


LAYOUTS = [
    MemoryLayout(heads=2, head_dim=5, window=4, sinks=1, slots=3, state_rows=6),
    MemoryLayout(heads=1, head_dim=3, window=2, dtype=torch.bfloat16),
    MemoryLayout(heads=3, head_dim=4, state_rows=8, dtype=torch.float16),
    MemoryLayout(heads=2, head_dim=4),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layout_counts_the_bytes_of_its_tensors(layout):
    memory = empty_memory(layout, 3, torch.device("cpu"))
    shape, dtype = layout.tensors().get("state", ((0,), torch.float32))
    state = torch.zeros(3, *shape, dtype=dtype)
    assert 3 * layout.num_bytes() == sum(tensor.nbytes for tensor in (*memory.tensors().values(), state))
    row = 2 * layout.head_dim * layout.dtype.itemsize + 8
    assert layout.bytes_per_place() == layout.heads * row
    assert layout.places == layout.window + layout.sinks + layout.slots
    one_more = MemoryLayout(**{**vars(layout), "window": layout.window + 1})
    if layout.window:
        assert one_more.num_bytes() - layout.num_bytes() == layout.bytes_per_place()


@torch.no_grad()
def test_a_memory_stays_where_it_lies():
    layout = MemoryLayout(heads=2, head_dim=WIDTH, window=3, sinks=1, slots=2)
    memory, reading = empty_memory(layout, 2, torch.device("cpu")), Reading(scaling=SCALING)
    places = [tensor.data_ptr() for tensor in memory.tensors().values()]
    for length in (5, 1, 1, 9, 1):
        query, keys_values = torch.randn(2, 2, length, WIDTH), torch.randn(2, 2, length, 2 * WIDTH)
        score = torch.randn(2, 2, length)
        if length == 1:
            attend_in_place(query, keys_values, score, memory, targets_of([memory], layout)[0], reading)
        else:
            arrivals = arrivals_of(memory.count, length, layout.sinks, None, None)
            new = attend_in_chunks(query, keys_values, score, arrivals, in_order(memory), layout, reading)[1]
            memory = new.stored_in(memory)
        assert [tensor.data_ptr() for tensor in memory.tensors().values()] == places
    memory.clear()
    for name, tensor in empty_memory(layout, 2, torch.device("cpu")).tensors().items():
        assert torch.equal(getattr(memory, name), tensor)
    assert [tensor.data_ptr() for tensor in memory.tensors().values()] == places


@torch.no_grad()
def test_scores_order_tokens_as_their_importance_at_any_query():
    importance = Importance(5, 2)
    importance.weight.copy_(torch.randn(2, 5)), importance.recency.copy_(torch.tensor([0.0, 0.3]))
    hidden, ordinal = torch.randn(3, 20, 5), torch.arange(20).expand(3, -1)
    score, when_it_comes = importance.score(hidden, ordinal), importance(hidden)
    assert_close(when_it_comes, torch.einsum("btn,hn->bht", hidden, importance.weight))
    for now in (19, 50):
        at_query = when_it_comes - importance.recency[:, None] * (now - ordinal[0])
        assert torch.equal(at_query.argsort(-1), score.argsort(-1))
