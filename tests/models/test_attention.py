"""Attention of models: in pieces and at once, weights of a step, random matrices, shared states, and what a step costs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from hf_rfa import RFALayer, RFASourceLayer
from hf_rfa.errors import InputError
from hf_rfa.inference import cache_num_bytes, use_attention_component
from hf_rfa.models.cache_names import cache_argument
from tests.families import (
    LENGTH,
    RETRIEVAL,
    ROWS,
    SOURCE_LENGTH,
    WIDTH,
    caches,
    every_case,
    every_family,
    has_encoder,
    logits,
    logits_by_steps,
    make,
    read,
    relative_error,
    rfa_modules,
    softmax_model,
    state_of,
    tokens,
)


@every_case
def test_multi_token_forwards_on_a_warm_cache_equal_one_pass(family, variant):
    ids, tolerance = tokens(), {"atol": 2e-4 if not has_encoder(family) else 3e-4, "rtol": 1e-4}
    model = make(family, variant)
    expected = logits(model, ids)
    for cuts in ([1], [28], [7, 8, 9, 20], [10, 20]):
        found, cache = logits_by_steps(model, ids, cuts)
        assert_close(found, expected, **tolerance)
    exact = make(family, variant, dtype=torch.float64)
    assert_close(logits_by_steps(exact, ids, [10, 20])[0], logits(exact, ids))
    assert cache.get_seq_length() == LENGTH
    assert len(DynamicCache(config=model.config).layers) == model.config.num_layers_for("causal")
    for kind, part in caches(cache).items():
        cls, length = {"causal": (RFALayer, LENGTH), "cross": (RFASourceLayer, SOURCE_LENGTH)}[kind]
        for index, layer in enumerate(part.layers):
            assert isinstance(layer, cls) == model.config.is_rfa(kind, index)
            assert layer.get_seq_length() == length


SIZES = {"window_size": 5, "num_sinks": 2, "num_slots": 3}
#: By name: fields, and the number of places.
MEMORIES: dict[str, tuple[dict[str, Any], int]] = {
    "exact": ({"feature_map": "none", **SIZES}, 10),
    "retrieval": (
        {
            "feature_map": "none",
            "window_size": 5,
            "num_sinks": 2,
            **RETRIEVAL,
            "retrieval_window": 4,
            "retrieval_slots": 1,
        },
        7,
    ),
    "features": ({"feature_map": "positive", "num_features": 16, **SIZES}, 10),
}


@torch.no_grad()
@pytest.mark.parametrize("name", MEMORIES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_weights_of_a_step_are_those_of_one_pass(family, name):
    """The row of a token in one pass over all, where what it sees is in the places, and what it does not see weighs 0."""
    options, places = MEMORIES[name]
    model, ids = make(family, options), tokens(2, 20)
    whole = model(ids, output_attentions=True, use_cache=False).attentions
    cache = DynamicCache(config=model.config)
    model(ids[:, :12], **cache_argument(cache))
    for t in range(12, 20):
        step = model(ids[:, t : t + 1], **cache_argument(cache), output_attentions=True).attentions
        for layer, (found, row) in enumerate(zip(step, whole, strict=True)):
            assert found.shape == (*row.shape[:2], 1, places)
            if name != "features":  # all that is seen: the same weights, each in the place of its token
                expected = row[:, :, t].sort(-1).values[..., -places:]
                assert_close(found[:, :, 0].sort(-1).values, expected, atol=1e-5, rtol=1e-4)
                assert_close(found.sum(-1), torch.ones_like(found.sum(-1)))
            arrival = cache.layers[layer].memories[0].places.arrival
            assert bool((arrival.amax(-1) == t).all())
            assert_close(found[..., -1], row[:, :, t : t + 1, t], atol=1e-5, rtol=1e-4)  # the token itself
    options = {"output_attentions": True, "return_dict_in_generate": True, "do_sample": False}
    generated = model.generate(ids, max_new_tokens=3, **options)
    assert [each[0].shape[2:] for each in generated.attentions] == [(20, 20), (1, places), (1, places)]


@every_family
def test_no_two_layers_draw_the_same_random_matrices(family):
    """Nor two kinds of attention of one layer: what one gets wrong by chance, the next ones would get wrong too."""
    options = {"softmax_encoder_layers": [], "num_cross_features": 128, "encoder_attention_heads": 3}
    model = make(family, {"num_features": 128, **({} if not has_encoder(family) else options)})
    state = model.state_dict()
    matrices = torch.stack([state[f"{name}.feature_map.projection"].flatten() for name in rfa_modules(model)])
    assert len(matrices) == {"gpt2": 2, "llama": 3}.get(family, 2 + 2 * 3)
    assert float(torch.corrcoef(matrices).fill_diagonal_(0).abs().max()) < 0.2


SWITCHES = {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}
SWITCHES |= {"n_inner": 11, "activation_function": "relu", "layer_norm_epsilon": 0.1}
SWITCHED = [("gpt2", {name: value}) for name, value in SWITCHES.items()]
SWITCHED += [("bart", each) for each in ({"scale_embedding": True}, {"activation_function": "relu"}, {})]


@pytest.mark.parametrize(("family", "switches"), SWITCHED)
def test_with_very_many_features_it_is_the_softmax_model(family, switches):
    """Every switch of the softmax model keeps its meaning, in all kinds of attention."""
    width = {"initializer_range" if not has_encoder(family) else "init_std": 0.1}
    many = {"num_features": 30_000}
    if has_encoder(family):
        many = dict.fromkeys(("num_features", "num_cross_features", "num_encoder_features"), 20_000)
        many["softmax_encoder_layers"] = []
    few = {"num_features": 4, "num_cross_features": 4}
    model, ids = make(family, many, **width, **switches), tokens()
    expected = logits(softmax_model(model, family, **width, **switches), ids)
    error = relative_error(logits(model, ids), expected)
    assert error < (0.06 if not has_encoder(family) else 0.03)
    if family == "bart":
        assert relative_error(logits(make(family, few, **width, **switches), ids), expected) > 0.03
    elif "reorder_and_upcast_attn" not in switches:  # that one changes precision only, which RFA always has
        assert relative_error(logits(make(family, many, **width), ids), expected) > 2 * error


def test_each_part_of_windowed_attention_alone():
    """The window alone ignores what has left it; the features alone are the model without a window."""
    model, ids = make("gpt2", "window"), tokens()
    both = logits(model, ids)
    use_attention_component(model, "linear")
    plain = make("gpt2", {})
    absent, _ = plain.load_state_dict(model.state_dict(), strict=False)
    assert not absent
    assert_close(logits(model, ids), logits(plain, ids))
    use_attention_component(model, "window")
    alone = logits(model, ids)
    assert not torch.allclose(alone, both, atol=1e-3)
    assert torch.allclose(alone[:, :5], both[:, :5], atol=1e-5), "before the window is full nothing has left it"
    changed = ids.clone()
    changed[:, 0] = 60 - changed[:, 0]
    reach = 2 * (5 - 1)  # two layers
    assert torch.equal(logits(model, changed)[:, reach + 1 :], alone[:, reach + 1 :])
    use_attention_component(model, "both")
    assert torch.equal(logits(model, ids), both)
    with pytest.raises(InputError, match="has none"):
        use_attention_component(plain, "linear")
    without_features = make("gpt2", "none")
    with pytest.raises(InputError, match="attention_component=linear needs features"):
        use_attention_component(without_features, "linear")
    use_attention_component(without_features, "window")
    assert torch.isfinite(logits(without_features, ids)).all()


def beams_that_share_a_state(model: Any, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> int:
    """Return how many rows of a batch read one state of cross attention, and check what they read."""
    ids, given = tokens(len(hidden), 2), {"encoder_outputs": (hidden,), "attention_mask": mask}
    found, cache = logits_by_steps(model, ids, [1], **given)
    assert_close(found, logits(model, ids, **given), atol=1e-4, rtol=1e-4)
    (rows,) = {state_of(layer).shape[0] for layer in caches(cache)["cross"].layers}
    return len(hidden) // rows


BEAM_MODEL = make("bart", "both")


@settings(max_examples=40)
@given(runs=st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_beams_share_a_state_however_many_times_a_source_is_repeated(runs):
    """One row of every n stands for all of them, and no larger n does: n divides every run of equal sources."""
    hidden = torch.randn(len(runs), 5, WIDTH, generator=torch.Generator().manual_seed(0))
    found = beams_that_share_a_state(BEAM_MODEL, hidden.repeat_interleave(torch.tensor(runs), dim=0))
    assert found == math.gcd(*runs)


def test_equal_sources_under_different_padding_share_no_state():
    hidden, mask = torch.randn(1, 5, WIDTH).repeat(2, 1, 1), torch.ones(2, 5, dtype=torch.long)
    assert beams_that_share_a_state(BEAM_MODEL, hidden, mask) == 2
    mask[1, 3:] = 0
    assert beams_that_share_a_state(BEAM_MODEL, hidden, mask) == 1
    hidden, mask = torch.randn(4, 5, WIDTH).repeat_interleave(3, dim=0), mask.flip(0).repeat_interleave(6, dim=0)
    assert beams_that_share_a_state(BEAM_MODEL, hidden, mask) == 3


class Operations(TorchDispatchMode):
    """Records every operation with the shapes of the tensors that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        shapes = tuple(tuple(x.shape) for x in tree_leaves((args, kwargs)) if torch.is_tensor(x))
        self.seen.append((str(func), shapes))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
