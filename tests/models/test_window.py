"""Exact tokens and features under one normalizer against a loop over tokens in float64, on any sizes, gate and split."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache

from hf_rfa.convert.activations import exact_tokens
from hf_rfa.convert.attention_weights import log_attention_weights
from hf_rfa.models.feature_maps import FEATURE_MAPS
from hf_rfa.models.linear_attention import mask_padding
from hf_rfa.models.masking import group_queries, ungroup
from tests.grouped_layers import HIDDEN, WIDTH, Layer
from tests.memory_by_loop import memory_by_loop


@dataclass
class Case:
    """An attention layer, its inputs, and what is padding and a document's start."""

    layer: Layer
    query: Tensor
    key: Tensor
    value: Tensor
    hidden: Tensor
    padding: Tensor | None
    starts: Tensor | None

    @property
    def length(self) -> int:
        return self.key.shape[2]

    def to(self, dtype: torch.dtype) -> Case:
        layer = copy.deepcopy(self.layer).to(dtype)
        query, key, value = (each.detach().to(dtype).requires_grad_() for each in (self.query, self.key, self.value))
        return replace(self, layer=layer, query=query, key=key, value=value, hidden=self.hidden.to(dtype))

    def run(self, cuts=(), **options: Any) -> Tensor:
        """Attend piece by piece; return the outputs [B, H_q, T, d]."""
        cache, outputs = DynamicCache() if cuts else None, []
        for start, stop in pairwise((0, *cuts, self.length)):
            masks = (None if each is None else each[:, start:stop] for each in (self.padding, self.starts))
            padding, starts = masks
            inputs = (each[:, :, start:stop] for each in (self.query, self.key, self.value))
            options = {"hidden_states": self.hidden[:, start:stop], "padding_mask": padding, "cache": cache}
            outputs.append(self.layer.attend(*inputs, **options, document_starts=starts)[0])
        return torch.cat(outputs, dim=2)

    def features(self) -> Any:
        """Return the features of all queries and keys."""
        rows = group_queries(self.query, self.key.shape[1])
        return self.layer.feature_map(rows, self.key, offset=self.layer.window_size > 0)

    def gates(self) -> tuple[Tensor | None, Tensor | None]:
        log_gate, scale = (None, None) if self.layer.gate is None else self.layer.gate(self.hidden)
        return mask_padding(self.padding, log_gate, scale)

    def loop(self) -> tuple[Tensor, Tensor]:
        """Return outputs and weights, [B, H_q, T, d] and [B, H_q, T, T].

        A token that is seen exactly has the weight exp(q·k s). One that is forgotten joins the state with φ(q)·φ(k), scaled
        by the gate of the token with which it is forgotten, and decays from there on.
        """
        layer, length, heads = self.layer, self.length, self.key.shape[1]
        groups, padding = self.query.shape[1] // heads, self.padding
        importance, recency = torch.zeros(len(self.key), heads, length), [0.0] * heads
        if layer.importance is not None:
            importance = torch.einsum("btn,hn->bht", self.hidden, layer.importance.weight)
            recency = layer.importance.recency.tolist()
        sizes = {"window": layer.window_size, "sinks": layer.num_sinks, "slots": layer.num_slots}
        seen, forgotten = memory_by_loop(importance, recency, **sizes, padding=padding, starts=self.starts)
        log_gate, scale = self.gates()
        log_gate = torch.zeros_like(self.key[..., 0]) if log_gate is None else log_gate
        scale = torch.ones_like(log_gate) if scale is None else scale.expand_as(log_gate)
        document = torch.zeros(len(self.key), length) if self.starts is None else self.starts.cumsum(1)
        factors = []  # of decay and scale
        for row in range(len(self.key)):
            for head in range(heads):
                columns = [torch.zeros(length, dtype=self.key.dtype) for _ in range(length)]
                for t, j in enumerate(forgotten[row, head].tolist()):
                    if j >= 0:
                        own = (document[row] == document[row, t]) & (torch.arange(length) >= t)
                        after = log_gate[row, head].masked_fill(torch.arange(length) <= t, 0.0).cumsum(0)
                        columns[j] = scale[row, head, t] * after.exp() * own
                factors.append(torch.stack(columns, dim=-1))
        factor = torch.stack(factors).view(len(self.key), heads, length, length).repeat_interleave(groups, dim=2)
        features = self.features()
        far = features.query @ features.key.mT * factor
        mass = far.sum(-1, keepdim=True)
        if layer.feature_map.signed:
            norms = (features.key.norm(dim=-1)[:, :, None] * factor).sum(-1, keepdim=True)
            floor = layer.feature_map.denominator_floor * features.query.norm(dim=-1, keepdim=True) * norms
            mass = torch.maximum(mass, floor)
            far = far * (mass > 0)
            mass = mass.clamp_min(0)
        if layer.window_size:
            rows = group_queries(self.query, heads)
            exact = (rows @ self.key.mT * layer.scaling + features.offset).exp()
            exact = exact * seen.repeat_interleave(groups, dim=2)
            far, mass = far + exact, mass + exact.sum(-1, keepdim=True)
        weights = far / torch.where(mass > 0, mass, 1.0)
        return tuple(ungroup(each, self.query.shape[1]) for each in (weights @ self.value, weights))

    def of_tokens(self, x: Tensor) -> Tensor:
        """Return [B, H_q, T, n] without padding, whose own outputs are nobody's."""
        return x if self.padding is None else x.transpose(1, 2)[self.padding != 0]


