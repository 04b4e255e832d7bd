"""The three forms of the recurrence against a loop in float64, and against each other, with any rows of queries per token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_rfa.models.attention_seq2seq import attend_with_state
from hf_rfa.models.linear_attention import (
    Tokens,
    _chunked_at_once,
    chunked,
    denominator,
    divide,
    final_state,
    linear_attention,
    mask_padding,
    parallel,
    recurrent,
)
from hf_rfa.models.masking import MASKED_LOGIT

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


@dataclass
class Case:
    """One recurrence: its inputs in float64, and what it should give."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_gate: Tensor | None
    weights: Tensor | None
    state: Tensor | None

    @property
    def groups(self) -> int:
        """Rows of queries per token."""
        return self.query.shape[2] // self.key.shape[2]

    def to(self, dtype: torch.dtype, *, grad: bool = False) -> Case:
        fields = {name: None if x is None else x.to(dtype).detach().clone() for name, x in vars(self).items()}
        if grad:
            for tensor in fields.values():
                if tensor is not None:
                    tensor.requires_grad_()
        return Case(**fields)

    def piece(self, piece: slice = slice(None)) -> tuple[Tensor, Tokens]:
        tokens = Tokens(self.key, self.value, self.log_gate, self.weights)
        scales = (None if each is None else each[..., piece] for each in tokens[2:4])
        rows = slice(*(None if end is None else end * self.groups for end in (piece.start, piece.stop)))
        return self.query[..., rows, :], Tokens(tokens.key[..., piece, :], tokens.value[..., piece, :], *scales)


def loop(case: Case) -> tuple[Tensor, Tensor]:
    """The definition, token by token: S = g S + w φ(k) vᵀ, y = φ(q)ᵀ S."""
    state = torch.zeros(*case.key.shape[:2], case.key.shape[-1], case.value.shape[-1], dtype=case.key.dtype)
    if case.state is not None:
        state = case.state
    outputs = []
    for t in range(case.key.shape[2]):
        gate = 1.0 if case.log_gate is None else case.log_gate[:, :, t].exp()[..., None, None]
        weight = 1.0 if case.weights is None else case.weights[:, :, t][..., None, None]
        state = gate * state + weight * case.key[:, :, t, :, None] * case.value[:, :, t, None, :]
        outputs.append(case.query[:, :, t * case.groups : (t + 1) * case.groups] @ state)
    return torch.cat(outputs, dim=2), state


def all_at_once(case: Case, chunk_size: int | None = None) -> tuple[Tensor, Tensor]:
    """`parallel`, or `chunked` if there is a size of chunks."""
    if chunk_size is None:
        return parallel(*case.piece(), initial_state=case.state)
    return chunked(*case.piece(), initial_state=case.state, chunk_size=chunk_size)


def chunks_at_once(case: Case, chunk_size: int) -> tuple[Tensor, Tensor]:
    """`chunked` as an accelerator computes it."""
    return _chunked_at_once(*case.piece(), case.state, chunk_size)


def token_by_token(case: Case) -> tuple[Tensor, Tensor]:
    """`recurrent`, once per token."""
    state = case.state
    if state is None:
        state = torch.zeros(*case.key.shape[:2], case.key.shape[-1], case.value.shape[-1], dtype=case.key.dtype)
    outputs = []
    for t in range(case.key.shape[2]):
        piece = slice(t, t + 1)
        output, state = recurrent(*case.piece(piece), initial_state=state)
        outputs.append(output)
    return torch.cat(outputs, dim=2), state


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30))


