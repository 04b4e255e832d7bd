"""The exact window, sinks and slots against a loop over tokens in float64, on any padding, split, chunk and gate."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_rfa.convert.attention_weights import ExactWindow, log_attention_weights, seen_in_slots
from hf_rfa.models.feature_maps import FEATURE_MAPS, Features
from hf_rfa.models.linear_attention import MASKED_LOGIT, Tokens, denominator
from hf_rfa.models.sinks_and_slots import split_importance
from hf_rfa.models.sliding_window import (
    Step,
    Stream,
    WindowSizes,
    in_stream_order,
    sliding_window_attention,
    stream_of,
)


def attend(
    query,
    key,
    value,
    features,
    size,
    scaling,
    *,
    sinks=0,
    slots=0,
    state=None,
    window=None,
    denominator_floor=None,
    **options,
):
    """Attend to some tokens as the attention layer does; return outputs, state and window."""
    chunk_size = options.pop("chunk_size", 5)
    sizes = WindowSizes(size, sinks, slots)
    stream = stream_of(Tokens(key, value, **options), window, sizes, chunk_size=chunk_size)
    query = in_stream_order(query, stream)
    given = {"scaling": scaling, "denominator_floor": denominator_floor, "chunk_size": chunk_size}
    leaving = stream.leaving()
    phi = features(query, leaving.key)
    output, state = sliding_window_attention(query, stream, leaving, phi, initial_state=state, **given)
    return output, state, stream.window()


@dataclass
class Case:
    """Queries, keys and values, a feature map given by two matrices, and the options of the attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_gate: Tensor | None
    padding: Tensor | None
    maps: tuple[Tensor, Tensor, Tensor]
    size: int
    signed: bool
    sinks: int
    importance: Tensor | None
    slots: int
    recency: float
    scaling: float = 0.7

    def features(self, query: Tensor, key: Tensor) -> Features:
        of_query, of_key, of_offset = (matrix.to(query.dtype) for matrix in self.maps)
        query_features, key_features = query @ of_query, key @ of_key
        if not self.signed:
            query_features, key_features = query_features.exp(), key_features.exp()
        return Features(query_features, key_features, query @ of_offset, None)

    def to(self, dtype: torch.dtype) -> Case:
        names = ("query", "key", "value", "log_gate")
        moved = {name: getattr(self, name) for name in names}
        moved = {name: None if x is None else x.detach().to(dtype).requires_grad_() for name, x in moved.items()}
        return Case(**{**vars(self), **moved})

    def run(self, cuts=(), chunk_size=5):
        """Run piece by piece; return outputs [B, H, T, d], state and window."""
        outputs, state, window = [], None, None
        for start, stop in pairwise((0, *cuts, self.query.shape[2])):
            padding = None if self.padding is None else self.padding[:, start:stop]
            log_gate, kept = None, None
            if self.log_gate is not None:
                log_gate = self.log_gate[..., start:stop]
                kept = 1 - log_gate.exp()
            if padding is not None:
                kept = torch.ones_like(self.query[..., start:stop, 0]) if kept is None else kept
                kept = kept * padding[:, None].to(kept.dtype)
                log_gate = None if log_gate is None else log_gate * padding[:, None].to(kept.dtype)
                padding = None if bool((padding != 0).all()) else padding
            piece = (x[:, :, start:stop] for x in (self.query, self.key, self.value))
            options = {"log_decay": log_gate, "input_scale": kept, "padding_mask": padding, "chunk_size": chunk_size}
            options |= {"state": state, "window": window, "denominator_floor": 0.1 if self.signed else None}
            options |= {"sinks": self.sinks, "slots": self.slots}
            if self.importance is not None:
                recency = torch.full_like(self.importance[..., start:stop], self.recency)
                recency = recency if padding is None else recency * padding[:, None]
                options |= {"importance": self.importance[..., start:stop], "recency": recency}
            output, state, window = attend(*piece, self.features, self.size, self.scaling, **options)
            outputs.append(output)
        return torch.cat(outputs, dim=2), state, window

    def loop(self) -> tuple[Tensor, Tensor]:
        """Return outputs and weights, token by token: padding is left out of each row before anything else."""
        length, rows = self.query.shape[2], {}
        phi_q, phi_k, offset, _ = self.features(self.query, self.key)
        for b in range(self.query.shape[0]):
            places = range(self.query.shape[2])
            tokens = [t for t in places if self.padding is None or self.padding[b, t]]
            for h in range(self.query.shape[1]):
                for n, t in enumerate(tokens):
                    terms, far, mass = {}, 0.0, 0.0
                    left = tokens[self.sinks : max(self.sinks, n + 1 - self.size)]
                    by_importance = []
                    if self.slots:
                        now = {
                            j: float(self.importance[b, h, j]) - self.recency * (n - m) for m, j in enumerate(tokens)
                        }
                        by_importance = sorted(left, key=lambda j: -now[j])
                    for m, j in enumerate(tokens[: n + 1]):
                        factor = 1.0
                        if self.log_gate is not None and m >= self.sinks:
                            between = tokens[m + 1 : n + 1]
                            factor = (1 - self.log_gate[b, h, j].exp()) * self.log_gate[b, h, between].sum().exp()
                        if n - m < self.size or m < self.sinks or j in by_importance[: self.slots]:
                            score = self.query[b, h, t] @ self.key[b, h, j] * self.scaling + offset[b, h, t, 0]
                            terms[j] = score.exp() * factor
                        else:
                            terms[j] = phi_q[b, h, t] @ phi_k[b, h, j] * factor
                            far = far + terms[j]
                            mass = mass + phi_k[b, h, j].norm() * factor
                    near = sum(terms.values()) - far
                    if self.signed and isinstance(far, Tensor):
                        far = denominator(far.view(1), phi_q[b, h, t], mass.view(1), 0.1)[0]
                        if far <= 0:
                            continue
                    row = torch.stack(list(terms.values())) / (near + far)
                    rows[b, h, t] = self.value.new_zeros(length).index_put((torch.tensor(list(terms)),), row)
        nothing = self.value.new_zeros(length)
        weights = [rows.get(place, nothing) for place in product(*map(range, self.query.shape[:3]))]
        weights = torch.stack(weights).view(*self.query.shape[:3], length)
        return weights @ self.value, weights