@st.composite
def cases(draw, signed: bool = False, packed: bool = True) -> Case:
    seed = draw(st.integers(0, 10_000))
    generator = torch.Generator().manual_seed(seed)
    batch, heads, groups, length = (draw(st.integers(1, most)) for most in (2, 2, 3, 17))
    window = draw(st.integers(0, 5))
    sinks, slots = (draw(st.integers(0, 4)) if window else 0 for _ in range(2))
    fields = {"window_size": window, "num_sinks": sinks, "num_slots": slots, "gate": draw(st.booleans())}
    fields |= {"feature_map": "gaussian" if signed else "positive", "chunk_size": draw(st.integers(1, 20))}
    torch.manual_seed(seed)
    layer = Layer(heads, groups, **fields, state_dtype="float64").double().eval()

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    with torch.no_grad():
        if layer.gate is not None:
            layer.gate.weight.copy_(normal(heads, HIDDEN) * 0.3)
            layer.gate.bias.copy_(normal(heads))
        if layer.importance is not None:  # multiples of 1/32, which are added without rounding; some are equal
            layer.importance.weight.copy_(normal(heads, HIDDEN).round())
            layer.importance.recency.fill_(draw(st.sampled_from([0.0, 0.03125, 0.09375])))
    padding = starts = None
    if draw(st.booleans()):
        padding = (torch.rand(batch, length, generator=generator) > 0.4).long()
    if packed and draw(st.booleans()):
        starts = torch.rand(batch, length, generator=generator) < 0.2
        starts = starts if padding is None else starts & (padding != 0)
    tensors = normal(batch, heads * groups, length, WIDTH), *(normal(batch, heads, length, WIDTH) for _ in range(2))
    return Case(layer, *tensors, normal(batch, length, HIDDEN).round(), padding, starts)


def cuts_of(data, case: Case) -> list[int]:
    """Return where a text is cut into pieces; several documents come at once."""
    most = 4 if case.starts is None else 0
    return sorted(data.draw(st.sets(st.integers(1, max(1, case.length - 1)), max_size=most)) - {case.length})


@pytest.mark.parametrize("signed", [False, True])
@given(data=st.data())
@settings(max_examples=40)
@torch.no_grad()
def test_attention_is_what_a_loop_over_tokens_gives_however_it_is_cut(signed, data):
    case = data.draw(cases(signed=signed))
    expected, weights = case.loop()
    inputs = {"padding_mask": case.padding, "document_starts": case.starts, "output_attentions": True}
    output, implied = case.layer.attend(case.query, case.key, case.value, hidden_states=case.hidden, **inputs)
    for found, wanted in ((output, expected), (implied, weights)):
        assert_close(case.of_tokens(found), case.of_tokens(wanted), rtol=1e-8, atol=1e-8)
    cuts = cuts_of(data, case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_rfa.models.memory.CHUNK_LENGTH", data.draw(st.integers(1, 20)))
        assert_close(case.of_tokens(case.run(cuts)), case.of_tokens(expected), rtol=1e-8, atol=1e-8)
    if case.starts is None:
        one_by_one = case.run(range(1, case.length))
        assert_close(case.of_tokens(one_by_one), case.of_tokens(expected), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-8)])
