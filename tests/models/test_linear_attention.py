"""The forms of the recurrence against a loop in float64, with any rows of queries per token, and the rule of division.

`test_window.py` has the attention that is built on them, and `test_attention_to_all_keys_is_what_the_features_say` in it the
two halves of cross and bidirectional attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from hf_rfa.models.linear_attention import (
    Tokens,
    _chunked_at_once,
    chunked,
    linear_attention,
    mask_padding,
    parallel,
    recurrent,
    split_tokens,
)
from hf_rfa.models.masking import MASKED_LOGIT

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


@dataclass
class Case:
    """The inputs of a recurrence."""

    query: Tensor
    tokens: Tokens
    state: Tensor | None

    def tensors(self) -> list[Tensor | None]:
        return [self.query, *self.tokens, self.state]

    def to(self, dtype: torch.dtype, *, grad: bool = False) -> Case:
        copies = (None if x is None else x.to(dtype, copy=True).requires_grad_(grad) for x in self.tensors())
        query, *tokens, state = copies
        return Case(query, Tokens(*tokens), state)

    def state_or_zeros(self) -> Tensor:
        key, value = self.tokens[:2]
        return key.new_zeros(*key.shape[:2], key.shape[-1], value.shape[-1]) if self.state is None else self.state


def loop(case: Case) -> tuple[Tensor, Tensor]:
    """The definition, token by token: S = g S + w φ(k) vᵀ, y = φ(q)ᵀ S."""
    key, value, log_decay, input_scale = case.tokens
    state, outputs, groups = case.state_or_zeros(), [], case.query.shape[2] // key.shape[2]
    for t in range(key.shape[2]):
        gate = 1.0 if log_decay is None else log_decay[:, :, t].exp()[..., None, None]
        weight = 1.0 if input_scale is None else input_scale[:, :, t][..., None, None]
        state = gate * state + weight * key[:, :, t, :, None] * value[:, :, t, None, :]
        outputs.append(case.query[:, :, t * groups : (t + 1) * groups] @ state)
    return torch.cat(outputs, dim=2), state


def token_by_token(case: Case) -> tuple[Tensor, Tensor]:
    """`recurrent`, once per token."""
    outputs, state = [], case.state_or_zeros()
    for query, token in split_tokens(1, case.query, case.tokens):
        output, state = recurrent(query, token, state)
        outputs.append(output)
    return torch.cat(outputs, dim=2), state


@st.composite
def cases(draw) -> Case:
    """Recurrences with gates of any strength, padding, and documents that follow one another."""
    batch, heads, features, columns = (draw(st.integers(1, n)) for n in (3, 2, 7, 5))
    groups, length = draw(st.integers(1, 3)), draw(st.one_of(st.integers(1, 9), st.sampled_from([63, 64, 65, 100])))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query, key = normal(batch, heads, length * groups, features), normal(batch, heads, length, features)
    if draw(st.booleans()):
        query, key = query.exp(), key.exp()
    log_decay = input_scale = padding = None
    strength = draw(st.sampled_from([None, 0.0, 1e-3, 0.1, 3.0, 30.0]))
    if strength is not None:
        log_decay = -strength * normal(batch, heads, length).exp()
        input_scale = -log_decay.expm1() if strength else torch.ones_like(log_decay)
    if draw(st.booleans()):
        padding = torch.rand(batch, length, generator=generator) > draw(st.sampled_from([0.1, 0.5, 1.0]))
    log_decay, input_scale = mask_padding(padding, log_decay, input_scale)
    if log_decay is not None and draw(st.booleans()):
        starts = torch.rand(batch, 1, length, generator=generator) < draw(st.sampled_from([0.02, 0.3, 1.0]))
        log_decay = log_decay.masked_fill(starts, MASKED_LOGIT)
    state = normal(batch, heads, features, columns).abs() if draw(st.booleans()) else None
    return Case(query, Tokens(key, normal(batch, heads, length, columns), log_decay, input_scale), state)


def values_and_gradients(case: Case, run: Callable[[Case], tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """Return what ``run`` computes of a case, and the gradients of all inputs of a sum of it."""
    outputs, generator = run(case), torch.Generator().manual_seed(3)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in outputs]
    loss = sum((x * w).sum() for x, w in zip(outputs, weights, strict=True))
    gradients = torch.autograd.grad(loss, [x for x in case.tensors() if x is not None])
    return [x.detach() for x in outputs], list(gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(case=cases(), chunk_size=st.integers(1, 110))
@settings(max_examples=40)
def test_forms_agree_in_values_and_gradients(dtype, case, chunk_size):
    def in_chunks(case: Case) -> tuple[Tensor, Tensor]:
        return chunked(case.query, case.tokens, case.state, chunk_size)

    def all_chunks_at_once(case: Case) -> tuple[Tensor, Tensor]:
        return _chunked_at_once(case.query, case.tokens, case.state, chunk_size)

    def whole(case: Case) -> tuple[Tensor, Tensor]:
        return parallel(case.query, case.tokens, case.state)

    expected, gradients = values_and_gradients(case.to(torch.float64, grad=True), loop)
    scale = 1e-3 * max(float(x.abs().max()) for x in gradients)

    def assert_near(found: list[Tensor], wanted: list[Tensor], least: float) -> None:
        for one, other in zip(found, wanted, strict=True):
            assert float((one.double() - other).abs().max()) <= TOLERANCE[dtype] * max(float(other.abs().max()), least)

    for run in (whole, in_chunks, all_chunks_at_once, token_by_token):
        values, found = values_and_gradients(case.to(dtype, grad=True), run)
        assert_near(values, expected, 1e-30)
        assert_near(found, gradients, scale)
    rounded = case.to(dtype)
    with torch.no_grad():
        assert_near(list(in_chunks(rounded)), expected, 1e-30)
        assert_near(list(all_chunks_at_once(rounded)), expected, 1e-30)
        assert case.state is None or torch.equal(rounded.state, case.state.to(dtype)), "the caller's stays as it is"
        assert_near(list(token_by_token(rounded)), expected, 1e-30)


@pytest.mark.parametrize("strength", [0.0, 1e-6, 1e-4, 1e-2, 1.0])
def test_a_thousand_chunks_at_once_round_as_one_after_another(strength):
    """With documents, which start in every fiftieth chunk on average."""
    shapes = ((1, 2, 2048, 5), (1, 2, 2048, 5), (1, 2, 2048, 3))
    query, key, value = (torch.rand(shape, dtype=torch.float64) for shape in shapes)
    log_decay = -strength * torch.rand(1, 2, 2048, dtype=torch.float64)
    log_decay.masked_fill_(torch.rand(1, 1, 2048) < 0.01, MASKED_LOGIT)
    case = Case(query, Tokens(key, value, log_decay), torch.rand(1, 2, 5, 3, dtype=torch.float64))
    rounded = case.to(torch.float32)
    at_once, one_by_one = (
        form(rounded.query, rounded.tokens, rounded.state, 2) for form in (_chunked_at_once, chunked)
    )
    for one, other, expected in zip(at_once, one_by_one, loop(case), strict=True):
        errors = [float((x.double() - expected).abs().max() / expected.abs().max()) for x in (one, other)]
        assert errors[0] <= max(1e-6, 2 * errors[1])
    assert at_once[1].untyped_storage().nbytes() == at_once[1].nbytes, "the states between are let go"


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
        assert_close(linear_attention(query * factor, Tokens(key, value), **options)[0], expected)
        assert_close(linear_attention(query, Tokens(key * factor, value), **options)[0], expected)
        assert_close(linear_attention(query, Tokens(key, value, None, weights), **options)[0], expected)
