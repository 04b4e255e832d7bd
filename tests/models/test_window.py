"""Exact tokens and features under one normalizer against a loop over tokens in float64, on any sizes, gate and split."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache
from transformers.cache_utils import EncoderDecoderCache

from hf_rfa.convert.calibrate.activations import exact_tokens
from hf_rfa.convert.calibrate.attention_weights import log_attention_weights
from hf_rfa.models.feature_maps import FEATURE_MAPS
from hf_rfa.models.linear_attention import mask_padding
from hf_rfa.models.masking import group_queries, join_heads, split_heads, ungroup
from tests.families import use_flex_attention
from tests.grouped_layers import HIDDEN, WIDTH, Layer
from tests.memory_by_loop import memory_by_loop

UNSIGNED = ["positive", "exponential", "elu", "arccos"]


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
    sink_logits: Tensor | None

    @property
    def length(self) -> int:
        return self.key.shape[2]

    def to(self, dtype: torch.dtype) -> Case:
        layer = copy.deepcopy(self.layer).to(dtype)
        query, key, value = (each.detach().to(dtype).requires_grad_() for each in (self.query, self.key, self.value))
        logits = None if self.sink_logits is None else self.sink_logits.to(dtype).requires_grad_()
        return replace(
            self, layer=layer, query=query, key=key, value=value, hidden=self.hidden.to(dtype), sink_logits=logits
        )

    def attend(self, start: int, stop: int, cache: DynamicCache | None = None, **options: Any) -> Any:
        """Attend to the tokens of a piece; return their outputs and weights."""
        padding, starts = (None if mask is None else mask[:, start:stop] for mask in (self.padding, self.starts))
        options = {"padding_mask": padding, "document_starts": starts, "sink_logits": self.sink_logits, **options}
        inputs = (tensor[:, :, start:stop] for tensor in (self.query, self.key, self.value))
        return self.layer.attend(*inputs, hidden_states=self.hidden[:, start:stop], cache=cache, **options)

    def run(self, cuts: Iterable[int] = (), cache: DynamicCache | None = None) -> Tensor:
        """Attend piece by piece; return the outputs [B, H_q, T, d]."""
        cuts = (0, *cuts, self.length)
        cache = DynamicCache() if cache is None and len(cuts) > 2 else cache
        return torch.cat([self.attend(start, stop, cache)[0] for start, stop in pairwise(cuts)], dim=2)

    def in_groups(self, query: Tensor, key: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return rows of queries, and keys, of all heads but the retrieval heads, and of these."""
        rows, retrieval = group_queries(query, key.shape[1]), self.layer.retrieval_heads
        if not retrieval:
            return [(rows, key)]
        return list(zip(split_heads(rows, retrieval), split_heads(key, retrieval), strict=True))

    def features(self) -> Any:
        """Return the features of all queries and keys that have some."""
        rows, key = self.in_groups(self.query, self.key)[0]
        return self.layer.feature_map(rows, key, offset=self.layer.window_size > 0)

    def gates(self) -> tuple[Tensor | None, Tensor | None]:
        log_gate, scale = (None, None) if self.layer.gate is None else self.layer.gate(self.hidden)
        return mask_padding(self.padding, log_gate, scale)

    def seen(self, heads: int, window: int, slots: int, rule: Any) -> tuple[Tensor, Tensor]:
        """Return what the queries of some heads see exactly, and what is forgotten with each token."""
        importance, recency = torch.zeros(len(self.key), heads, self.length), [0.0] * heads
        if slots and rule is not None:
            importance = torch.einsum("btn,hn->bht", self.hidden, rule.weight)
            recency = rule.recency.tolist()
        sizes = {"window": window, "sinks": self.layer.num_sinks, "slots": slots}
        return memory_by_loop(importance, recency, **sizes, padding=self.padding, starts=self.starts)

    def factors(self, forgotten: Tensor) -> Tensor:
        """Return what multiplies φ(q_t)·φ(k_j), [B, H, T, T].

        A token that is forgotten joins the state, scaled by the gate of the token with which it is forgotten, and decays
        from there on; nothing is left of it after its document.
        """
        log_gate, scale = self.gates()
        log_gate = torch.zeros(forgotten.shape, dtype=self.key.dtype) if log_gate is None else log_gate
        scale = torch.ones_like(log_gate) if scale is None else scale.expand_as(log_gate)
        now = torch.arange(self.length)
        document = torch.zeros(len(self.key), self.length) if self.starts is None else self.starts.cumsum(1)
        factors = []
        for row in range(forgotten.shape[0]):
            for head in range(forgotten.shape[1]):
                columns = [torch.zeros(self.length, dtype=self.key.dtype) for _ in now]
                for t, j in enumerate(forgotten[row, head].tolist()):
                    if j >= 0:
                        remembered = (document[row] == document[row, t]) & (now >= t)
                        decay = log_gate[row, head].masked_fill(now <= t, 0.0).cumsum(0).exp()
                        columns[j] = scale[row, head, t] * decay * remembered
                factors.append(torch.stack(columns, dim=-1))
        return torch.stack(factors).view(*forgotten.shape, -1)

    def loop(self) -> tuple[Tensor, Tensor]:
        """Return outputs and weights, [B, H_q, T, d] and [B, H_q, T, T].

        A token that is seen exactly has the weight exp(q·k s), and a learned sink exp(its logit).
        """
        layer, heads = self.layer, self.key.shape[1]
        groups = self.query.shape[1] // heads
        logits = None if self.sink_logits is None else self.sink_logits.view(1, heads, groups).repeat(1, 1, self.length)
        sinks = [logits] if logits is None or not layer.retrieval_heads else split_heads(logits, layer.retrieval_heads)
        weights = []
        for index, (rows, key) in enumerate(self.in_groups(self.query, self.key)):
            far = mass = offset = torch.zeros((), dtype=key.dtype)
            has_features = index == 0 and layer.feature_map.feature_dim > 0
            window, slots = (layer.window_size, layer.num_slots)
            if index == 1:
                window, slots = layer.retrieval_window, layer.retrieval_slots
            seen, forgotten = self.seen(key.shape[1], window, slots, layer.importances()[index])
            if has_features:
                features, factor = self.features(), self.factors(forgotten).repeat_interleave(groups, dim=2)
                offset = offset if features.offset is None else features.offset
                far = features.query @ features.key.mT * factor
                mass = far.sum(-1, keepdim=True)
                if layer.feature_map.signed:
                    norms = (features.key.norm(dim=-1)[:, :, None] * factor).sum(-1, keepdim=True)
                    floor = layer.feature_map.denominator_floor * features.query.norm(dim=-1, keepdim=True) * norms
                    mass = torch.maximum(mass, floor)
                    far = far * (mass > 0)
                    mass = mass.clamp_min(0)
            if window:
                exact = (rows @ key.mT * layer.scaling + offset).exp() * seen.repeat_interleave(groups, dim=2)
                far, mass = far + exact, mass + exact.sum(-1, keepdim=True)
                if logits is not None:
                    mass = mass + (sinks[min(index, len(sinks) - 1)][..., None] + offset).exp()
            weights.append(far / torch.where(mass > 0, mass, 1.0))
        joined = ungroup(join_heads(weights, layer.retrieval_heads), self.query.shape[1])
        return joined @ self.value.repeat_interleave(groups, dim=1), joined

    def of_tokens(self, x: Tensor) -> Tensor:
        """Return [B, H_q, T, n] without padding, whose own outputs are nobody's."""
        padding = None if self.padding is None else self.padding[:, -x.shape[2] :]
        return x if padding is None else x.transpose(1, 2)[padding != 0]

    def assert_same(self, found: Tensor, expected: Tensor) -> None:
        assert_close(self.of_tokens(found), self.of_tokens(expected), rtol=1e-8, atol=1e-8)


