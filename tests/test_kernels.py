"""The three forms of the recurrence against a loop in float64, and against each other."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_rfa.models.attention_weights import implied_weights
from hf_rfa.models.linear_attention import (
    _chunked_at_once,
    apply_weights,
    attend_with_state,
    chunked,
    mask_padding,
    noncausal,
    normalise,
    parallel,
    parallel_weights,
    recurrent,
    rfa_attention,
    source_state,
    state_shape,
)

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

    def to(self, dtype: torch.dtype, *, grad: bool = False) -> Case:
        fields = {name: None if x is None else x.to(dtype).detach().clone() for name, x in vars(self).items()}
        if grad:
            for tensor in fields.values():
                if tensor is not None:
                    tensor.requires_grad_()
        return Case(**fields)

    def options(self, piece: slice = slice(None)) -> dict:
        return {
            "log_gate": None if self.log_gate is None else self.log_gate[..., piece],
            "weights": None if self.weights is None else self.weights[..., piece],
        }

    def piece(self, piece: slice) -> tuple[Tensor, Tensor, Tensor]:
        return self.query[..., piece, :], self.key[..., piece, :], self.value[..., piece, :]


def loop(case: Case) -> tuple[Tensor, Tensor]:
    """The definition, token by token: S = g S + w φ(k) vᵀ, y = φ(q)ᵀ S."""
    state = torch.zeros(*case.key.shape[:2], case.key.shape[-1], case.value.shape[-1], dtype=case.key.dtype)
    if case.state is not None:
        state = case.state
    outputs = []
    for t in range(case.query.shape[2]):
        gate = 1.0 if case.log_gate is None else case.log_gate[:, :, t].exp()[..., None, None]
        weight = 1.0 if case.weights is None else case.weights[:, :, t][..., None, None]
        state = gate * state + weight * case.key[:, :, t, :, None] * case.value[:, :, t, None, :]
        outputs.append((case.query[:, :, t, None, :] @ state)[:, :, 0])
    return torch.stack(outputs, dim=2), state


def token_by_token(case: Case) -> tuple[Tensor, Tensor]:
    """`recurrent`, once per token."""
    state = case.state
    if state is None:
        state = torch.zeros(*case.key.shape[:2], case.key.shape[-1], case.value.shape[-1], dtype=case.key.dtype)
    outputs = []
    for t in range(case.query.shape[2]):
        piece = slice(t, t + 1)
        output, state = recurrent(*case.piece(piece), **case.options(piece), state=state)
        outputs.append(output)
    return torch.cat(outputs, dim=2), state


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30))


@st.composite
def cases(draw, signed: bool | None = None) -> Case:
    batch, heads, features, columns = (draw(st.integers(1, n)) for n in (3, 2, 7, 5))
    length = draw(st.one_of(st.integers(1, 9), st.sampled_from([63, 64, 65, 100])))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query, key = normal(batch, heads, length, features), normal(batch, heads, length, features)
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
    state = normal(batch, heads, features, columns).abs() if draw(st.booleans()) else None
    return Case(query, key, normal(batch, heads, length, columns), log_gate, weights, state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(case=cases(), chunk_size=st.integers(1, 110))
@settings(max_examples=60)
def test_forms_agree(dtype, case, chunk_size):
    expected = loop(case)
    given_case = case.to(dtype)
    forms = {
        "parallel": parallel(*given_case.piece(slice(None)), **given_case.options(), state=given_case.state),
        "chunked": chunked(
            *given_case.piece(slice(None)), **given_case.options(), state=given_case.state, chunk_size=chunk_size
        ),
        "all chunks at once": _chunked_at_once(
            given_case.query,
            given_case.key,
            apply_weights(given_case.value, given_case.weights),
            given_case.log_gate,
            given_case.state,
            chunk_size,
        ),
        "recurrent": token_by_token(given_case),
    }
    with torch.no_grad():
        in_place = given_case.to(dtype)
        forms["recurrent in place"] = token_by_token(in_place)
    for name, found in forms.items():
        for what, a, b in zip(("output", "state"), found, expected, strict=True):
            assert relative_error(a, b) <= TOLERANCE[dtype], (name, what)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(case=cases(), chunk_size=st.integers(1, 110))
@settings(max_examples=40)
def test_gradients_agree(dtype, case, chunk_size):
    def gradients(case: Case, run) -> list[Tensor]:
        output, state = run(case)
        generator = torch.Generator().manual_seed(3)
        weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in (output, state)]
        sum((x * w).sum() for x, w in zip((output, state), weights, strict=True)).backward()
        return [x.grad for x in vars(case).values() if x is not None]

    expected = gradients(case.to(torch.float64, grad=True), loop)

    def run_parallel(case):
        return parallel(*case.piece(slice(None)), **case.options(), state=case.state)

    def run_chunked(case):
        return chunked(*case.piece(slice(None)), **case.options(), state=case.state, chunk_size=chunk_size)

    for run in (run_parallel, run_chunked, token_by_token):
        for found, wanted in zip(gradients(case.to(dtype, grad=True), run), expected, strict=True):
            scale = max(float(x.abs().max()) for x in expected)
            error = float((found.double() - wanted).abs().max()) / max(float(wanted.abs().max()), 1e-3 * scale)
            assert error <= TOLERANCE[dtype], run.__name__


@given(case=cases(), data=st.data())
@settings(max_examples=60)
def test_any_split_gives_the_same(case, data):
    length = case.query.shape[2]
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, length - 1)), max_size=4)) | {0, length})
    outputs, state = [], case.state
    for start, stop in pairwise(cuts):
        piece = slice(start, stop)
        form = recurrent if stop - start == 1 and state is not None and data.draw(st.booleans()) else chunked
        output, state = form(*case.piece(piece), **case.options(piece), state=state)
        outputs.append(output)
    expected = loop(case)
    assert relative_error(torch.cat(outputs, dim=2), expected[0]) <= 1e-10
    assert relative_error(state, expected[1]) <= 1e-10


def loop_over_all(case: Case) -> tuple[Tensor, Tensor]:
    """Cross and bidirectional attention by definition: sum every key, then let every query read the sum."""
    state = case.state
    for t in range(case.key.shape[2]):
        weight = 1.0 if case.weights is None else case.weights[:, :, t][..., None, None]
        term = weight * case.key[:, :, t, :, None] * case.value[:, :, t, None, :]
        state = term if state is None else state + term
    return torch.stack([(q[:, :, None] @ state)[:, :, 0] for q in case.query.unbind(2)], dim=2), state


def quadratic_over_all(case: Case) -> tuple[Tensor, Tensor]:
    """The same from the matrix of weights."""
    output = parallel_weights(case.query, case.key, weights=case.weights, causal=False) @ case.value
    state = noncausal(case.query, case.key, case.value, weights=case.weights, state=case.state)[1]
    return (output if case.state is None else output + case.query @ case.state), state


def in_pieces(cuts: list[int]):
    """The same, the keys summed piece by piece onto the state."""

    def run(case: Case) -> tuple[Tensor, Tensor]:
        state, weights = case.state, case.weights
        for start, stop in pairwise(cuts):
            piece = slice(start, stop)
            weights = None if case.weights is None else case.weights[..., piece]
            output, state = noncausal(
                case.query, case.key[:, :, piece], case.value[:, :, piece], weights=weights, state=state
            )
        return output, state

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(data=st.data())
@settings(max_examples=60)
def test_noncausal_forms_agree_in_values_and_gradients(dtype, data):
    case = data.draw(cases())
    case.log_gate = None
    length = case.key.shape[2]
    case.query = case.query[:, :, : data.draw(st.integers(1, length))]  # as many queries as there happen to be
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, length - 1)), max_size=4)) | {0, length})
    forms = {
        "quadratic": quadratic_over_all,
        "whole": in_pieces([0, length]),
        "pieces": in_pieces(cuts),
        "token by token": in_pieces(list(range(length + 1))),
    }

    def values_and_gradients(case: Case, run) -> list[Tensor]:
        output, state = run(case)
        generator = torch.Generator().manual_seed(3)
        loss = sum((x * torch.randn(x.shape, generator=generator).to(x)).sum() for x in (output, state))
        inputs = [x for x in vars(case).values() if x is not None]
        return [
            output.detach(),
            state.detach(),
            *torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True),
        ]

    expected = values_and_gradients(case.to(torch.float64, grad=True), loop_over_all)
    scale = max(float(x.abs().max()) for x in expected[2:])
    for name, run in forms.items():
        found = values_and_gradients(case.to(dtype, grad=True), run)
        for index, (a, b) in enumerate(zip(found, expected, strict=True)):
            least = 1e-30 if index < 2 else 1e-3 * scale
            error = float((a.double() - b).abs().max()) / max(float(b.abs().max()), least)
            assert error <= TOLERANCE[dtype], (name, index)


@pytest.mark.parametrize("signed", [False, True])
@given(data=st.data())
@settings(max_examples=40)
def test_attention_is_the_same_in_any_form_and_is_what_the_weights_say(signed, data):
    case = data.draw(cases(signed=signed))
    options = {"signed": signed, "floor": 0.1 if signed else 0.0}
    run = {**case.options(), **options}
    whole, state = rfa_attention(case.query, case.key, case.value, chunk_size=1000, **run)
    pieces, other_state = rfa_attention(case.query, case.key, case.value, chunk_size=7, **run)
    weights = implied_weights(case.query, case.key, **run)
    assert relative_error(pieces, whole) <= 1e-9
    assert relative_error(other_state, state) <= 1e-10
    assert float((weights @ case.value - whole).abs().max()) <= 1e-9 * max(1.0, float(whole.abs().max()))
    for no_grad in (False, True):
        step_state, outputs = None, []
        with torch.set_grad_enabled(not no_grad):
            for t in range(case.query.shape[2]):
                piece = slice(t, t + 1)
                before = step_state
                output, step_state = rfa_attention(
                    *case.piece(piece), **case.options(piece), **options, state=step_state
                )
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
    cut, options = data.draw(st.integers(0, length)), {"signed": signed, "floor": 0.1 if signed else 0.0}
    state = None
    for piece in (slice(0, cut), slice(cut, length)):
        weights = None if case.weights is None else case.weights[..., piece]
        state = source_state(
            case.key[:, :, piece], case.value[:, :, piece], weights=weights, state=state, signed=signed
        )
    assert state.shape[-2:] == state_shape(case.key.shape[-1], case.value.shape[-1], signed=signed)
    implied = implied_weights(case.query, case.key, weights=case.weights, causal=False, **options)
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
    state = source_state(key, value, weights=torch.zeros(1, 1, 5), signed=signed)
    output = attend_with_state(torch.rand(1, 2, 3, 4), state, signed=signed, floor=0.1)
    assert torch.equal(output, torch.zeros(1, 2, 3, 3))


@pytest.mark.parametrize("signed", [False, True])
def test_denominator_rule_is_scale_free(signed):
    """Rescaling φ(q), φ(k) or the weights (g → 1 makes them all small) changes no output."""
    query, key, value = (torch.randn(1, 2, 40, n, dtype=torch.float64) for n in (8, 8, 4))
    if not signed:
        query, key = query.abs(), key.abs()
    options = {"signed": signed, "floor": 0.1}
    expected, _ = rfa_attention(query, key, value, **options)
    for factor in (1e-12, 1e12):
        weights = torch.full((1, 2, 40), factor, dtype=torch.float64)
        torch.testing.assert_close(rfa_attention(query * factor, key, value, **options)[0], expected)
        torch.testing.assert_close(rfa_attention(query, key * factor, value, **options)[0], expected)
        torch.testing.assert_close(rfa_attention(query, key, value, weights=weights, **options)[0], expected)


def test_signed_features_are_never_divided_by_less_than_the_floor():
    """Denominators near or under zero stay finite and bounded: |output| ≤ max |v| / floor."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 2, 300, n, generator=generator) for n in (6, 6, 3))
    output, _ = rfa_attention(query, key, value, signed=True, floor=0.1)
    assert torch.isfinite(output).all()
    assert float(output.abs().max()) <= float(value.abs().max()) / 0.1 * 1.001


def test_nothing_seen_gives_zero_and_finite_gradients():
    output = torch.zeros(1, 1, 3, 5, requires_grad=True)
    result = normalise(output, torch.ones(1, 1, 3, 2), None, 0.0)
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
    output, _ = rfa_attention(key, key, torch.ones(1, 1, 50, 3), log_gate=log_gate, weights=-log_gate.expm1())
    torch.testing.assert_close(output, torch.ones_like(output))


def test_training_time_is_linear_in_length():
    """Eight times the length takes about eight times as long, backward pass included."""

    def seconds(length: int) -> float:
        best = float("inf")
        for _ in range(3):
            inputs = [torch.rand(1, 8, length, 64, requires_grad=True) for _ in range(3)]
            start = time.perf_counter()
            chunked(*inputs, chunk_size=16)[0].sum().backward()
            best = min(best, time.perf_counter() - start)
        return best

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert seconds(8192) < 20 * seconds(1024)
    finally:
        torch.set_num_threads(threads)


def test_empty_sequences_are_refused():
    empty = torch.zeros(1, 1, 0, 4)
    with pytest.raises(ValueError, match="no tokens"):
        chunked(empty, empty, empty)