@st.composite
def cases(draw, signed: bool | None = None, packed: bool = False) -> Case:
    """Recurrences with gates of any strength and padding; if packed, several documents may follow one another."""
    batch, heads, features, columns = (draw(st.integers(1, n)) for n in (3, 2, 7, 5))
    groups, length = draw(st.integers(1, 3)), draw(st.one_of(st.integers(1, 9), st.sampled_from([63, 64, 65, 100])))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query, key = normal(batch, heads, length * groups, features), normal(batch, heads, length, features)
    if not (draw(st.booleans()) if signed is None else signed):
        query, key = query.exp(), key.exp()
    log_gate = weights = None
    strength = draw(st.sampled_from([None, 0.0, 1e-3, 0.1, 3.0, 30.0]))
    if strength is not None:
        log_gate = -strength * normal(batch, heads, length).exp()
        weights = -log_gate.expm1()
        if strength == 0.0:
            weights = torch.ones_like(weights)
    padding = None
    kind = draw(st.sampled_from(["none", "left", "right", "inside"]))
    if kind != "none":
        padding = torch.ones(batch, length)
        for row in range(batch):
            first = draw(st.integers(0, length))
            last = {"left": 0, "right": length, "inside": draw(st.integers(0, length))}[kind]
            padding[row, min(first, last) : max(first, last)] = 0
    log_gate, weights = mask_padding(padding, log_gate, weights)
    if weights is not None:
        weights = weights.double()
    if packed and draw(st.booleans()):
        starts = torch.rand(batch, 1, length, generator=generator) < draw(st.sampled_from([0.02, 0.3, 1.0]))
        log_gate = query.new_zeros(batch, heads, length) if log_gate is None else log_gate
        log_gate = log_gate.masked_fill(starts, MASKED_LOGIT)
    state = normal(batch, heads, features, columns).abs() if draw(st.booleans()) else None
    return Case(query, key, normal(batch, heads, length, columns), log_gate, weights, state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(case=cases(packed=True), chunk_size=st.integers(1, 110))
@settings(max_examples=60)
def test_forms_agree(dtype, case, chunk_size):
    expected = loop(case)
    given_case = case.to(dtype)
    forms = {
        "parallel": all_at_once(given_case),
        "chunked": all_at_once(given_case, chunk_size),
        "all chunks at once": chunks_at_once(given_case, chunk_size),
        "recurrent": token_by_token(given_case),
    }
    with torch.no_grad():
        forms["recurrent in place"] = token_by_token(given_case.to(dtype))
        forms["chunked without gradients"] = all_at_once(given_case, chunk_size)
        forms["all chunks at once without gradients"] = chunks_at_once(given_case, chunk_size)
    for name, found in forms.items():
        for what, a, b in zip(("output", "state"), found, expected, strict=True):
            assert relative_error(a, b) <= TOLERANCE[dtype], (name, what)
    if case.state is not None:
        assert torch.equal(given_case.state, case.state.to(dtype)), "a state of the caller's stays as it is"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(case=cases(packed=True), chunk_size=st.integers(1, 110))
@settings(max_examples=40)
def test_gradients_agree(dtype, case, chunk_size):
    def gradients(case: Case, run) -> list[Tensor]:
        output, state = run(case)
        generator = torch.Generator().manual_seed(3)
        weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in (output, state)]
        sum((x * w).sum() for x, w in zip((output, state), weights, strict=True)).backward()
        return [x.grad for x in vars(case).values() if x is not None]

    expected = gradients(case.to(torch.float64, grad=True), loop)

    in_chunks = (partial(form, chunk_size=chunk_size) for form in (all_at_once, chunks_at_once))
    for run in (all_at_once, *in_chunks, token_by_token):
        for found, wanted in zip(gradients(case.to(dtype, grad=True), run), expected, strict=True):
            scale = max(float(x.abs().max()) for x in expected)
            error = float((found.double() - wanted).abs().max()) / max(float(wanted.abs().max()), 1e-3 * scale)
            assert error <= TOLERANCE[dtype], run


@pytest.mark.parametrize("strength", [0.0, 1e-6, 1e-4, 1e-2, 1.0])
def test_a_thousand_chunks_at_once_round_as_one_after_another(strength):
    """With documents, which start in every fiftieth chunk on average."""
    shapes = ((1, 2, 2048, 5), (1, 2, 2048, 5), (1, 2, 2048, 3))
    query, key, value = (torch.rand(shape, dtype=torch.float64) for shape in shapes)
    log_gate = -strength * torch.rand(1, 2, 2048, dtype=torch.float64)
    log_gate.masked_fill_(torch.rand(1, 1, 2048) < 0.01, MASKED_LOGIT)
    case = Case(query, key, value, log_gate, None, torch.rand(1, 2, 5, 3, dtype=torch.float64))
    found, one_by_one = (form(case.to(torch.float32), chunk_size=2) for form in (chunks_at_once, all_at_once))
    for a, b, expected in zip(found, one_by_one, loop(case), strict=True):
        assert relative_error(a, expected) <= max(1e-6, 2 * relative_error(b, expected))
    assert found[1].untyped_storage().nbytes() == found[1].nbytes, "the states between are let go"


