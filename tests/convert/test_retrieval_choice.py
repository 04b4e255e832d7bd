"""Choosing retrieval heads: the gradient against differences, and what a conversion makes of them."""

from __future__ import annotations

import functools
import json

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from hf_rfa.convert import ConversionOptions, convert, pipeline
from hf_rfa.convert.calibrate import retrieval_heads
from hf_rfa.convert.calibrate.retrieval_heads import ExactShares, choose_retrieval_heads, repeated_passages
from hf_rfa.convert.checkpoint.base_model import rfa_layers
from hf_rfa.convert.checkpoint.loading import load_models
from hf_rfa.convert.checkpoint.source import open_checkpoint
from hf_rfa.convert.configuration import rfa_config
from hf_rfa.convert.presets import with_preset
from hf_rfa.evaluation.memory import cache_memory
from hf_rfa.models.cache_names import cache_argument, returned_cache

WINDOW = {"preset": "exact", "window_size": 4, "num_sinks": 2, "num_slots": 0}


def models(parent, **options):
    checkpoint = open_checkpoint(parent)
    config = rfa_config(checkpoint, with_preset(checkpoint, ConversionOptions(**WINDOW | options)))
    return load_models(checkpoint, config, ConversionOptions(device="cpu"))


@torch.no_grad()
def test_all_shares_of_exact_attention_are_the_softmax_model(decoder):
    """At once, and in two parts by a cache."""
    model, base_model = models(decoder)
    layers = list(rfa_layers(model).values())
    ids = torch.randint(3, 61, (2, 60))
    plain = model(ids, use_cache=False).logits
    with ExactShares(layers, model.device) as exact:
        torch.testing.assert_close(model(ids, use_cache=False).logits, plain)
        exact.shares.fill_(1.0)
        logits = model(ids, use_cache=False).logits
        first = model(ids[:, :41], use_cache=True)
        second = model(ids[:, 41:], **cache_argument(returned_cache(first))).logits
    expected = base_model(ids).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.cat([first.logits, second], dim=1), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model(ids, use_cache=False).logits, plain, rtol=0, atol=0)


