"""Calibration: each step finds what it looks for, of features, gates and the importance of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_rfa import FEATURE_MAPS
from hf_rfa.convert import convert
from hf_rfa.convert.calibrate import calibration, far_outputs, importance
from hf_rfa.convert.calibrate.activations import LayerActivations
from hf_rfa.convert.calibrate.attention_weights import key_exponents
from hf_rfa.convert.calibrate.calibration import (
    CLOSED,
    GATE_TIME_SCALES,
    MAX_WINDOW_SHIFT,
    _Comparison,
    _set_log_scale,
    _set_temperature,
    calibrate_layer,
)
from hf_rfa.convert.calibrate.far_outputs import FarText, far_queries, output_roots
from hf_rfa.convert.calibrate.importance import far_weights, refine_importance, regress_importance
from hf_rfa.convert.calibrate.summary_fit import fit_summary
from hf_rfa.convert.calibrate.threads import run_together
from hf_rfa.convert.checkpoint.base_model import rfa_layers
from hf_rfa.finetune.distill import distill
from hf_rfa.finetune.recipe import Recipe, Stage
from hf_rfa.inference import cache_num_bytes
from hf_rfa.models.cache_names import returned_cache
from tests.families import make, softmax_model
from tests.grouped_layers import Layer
from tests.training import weights


@pytest.fixture
def threads() -> Iterator[int]:
    """The number of threads, which a test may change."""
    number = torch.get_num_threads()
    yield number
    torch.set_num_threads(number)


def test_a_window_is_calibrated_to_the_features(tiny_parent, tmp_path):
    """Maps whose φ has another scale than the softmax kernel get a shift; it lowers the divergence."""
    for feature_map in ("elu", "positive"):
        report = convert(tiny_parent, tmp_path / feature_map, preset="rfa", feature_map=feature_map, window_size=3)
        assert all(sum(gain.after) < sum(gain.before) for gain in report.gains)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / feature_map)
        assert float(model.transformer.h[0].attn.feature_map.window_shift.detach().abs().max()) > 0
        cache = returned_cache(model(torch.ones(1, 5, dtype=torch.long)))
        assert report.memory.fixed == cache_num_bytes(cache)


def test_the_heaviest_keys_keep_their_proportions():
    """A few keys far heavier than the others, and new ones heavier still: none is cut off, none drowns another."""
    feature_map = FEATURE_MAPS["exponential"](num_heads=2, head_dim=6, num_features=6)
    feature_map.key_projection.data.copy_(torch.eye(6))
    feature_map.norm_weight.data.zero_()  # exponents are the keys
    keys = torch.randn(2, 101, 6)
    keys[:, 7, 0], keys[:, 8, 0] = 140.0, 120.0
    _set_log_scale(feature_map, keys)
    heavy = torch.cat([keys[:, 7:9], 1.05 * keys[:, 7:8]], dim=1)[None]
    with torch.no_grad():
        exponents = key_exponents(feature_map, feature_map.key_input(heavy)).amax(-1)
        found = feature_map.key(heavy).amax(-1).log()
    torch.testing.assert_close(found.diff(), exponents.diff(), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_every_step_brings_attention_closer_to_the_parent():
    """With one of them undone, and the best temperature for what is left, every head is farther from its softmax weights."""
    layer = make("gpt2", {"n_embd": 48, "n_head": 6, "num_features": 32}).transformer.h[0].attn
    feature_map = layer.feature_map
    mix, width = torch.randn(6, 8, 8) / 8**0.5, torch.linspace(-0.7, 0.7, 8).exp()
    # Correlated, of other widths on the two sides, and neither of mean 0.
    query, key = (torch.randn(1, 6, 64, 8) @ (mix * each) + torch.randn(6, 1, 8) for each in (width, 1 / width))
    sample = LayerActivations(query, key, torch.randn_like(key))
    hidden = torch.zeros(1, 64, 48)
    calibrate_layer(layer, sample, hidden)
    assert (feature_map.sigma != 1).any()
    masses = feature_map.key(key)[0].sum(-1)
    torch.testing.assert_close(masses.median(dim=1).values, torch.ones(6), msg="of the keys at the temperature chosen")
    comparison = _Comparison(layer, sample, hidden)
    calibrated = comparison.divergence()
    constants = {name: tensor.clone() for name, tensor in feature_map.state_dict().items()}
    mean_query, mean_key = sample.queries().mean(1), sample.keys().mean(1)
    undone = {
        "shape": {"projection": feature_map.initial_projection(), "feature_bias": torch.zeros(6, 32)},
        "mean of the queries": {"key_shift": mean_key},
        "mean of the keys": {"key_shift": constants["balance"].square() * mean_query},
        "balance": {"balance": torch.ones(6, 8), "key_shift": mean_key + mean_query},
    }
    for name, values in undone.items():
        feature_map.load_state_dict(constants | values)
        _set_temperature(feature_map, sample.keys(), comparison)
        assert (comparison.divergence() > calibrated).all(), name


def distance_sample(decays: torch.Tensor, length: int) -> LayerActivations:
    """Return queries and keys with softmax weights g^(i − j), [H], before they are normalised.

    In the one dimension that tells keys apart they are so negative that elu features do not tell them apart; a second one,
    large and the same for all keys, takes from a query's scores what its position adds.
    """
    query, key = torch.zeros(2, 1, len(decays), length, 8)
    rates = -decays.log()[:, None] * 8**0.5
    positions, below, large = torch.arange(float(length)), length + 10, 100
    query[..., 0], key[..., 0] = rates, positions - below
    query[..., 1], key[..., 1] = rates * (below - positions) / large, large
    return LayerActivations(query, key, torch.randn_like(key))


@pytest.mark.parametrize(("window", "left"), [(0, 1e-5), (5, 1e-2)])  # a window's shift is the same for all queries
def test_the_gates_find_the_spans_of_softmax_attention(window, left):
    model = make("gpt2", {"gate": True, "feature_map": "elu", "window_size": window}, n_positions=64)
    layer = model.transformer.h[0].attn
    spans = torch.tensor([1 / 8, 1.0, max(GATE_TIME_SCALES)]) * 64
    sample, hidden = distance_sample(1 - 1 / spans, 64), torch.randn(1, 64, 24)
    before = _Comparison(layer, sample, hidden).best_divergence()
    calibrate_layer(layer, sample, hidden)
    torch.testing.assert_close(layer.gate.bias.detach().exp() + 1, spans)
    after = _Comparison(layer, sample, hidden).divergence()
    assert (after < left).all()
    assert after[0] < before[0] / 5
    assert not layer.gate.weight.any()


# Features beside exact tokens


@torch.no_grad()
@pytest.mark.parametrize(("feature_map", "gate"), [("positive", False), ("exponential", True), ("elu", False)])
def test_features_beside_exact_tokens_are_never_worse_than_none(feature_map, gate):
    """Of the heads' outputs; where they would only harm they are closed, and nothing of them is left."""
    layer = Layer(3, 2, feature_map=feature_map, window_size=4, num_sinks=1, gate=gate)
    hidden = torch.randn(4, 50, 5)
    query, key, value = torch.randn(4, 6, 50, 4), torch.randn(4, 3, 50, 4), torch.randn(4, 3, 50, 4)
    query[:, :2], key[:, 0] = 4 * query[:, :2], 4 * key[:, 0]  # sharp attention, which few features do not stand for
    value[:, 2, :25] += 3.0  # which no window tells of later
    rows = query.unflatten(1, (3, 2)).transpose(2, 3).flatten(2, 3)
    calibrate_layer(layer, LayerActivations(rows, key, value), hidden)
    truth = F.scaled_dot_product_attention(query, key, value, scale=layer.scaling, is_causal=True, enable_gqa=True)
    outputs = {}
    for component in ("both", "window"):
        layer.attention_component = component
        outputs[component] = layer.attend(query, key, value, hidden_states=hidden)[0].unflatten(1, (3, 2))
    errors = {
        name: (output - truth.unflatten(1, (3, 2))).square().mean((0, 2, 3, 4)) for name, output in outputs.items()
    }
    assert (errors["both"] <= errors["window"] * (1 + 1e-5)).all()
    if feature_map in ("positive", "elu"):
        assert errors["both"][2] < 0.9 * errors["window"][2]
    closed = layer.feature_map.window_shift == CLOSED
    torch.testing.assert_close(outputs["both"][:, closed], outputs["window"][:, closed], rtol=1e-6, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("feature_map", ["positive", "elu", "gaussian"])
def test_nothing_is_left_of_closed_features(feature_map):
    layer = Layer(2, 1, feature_map=feature_map, window_size=4)
    query, key, value = (torch.randn(4, 2, 50, 4) for _ in range(3))
    hidden = torch.zeros(4, 50, 5)
    calibrate_layer(layer, LayerActivations(query, key, value), hidden, to_train=True)
    assert (layer.feature_map.window_shift.abs() <= MAX_WINDOW_SHIFT).all(), "training has to find them open"
    layer.feature_map.window_shift.fill_(CLOSED)
    closed = layer.attend(query, key, value, hidden_states=hidden)[0]
    layer.attention_component = "window"
    alone = layer.attend(query, key, value, hidden_states=hidden)[0]
    torch.testing.assert_close(closed, alone, rtol=1e-6, atol=1e-6)


# The importance of tokens, by which slots choose


@torch.no_grad()
def test_tokens_that_are_asked_for_later_become_important():
    """Queries look at the keys of some tokens, wherever these stand, and hidden states say which: the fit finds them."""
    layer = Layer(2, 3, feature_map="none", window_size=4, num_sinks=1, num_slots=3, hidden_size=5)
    query, hidden = torch.zeros(2, 6, 60, 4), torch.randn(2, 60, 5)
    key, value = torch.zeros(2, 2, 60, 4), torch.randn(2, 2, 60, 4)
    query[..., 0] = 6.0
    marked = torch.rand(2, 60) < 0.1
    key[:, 0, :, 0] = 3.0 * marked
    hidden[..., 0] = marked.float()
    activations = LayerActivations(query.unflatten(1, (2, 3)).transpose(2, 3).flatten(2, 3), key, value)
    regress_importance(FarText(layer, activations, hidden, None))
    importances = layer.importance.score(hidden, key, torch.zeros(2, 60))[:, 0]
    assert float(importances[marked].min()) > float(importances[~marked].max())

    target, weight = far_weights(FarText(layer, activations, hidden, None))
    softmax = (query @ key.repeat_interleave(3, dim=1).mT * layer.scaling).tril()
    softmax = softmax.masked_fill(~torch.ones(60, 60).tril().bool(), -1e30).softmax(-1).square()
    far = torch.ones(60, 60).tril(-4)[4:]
    expected = (softmax.unflatten(1, (2, 3)).sum(2)[:, :, 4:] * far).sum(2) / far.sum(0).clamp_min(1)
    torch.testing.assert_close(target[..., 1:], expected[..., 1:], rtol=1e-4, atol=1e-6)
    assert torch.equal(weight[0, 0], F.pad(far.sum(0)[1:], (1, 0)))


@torch.no_grad()
def test_padding_changes_no_importance():
    layer = Layer(2, 1, feature_map="none", window_size=3, num_sinks=1, num_slots=3, hidden_size=5)
    query, key, value = (torch.randn(1, 2, 30, 4) for _ in range(3))
    hidden = torch.randn(1, 30, 5)
    regress_importance(FarText(layer, LayerActivations(query, key, value), hidden, None))
    expected = layer.importance.weight.clone()
    mask = torch.ones(1, 37, dtype=torch.bool)
    mask[:, :7] = False
    padded = LayerActivations(*(F.pad(each, (0, 0, 7, 0), value=9.0) for each in (query, key, value)), mask, mask)
    regress_importance(FarText(layer, padded, F.pad(hidden, (0, 0, 7, 0), value=9.0), None))
    torch.testing.assert_close(layer.importance.weight, expected, rtol=1e-4, atol=1e-6)
    layer.importance.weight.fill_(7.0)
    short = LayerActivations(*(x[:, :, :3] for x in (query, key, value)))
    regress_importance(FarText(layer, short, hidden[:, :3], None))
    assert (layer.importance.weight == 7.0).all(), "a text shorter than the window says nothing"


def text_of_two_kinds(rows: int, length: int) -> tuple[LayerActivations, Tensor]:
    """Return a layer's activations and its input: what most is looked at adds least to an output, as its value is 0."""
    hidden = torch.randn(rows, length, 5)
    empty, full = (torch.rand(rows, length) < share for share in (0.2, 0.1))
    hidden[..., 0], hidden[..., 1] = 2.0 * empty, 2.0 * full
    query, key = torch.zeros(rows, 2, 3 * length, 4), torch.zeros(rows, 2, length, 4)
    query[..., 0] = 5.0
    key[..., 0] = (0.8 * empty + 0.6 * full)[:, None]
    value = torch.randn(rows, 2, length, 4) * full[:, None, :, None]
    return LayerActivations(query, key, value), hidden


@torch.no_grad()
def test_the_error_of_slots_is_that_of_the_layers_outputs():
    layer = Layer(2, 3, feature_map="none", window_size=4, num_sinks=1, num_slots=3, hidden_size=5)
    layer.importance.weight.normal_()
    layer.importance.recency.fill_(0.05)
    activations, hidden = text_of_two_kinds(2, 40)
    query = activations.query.unflatten(2, (-1, 3)).transpose(2, 3).flatten(1, 2)
    output, _ = layer.attend(query, activations.key, activations.value, hidden_states=hidden)
    expected = F.scaled_dot_product_attention(
        query, activations.key, activations.value, scale=layer.scaling, is_causal=True, enable_gqa=True
    )
    places = torch.arange(8, 40, 5)
    squares = (output - expected)[:, :, places].square().sum(-1).unflatten(1, (2, 3)).sum(2).mean((0, 2))
    score = layer.importance.score(hidden, activations.key, torch.arange(40.0).expand(2, -1))
    queries = far_queries(layer, activations, places)
    errors = queries.errors(queries.shares(score, 3))
    torch.testing.assert_close(errors, squares, rtol=1e-4, atol=1e-7)
    assert (errors > 0).all()


@torch.no_grad()
def test_the_slots_of_retrieval_heads_are_fitted_as_if_all_heads_were_such(monkeypatch):
    """With their window and their number of slots, and no other head's."""
    monkeypatch.setattr(far_outputs, "FITTED_FROM", 1)
    inputs = {"input_ids": torch.randint(3, 61, (9, 60))}
    of_all = {"feature_map": "none", "window_size": 5, "num_sinks": 2, "num_slots": 6}
    heads = {"retrieval_heads": [[0, 1]], "retrieval_window": 5, "retrieval_slots": 6}
    expected = make("llama", of_all)
    model = make("llama", of_all | heads | {"window_size": 3, "num_slots": 4})
    base = softmax_model(expected, "llama")
    for each in (expected, model):
        calibration.calibrate(each, base, inputs, on_layer=lambda: None)
    theirs, rule = (next(iter(rfa_layers(each).values())) for each in (expected, model))
    for name in ("weight", "recency"):
        found = getattr(rule.retrieval_importance, name)
        torch.testing.assert_close(found, getattr(theirs.importance, name)[1:2], rtol=1e-4, atol=1e-6)
        assert not torch.allclose(getattr(rule.importance, name), getattr(theirs.importance, name)[:1])
        assert found.any()


def padded(activations: LayerActivations, hidden: Tensor) -> tuple[LayerActivations, Tensor]:
    """Return a text with padding, some of its rows shorter than what a memory holds, one of these held out."""
    rows, _, length, _ = activations.key.shape
    mask = F.pad(torch.ones(rows, length, dtype=torch.bool), (7, 0))
    mask[0, 10:] = mask[-1, :-3] = False
    groups = activations.query.shape[2] // length
    return LayerActivations(
        F.pad(activations.query, (0, 0, 7 * groups, 0), value=9.0),
        *(F.pad(each, (0, 0, 7, 0), value=9.0) for each in (activations.key, activations.value)),
        mask,
        mask,
    ), F.pad(hidden, (0, 0, 7, 0), value=9.0)


@torch.no_grad()
def test_gradients_make_outputs_nearer(monkeypatch):
    """On another text of the same kind, from nothing; padding changes nothing, and a short text is none for gradients."""
    layer = Layer(2, 3, feature_map="none", window_size=4, num_sinks=1, num_slots=5, hidden_size=5)
    activations, hidden = text_of_two_kinds(16, 60)
    layer.importance.recency.fill_(importance.RECENCY)
    other, other_hidden = text_of_two_kinds(50, 60)
    assert not FarText(layer, activations, hidden, None).is_long
    monkeypatch.setattr(far_outputs, "FITTED_FROM", 16 * 60)
    assert FarText(layer, activations, hidden, None).is_long
    assert not FarText(layer, *padded(activations, hidden), None).is_long
    monkeypatch.setattr(importance, "STEPS", 60)
    monkeypatch.setattr(importance, "LEARNING_RATE", 0.05)

    def errors() -> Tensor:
        score = layer.importance.score(other_hidden, other.key, torch.arange(60.0).expand(50, -1))
        queries = far_queries(layer, other, torch.arange(10, 60))
        return queries.errors(queries.shares(score, layer.num_slots))

    before = errors()
    for text, inputs in ((activations, hidden), padded(activations, hidden)):
        layer.importance.weight.zero_()
        refine_importance(FarText(layer, text, inputs, None))
        assert (errors() < 0.5 * before).all()


@pytest.mark.parametrize("options", [{"feature_map": "summary", "window_size": 3, "num_slots": 2}, {"preset": "rfa"}])
def test_layers_fitted_together_are_those_fitted_one_after_the_other(options, checkpoints, tmp_path, threads):
    """On threads of their own, of which the model has its part before and after."""
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be " * 200)
    reports, layers = [], []
    for number in (1, 3):
        torch.set_num_threads(number)
        folder = tmp_path / str(number)
        reports.append(convert(checkpoints["gpt2"], folder, calibrate_on=text, force=True, **options))
        layers.append(weights(folder))
        assert torch.get_num_threads() == number
    torch.testing.assert_close(layers[1], layers[0], rtol=1e-3, atol=1e-4)
    assert [gain.name for gain in reports[1].gains] == [gain.name for gain in reports[0].gains]


def test_a_layer_that_cannot_be_fitted_says_so(threads):
    """Beside others that can: its error arrives, and the model has its threads again."""
    seen = []

    def fit(number: int) -> bool:
        seen.append(torch.get_num_threads())
        if number == 1:
            raise FloatingPointError("no number")
        return torch.is_grad_enabled()

    torch.set_num_threads(6)
    for numbers in ((0,), (0, 2), (0, 1, 2)):
        seen.clear()
        results = run_together([partial(fit, number) for number in numbers])
        if 1 in numbers:
            with pytest.raises(FloatingPointError, match="no number"):
                list(results)
        else:
            assert not any(list(results))
        assert seen == [6 // len(numbers)] * len(numbers)
        assert torch.get_num_threads() == 6


def test_another_seed_draws_other_queries(monkeypatch):
    """The first step of gradient descent sees the same queries for a seed and a layer, and others for another seed."""
    activations, hidden = text_of_two_kinds(50, 60)
    monkeypatch.setattr(far_outputs, "STEP_ROWS", 3)

    def rows(seed: int) -> list[int]:
        layer = Layer(
            2, 3, feature_map="none", feature_seed=seed, window_size=4, num_sinks=1, num_slots=5, hidden_size=5
        )
        text = FarText(layer, activations, hidden, None)
        return [row for row, _ in text.draw(text.generator())]

    assert rows(0) == rows(0)
    assert len({tuple(rows(seed)) for seed in (0, 1, 2, 2**32 - 1)}) == 4


def layer_error(layer: Layer, activations: LayerActivations, hidden: Tensor, places: Tensor) -> Tensor:
    """Return the mean squared error of a layer's outputs from those of softmax, by key-value heads, [H]."""
    groups = layer.feature_map.groups
    query = activations.query.unflatten(2, (-1, groups)).transpose(2, 3).flatten(1, 2)
    output, _ = layer.attend(query, activations.key, activations.value, hidden_states=hidden)
    expected = F.scaled_dot_product_attention(
        query, activations.key, activations.value, scale=layer.scaling, is_causal=True, enable_gqa=True
    )
    squares = (output - expected)[:, :, places].square().sum(-1)
    return squares.unflatten(1, (-1, groups)).sum(2).mean((0, 2))


@torch.no_grad()
@pytest.mark.parametrize("slots", [3, 0])
def test_a_summary_makes_the_outputs_of_the_layer_better(slots):
    """On another text, whatever is padded: by the errors that the fit reports, which are those of the layer itself."""
    layer = Layer(
        2, 3, feature_map="summary", num_features=4, window_size=4, num_sinks=1, num_slots=slots, hidden_size=5
    )
    if slots:
        layer.importance.weight.normal_()
    activations, hidden = text_of_two_kinds(48, 60)
    other, other_hidden = text_of_two_kinds(20, 60)
    places = torch.arange(layer.num_sinks + layer.window_size + slots, 60)
    layer.feature_map.window_shift.fill_(CLOSED)
    without = layer_error(layer, other, other_hidden, places)
    for text, inputs in ((activations, hidden), padded(activations, hidden)):
        layer.feature_map.reset_parameters()
        far = FarText(layer, text, inputs, None)
        before, after = fit_summary(far)
        assert (after < 0.8 * before).all()
        assert (layer_error(layer, other, other_hidden, places) < 0.8 * without).all()
    rows = activations.rows(far.held_out)
    _, after = fit_summary(FarText(layer, activations, hidden, None))
    torch.testing.assert_close(
        layer_error(layer, rows, hidden[: far.held_out], places), 3 * after, rtol=1e-3, atol=1e-6
    )


@torch.no_grad()
def test_a_summary_that_does_not_help_is_closed(monkeypatch):
    """A model that is trained afterwards needs it open."""
    errors = torch.tensor([2.0, 1.0]), torch.tensor([1.0, 1.5])
    monkeypatch.setattr(calibration, "fit_summary", lambda *args: errors)
    layer = Layer(2, 3, feature_map="summary", window_size=4, num_sinks=1, hidden_size=5)
    activations, hidden = text_of_two_kinds(4, 60)
    text = FarText(layer, activations, hidden, None)
    for to_train, expected in ((False, [0.5, CLOSED]), (True, [0.5, 0.5])):
        layer.feature_map.window_shift.fill_(0.5)
        calibration.summarise(text, to_train=to_train)
        assert layer.feature_map.window_shift.tolist() == expected


@torch.no_grad()
@pytest.mark.parametrize(("family", "retrieval"), [("gpt2", False), ("llama", False), ("llama", True)])
def test_errors_are_weighed_as_the_output_projection_weighs_them(family, retrieval):
    fields = {"retrieval_heads": [[0, 1]], "retrieval_window": 6, "window_size": 4} if retrieval else {}
    model = make(family, fields)
    layer = next(iter(rfa_layers(model).values()))
    projection = "c_proj" if family == "gpt2" else "o_proj"
    linear = layer.get_submodule(projection)
    heads, groups, width = layer.rfa_heads, layer.feature_map.groups, layer.rfa_width
    root = output_roots(layer, projection)[0]
    chosen = [head for head in range(heads) if head not in layer.retrieval_heads]
    assert root.shape == (len(chosen), groups, width, width)
    for index, head in enumerate(chosen):
        for group in range(groups):
            error = torch.zeros(heads * groups, width)
            error[head * groups + group] = torch.randn(width)
            expected = linear(error.flatten()) - linear(torch.zeros(heads * groups * width))
            weighed = error[head * groups + group] @ root[index, group]
            torch.testing.assert_close(weighed.square().sum(), expected.square().sum(), rtol=1e-2, atol=1e-4)


def test_distillation_leaves_importance_as_it_is_in_float32(checkpoints, text, tmp_path):
    options = {"preset": "exact", "window_size": 4, "num_sinks": 0, "num_slots": 3, "dtype": "bfloat16"}
    convert(checkpoints["gpt2"], tmp_path / "rfa", calibrate_on=text, **options)
    recipe = Recipe(end_to_end=Stage(steps=2, batch_size=2, block_length=24, kl_weight=1.0))
    distill(tmp_path / "rfa", tmp_path / "out", teacher=checkpoints["gpt2"], data=text, recipe=recipe)
    before, after = (weights(tmp_path / name) for name in ("rfa", "out"))
    found = {name for name in before if name.endswith("importance.weight")}
    assert len(found) == 2
    for name in found:
        assert after[name].dtype == torch.float32
        assert torch.equal(after[name], before[name])
        assert not torch.equal(after[name].bfloat16().float(), after[name])