@given(case=cases(), data=st.data())
@settings(max_examples=60)
def test_any_split_gives_the_same(case, data):
    length = case.key.shape[2]
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, length - 1)), max_size=4)) | {0, length})
    outputs, state = [], case.state
    for start, stop in pairwise(cuts):
        piece = slice(start, stop)
        form = recurrent if stop - start == 1 and state is not None and data.draw(st.booleans()) else chunked
        output, state = form(*case.piece(piece), initial_state=state)
        outputs.append(output)
    expected = loop(case)
    assert relative_error(torch.cat(outputs, dim=2), expected[0]) <= 1e-10
    assert relative_error(state, expected[1]) <= 1e-10


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(data=st.data())
@settings(max_examples=60)
def test_a_final_state_is_that_of_the_loop_in_values_and_gradients(signed, dtype, data):
    """Of cross and encoder attention, and of replayed tokens: with gates, in pieces, and with the row of signed features."""
    case = data.draw(cases(signed=signed))
    length = case.key.shape[2]
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, length - 1)), max_size=4)) | {0, length})
    case.state = None

    def with_loop(case: Case) -> Tensor:
        ones = torch.nn.functional.pad(case.value, (0, 1), value=1.0)
        rows = loop(Case(case.query, case.key, ones, case.log_gate, case.weights, None))[1]
        if not signed:
            return rows
        norm = case.key.norm(dim=-1, keepdim=True)
        last = loop(Case(norm, norm, torch.ones_like(norm), case.log_gate, case.weights, None))[1]
        return torch.cat([rows, torch.nn.functional.pad(last, (rows.shape[-1] - 1, 0))], dim=-2)

    def in_pieces(case: Case) -> Tensor:
        state = None
        for start, stop in pairwise(cuts):
            piece = slice(start, stop)
            floor = 0.1 if signed else None
            state = final_state(case.piece(piece)[1], initial_state=state, denominator_floor=floor)
        return state

    def values_and_gradients(case: Case, run) -> list[Tensor]:
        state = run(case)
        direction = torch.randn(state.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        inputs = [x for x in (case.key, case.value, case.log_gate, case.weights) if x is not None]
        loss = (state * direction.to(state)).sum()
        return [state.detach(), *torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)]

    expected = values_and_gradients(case.to(torch.float64, grad=True), with_loop)
    found = values_and_gradients(case.to(dtype, grad=True), in_pieces)
    scale = max(float(x.abs().max()) for x in expected[1:])
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        least = (
            1e-30 if index == 0 else 0.1 * scale
        )  # a gradient may be the difference of larger ones, which are rounded
        assert float((a.double() - b).abs().max()) / max(float(b.abs().max()), least) <= TOLERANCE[dtype], index


def attention_weights(case: Case, floor: float | None, *, causal: bool = True) -> Tensor:
    """The weights by definition, [B, H, Tq, Tk]: φ(q)·φ(k) w Π g over their sum, or over what the floor makes of it."""
    scores = case.query @ case.key.mT
    factor = torch.ones(*case.key.shape[:3], case.key.shape[2], dtype=scores.dtype)
    if causal:
        if case.log_gate is not None:
            total = case.log_gate.cumsum(-1)
            factor = (total[..., :, None] - total[..., None, :]).exp()
        factor = factor.tril()
    if case.weights is not None:
        factor = factor * case.weights[..., None, :]
    factor = factor.repeat_interleave(case.groups, dim=2)
    scores = scores * factor
    norms = None if floor is None else (factor * case.key.norm(dim=-1)[..., None, :]).sum(-1, keepdim=True)
    return divide(scores, denominator(scores.sum(-1, keepdim=True), case.query, norms, floor))


@pytest.mark.parametrize("signed", [False, True])
@given(data=st.data())
@settings(max_examples=40)
def test_attention_is_the_same_in_any_form_and_is_what_the_weights_say(signed, data):
    case = data.draw(cases(signed=signed))
    options = {"denominator_floor": 0.1 if signed else None}
    whole, state = linear_attention(*case.piece(), chunk_size=1000, **options)
    pieces, other_state = linear_attention(*case.piece(), chunk_size=7, **options)
    weights = attention_weights(case, options["denominator_floor"])
    assert relative_error(pieces, whole) <= 1e-9
    assert relative_error(other_state, state) <= 1e-10
    assert float((weights @ case.value - whole).abs().max()) <= 1e-9 * max(1.0, float(whole.abs().max()))
    for no_grad in (False, True):
        step_state, outputs = None, []
        with torch.set_grad_enabled(not no_grad):
            for t in range(case.key.shape[2]):
                piece = slice(t, t + 1)
                before = step_state
                output, step_state = linear_attention(*case.piece(piece), **options, initial_state=step_state)
                assert not no_grad or before is None or step_state is before, "decoding must reuse the state"
                outputs.append(output)
        assert relative_error(torch.cat(outputs, dim=2), whole) <= 1e-9
        assert relative_error(step_state, state) <= 1e-10