@st.composite
def cases(draw, signed=False):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    batch, heads, length = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 17))
    width, features = draw(st.integers(1, 4)), draw(st.integers(1, 5))

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    padding = None
    if draw(st.booleans()):
        padding = (torch.rand(batch, length, generator=generator) > 0.4).long()
    log_gate = -normal(batch, heads, length).exp() if draw(st.booleans()) else None
    inputs = [normal(batch, heads, length, n) for n in (width, width, 3)]
    maps = normal(width, features), normal(width, features), normal(width, 1)
    slots = draw(st.integers(0, 5)) if log_gate is None else 0
    importance = normal(batch, heads, length).round(decimals=1) if slots else None
    recency = draw(st.sampled_from([0.0, 0.03125, 0.0917]))  # with 0, some of them are equal
    size, sinks = draw(st.integers(1, 6)), draw(st.integers(0, 4))
    return Case(*inputs, log_gate, padding, maps, size, signed, sinks, importance, slots, recency)


def tokens_of(case: Case, x: Tensor) -> Tensor:
    """Return [B, H, T, n] without padding, whose own outputs are nobody's."""
    return x if case.padding is None else x.transpose(1, 2)[case.padding.bool()]


def pieces(data, case: Case) -> list[int]:
    return sorted(
        data.draw(st.sets(st.integers(1, max(1, case.query.shape[2] - 1)), max_size=4)) - {case.query.shape[2]}
    )


