"""Shares of attention, against the weights that a model returns itself."""

from __future__ import annotations

import pytest
import torch

from hf_rfa.convert.calibrate.attention_shares import attention_shares
from tests.families import draw_importance, make

CASES = [
    ("gpt2", {"window_size": 4, "num_sinks": 2, "num_slots": 3, "num_features": 8}),
    ("llama", {"window_size": 4, "num_sinks": 1, "num_features": 8}),
    ("llama", {"window_size": 3, "num_slots": 2, "feature_map": "none", "softmax_layers": [1]}),
    ("llama", {"num_features": 8}),
    ("llama", {"window_size": 4, "num_sinks": 2, "num_slots": 3, "feature_map": "summary", "num_features": 3}),
]


@torch.no_grad()
@pytest.mark.parametrize(("family", "fields"), CASES)
def test_shares_are_sums_of_the_weights_of_the_model(family, fields):
    torch.manual_seed(0)
    model = make(family, fields)
    draw_importance(model)
    for name, parameter in model.named_parameters():
        if "feature_map" in name and model.config.feature_map == "summary":
            torch.nn.init.normal_(parameter, 0, 0.3)
    ids = torch.randint(4, 61, (1, 30))
    shares = attention_shares(model, ids[0])
    # None are those of softmax layers, whose function returns no weights
    weights = torch.stack([each for each in model(ids, output_attentions=True).attentions if each is not None])
    query, key = torch.arange(30)[:, None], torch.arange(30)
    window = (query - key < model.config.window_size) & (key <= query)
    sinks = (key < model.config.num_sinks) & (key <= query) & ~window

    def share(chosen: torch.Tensor) -> float:
        return float((weights * chosen).sum(-1).mean())

    assert shares.window == pytest.approx(share(window), abs=1e-5)
    assert shares.sinks == pytest.approx(share(sinks), abs=1e-5)
    assert shares.slots + shares.features == pytest.approx(share(~window & ~sinks), abs=1e-5)
    assert (shares.slots > 0) == (model.config.num_slots > 0)
    assert (shares.features > 1e-6) == (model.config.feature_map != "none")
    assert (0 < shares.forgotten < 1 - 1e-6) == (model.config.window_size > 0)  # sums of softmax are 1 up to rounding
    assert shares.tokens == 30
