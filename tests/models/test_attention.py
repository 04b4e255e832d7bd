"""Attention of every family and variant: in pieces and at once, its weights, its random matrices, and what it is near to."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, EncoderDecoderCache

from hf_rfa import RFALayer, RFASourceLayer
from hf_rfa.errors import InputError
from hf_rfa.inference import cache_num_bytes, use_attention_component
from hf_rfa.models.cache_names import cache_argument
from hf_rfa.models.rfa_classes import own_prefixes
from hf_rfa.models.state_attention import StateAttentionMixin
from tests.families import (
    LENGTH,
    RETRIEVAL,
    ROWS,
    SOURCE_LENGTH,
    WIDTH,
    caches,
    every_case,
    every_decoder_case,
    every_family,
    has_encoder,
    logits,
    logits_by_steps,
    make,
    read,
    relative_error,
    rfa_modules,
    softmax_model,
    source,
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


def attention_modules(model: Any) -> dict[str, list[Any]]:
    """Return all attention modules, RFA or softmax, by the output that holds their weights."""
    decoder = model.transformer.h if hasattr(model, "transformer") else model.get_decoder().layers
    if not model.config.is_encoder_decoder:
        return {"attentions": [layer.attn if hasattr(layer, "attn") else layer.self_attn for layer in decoder]}
    return {
        "encoder_attentions": [layer.self_attn for layer in model.get_encoder().layers],
        "decoder_attentions": [layer.self_attn for layer in decoder],
        "cross_attentions": [layer.encoder_attn for layer in decoder],
    }


@torch.no_grad()
@every_case
def test_output_attentions_are_the_weights_that_give_the_output(family, variant):
    model, ids = make(family, variant, attn_implementation="eager"), tokens()
    exact = copy.deepcopy(model).double()
    assert_close(read(exact, ids, output_attentions=True, use_cache=False).logits, logits(exact, ids))
    values, outputs = {}, {}
    for modules in attention_modules(model).values():
        for each in modules:  # GPT-2 projects queries, keys and values at once
            project = each.c_attn if family == "gpt2" else each.v_proj
            width = WIDTH if family == "gpt2" else None
            project.register_forward_hook(
                lambda _, args, out, each=each, width=width: values.update({each: out[..., -(width or 0) :]})
            )
            each.register_forward_hook(lambda each, args, out: outputs.update({each: out[0]}))
    found = read(model, ids, output_attentions=True, use_cache=False)
    mask = source()["attention_mask"]
    groups = 2 if family == "llama" else 1  # query heads that share a key-value head
    for name, modules in attention_modules(model).items():
        assert len(found[name]) == len(modules)
        for weights, each in zip(found[name], modules, strict=True):
            heads = values[each].unflatten(-1, (weights.shape[1] // groups, -1)).transpose(1, 2)
            heads = heads.repeat_interleave(groups, dim=1)
            project = getattr(each, {"gpt2": "c_proj", "llama": "o_proj"}.get(family, "out_proj"))
            expected = project((weights @ heads).transpose(1, 2).flatten(2))
            exactly = has_encoder(family) and model.config.feature_map == "positive"
            assert_close(outputs[each], expected, atol=1e-5 if exactly else 1e-4, rtol=1e-4)
            if model.config.feature_map == "positive":
                assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
            if name in ("attentions", "decoder_attentions"):
                assert not weights.triu(1).any()
            else:
                assert not weights.transpose(1, 3)[mask == 0].any(), "padding must get no weight"


@torch.no_grad()
@every_family
@pytest.mark.parametrize("past", [9, LENGTH - 1])
def test_output_attentions_on_a_warm_cache_cover_this_calls_tokens(family, past):
    model, ids = make(family, {}), tokens(4)
    rows = (
        {} if not has_encoder(family) else {name: each.repeat_interleave(2, dim=0) for name, each in source(2).items()}
    )
    whole = read(model, ids, output_attentions=True, **rows)
    cache = read(model, ids[:, :past], **rows).past_key_values
    part = read(model, ids[:, past:], **cache_argument(cache), output_attentions=True, **rows)
    name = "attentions" if not has_encoder(family) else "decoder_attentions"
    for found, expected in zip(part[name], whole[name], strict=True):
        assert_close(found, expected[:, :, past:, past:], atol=1e-5, rtol=1e-4)
    if rows:
        assert {state_of(layer).shape[0] for layer in caches(cache)["cross"].layers} == {2}, "beams share one state"
        for found, expected in zip(part.cross_attentions, whole.cross_attentions, strict=True):
            assert_close(found, expected[:, :, past:], atol=1e-5, rtol=1e-4)


SIZES = {"window_size": 5, "num_sinks": 2, "num_slots": 3}
#: By name: fields, and the number of places.
MEMORIES: dict[str, tuple[dict[str, Any], int]] = {
    "exact": ({"feature_map": "none", **SIZES}, 10),
    "retrieval": ({"feature_map": "none", "window_size": 5, "num_sinks": 2, **RETRIEVAL, "retrieval_window": 5}, 7),
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


@torch.no_grad()
def test_weights_of_several_tokens_come_after_those_of_the_places():
    """A window as long as the text: in the order of arrival all are those of one pass."""
    model, ids = make("llama", feature_map="none", window_size=30, num_sinks=2), tokens(2, 20)
    whole = model(ids, output_attentions=True, use_cache=False).attentions
    cache = DynamicCache(config=model.config)
    model(ids[:, :12], **cache_argument(cache))
    rest = model(ids[:, 12:], **cache_argument(cache), output_attentions=True).attentions
    for found, expected in zip(rest, whole, strict=True):
        assert found.shape == (2, expected.shape[1], 8, 32 + 8)
        assert found[..., :20].abs().max() == 0  # empty places come first
        assert_close(found[..., 20:], expected[:, :, 12:], atol=1e-5, rtol=1e-4)


def test_each_kind_of_attention_is_chosen_per_layer():
    layers = {"encoder.layers.0.self_attn"}
    layers |= {f"decoder.layers.{each}" for each in ("0.encoder_attn", "1.self_attn", "2.self_attn", "2.encoder_attn")}
    assert set(rfa_modules(make("bart", "per-layer").model)) == layers
    model = make("bart", "paper")
    counts = [sum(part in name for name in rfa_modules(model)) for part in ("decoder", "self_attn", "encoder_attn")]
    assert counts == [6, 3, 3]
    rows = {key.split(".")[4]: value.shape[1] for key, value in model.state_dict().items() if ".projection" in key}
    assert rows == {"self_attn": 16, "encoder_attn": 32}
    gates = {key.rpartition(".gate.")[0] for key in model.state_dict() if ".gate." in key}
    assert gates == {f"model.decoder.layers.{index}.self_attn" for index in range(3)}, (
        "gates act in causal attention only"
    )


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
    many = (
        {"num_features": 30_000} if not has_encoder(family) else {"num_features": 20_000, "softmax_encoder_layers": []}
    )
    many |= {} if not has_encoder(family) else {"num_cross_features": 20_000, "num_encoder_features": 20_000}
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


@torch.no_grad()
@every_decoder_case
def test_documents_packed_into_one_row_see_nothing_of_each_other(family, variant):
    """One starts wherever positions do not continue: pieces may be from the middle of documents, or of one twice."""
    model = make(family, variant)
    pieces = [range(7, 12), range(3), range(2), range(1), range(13), range(30, 34), range(33, 36)]
    ids = [tokens(1, len(piece)) for piece in pieces]
    positions = [torch.tensor([list(piece)]) for piece in pieces]
    packed = model(torch.cat(ids, dim=1), position_ids=torch.cat(positions, dim=1)).logits
    alone = [model(piece, position_ids=place).logits for piece, place in zip(ids, positions, strict=True)]
    assert_close(packed, torch.cat(alone, dim=1), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_cross_attention_of_a_decoder_alone_and_its_cache():
    model, ids = make("bart", "decoder-alone"), tokens()
    hidden, mask = torch.randn(ROWS, 13, WIDTH), torch.ones(ROWS, 13, dtype=torch.long)
    mask[1, 9:] = 0
    given = {"encoder_hidden_states": hidden, "encoder_attention_mask": mask}
    expected = logits(model, ids, **given)
    changed = torch.where(mask[..., None] == 1, hidden, 99.0)
    assert_close(logits(model, ids, encoder_hidden_states=changed, encoder_attention_mask=mask), expected)
    single = logits(model, ids[1:2], encoder_hidden_states=hidden[1:2, :9])
    assert_close(expected[1:2], single, atol=1e-4, rtol=1e-4)
    # as `generate` builds it for a model without an encoder, or as the model builds it
    for cache in (DynamicCache(config=model.config), None):
        first = model(ids[:, :10], **cache_argument(cache), use_cache=True, **given).past_key_values
        assert isinstance(first, EncoderDecoderCache)
        size = cache_num_bytes(first.cross_attention_cache)
        second = model(ids[:, 10:], **cache_argument(first), use_cache=True, **given)
        assert_close(second.logits, expected[:, 10:], atol=2e-4, rtol=1e-4)
        assert cache_num_bytes(first.cross_attention_cache) == size
    model.set_attn_implementation("eager")  # SDPA returns no weights of softmax attention
    weights = model(ids, output_attentions=True, use_cache=False, **given).cross_attentions
    assert len(weights) == model.config.num_layers_for("causal")
    assert_close(weights[-1].sum(-1), torch.ones(ROWS, 3, LENGTH))
    assert not weights[-1][1, ..., 9:].any()


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


def test_own_tensors_are_told_by_their_layer():
    """Attention may have a gate_proj, and experts a gate, which are the softmax model's."""

    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.rfa_kind = "causal"
            self.feature_map, self.gate, self.gate_proj = (nn.Linear(2, 2) for _ in range(3))

    model = nn.ModuleDict({"mixer": Mixer(), "experts": nn.ModuleDict({"gate": nn.Linear(2, 2)})})
    own = [name for name, _ in model.named_parameters() if name.startswith(own_prefixes(model))]
    assert own == [f"mixer.{part}.{name}" for part in ("feature_map", "gate") for name in ("weight", "bias")]


@pytest.mark.parametrize(("features", "segments"), [(4, 1), (8, 3), (16, 3)])
def test_in_training_few_features_of_a_long_text_are_made_at_once(features, segments, monkeypatch):
    """Those of 20 tokens, where 8 features may be of 10: 4 may be of 20."""
    path = "hf_rfa.models.state_attention"
    for name, value in (("SEGMENT_LENGTH", 8), ("MAX_LENGTH_WITHOUT_SEGMENTS", 10), ("FEW_FEATURES", 8)):
        monkeypatch.setattr(f"{path}.{name}", value)
    model = make("gpt2", {"num_features": features, "feature_map": "positive"})
    calls = []
    attend = StateAttentionMixin._attend_segment

    def counted(self, new, group, shift):
        calls.append(new.length)
        return attend(self, new, group, shift)

    monkeypatch.setattr(StateAttentionMixin, "_attend_segment", counted)
    ids = tokens()[:, :20]
    model(ids)
    layers = len(rfa_modules(model))
    assert len(calls) == segments * layers
    assert sum(calls) == 20 * layers