@pytest.mark.parametrize("signed", [False, True])
@given(data=st.data())
@settings(max_examples=60)
def test_window_is_what_a_loop_over_tokens_gives_however_it_is_cut(signed, data):
    case = data.draw(cases(signed=signed))
    expected, weights = case.loop()
    found, *_ = case.run()
    one_hot = torch.eye(case.value.shape[2], dtype=torch.float64).expand(*case.value.shape[:3], -1)
    implied, *_ = Case(**{**vars(case), "value": one_hot}).run()
    torch.testing.assert_close(tokens_of(case, found), tokens_of(case, expected), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(tokens_of(case, implied), tokens_of(case, weights), rtol=1e-9, atol=1e-9)
    cut, state, window = case.run(pieces(data, case), chunk_size=data.draw(st.integers(1, 20)))
    torch.testing.assert_close(tokens_of(case, cut), tokens_of(case, expected), rtol=1e-9, atol=1e-9)
    whole = case.run()
    torch.testing.assert_close(state, whole[1], rtol=1e-9, atol=1e-12)
    weight = -2 if case.slots else -1
    known = window[..., weight] > -1e29  # what stands in empty places is nobody's either
    assert torch.equal(known, whole[2][..., weight] > -1e29)
    torch.testing.assert_close(window[known], whole[2][known], rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        one_by_one = case.run(range(1, case.query.shape[2]))[0]
    torch.testing.assert_close(tokens_of(case, one_by_one), tokens_of(case, expected), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@given(data=st.data())
@settings(max_examples=25)
def test_a_step_is_a_stream_of_one_token(dtype, data):
    """The form of few operations against the one for any number of tokens, which takes what is told to be padded."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10_000)))
    sizes = WindowSizes(data.draw(st.integers(1, 4)), data.draw(st.integers(0, 3)), data.draw(st.integers(0, 4)))
    past, batch, heads = data.draw(st.integers(1, 14)), 2, 2
    compute = torch.promote_types(dtype, torch.float32)

    def some(*shape: int) -> Tensor:
        return torch.randn(batch, heads, *shape, generator=generator).to(dtype).to(compute)

    def tokens(count: int, padding: Tensor | None) -> Tokens:
        ranks = [some(count), torch.full_like(some(count), 0.25)] if sizes.slots else [None, None]
        return Tokens(some(count, 3), some(count, 2), None, None, padding, *ranks)

    before = torch.ones(batch, past, dtype=torch.long)
    before[0, : data.draw(st.integers(0, past))] = 0  # so that a row may lack sinks
    known = tokens(past, before)
    if sizes.slots:
        known = known._replace(recency=known.recency * before[:, None])
    scale = before[:, None].to(compute).expand_as(known.key[..., 0])
    window = stream_of(known._replace(input_scale=scale), None, sizes, dtype=dtype).window()
    new = tokens(1, None)
    all_held = bool(
        (window[:, 0, : sizes.sinks, 5] > MASKED_LOGIT / 2).all()
    )  # after 3 columns of keys and 2 of values
    step = stream_of(new, window, sizes, dtype=dtype, sinks_held=all_held and data.draw(st.booleans()))
    stream = stream_of(new._replace(padding_mask=torch.ones(batch, 1)), window, sizes, dtype=dtype)
    assert isinstance(step, Step)
    assert isinstance(stream, Stream)
    query, offset = some(3, 3), some(3, 1)
    for found, expected in zip(step.attend(query, offset, 1), stream.attend(query, offset, 1), strict=True):
        torch.testing.assert_close(found, expected)
    alone = stream.attend(query * 0.5, torch.zeros_like(offset), 1)[0]
    torch.testing.assert_close(step.attend_alone(query, 0.5), alone)
    found, expected = step.leaving(), stream.leaving()
    assert torch.equal(found.input_scale, expected.input_scale)
    assert torch.equal(found.key * found.input_scale[..., None], expected.key * expected.input_scale[..., None])
    assert torch.equal(found.value * found.input_scale[..., None], expected.value * expected.input_scale[..., None])
    windows = step.window(), stream.window()
    assert windows[0].dtype == windows[1].dtype == dtype
    if sizes.slots:
        windows, ranks = zip(*(split_importance(each) for each in windows), strict=True)
        torch.testing.assert_close(*(each[..., sizes.sinks :] for each in ranks))  # nobody reads that of a sink
    known = [each[..., -1] == 0 for each in windows]
    assert torch.equal(*known)
    assert torch.equal(windows[0][known[0]], windows[1][known[1]])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
@given(data=st.data())
@settings(max_examples=30)
def test_gradients_are_those_of_the_loop(dtype, tolerance, data):
    case = data.draw(cases())
    cuts = pieces(data, case)

    def gradients(of: Case, output: Tensor) -> list[Tensor]:
        tensors = [x for x in (of.query, of.key, of.value, of.log_gate) if x is not None]
        output = tokens_of(of, output)
        direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        loss = (output * direction.to(output)).sum()
        return list(torch.autograd.grad(loss, tensors, allow_unused=True, materialize_grads=True))

    truth, other = case.to(torch.float64), case.to(dtype)
    expected, found = gradients(truth, truth.loop()[0]), gradients(other, other.run(cuts)[0])
    scale = max(1e-3, *(float(x.abs().max()) for x in expected))
    for a, b in zip(found, expected, strict=True):
        assert float((a.double() - b).abs().max()) <= tolerance * scale


@pytest.mark.parametrize("signed", [False, True])
@given(data=st.data())
@settings(max_examples=30)
def test_log_weights_for_training_are_the_weights(signed, data):
    case = data.draw(cases(signed=signed))
    case.padding = None if case.padding is None else case.padding.sort(dim=1, descending=True)[0]  # see its docstring
    _, expected = case.loop()
    phi_q, phi_k, offset, _ = case.features(case.query, case.key)
    weights = None if case.log_gate is None else 1 - case.log_gate.exp()
    if case.padding is not None:
        weights = (1.0 if weights is None else weights) * case.padding[:, None].double()
    log_gate = case.log_gate
    if log_gate is not None and case.padding is not None:
        log_gate = log_gate * case.padding[:, None]
    length, step = case.query.shape[2], data.draw(st.integers(1, 20))
    for start in range(0, length, step):
        rows = slice(start, min(length, start + step))
        tokens = torch.ones_like(case.key[:, 0, :, 0]) if case.padding is None else case.padding
        sinks = (tokens > 0) & (tokens.cumsum(1) <= case.sinks) if case.sinks else None
        in_slots = None
        if case.slots:
            sizes = WindowSizes(case.size, case.sinks, case.slots)
            recency = torch.full_like(case.importance, case.recency)
            in_slots = seen_in_slots(
                case.importance, recency, sizes, None if case.padding is None else case.padding > 0
            )
        window = ExactWindow(case.size, case.query * case.scaling, case.key, offset, sinks, in_slots)
        options = {"log_decay": log_gate, "input_scale": weights, "denominator_floor": 0.1 if signed else None}
        logs = log_attention_weights(phi_q, phi_k, rows=rows, window=window, **options)
        wanted = expected[:, :, rows, : rows.stop]
        wanted = wanted.clamp_min(0) if signed else wanted
        found = torch.nn.functional.pad(logs.exp(), (0, wanted.shape[-1] - logs.shape[-1]))
        kept = slice(None) if case.padding is None else case.padding[:, rows].bool()
        found, wanted = found.transpose(1, 2)[kept], wanted.transpose(1, 2)[kept]
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8 if signed else 1e-9)


@torch.no_grad()
def test_a_window_as_long_as_the_text_is_softmax_attention_and_the_kernels_agree_on_scale():
    """Unbiased positive features: what leaves the window keeps its weight but for the noise of the features."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 40, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    feature_map = FEATURE_MAPS["positive"](num_heads=2, head_dim=8, num_features=4096, scaling=0.35, windowed=True)

    def features(q, k):
        return feature_map(q, k, offset=True)

    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.35)
    exact = attend(query, key, value, features, 40, 0.35)[0]
    torch.testing.assert_close(exact, expected, rtol=1e-9, atol=1e-9)

    def error(shift: float) -> float:
        feature_map.window_shift.fill_(shift)
        near = attend(query * 0.6, key, value, features, 10, 0.35)[0]
        target = torch.nn.functional.scaled_dot_product_attention(query * 0.6, key, value, is_causal=True, scale=0.35)
        return float((near - target).norm() / target.norm())

    assert error(0.0) < 0.1
    assert error(0.0) < min(error(-0.5), error(0.5)) * 0.6


@given(scale=st.sampled_from([1e-3, 1.0, 30.0, 1e3]))
def test_large_scores_and_padding_alone_give_finite_outputs_and_gradients(scale):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 1, 12, 4, generator=generator).mul(scale).requires_grad_() for _ in range(3))
    feature_map = FEATURE_MAPS["positive"](num_heads=1, head_dim=4, num_features=8, scaling=0.5, windowed=True)
    padding = torch.ones(2, 12).index_fill_(0, torch.tensor([1]), 0)

    def features(q, k):
        return feature_map(q, k, least_shift=feature_map.least_shift(None), offset=True)

    given = {"input_scale": padding[:, None], "padding_mask": padding}
    output, *_ = attend(query, key, value, features, 3, 0.5, **given)
    output.square().sum().backward()
    assert torch.isfinite(output).all()
    assert (output[1] == 0).all()
    assert all(torch.isfinite(x.grad).all() for x in (query, key, value))