@given(data=st.data())
@settings(max_examples=20)
def test_gradients_are_those_of_the_loop(dtype, tolerance, data):
    case = data.draw(cases())
    cuts = cuts_of(data, case)

    def gradients(of: Case, output: Tensor) -> list[Tensor]:
        tensors = [of.query, of.key, of.value, *([] if of.layer.gate is None else of.layer.gate.parameters())]
        output = of.of_tokens(output)
        direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        loss = (output * direction.to(output)).sum()
        return list(torch.autograd.grad(loss, tensors, allow_unused=True, materialize_grads=True))

    truth, other = case.to(torch.float64), case.to(dtype)
    expected, found = gradients(truth, truth.loop()[0]), gradients(other, other.run(cuts))
    scale = max(1e-3, *(float(x.abs().max()) for x in expected))
    for a, b in zip(found, expected, strict=True):
        assert float((a.double() - b).abs().max()) <= tolerance * scale


@pytest.mark.parametrize("signed", [False, True])
@given(data=st.data())
@settings(max_examples=30)
@torch.no_grad()
def test_log_weights_for_training_are_the_weights(signed, data):
    case = data.draw(cases(signed=signed, packed=False))
    if case.padding is not None:  # which must not stand between tokens
        case.padding = case.padding.sort(dim=1, descending=data.draw(st.booleans()))[0]
    _, expected = case.loop()
    expected = group_queries(expected, case.key.shape[1])
    layer, features, mask = case.layer, case.features(), None if case.padding is None else case.padding != 0
    rows = group_queries(case.query, case.key.shape[1])
    window = exact_tokens(layer, rows, case.key, features.offset, mask, case.hidden)
    log_gate, scale = case.gates()
    options = {"log_decay": log_gate, "input_scale": scale, "denominator_floor": layer.feature_map.denominator_floor}
    groups, step = rows.shape[2] // case.length, data.draw(st.integers(1, 20))
    for start in range(0, case.length, step):
        stop = min(case.length, start + step)
        here = slice(start * groups, stop * groups)
        logs = log_attention_weights(features.query, features.key, rows=here, window=window, **options)
        wanted = expected[:, :, here, :stop]
        wanted = wanted.clamp_min(0) if signed else wanted
        kept = slice(None) if mask is None else mask[:, start:stop].repeat_interleave(groups, dim=1)
        found, wanted = logs.exp().transpose(1, 2)[kept], wanted.transpose(1, 2)[kept]
        assert_close(found, wanted, rtol=1e-6, atol=1e-8)


@torch.no_grad()
def test_a_window_as_long_as_the_text_is_softmax_attention_and_the_kernels_agree_on_scale():
    """Unbiased positive features: what leaves the window keeps its weight but for the noise of the features."""
    layer = Layer(2, 1, window_size=40).double()
    layer.feature_map = FEATURE_MAPS["positive"](
        num_heads=2, head_dim=WIDTH, num_features=4096, scaling=layer.scaling, windowed=True
    ).double()
    query, key, value = (torch.randn(1, 2, 40, WIDTH, dtype=torch.float64) for _ in range(3))
    hidden = torch.zeros(1, 40, HIDDEN, dtype=torch.float64)

    def softmax() -> Tensor:
        scale = layer.scaling
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)

    assert_close(layer.attend(query, key, value, hidden_states=hidden)[0], softmax(), rtol=1e-9, atol=1e-9)
    layer.window_size, query = 10, query * 0.3
    layer._layouts.clear()

    def error(shift: float) -> float:
        layer.feature_map.window_shift.fill_(shift)
        found, expected = layer.attend(query, key, value, hidden_states=hidden)[0], softmax()
        return float((found - expected).norm() / expected.norm())

    assert error(0.0) < 0.1
    assert error(0.0) < min(error(-0.5), error(0.5)) * 0.6


@pytest.mark.parametrize("slots", [0, 2])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e3])
def test_large_scores_and_padding_alone_give_finite_outputs_and_gradients(scale, slots):
    layer = Layer(1, 1, window_size=3, num_slots=slots)
    query, key, value = (torch.randn(2, 1, 12, WIDTH).mul(scale).requires_grad_() for _ in range(3))
    padding = torch.ones(2, 12).index_fill_(0, torch.tensor([1]), 0)
    output, _ = layer.attend(query, key, value, hidden_states=torch.randn(2, 12, HIDDEN), padding_mask=padding)
    output[0].square().sum().backward()
    assert torch.isfinite(output).all()
    assert all(torch.isfinite(x.grad).all() for x in (query, key, value))
