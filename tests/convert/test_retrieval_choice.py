"""Choosing retrieval heads: the gradient against differences, and what a conversion makes of them."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_rfa.convert import ConversionOptions, convert
from hf_rfa.convert.calibrate.retrieval_heads import choose_retrieval_heads, exact_shares, repeated_passages
from hf_rfa.convert.checkpoint.base_model import rfa_layers
from hf_rfa.convert.checkpoint.loading import load_models
from hf_rfa.convert.checkpoint.source import open_checkpoint
from hf_rfa.convert.configuration import rfa_config
from hf_rfa.convert.presets import with_preset
from hf_rfa.evaluation.memory import cache_memory

WINDOW = {"preset": "exact", "window_size": 4, "num_sinks": 2, "num_slots": 0}


def models(parent, **options):
    checkpoint = open_checkpoint(parent)
    config = rfa_config(checkpoint, with_preset(checkpoint, ConversionOptions(**WINDOW | options)))
    return load_models(checkpoint, config, ConversionOptions(device="cpu"))


@torch.no_grad()
def test_all_shares_of_exact_attention_are_the_softmax_model(decoder):
    model, base_model = models(decoder)
    layers = list(rfa_layers(model).values())
    ids = torch.randint(3, 61, (2, 60))
    plain = model(ids).logits
    with exact_shares(layers, model.device) as shares:
        torch.testing.assert_close(model(ids).logits, plain)
        shares.fill_(1.0)
        exact = model(ids).logits
    torch.testing.assert_close(exact, base_model(ids).logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model(ids).logits, plain, rtol=0, atol=0)


def test_the_first_head_is_that_of_the_steepest_descent(decoder):
    """Against differences of the divergence, in float64, for every head of every layer."""
    model, base_model = models(decoder)
    model.double(), base_model.double()
    layers = list(rfa_layers(model).values())
    ids, scored = repeated_passages(torch.randint(3, 61, (1, 64)), seed=0)
    expected = base_model(ids).logits[:, :-1].log_softmax(-1)
    slopes = {}
    with torch.no_grad(), exact_shares(layers, model.device) as shares:
        for row, layer in enumerate(layers):
            for head in range(shares.shape[1]):
                values = []
                for share in (1e-3, -1e-3):
                    shares.zero_()
                    shares[row, head] = share
                    found = model(ids).logits[:, :-1].log_softmax(-1)
                    each = (expected.exp() * (expected - found)).sum(-1)
                    values.append(float(each[scored[:, 1:]].mean()))
                slopes[layer.rfa_layer_idx, head] = values[0] - values[1]
    inputs = {"input_ids": ids}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_rfa.convert.calibrate.retrieval_heads.repeated_passages", lambda *args, seed: (ids, scored))
        chosen = choose_retrieval_heads(model, base_model, inputs, 1, seed=0, on_head=lambda: None)
    assert chosen.heads[0] == min(slopes, key=slopes.get)


def test_heads_are_distinct_one_of_a_layer_is_left_and_the_divergence_is_that_of_the_model_made_of_them(decoder):
    model, base_model = models(decoder)
    layers, heads = len(rfa_layers(model)), model.config.num_heads_for("causal")
    inputs = {"input_ids": torch.randint(3, 61, (2, 64))}
    chosen = choose_retrieval_heads(model, base_model, inputs, 100, seed=0, on_head=lambda: None)
    pairs = [list(pair) for pair in chosen.heads]
    assert len(set(chosen.heads)) == len(pairs) <= layers * (heads - 1)
    made, _ = models(decoder, retrieval_heads=pairs)
    ids, scored = repeated_passages(inputs["input_ids"], seed=0)
    for converted, expected in ((model, chosen.before), (made, chosen.after)):
        with torch.no_grad():
            one, other = (each(ids[:1]).logits[:, :-1].log_softmax(-1) for each in (base_model, converted))
        divergence = float((one.exp() * (one - other)).sum(-1)[scored[:1, 1:]].mean())
        assert divergence == pytest.approx(expected, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("features", [{}, {"preset": "mixed", "feature_map": "summary", "num_features": 3}], ids=str)
def test_a_number_is_chosen_and_reported(decoder, text, tmp_path, features):
    options = {**WINDOW, "num_slots": 3, "retrieval_heads": 2, "retrieval_window": 20, "calibrate_on": text, **features}
    report = convert(decoder, tmp_path / "out", **options)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    pairs = [list(pair) for pair in report.retrieval_heads.heads]
    assert model.config.retrieval_heads == pairs
    assert model.config.retrieval_window == 20
    assert len(pairs) in (1, 2)
    memory = cache_memory(model)
    assert memory == report.memory
    assert (memory.per_token, report.grows) == (0, False)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "--retrieval-heads 2 --config retrieval_window=20" in card
    assert f"{pairs[0][0]}.{pairs[0][1]}" in card
    written = json.loads((tmp_path / "out" / "conversion.json").read_text())["retrieval_heads"]
    assert written["heads"] == pairs
    by_hand = convert(decoder, tmp_path / "hand", **options | {"retrieval_heads": pairs})
    ids = torch.randint(3, 61, (1, 50))
    with torch.no_grad():
        other = AutoModelForCausalLM.from_pretrained(tmp_path / "hand")(ids).logits
        torch.testing.assert_close(
            model(ids).logits, other
        )  # what is fitted to all heads is what is fitted to those left
    assert by_hand.retrieval_heads is None
    assert ",".join(f"{layer}.{head}" for layer, head in pairs) in by_hand.command