@torch.no_grad()
def divergence(model, base_model, ids, scored, shares, shares_before):
    """Return KL(softmax ‖ converted) on the repeated passages, with other shares for the queries before the first of them.

    The heads of all layers attend in one piece.
    """
    start = int(scored.int().argmax()) - 1
    layers = list(rfa_layers(model).values())

    def attend(layer, row, query, key, value, **options):
        output, weights = type(layer).attend(layer, query, key, value, **options)
        exact = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=layer.scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        by_query = torch.where(torch.arange(query.shape[2])[:, None] < start, shares_before[row], shares[row])  # [T, H]
        share = by_query.T.repeat_interleave(query.shape[1] // key.shape[1], 0)[..., None]
        return output + share * (exact - output), weights

    for row, layer in enumerate(layers):
        layer.attend = functools.partial(attend, layer, row)
    converted = model(ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    for layer in layers:
        del layer.attend
    expected = base_model(ids).logits[:, :-1].log_softmax(-1)
    return float((expected.exp() * (expected - converted)).sum(-1)[scored[:, 1:]].mean())


def slopes(model, base_model, ids, scored, chosen):
    """Return the differences of the divergence by every head's share, on a row [1, T], beside heads that are chosen."""
    layers, heads = list(rfa_layers(model).values()), model.config.num_heads_for("causal")
    before = torch.zeros(len(layers), heads, dtype=torch.float64)
    names = [(layer.rfa_layer_idx, head) for layer in layers for head in range(heads)]
    for number, name in enumerate(names):
        before[divmod(number, heads)] = float(name in chosen)
    found = {}
    for number, name in enumerate(names):
        step = torch.zeros_like(before)
        step[divmod(number, heads)] = 1e-3
        up, down = (divergence(model, base_model, ids, scored, before + sign * step, before) for sign in (1, -1))
        found[name] = up - down
    return found


def test_the_first_head_is_that_of_the_steepest_descent(decoder, monkeypatch):
    """Against differences of the divergence by shares from the first passage on, in float64, for every head of a layer."""
    model, base_model = models(decoder)
    model.double(), base_model.double()
    ids, scored = repeated_passages(torch.randint(3, 61, (1, 64)), seed=0)
    monkeypatch.setattr(retrieval_heads, "repeated_passages", lambda *args, seed: (ids, scored))
    chosen = choose_retrieval_heads(model, base_model, {"input_ids": ids}, 1, by_recall=1, seed=0, on_head=lambda: None)
    by_head = slopes(model, base_model, ids, scored, [])
    assert chosen.heads[0] == min(by_head, key=by_head.get)


def test_text_as_it_is_chooses_the_others_by_the_sum_of_their_slopes(decoder):
    model, base_model = models(decoder)
    model.double(), base_model.double()
    ids, heads, asked = torch.randint(3, 61, (3, 64)), model.config.num_heads_for("causal"), []
    chosen = choose_retrieval_heads(
        model, base_model, {"input_ids": ids}, 4, by_recall=2, seed=0, on_head=lambda: asked.append(1)
    ).heads
    assert len(asked) == len(chosen) >= 3
    by_recall = chosen[:2]
    scored = torch.zeros(1, 64, dtype=torch.bool)
    scored[:, 64 - 3 * 6 + 1 :] = True  # of a block's end, as long as its three passages
    by_block = [slopes(model, base_model, ids[row : row + 1], scored, by_recall) for row in (2, 0)]
    free = [
        name
        for name in by_block[0]
        if name not in by_recall and sum(layer == name[0] for layer, _ in by_recall) < heads - 1
    ]
    expected = min(free, key=lambda name: sum(block[name] for block in by_block))
    assert chosen[2] == expected


@pytest.mark.parametrize("by_recall", [1, 100])
def test_heads_are_distinct_one_of_a_layer_is_left_and_the_divergence_is_what_they_leave(decoder, by_recall):
    model, base_model = models(decoder)
    layers, heads = list(rfa_layers(model).values()), model.config.num_heads_for("causal")
    inputs = {"input_ids": torch.randint(3, 61, (2, 64))}
    chosen = choose_retrieval_heads(model, base_model, inputs, 100, by_recall=by_recall, seed=0, on_head=lambda: None)
    assert len(set(chosen.heads)) == len(chosen.heads) <= len(layers) * (heads - 1)
    ids, scored = repeated_passages(inputs["input_ids"], seed=0)
    shares = torch.zeros(len(layers), heads)
    found = divergence(model, base_model, ids[:1], scored[:1], shares, shares)
    assert found == pytest.approx(chosen.before, rel=1e-3, abs=1e-6)
    for layer, head in chosen.heads:
        shares[[other.rfa_layer_idx for other in layers].index(layer), head] = 1.0
    found = divergence(model, base_model, ids[:1], scored[:1], shares, shares)
    assert found == pytest.approx(chosen.after, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("features", [{}, {"preset": "mixed", "feature_map": "summary", "num_features": 3}], ids=str)
def test_a_number_is_chosen_beside_what_is_fitted_and_reported(decoder, text, tmp_path, features, monkeypatch):
    options = {**WINDOW, "num_slots": 3, "retrieval_heads": 2, "retrieval_window": 20, "retrieval_slots": 4}
    options |= {"calibrate_on": text, **features}
    scores, shares = [], []

    def choose(model, *args, by_recall, **options):
        scores.extend(rule.weight.clone() for layer in rfa_layers(model).values() for rule in layer.importances())
        shares.append(by_recall)
        return choose_retrieval_heads(model, *args, by_recall=by_recall, **options)

    monkeypatch.setattr(pipeline, "choose_retrieval_heads", choose)
    monkeypatch.setattr(pipeline, "RETRIEVAL_TOKENS", 24 if features else 25)
    report = convert(decoder, tmp_path / "out", **options)
    assert shares == [2 if features else 1]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert len(scores) == len(rfa_layers(model))
    assert all(weight.any() for weight in scores)
    pairs = [list(pair) for pair in report.retrieval_heads.heads]
    assert model.config.retrieval_heads == pairs
    assert (model.config.retrieval_window, model.config.retrieval_slots) == (20, 4)
    assert len(pairs) in (1, 2)
    memory = cache_memory(model)
    assert memory == report.memory
    assert (memory.per_token, report.grows) == (0, False)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "--retrieval-heads 2 --config retrieval_window=20 --config retrieval_slots=4" in card
    assert f"{pairs[0][0]}.{pairs[0][1]}" in card
    written = json.loads((tmp_path / "out" / "conversion.json").read_text())["retrieval_heads"]
    assert written["heads"] == pairs
    by_hand = convert(decoder, tmp_path / "hand", **options | {"retrieval_heads": pairs})
    ids = torch.randint(3, 61, (1, 50))
    with torch.no_grad():
        other = AutoModelForCausalLM.from_pretrained(tmp_path / "hand")(ids).logits
        torch.testing.assert_close(model(ids).logits, other)
    assert by_hand.retrieval_heads is None
    assert ",".join(f"{layer}.{head}" for layer, head in pairs) in by_hand.command