@st.composite
def cases(draw, signed: bool = False, packed: bool = True, all_heads: bool = False) -> Case:
    """Draw a layer of any sizes; ``all_heads`` leaves retrieval heads and learned sinks out."""
    seed = draw(st.integers(0, 10_000))
    generator = torch.Generator().manual_seed(seed)
    batch, heads, groups, length = (draw(st.integers(1, most)) for most in (2, 3, 3, 40))
    window = draw(st.integers(0, 9))
    sinks, slots = (draw(st.integers(0, most)) if window else 0 for most in (5, 12))
    name = "gaussian" if signed else draw(st.sampled_from([*UNSIGNED, *(["none"] if window and not all_heads else [])]))
    fields = {"window_size": window, "num_sinks": sinks, "num_slots": slots, "feature_map": name}
    fields |= {each: name != "none" and draw(st.booleans()) for each in ("gate", "unit_norm")}
    fields["chunk_size"] = draw(st.integers(1, 20))
    if heads > 1 and not all_heads and draw(st.booleans()):
        retrieval = draw(st.sets(st.integers(0, heads - 1), min_size=1, max_size=heads - 1))
        fields |= {"retrieval_heads": sorted(retrieval), "retrieval_window": draw(st.integers(1, 9))}
        fields["retrieval_slots"] = draw(st.integers(0, 5))
    torch.manual_seed(seed)
    layer = Layer(heads, groups, **fields).double().eval()

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    with torch.no_grad():
        if layer.gate is not None:
            layer.gate.weight.copy_(normal(*layer.gate.weight.shape) * 0.3)
            layer.gate.bias.copy_(normal(*layer.gate.bias.shape))
        for rule in filter(None, layer.importances()):
            # multiples of 1/32, which are added without rounding; some are equal
            rule.weight.copy_(normal(*rule.weight.shape).round())
            rule.recency.fill_(draw(st.sampled_from([0.0, 0.03125, 0.09375])))
    padding = starts = None
    if draw(st.booleans()):
        padding = (torch.rand(batch, length, generator=generator) > draw(st.sampled_from([0.1, 0.5, 0.9]))).long()
    if packed and draw(st.booleans()):
        starts = torch.rand(batch, length, generator=generator) < draw(st.sampled_from([0.05, 0.3]))
        starts = starts if padding is None else starts & (padding != 0)
    tensors = normal(batch, heads * groups, length, WIDTH), *(normal(batch, heads, length, WIDTH) for _ in range(2))
    sink_logits = normal(heads * groups) if window and not all_heads and draw(st.booleans()) else None
    return Case(layer, *tensors, normal(batch, length, HIDDEN).round(), padding, starts, sink_logits)


