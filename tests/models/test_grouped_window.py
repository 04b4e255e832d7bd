"""The window and learned sinks of grouped queries: against a loop over tokens and softmax with a column more, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from tests.grouped_layers import (
    BATCH,
    DOCUMENTS,
    GROUPS,
    HEADS,
    PADDING,
    SCALING,
    WIDTH,
    pair,
    repeat,
    sample,
)


@torch.no_grad()
@pytest.mark.parametrize("document_starts", [None, DOCUMENTS], ids=["one text", "packed"])
@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "padded"])
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("with_sink_logits", [False, True])
def test_the_window_against_a_loop(document_starts, padding, gate, with_sink_logits):
    size, count = 3, 2
    layer, _ = pair(feature_map="positive", window_size=size, num_sinks=count, gate=gate)
    query, key, value, hidden = sample()
    logits = torch.linspace(-1.0, 2.0, HEADS * GROUPS).double() if with_sink_logits else None
    found, _ = layer.attend(
        query,
        key,
        value,
        hidden_states=hidden,
        padding_mask=padding,
        document_starts=document_starts,
        sink_logits=logits,
    )
    gates = torch.ones(BATCH, HEADS, 13).double()
    scales = gates
    if layer.gate is not None:
        log_gates, scales = layer.gate(hidden)
        gates = log_gates.exp()
    feature_map = layer.feature_map
    for row in range(BATCH):
        tokens = [t for t in range(13) if padding is None or padding[row, t]]
        starts = [] if document_starts is None else [t for t in tokens if document_starts[row, t]]
        documents = {t: sum(start <= t for start in starts) for t in tokens}
        for head in range(HEADS * GROUPS):
            shared = head // GROUPS
            for place, t in enumerate(tokens):
                q = query[row : row + 1, head : head + 1, t : t + 1]
                own = [j for j in tokens[: place + 1] if documents[j] == documents[t]]
                total, mean = 0.0, torch.zeros(WIDTH).double()
                everyone = key[row : row + 1, :, own]
                features = feature_map(q.expand(1, HEADS, 1, -1), everyone, offset=True)
                offset = float(features.offset[0, shared, 0, 0])
                for index, j in enumerate(own):
                    after = own[index + size :]  # the first of them is the token with which this one is forgotten
                    decay = math.prod([*scales[row, shared, after[:1]], *gates[row, shared, after[1:]]])
                    exact = math.exp(float(query[row, head, t] @ key[row, shared, j]) * SCALING + offset)
                    if index < count or index > len(own) - 1 - size:
                        weight = exact
                    else:
                        weight = float(features.query[0, shared, 0] @ features.key[0, shared, index]) * decay
                    total, mean = total + weight, mean + weight * value[row, shared, j]
                if logits is not None:
                    total = total + math.exp(float(logits[head]) + offset)
                assert_close(found[row, head, t], mean / total, rtol=1e-7, atol=1e-9)


@torch.no_grad()
def test_learned_sinks_are_a_softmax_column_that_is_dropped():
    """Without features, and with a window as long as the text."""
    layer, _ = pair(feature_map="none", window_size=13)
    query, key, value, hidden = sample()
    sink_logits = torch.linspace(-1.0, 2.0, HEADS * GROUPS)
    logits = SCALING * query @ repeat(key).mT + torch.full((13, 13), -math.inf).triu(1)
    column = sink_logits.double()[None, :, None, None].expand(BATCH, -1, 13, 1)
    expected = torch.cat([logits, column], dim=-1).softmax(-1)[..., :-1]
    options = {"hidden_states": hidden, "sink_logits": sink_logits, "output_attentions": True}
    output, weights = layer.attend(query, key, value, **options)
    assert_close(weights, expected)
    assert_close(output, expected @ repeat(value))


def test_learned_sinks_need_a_window():
    query, key, value, hidden = sample()
    for kind in ("causal", "encoder"):
        with pytest.raises(ValueError, match="sink_logits need a sliding window"):
            pair(kind)[0].attend(query, key, value, hidden_states=hidden, sink_logits=torch.zeros(HEADS * GROUPS))
