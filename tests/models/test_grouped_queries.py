"""Query heads that share key-value heads: against one key-value head for every query head, in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache

from hf_rfa import FEATURE_MAPS
from hf_rfa.models import attention
from hf_rfa.models.linear_attention import Tokens, _chunked_at_once, linear_attention, parallel
from hf_rfa.models.masking import group_queries, ungroup
from tests.grouped_layers import (
    BATCH,
    CASES,
    GROUPS,
    HEADS,
    PADDING,
    SCALING,
    WIDTH,
    double,
    every_case,
    every_text,
    options_of,
    pair,
    repeat,
    sample,
)

# The recurrence


@st.composite
def recurrences(draw):
    """Features of grouped queries [B, H_q, T, F] and tokens, an initial state, a floor, and a chunk size."""
    groups, length = draw(st.integers(1, 4)), draw(st.integers(1, 13))
    torch.manual_seed(draw(st.integers(0, 1000)))
    features, signed = draw(st.sampled_from([1, 3, 6])), draw(st.booleans())
    query, key = double(BATCH, HEADS * groups, length, features), double(BATCH, HEADS, length, features)
    query, key = (query, key) if signed else (query.exp(), key.exp())
    keep = torch.ones(BATCH, 1, length, dtype=torch.bool)
    if draw(st.booleans()):
        keep = torch.rand(BATCH, 1, length) > 0.3
    gate = torch.rand(BATCH, HEADS, length, dtype=torch.float64).log() * keep if draw(st.booleans()) else None
    scale = None if gate is None and bool(keep.all()) else keep.double() * torch.rand(BATCH, 1, length).double()
    state = None
    if draw(st.booleans()):
        before = Tokens(double(BATCH, HEADS, 4, features).exp(), double(BATCH, HEADS, 4, WIDTH))
        state = linear_attention(before.key, before, denominator_floor=0.1 if signed else None)[1]
    tokens = Tokens(key, double(BATCH, HEADS, length, WIDTH), gate, scale)
    return groups, query, tokens, state, 0.1 if signed else None, draw(st.integers(1, 7))


def repeated(tokens: Tokens, groups: int) -> Tokens:
    scale = tokens.input_scale
    scale = scale if scale is None or scale.shape[1] == 1 else repeat(scale, groups)
    return Tokens(*(repeat(each, groups) for each in tokens[:3]), scale)


@given(recurrences(), st.booleans())
@settings(deadline=None, max_examples=80)
def test_linear_attention_is_that_of_every_query_head_alone(case, with_gradients):
    groups, query, tokens, state, floor, chunk = case
    expected, expected_state, expected_divisor = linear_attention(
        query, repeated(tokens, groups), initial_state=repeat(state, groups), denominator_floor=floor, chunk_size=100
    )
    rows = group_queries(query, HEADS)
    with torch.set_grad_enabled(with_gradients):
        state = None if state is None else state.clone()
        options: Any = {"initial_state": state, "denominator_floor": floor, "chunk_size": chunk}
        output, after, divisor = linear_attention(rows, tokens, **options)
    heads = HEADS * groups
    assert_close(ungroup(output, heads), expected, rtol=1e-8, atol=1e-9)
    assert_close(ungroup(divisor, heads), expected_divisor, rtol=1e-8, atol=1e-9)
    assert after.shape[1] == HEADS
    assert_close(repeat(after, groups), expected_state)


@given(recurrences())
@settings(deadline=None, max_examples=40)
def test_every_form_of_the_recurrence_agrees_with_the_definition(case):
    groups, query, tokens, state, floor, chunk = case
    state = state if state is None or floor is None else state[..., :-1, :]
    tokens = tokens._replace(value=torch.cat([tokens.value, torch.ones_like(tokens.value[..., :1])], dim=-1))
    rows = group_queries(query, HEADS)
    for form in (parallel, lambda *args: _chunked_at_once(*args, chunk)):
        output, after = form(rows, tokens, state)
        expected = parallel(query, repeated(tokens, groups), repeat(state, groups))
        assert_close(ungroup(output, HEADS * groups), expected[0])
        assert_close(repeat(after, groups), expected[1])


@given(recurrences(), st.booleans())
@settings(deadline=None, max_examples=20)
def test_one_token_at_a_time(case, with_gradients):
    groups, query, tokens, state, floor, _ = case
    rows, options = group_queries(query, HEADS), {"denominator_floor": floor}
    expected, expected_state, _ = linear_attention(rows, tokens, initial_state=state, **options)
    outputs, state = [], None if state is None else state.clone()
    with torch.set_grad_enabled(with_gradients):
        for t in range(tokens.key.shape[2]):
            scales = (None if each is None else each[..., t : t + 1] for each in tokens[2:4])
            token = Tokens(*(each[:, :, t : t + 1] for each in tokens[:2]), *scales)
            queries = rows[:, :, t * groups : (t + 1) * groups]
            output, state, _ = linear_attention(queries, token, initial_state=state, **options)
            outputs.append(output)
    assert_close(torch.cat(outputs, dim=2), expected, rtol=1e-8, atol=1e-9)
    assert_close(state, expected_state)


# The attention layer


@every_case
@every_text
@pytest.mark.parametrize("with_gradients", [False, True])
def test_attention_is_that_of_every_query_head_alone(fields, text, with_gradients):
    grouped, single = pair(**fields)
    query, key, value, hidden = sample()
    options = {"hidden_states": hidden, "output_attentions": True, **options_of(grouped), **text}
    with torch.set_grad_enabled(with_gradients):
        output, weights = grouped.attend(query, key, value, **options)
        expected, expected_weights = single.attend(query, repeat(key), repeat(value), **options)
    kept = text.get("padding_mask", torch.ones_like(PADDING)).bool()
    assert_close(output.transpose(1, 2)[kept], expected.transpose(1, 2)[kept])
    assert_close(weights.transpose(1, 2)[kept], expected_weights.transpose(1, 2)[kept])
    assert_close((weights @ repeat(value)).transpose(1, 2)[kept], output.transpose(1, 2)[kept])


@every_case
def test_gradients_are_the_sums_over_a_group(fields):
    grouped, single = pair(**fields)
    query, key, value, hidden = (each.requires_grad_() for each in sample())
    options = {"hidden_states": hidden, "padding_mask": PADDING, **options_of(grouped)}
    inputs = [query, key, value]
    if "sink_logits" in options:
        inputs.append(options["sink_logits"].requires_grad_())
    weights = double(*query.shape) * PADDING[:, None, :, None]
    found = [grouped.attend(*inputs[:3], **options)[0], single.attend(query, repeat(key), repeat(value), **options)[0]]
    gradients = [torch.autograd.grad((each * weights).sum(), inputs, retain_graph=True) for each in found]
    assert_close(*gradients)
    for each in found:
        (each * weights).sum().backward()
    expected = dict(single.named_parameters())
    for name, parameter in grouped.named_parameters():
        gradient = expected[name].grad
        if gradient.shape != parameter.shape:
            gradient = gradient.unflatten(0, (HEADS, GROUPS)).sum(1)
        assert_close(parameter.grad, gradient, rtol=1e-6, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gaussian", "sinks"])
def test_a_length_left_open_by_an_exporter(name):
    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = pair(**CASES[name])[0]

        def forward(self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor) -> Tensor:
            return self.layer.attend(query, key, value, hidden_states=hidden)[0]

    length = torch.export.Dim("length", min=3, max=64)
    dimensions = [{2: length}, {2: length}, {2: length}, {1: length}]
    program = torch.export.export(Whole(), sample(9), dynamic_shapes=dimensions).module()
    for count in (3, 9, 30):
        assert_close(program(*sample(count)), Whole()(*sample(count)))


@torch.no_grad()
@every_case
@pytest.mark.parametrize("cuts", [[1] * 13, [4, 1, 8]], ids=str)
@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "padded"])
def test_pieces_on_a_cache_are_the_whole(fields, cuts, padding):
    layer, _ = pair(**fields)
    query, key, value, hidden = sample()
    expected, _ = layer.attend(query, key, value, hidden_states=hidden, padding_mask=padding, **options_of(layer))
    cache, outputs, start = DynamicCache(), [], 0
    for count in cuts:
        here = slice(start, start + count)
        mask = None if padding is None else padding[:, here]
        pieces = (each[:, :, here] for each in (query, key, value))
        options = {"hidden_states": hidden[:, here], "cache": cache, "padding_mask": mask, **options_of(layer)}
        outputs.append(layer.attend(*pieces, **options)[0])
        start += count
    kept = torch.ones_like(PADDING).bool() if padding is None else padding.bool()
    assert_close(torch.cat(outputs, dim=2).transpose(1, 2)[kept], expected.transpose(1, 2)[kept])
    shapes = {name: tensor.shape for name, tensor in cache.layers[0].tensors().items()}
    assert all(shape[1] == HEADS for name, shape in shapes.items() if name != "0.count")


@torch.no_grad()
@every_case
def test_what_was_recorded_is_cropped(fields):
    layer, _ = pair(**fields)
    query, key, value, hidden = sample()
    states = []
    for recording in (True, False):
        cache = DynamicCache()
        for start, stop in ((0, 4), (4, 13 if recording else 9)):
            pieces = (each[:, :, start:stop] for each in (query, key, value))
            layer.attend(*pieces, hidden_states=hidden[:, start:stop], cache=cache)
            if recording:
                cache.layers[0].activate_past_recording()
        if recording:
            cache.layers[0].crop(-4)
        states.append(cache.layers[0].tensors())
    assert_close(*states)


@torch.no_grad()
def test_tokens_of_which_only_keys_and_values_are_known():
    layers, found = pair(gate=True, window_size=3), []
    query, key, value, hidden = sample()
    for layer, heads in zip(layers, (lambda x: x, repeat), strict=True):
        cache = DynamicCache()
        cache.layers.append(DynamicLayer())
        cache.layers[0].update(heads(key[:, :, :4]), heads(value[:, :, :4]))
        inputs = (query[:, :, 4:], heads(key[:, :, 4:]), heads(value[:, :, 4:]))
        options = {"hidden_states": hidden[:, 4:], "padding_mask": PADDING, "output_attentions": True}
        found.append(layer.attend(*inputs, cache=cache, **options))
    kept = PADDING[:, 4:].bool()
    for each, expected in zip(*found, strict=True):
        assert_close(each.transpose(1, 2)[kept], expected.transpose(1, 2)[kept])


@pytest.mark.parametrize("with_gradients", [False, True])
def test_segments_count_tokens(with_gradients, monkeypatch):
    layer, _ = pair(gate=True)
    query, key, value, hidden = sample()
    with torch.set_grad_enabled(with_gradients):
        expected = layer.attend(query, key, value, hidden_states=hidden)[0]
        monkeypatch.setattr(attention, "SEGMENT_LENGTH", 4)
        monkeypatch.setattr(attention, "MAX_LENGTH_WITHOUT_SEGMENTS", 5)
        assert_close(layer.attend(query, key, value, hidden_states=hidden)[0], expected)
    monkeypatch.setattr(attention, "SEGMENT_LENGTH", 13)
    monkeypatch.setattr(attention.HeadGroup, "split", None)  # 13 tokens are one segment, however many rows they have
    with torch.no_grad():
        assert_close(layer.attend(query, key, value, hidden_states=hidden)[0], expected.detach())


def test_backends_get_no_grouped_queries(monkeypatch):
    called = []
    backend = SimpleNamespace(attend=lambda *args: called.append(args))
    monkeypatch.setitem(attention.BACKENDS, "other", backend)
    query, key, value, hidden = sample()
    for layer, args in zip(pair(), ((query, key, value), (query, repeat(key), repeat(value))), strict=True):
        layer.backend = "other"
        layer.attend(*args, hidden_states=hidden)
    assert len(called) == 1


@torch.no_grad()
@pytest.mark.parametrize("feature_map", ["positive", "gaussian", "exponential"])
def test_attention_to_all_keys(feature_map):
    """Bidirectional attention, and cross attention on what its cache holds, with two beams to a source."""
    found, (query, key, value, hidden) = [], sample()
    for encoder, cross, heads in zip(
        pair("encoder", feature_map=feature_map),
        pair("cross", feature_map=feature_map),
        (lambda x: x, repeat),
        strict=True,
    ):
        options = {"hidden_states": hidden, "padding_mask": PADDING, "output_attentions": True}
        found.append([*encoder.attend(query, heads(key), heads(value), **options)])
        cross.source = (query[:, :, :7], heads(key[:1]), heads(value[:1]))
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        same = hidden[:1].expand(2, -1, -1)
        options = {"past_key_values": cache, "padding_mask": PADDING[:1].expand(2, -1)}
        found[-1].append(cross.attend_to_source(hidden[:, :7], same, **options)[0])
        cross.source = (query[:, :, 7:8],)
        found[-1].append(cross.attend_to_source(hidden[:, 7:8], same, **options)[0])
    assert_close(*found)


# Feature maps


def test_exponential_learns_a_query_map_for_every_query_head():
    options = {"num_heads": HEADS, "head_dim": WIDTH, "num_features": 6, "scaling": SCALING}
    grouped = FEATURE_MAPS["exponential"](**options, groups=GROUPS)
    shapes = {name: tuple(parameter.shape) for name, parameter in grouped.named_parameters()}
    heads = HEADS * GROUPS
    assert shapes == {
        "sigma": (HEADS, WIDTH), "projection": (heads, 6, WIDTH), "query_bias": (heads, 6),
        "key_projection": (HEADS, 6, WIDTH), "key_bias": (HEADS, 6), "norm_weight": (HEADS, WIDTH),
    }  # fmt: skip
    query, key = torch.randn(1, HEADS, 7 * GROUPS, WIDTH), torch.randn(1, HEADS, 7, WIDTH)
    expected = FEATURE_MAPS["positive"](**options)(query, key)
    found = grouped(query, key)
    assert_close(found.query, expected.query, rtol=1e-4, atol=0.0)
    assert_close(found.key, expected.key, rtol=1e-4, atol=0.0)
    single = FEATURE_MAPS["exponential"](**options)
    assert single.projection.shape == (HEADS, 6, WIDTH)
    assert torch.equal(single.projection, grouped.key_projection)


def test_kept_specifications_follow_the_parameters():
    grouped = FEATURE_MAPS["exponential"](num_heads=HEADS, head_dim=WIDTH, num_features=6, groups=GROUPS).eval()
    query = torch.randn(2, HEADS, 7 * GROUPS, WIDTH)
    with torch.no_grad():
        before = grouped(query).query
        grouped.query_bias[1] += torch.arange(6.0)
        changed = (grouped(query).query != before).any(-1)
    expected = torch.zeros(2, HEADS, 7, GROUPS, dtype=torch.bool)
    expected[:, 0, :, 1] = True
    assert torch.equal(changed, expected.flatten(2))