def cuts_of(data: Any, case: Case) -> list[int]:
    """Return where a text is cut into pieces; documents start in the first of them."""
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, case.length - 1)), max_size=4)) - {case.length})
    if case.starts is not None and cuts:
        case.starts[:, cuts[0] :] = False
    return cuts


@pytest.mark.parametrize("signed", [False, True])
@given(data=st.data())
@settings(max_examples=60)
@torch.no_grad()
def test_attention_is_what_a_loop_over_tokens_gives_however_it_is_cut(signed, data):
    case = data.draw(cases(signed=signed))
    cuts, length = cuts_of(data, case), data.draw(st.integers(1, 20))
    expected, weights = case.loop()
    output, implied = case.attend(0, case.length, output_attentions=True)
    case.assert_same(output, expected)
    case.assert_same(implied, weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_rfa.models.exact_attention.CHUNK_LENGTH", length)
        patch.setattr("hf_rfa.models.state_attention.SEGMENT_LENGTH", data.draw(st.integers(1, 20)))
        case.assert_same(case.run(cuts), expected)
    if case.starts is None:
        case.assert_same(case.run(range(1, case.length)), expected)


@given(data=st.data())
@settings(max_examples=30)
@torch.no_grad()
def test_attention_by_flex_attention_is_what_a_loop_over_tokens_gives(data):
    """All tokens at once, in blocks that somebody sees."""
    case = data.draw(cases())
    cuts = cuts_of(data, case)
    with pytest.MonkeyPatch.context() as patch:
        use_flex_attention(patch, data.draw(st.integers(1, 16)))
        case.assert_same(case.run(cuts), case.loop()[0])


@pytest.mark.parametrize("signed", [False, True])
@given(data=st.data())
@settings(max_examples=40)
@torch.no_grad()
def test_tokens_that_are_taken_back_leave_nothing(signed, data):
    """In steps of any size: what is cropped may end within one of them."""
    case, cache = data.draw(cases(signed=signed, packed=False)), DynamicCache()
    assume(case.length > 1)
    cuts = cuts_of(data, case) or [1]
    case.attend(0, cuts[0], cache)
    cache.activate_past_recording()
    for start, stop in pairwise((*cuts, case.length)):
        case.attend(start, stop, cache)
    stays = data.draw(st.integers(cuts[0], case.length))
    cache.crop(stays - case.length)
    assert cache.get_seq_length() == stays
    if stays < case.length:
        found = case.attend(stays, case.length, cache)[0]
        case.assert_same(found, case.loop()[0][:, :, stays:])


def compare_gradients(data: Any, dtype: torch.dtype, tolerance: float, flex: bool = False) -> None:
    """Compare those of a case, computed in a dtype, with those of the loop."""
    case = data.draw(cases())
    cuts, size = cuts_of(data, case), data.draw(st.integers(1, 20))

    def gradients(of: Case, output: Tensor) -> list[Tensor]:
        tensors = [of.query, of.key, of.value, *of.layer.parameters()]
        tensors += [] if of.sink_logits is None else [of.sink_logits]
        output = of.of_tokens(output)
        direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        loss = (output * direction.to(output)).sum()
        return list(torch.autograd.grad(loss, tensors, allow_unused=True, materialize_grads=True))

    truth, other = case.to(torch.float64), case.to(dtype)
    expected = gradients(truth, truth.loop()[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_rfa.models.state_attention.SEGMENT_LENGTH", size)
        patch.setattr("hf_rfa.models.state_attention.MAX_LENGTH_WITHOUT_SEGMENTS", size)
        patch.setattr("hf_rfa.models.state_attention.FEW_FEATURES", 1)
        if flex:
            use_flex_attention(patch, size)
        found = gradients(other, other.run(cuts))
    scale = max(1e-3, *(float(gradient.abs().max()) for gradient in expected))
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours.double() - theirs).abs().max()) <= tolerance * scale


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-8)])
@given(data=st.data())
@settings(max_examples=12)
def test_gradients_are_those_of_the_loop(dtype, tolerance, data):
    """Also those of parameters of gates and feature maps, in which the query heads of a group are summed."""
    compare_gradients(data, dtype, tolerance)