@every_family
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_no_quadratic_mask_is_built(family, implementation, padded):
    """No tensor of a model whose attention is all RFA has two dimensions as long as its texts."""
    options = {} if not has_encoder(family) else {"softmax_encoder_layers": []}
    model = make(family, {"chunk_size": 8, **options}, attn_implementation=implementation)
    ids, mask = tokens(ROWS, 83), None
    given = {} if not has_encoder(family) else {"input_ids": tokens(ROWS, 79), "attention_mask": None}
    if padded:
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        given |= {} if not has_encoder(family) else {"attention_mask": (torch.arange(79) < 60).long().repeat(ROWS, 1)}
    with Operations() as operations:
        cache = read(model, ids, mask=mask, **given).past_key_values
        more = None if mask is None else torch.cat([mask, mask[:, -2:]], dim=1)
        read(model, ids[:, :2], mask=more, **cache_argument(cache), **given)
    lengths = {79, 83, 85}
    shapes = {shape for _, read_ in operations.seen for shape in read_}
    assert any(lengths & set(shape) for shape in shapes)
    assert not [shape for shape in shapes if sum(size in lengths for size in shape) > 1]


@torch.no_grad()
@pytest.mark.parametrize("variant", ["both", "paper"])
def test_a_step_is_the_same_operations_at_any_output_position_and_source_length(variant):
    """Not one tensor of a decoding step depends on how long the output or the source is: it costs the same."""
    model = make("bart", variant, max_position_embeddings=4100)
    steps, sizes = {}, set()
    for source_length in (32, 4000):
        encoded = model.get_encoder()(tokens(2, source_length))
        mask = torch.ones(2, source_length, dtype=torch.long)
        mask[0, 20:] = 0
        for position in (100, 4000):
            inputs = {"encoder_outputs": encoded, "attention_mask": mask}
            cache = model(decoder_input_ids=tokens(2, position), **inputs).past_key_values
            sizes.add(cache_num_bytes(cache))
            with Operations() as operations:
                model(decoder_input_ids=torch.full((2, 1), 5), **cache_argument(cache), **inputs)
            steps[source_length, position] = operations.seen
    (size,) = sizes
    assert size > 0
    first = steps.pop((32, 100))
    assert len(first) > 100
    for setting, operations in steps.items():
        assert operations == first, setting