@pytest.mark.parametrize("signed", [False, True])
@given(data=st.data())
@settings(max_examples=40)
def test_attention_to_a_source_is_what_the_weights_say(signed, data):
    """Normalised, with padding, the source summed in two pieces, and each state read by several rows of queries."""
    case = data.draw(cases(signed=signed))
    length, rows = case.key.shape[2], data.draw(st.integers(1, 3))
    cut, options = data.draw(st.integers(0, length)), {"denominator_floor": 0.1 if signed else None}
    state = None
    for piece in (slice(0, cut), slice(cut, length)):
        tokens = case.piece(piece)[1]._replace(log_decay=None)
        state = final_state(tokens, initial_state=state, **options)
    assert state.shape[-2:] == (case.key.shape[-1] + signed, case.value.shape[-1] + 1)
    implied = attention_weights(case, options["denominator_floor"], causal=False)
    expected = implied @ case.value
    tolerance = 1e-9 * max(1.0, float(expected.abs().max()))
    assert float((attend_with_state(case.query, state, **options) - expected).abs().max()) <= tolerance
    several = attend_with_state(case.query.repeat_interleave(rows, dim=0), state, **options)
    assert float((several - expected.repeat_interleave(rows, dim=0)).abs().max()) <= tolerance
    if case.weights is not None:
        for row, column in (case.weights == 0).all(1).nonzero().tolist():
            assert float(implied[row, :, :, column].abs().max()) == 0, "padding must get no weight"


@pytest.mark.parametrize("signed", [False, True])
def test_a_source_of_nothing_but_padding_gives_zero(signed):
    key, value = torch.rand(1, 2, 5, 4), torch.randn(1, 2, 5, 3)
    floor = 0.1 if signed else None
    state = final_state(Tokens(key, value, None, torch.zeros(1, 1, 5)), denominator_floor=floor)
    output = attend_with_state(torch.rand(1, 2, 3, 4), state, denominator_floor=floor)
    assert torch.equal(output, torch.zeros(1, 2, 3, 3))


@pytest.mark.parametrize("signed", [False, True])
def test_denominator_rule_is_scale_free(signed):
    """Rescaling φ(q), φ(k) or the weights (g → 1 makes them all small) changes no output."""
    query, key, value = (torch.randn(1, 2, 40, n, dtype=torch.float64) for n in (8, 8, 4))
    if not signed:
        query, key = query.abs(), key.abs()
    options = {"denominator_floor": 0.1 if signed else None}
    expected, *_ = linear_attention(query, Tokens(key, value), **options)
    for factor in (1e-12, 1e12):
        weights = torch.full((1, 2, 40), factor, dtype=torch.float64)
        torch.testing.assert_close(linear_attention(query * factor, Tokens(key, value), **options)[0], expected)
        torch.testing.assert_close(linear_attention(query, Tokens(key * factor, value), **options)[0], expected)
        tokens = Tokens(key, value, None, weights)
        torch.testing.assert_close(linear_attention(query, tokens, **options)[0], expected)


def test_signed_features_are_never_divided_by_less_than_the_floor():
    """Denominators near or under zero stay finite and bounded: |output| ≤ max |v| / floor."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 2, 300, n, generator=generator) for n in (6, 6, 3))
    output, *_ = linear_attention(query, Tokens(key, value), denominator_floor=0.1)
    assert torch.isfinite(output).all()
    assert float(output.abs().max()) <= float(value.abs().max()) / 0.1 * 1.001


def test_nothing_seen_gives_zero_and_finite_gradients():
    output = torch.zeros(1, 1, 3, 5, requires_grad=True)
    divisor = denominator(output[..., -1:], torch.ones(1, 1, 3, 2), None, None)
    result = divide(output[..., :-1], divisor)
    result.sum().backward()
    assert (result == 0).all()
    assert torch.isfinite(output.grad).all()


@example(strength=1e-9)
@given(strength=st.floats(1e-9, 1.0))
@settings(max_examples=20)
def test_gates_near_one_do_not_collapse(strength):
    """w = 1 − g → 0 scales numerator and normaliser alike: the output stays an average of the values."""
    log_gate = torch.full((1, 1, 50), -strength)
    key = torch.rand(1, 1, 50, 4) + 0.1
    output, *_ = linear_attention(key, Tokens(key, torch.ones(1, 1, 50, 3), log_gate, -log_gate.expm1()))
    torch.testing.assert_close(output, torch.ones_like(output))


def test_empty_sequences_are_refused():
    empty = torch.zeros(1, 1, 0, 4)
    with pytest.raises(ValueError, match="no tokens"):
        chunked(empty, Tokens(empty, empty))