@given(data=st.data())
@settings(max_examples=5)  # each takes a second: torch traces the backward pass
def test_gradients_by_flex_attention_are_those_of_the_loop(data):
    compare_gradients(data, torch.float32, 1e-4, flex=True)


@pytest.mark.parametrize("signed", [False, True])
@given(data=st.data())
@settings(max_examples=30)
@torch.no_grad()
def test_log_weights_for_training_are_the_weights(signed, data):
    case = data.draw(cases(signed=signed, packed=False, all_heads=True))
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
        told = (wanted.amax(-1) > 0) | signed  # by arccos a query may have no features, and see nothing
        if mask is not None:
            told &= mask[:, None, start:stop].repeat_interleave(groups, dim=2)
        assert_close(logs.exp()[told], wanted[told], rtol=1e-6, atol=1e-8)


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


@pytest.mark.parametrize("sizes", [{}, {"window_size": 3}, {"window_size": 3, "num_slots": 2}], ids=str)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 10.0, 30.0, 1e3])
def test_large_scores_and_padding_alone_give_finite_outputs_and_gradients(scale, sizes):
    layer = Layer(1, 1, **sizes)
    query, key, value = (torch.randn(2, 1, 12, WIDTH).mul(scale).requires_grad_() for _ in range(3))
    padding = torch.ones(2, 12).index_fill_(0, torch.tensor([1]), 0)
    output, _ = layer.attend(query, key, value, hidden_states=torch.randn(2, 12, HIDDEN), padding_mask=padding)
    output[0].square().sum().backward()
    assert torch.isfinite(output).all()
    learned = [parameter for parameter in layer.parameters() if parameter.grad is not None]
    assert all(torch.isfinite(x.grad).all() for x in (query, key, value, *learned))


@pytest.mark.parametrize("feature_map", ["positive", "gaussian", "exponential"])
def test_attention_to_all_keys_is_what_the_features_say(feature_map):
    """Of grouped queries: bidirectional attention, and cross attention on what its cache holds, two beams to a source."""
    query, key, value = (
        torch.randn(2, heads, 13, WIDTH, dtype=torch.float64, requires_grad=True) for heads in (6, 2, 2)
    )
    hidden, padding = torch.randn(2, 13, HIDDEN, dtype=torch.float64), torch.ones(2, 13)
    padding[0, :3], padding[1, 5], padding[1, 11:] = 0, 0, 0
    encoder, cross = (Layer(2, 3, kind, feature_map=feature_map).double().eval() for kind in ("encoder", "cross"))

    def weights_of(layer: Layer, key: Tensor, mask: Tensor) -> Tensor:
        features, floor = layer.feature_map(group_queries(query, 2), key), layer.feature_map.denominator_floor
        scores, divisor = features.query @ features.key.mT * mask[:, None, None], torch.zeros(())
        if floor is not None:
            norms = (features.key.norm(dim=-1) * mask[:, None]).sum(-1)[..., None, None]
            divisor = floor * features.query.norm(dim=-1, keepdim=True) * norms
        return ungroup(scores / torch.maximum(scores.sum(-1, keepdim=True), divisor), 6)

    expected = weights_of(encoder, key, padding)
    output, _, weights = encoder.attend_to_all(query, key, value, padding_mask=padding, output_attentions=True)
    assert_close(weights, expected)
    expected = expected @ value.repeat_interleave(3, dim=1)
    assert_close(output, expected)
    direction = torch.randn_like(output)
    losses = ((each * direction).sum() for each in (output, expected))
    assert_close(*(torch.autograd.grad(loss, (query, key, value)) for loss in losses))

    expected = weights_of(cross, key[:1].expand(2, -1, -1, -1), padding[:1].expand(2, -1))
    expected = expected @ value[:1].repeat_interleave(3, dim=1)
    cache, source = EncoderDecoderCache(DynamicCache(), DynamicCache()), hidden[:1].expand(2, -1, -1)
    for start, stop in ((0, 7), (7, 8)):
        cross.source = (query[:, :, start:stop], key[:1], value[:1])
        options = {"past_key_values": cache, "padding_mask": padding[:1].expand(2, -1)}
        found = cross.attend_to_source(hidden[:, start:stop], source, **options)[0]
        assert_close(found, expected[:, :, start:stop])
