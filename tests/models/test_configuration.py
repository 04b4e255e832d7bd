"""The configuration: defaults, round trips, and refusals that name the field, its value and what is allowed.

Configurations are drawn at random too: one that is accepted builds and runs, and a wrong field is named. Which fields are
wrong is said here a second time, by lists of values and a few rules.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from hf_rfa import FEATURE_MAPS, RFAGPT2Config, RFAGPT2LMHeadModel
from tests.conftest import tiny_parent_config
from tests.families import (
    COMMON,
    FAMILIES,
    base_config,
    every_family,
    has_encoder,
    logits,
    logits_by_steps,
    make,
    make_head,
    read,
    tokens,
)
from tests.tiny_models import tiny_config

NO_FEATURES = {"feature_map": "none", "window_size": 4}
#: Fields that are at odds with others, with their error; `test_every_bad_value_is_refused` has those that are bad alone.
AT_ODDS: list[tuple[str, dict[str, Any], str]] = [
    ("gpt2", {"feature_map": "cosine"}, "feature_map.*cosine.*arccos, elu, exponential, gaussian, hedgehog"),
    (
        "gpt2",
        {"trainable_projection": True, "feature_map": "hedgehog"},
        "trainable_projection=True has no .*'hedgehog'",
    ),
    ("gpt2", {"unit_norm": True, "feature_map": "t2r"}, "unit_norm=True does not apply to feature_map='t2r'"),
    ("gpt2", {"softmax_layers": [2]}, r"softmax_layers must be .* from 0 to 1, got \[2\]"),
    ("gpt2", {"num_features": 9, "feature_map": "hedgehog"}, r"num_features=9 .*'hedgehog'.*\(8\)"),
    ("gpt2", {"num_sinks": 4}, "num_sinks=4 must come with a sliding window"),
    ("gpt2", {"num_sinks": 97, "window_size": 4}, "num_sinks must be from 0 to 96"),
    ("gpt2", {"num_slots": 4}, "num_slots=4 must come with a sliding window"),
    ("gpt2", {"num_slots": 97, "window_size": 4}, "num_slots must be from 0 to 96"),
    ("gpt2", {"feature_map": "none"}, "must come with a sliding window"),
    ("gpt2", {**NO_FEATURES, "gate": True}, "gate.*no effect without features"),
    ("gpt2", {**NO_FEATURES, "unit_norm": True}, "unit_norm.*no effect without features"),
    ("gpt2", {**NO_FEATURES, "num_features": 8}, "which has no features"),
    ("bart", {**NO_FEATURES, "softmax_cross_layers": [0]}, "leaves cross attention nothing to see"),
    ("llama", {"retrieval_heads": [[0, 2]]}, "of 3 layers of 2 key-value heads"),
    ("llama", {"retrieval_heads": [[3, 0]]}, "of 3 layers"),
    ("llama", {"retrieval_heads": [0, 1]}, "must be pairs"),
    ("llama", {"retrieval_heads": [[0, 0], [0, 1]]}, "names all 2 heads of layer 0"),
    ("llama", {"retrieval_heads": [[0, 0], [0, 0]]}, "names a head twice"),
    ("llama", {"retrieval_heads": [[0, 0]], "softmax_layers": [0]}, "whose attention is not RFA"),
    ("llama", {"retrieval_heads": [], "retrieval_window": 5}, "has no effect without retrieval_heads"),
    ("llama", {"retrieval_heads": [[0, 0]], "retrieval_window": 97}, "retrieval_window must be from 0 to 96"),
    ("llama", {"retrieval_heads": [[0, 0]]}, "must have a window of their own: set retrieval_window"),
]


@pytest.mark.parametrize(("family", "options", "message"), AT_ODDS)
def test_refusals_name_field_value_and_range(family, options, message):
    with pytest.raises(StrictDataclassError, match=message):
        FAMILIES[family].rfa_config.from_base(base_config(family), **options)


def test_fields_given_while_loading_are_checked_too(tmp_path):
    """`from_pretrained` sets them after the configuration was checked."""
    make("gpt2").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"chunk_size must be from 1 .* got 0"):
        RFAGPT2LMHeadModel.from_pretrained(tmp_path, chunk_size=0)
    with pytest.raises(StrictDataclassError, match="'window_size' expected int, got float"):
        RFAGPT2LMHeadModel.from_pretrained(tmp_path, window_size=1.5)


@pytest.mark.parametrize("name", sorted(FEATURE_MAPS))
def test_the_number_of_features_is_the_maps_default_and_stated(name, tmp_path):
    options = {"window_size": 4} if name == "none" else {"gate": True}
    config = RFAGPT2Config.from_base(tiny_parent_config(), feature_map=name, softmax_layers=[1], **options)
    config.save_pretrained(tmp_path)
    again = RFAGPT2Config.from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict()
    assert again.cache_layer_types() == ["rfa", "full_attention"]
    assert again.n_embd == 24
    known = {"none": 0, "elu": 8, "hedgehog": 8, "gaussian": 64, "positive": 128}
    assert again.num_features == known.get(name, FEATURE_MAPS[name].default_num_features or 8)


@every_family
def test_a_configuration_survives_copies_and_files(family, tmp_path):
    cls, config = FAMILIES[family].rfa_config, make_head(family).config
    assert cls().model_type == config.model_type == f"rfa_{family}"  # every field has a default
    assert cls.from_dict(config.to_dict()).to_dict() == config.to_dict()
    config.to_json_file(tmp_path / "config.json")
    assert cls.from_json_file(tmp_path / "config.json").to_dict() == config.to_dict()
    config.num_labels = 5
    assert len(config.id2label) == len(config.label2id) == 5
    assert copy.deepcopy(config).to_dict() == config.to_dict()
    for common, own in cls.attribute_map.items():
        setattr(config, own, getattr(config, common))
        assert getattr(config, common) == getattr(config, own)


@pytest.mark.parametrize("family", [*COMMON, "bamba", "jamba", "ministral", "whisper"])
def test_what_is_written_to_the_decoders_configuration_is_written_to_the_models(family):
    """Caches are built by it: only the types of its layers, and the decoder's numbers of an encoder-decoder, are others."""
    encoder, common = has_encoder(family), family in (*COMMON, "whisper")
    config = FAMILIES[family].rfa_config.from_base(base_config(family) if common else tiny_config(family))
    decoder, before = config.get_text_config(decoder=True), config.to_dict()
    assert decoder.layer_types == config.cache_layer_types() == decoder.get_text_config(decoder=True).layer_types
    assert len(decoder.layer_types) == decoder.num_hidden_layers == config.num_layers_for("causal")
    assert decoder.num_attention_heads == config.num_query_heads_for("causal")
    assert decoder.to_dict() == config.to_dict() == before
    for name in ("tie_word_embeddings", "some_new_field"):  # the first as torchao's integration does
        setattr(decoder, name, False)
        assert getattr(config, name) is False
    if encoder:  # by the name that transformers' own copy has it under
        decoder.num_hidden_layers, decoder.ffn_dim = 1, 7
        assert (config.decoder_layers, config.encoder_layers, config.decoder_ffn_dim) == (1, 2, 7)
        assert decoder.layer_types == ["rfa"]
    if "layer_types" in vars(config):
        decoder.layer_types = ["sliding_attention"] * config.num_hidden_layers
        assert set(decoder.layer_types) == set(config.base_layer_types()) == {"sliding_attention"}
    apart = copy.deepcopy(decoder)
    apart.vocab_size = 7
    assert config.vocab_size != 7


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 7, "summary_type": "mean"}),
        ("bart", {"scale_embedding": True, "decoder_ffn_dim": 7}),
        ("marian", {"activation_function": "relu", "share_encoder_decoder_embeddings": False}),
        ("llama", {"attention_bias": True, "intermediate_size": 7, "rms_norm_eps": 0.1}),
    ],
)
def test_fields_of_the_softmax_model_are_kept(family, changed):
    base = base_config(family, **changed)
    config = FAMILIES[family].rfa_config.from_base(base)
    kept = set(base.to_dict()) - {"model_type", "architectures", "transformers_version", "id2label", "label2id"}
    assert {name: getattr(config, name) for name in kept} == {name: getattr(base, name) for name in kept}


# Configurations drawn at random

WIDTH, POSITIONS, LENGTH = 24, 16, 9
RANDOM_MAPS, OWN_SIZE = ("positive", "gaussian", "arccos"), ("elu", "hedgehog")
LEARNED_MAPS = ("t2r", "hedgehog", "mlp")
HUGE = 2**70

FLAG = ([True, False], [None, 1, "yes", 0.0])
COUNT = ([None, 1, 2, 7, 8, 16, 33], [0, -3, 8.0, 2.5, "8", True])
LAYERS = ([[], [0], [1], [0, 1], [1, 0], [2]], [None, "all", 0, (0,), [0, 0], [-1], [3], [0.0], [True], [None], [HUGE]])
WRONG_HEADS = [None, "all", (), [0], [[0]], [[0, -1]], [[9, 0]], [[0, HUGE]], [[0, 0], [0, 0]], [[0.0, 0]], [[True, 0]]]
HEADS = ([1, 2, 3, 4, 6, 24], [0, -1, 2.0, "3", None])
NUM_LAYERS = ([1, 2, 3], [0, -1, None, "2", 1.5])
CHANCE = ([0.0, 0.4, 1.0], [])

#: Good and bad values of a field; those that transformers checks as it builds a model are left to it.
RFA_FIELDS: dict[str, tuple[list[Any], list[Any]]] = {
    "feature_map": (["none", *sorted(FEATURE_MAPS)], [None, 3, "cosine", "", ["positive"]]),
    "num_features": COUNT,
    "unit_norm": FLAG,
    "trainable_projection": FLAG,
    "feature_seed": ([0, 1, 20261121, 2**32 - 1], [-1, 2**32, 1.5, None, "0"]),
    "gate": FLAG,
    "window_size": ([0, 1, 2, 5, POSITIONS], [-1, POSITIONS + 1, HUGE, None, 1.5, True]),
    "num_sinks": ([0, 1, 3, POSITIONS], [-1, POSITIONS + 1, HUGE, None, 1.5, True]),
    "num_slots": ([0, 1, 3, POSITIONS], [-1, POSITIONS + 1, HUGE, None, 1.5, True]),
    "importance": (["learned", "key_norm"], [None, 3, "luck"]),
    "retrieval_heads": ([[], [[0, 0]], [[0, 1]], [[1, 0], [0, 2]]], WRONG_HEADS),
    "retrieval_window": ([0, 1, 4, POSITIONS], [-1, POSITIONS + 1, HUGE, None, 1.5, True]),
    "max_distance": ([None, 2, 9, POSITIONS], [0, 1, -1, POSITIONS + 1, HUGE, 1.5, True]),
    "distance_step": ([None, 1], [0, -1, POSITIONS, HUGE, 1.5, True]),
    "softmax_layers": LAYERS,
    "chunk_size": ([1, 2, 3, 64, 2**63 - 1], [0, -1, None, 2.5, HUGE]),
}
GPT2_FIELDS = RFA_FIELDS | {
    "n_head": HEADS,
    "n_layer": NUM_LAYERS,
    "n_embd": ([WIDTH], [0, -24, None, "24"]),
    "n_positions": ([POSITIONS], [0, -1, None]),
    "vocab_size": ([61], [0, -61, None]),
    "attn_pdrop": CHANCE,
    **dict.fromkeys(("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "add_cross_attention"), FLAG),
}
LLAMA_FIELDS = RFA_FIELDS | {
    "num_attention_heads": ([2, 4, 6, 12], [-1, 2.0, "3", None]),  # of width 6, in two groups
    "num_key_value_heads": ([1, 2], [0, -1, 5, 2.0, "3"]),
    "num_hidden_layers": NUM_LAYERS,
    "hidden_size": ([WIDTH], [0, -24, None, "24"]),
    "max_position_embeddings": ([POSITIONS], [0, -1, None]),
    "vocab_size": ([61], [0, -61, None]),
    "attention_dropout": CHANCE,
    "attention_bias": FLAG,
}
SEQ2SEQ_FIELDS = (
    RFA_FIELDS
    | {
        "num_cross_features": COUNT,
        "num_encoder_features": COUNT,
        "softmax_cross_layers": LAYERS,
        "merged_source_length": ([0], [-1, 5, None, "3", 0.5]),  # of audio alone
        "softmax_encoder_layers": ([*LAYERS[0], None], LAYERS[1][1:]),
        "encoder_attention_heads": HEADS,
        "decoder_attention_heads": HEADS,
        "encoder_layers": ([0, 1, 2, 3], NUM_LAYERS[1][1:]),
        "decoder_layers": NUM_LAYERS,
        "d_model": ([WIDTH], [0, -24, None, "24"]),
        "max_position_embeddings": ([POSITIONS], [0, -1, None]),
        "attention_dropout": CHANCE,
        "decoder_layerdrop": CHANCE,
    }
)
LLAMA_LAYERS = {"softmax_layers": ("num_hidden_layers", 3)}
#: By family: the fields, those that count features with the heads that they are for, and lists of layers with their number.
DRAWN: dict[str, tuple[dict[str, Any], dict[str, tuple[str, int]], dict[str, tuple[str, int]]]] = {
    "gpt2": (GPT2_FIELDS, {"num_features": ("n_head", 3)}, {"softmax_layers": ("n_layer", 2)}),
    "llama": (LLAMA_FIELDS, {"num_features": ("heads that the width is divided by", 4)}, LLAMA_LAYERS),
}
#: The field that counts the heads of causal attention with keys and values, and its number where it is not drawn.
KEY_VALUE_HEADS = {"gpt2": ("n_head", 3), "llama": ("num_key_value_heads", 2)}
KEY_VALUE_HEADS |= dict.fromkeys(("bart", "marian"), ("decoder_attention_heads", 3))
OF_DECODER, OF_ENCODER = ("decoder_attention_heads", 3), ("encoder_attention_heads", 2)
DRAWN["bart"] = DRAWN["marian"] = (
    SEQ2SEQ_FIELDS,
    {"num_features": OF_DECODER, "num_cross_features": OF_DECODER, "num_encoder_features": OF_ENCODER},
    {
        "softmax_layers": ("decoder_layers", 3),
        "softmax_cross_layers": ("decoder_layers", 3),
        "softmax_encoder_layers": ("encoder_layers", 2),
    },
)


@st.composite
def drawn(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """Draw some fields with good values, and every third time one bad value."""
    fields, counts, _ = DRAWN[family]
    good = {name: st.sampled_from(values) for name, (values, _) in fields.items()}
    options = draw(st.fixed_dictionaries({}, optional=good))
    # Half of all combinations are at odds with the feature map: let most be told apart by something else.
    if draw(st.integers(0, 3)) and options.get("feature_map") not in (None, *RANDOM_MAPS):
        for name in ("trainable_projection", "unit_norm", *counts):
            options.pop(name, None)
    if draw(st.integers(0, 3)) and bool(options.get("retrieval_heads")) != bool(options.get("retrieval_window")):
        options.pop("retrieval_heads", None), options.pop("retrieval_window", None)
    if draw(st.integers(0, 2)) == 0:
        name = draw(st.sampled_from(sorted(name for name, (_, bad) in fields.items() if bad)))
        options[name] = draw(st.sampled_from(fields[name][1]))
    return options


def wrong_fields(family: str, options: dict[str, Any]) -> set[str]:
    """Return the fields that have to be refused: bad by themselves, or at odds with others."""
    fields, counts, stacks = DRAWN[family]

    def is_in(value: Any, values: list[Any]) -> bool:  # 1 is not True, and nan is nan
        return any(type(value) is type(each) and repr(value) == repr(each) for each in values)

    wrong = {name for name, value in options.items() if not is_in(value, fields[name][0])}
    options = {name: value for name, value in options.items() if name not in wrong}
    name = options.get("feature_map", "positive")
    for count, (heads, default) in counts.items():
        if name in OWN_SIZE and options.get(count) not in (None, WIDTH // options.get(heads, default)):
            wrong.add(count)
    for layers, (count, default) in stacks.items():
        if any(index >= options.get(count, default) for index in options.get(layers) or []):
            wrong.add(layers)
    if options.get("trainable_projection") and name not in RANDOM_MAPS:
        wrong.add("trainable_projection")
    if options.get("importance", "learned") != "learned" and not options.get("num_slots"):
        wrong.add("importance")
    if options.get("unit_norm") and name in (*LEARNED_MAPS, "none"):
        wrong.add("unit_norm")
    wrong |= {name for name in ("num_sinks", "num_slots") if options.get(name) and not options.get("window_size")}
    layers, heads = (options.get(*each) for each in (stacks["softmax_layers"], KEY_VALUE_HEADS[family]))
    chosen = options.get("retrieval_heads", [])
    for layer, head in chosen:
        alone = sum(each == layer for each, _ in chosen) == heads
        if layer >= layers or head >= heads or alone or layer in (options.get("softmax_layers") or []):
            wrong.add("retrieval_heads")
    if bool(options.get("retrieval_window")) != bool(chosen):
        wrong |= {"retrieval_window", "retrieval_heads"} & options.keys()
    streams = family == "llama" and name == "none" and options.get("window_size") and not options.get("softmax_layers")
    if not streams:
        wrong |= {field for field in ("max_distance", "distance_step") if options.get(field) is not None}
    if name == "none":
        wrong |= {field for field in (*counts, "gate") if options.get(field)}
        kept = {"softmax_cross_layers": [], "softmax_encoder_layers": None}
        others = [(options.get(key, value), *stacks[key]) for key, value in kept.items() if key in stacks]
        converted = any(each is not None and len(each) < options.get(count, most) for each, count, most in others)
        if not options.get("window_size") or converted:
            wrong.add("feature_map")
    return wrong


def assert_named(message: str, wrong: set, options: dict[str, Any]) -> None:
    """A refusal names a field, its value or the value's type, and what is allowed."""

    def is_named(name: str) -> bool:
        values = (repr(options[name]), str(options[name]), f"got {type(options[name]).__name__}")
        return bool(re.search(rf"\b{name}\b", message)) and any(each in message for each in values)

    assert any(map(is_named, wrong)), (message, wrong)
    assert re.search("must|expected|Known|match|does not fit|Leave", message), message


def assert_runs(family: str, model: Any) -> None:
    """Forward with padding, backward with finite gradients, and a cached step equal to the uncached forward."""
    ids, options = tokens(2, LENGTH), {}
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    if has_encoder(family):
        mask[0, :2], mask[0, 2:4] = 1, 0
        source = torch.randint(3, 61, (2, 6))
        options = {"input_ids": source, "attention_mask": torch.ones_like(source)}
        options["attention_mask"][0, 4:] = 0
    model.train()
    outputs = read(model, ids, mask=mask, use_cache=False, **options)
    assert torch.isfinite(outputs.logits).all()
    outputs.logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or torch.isfinite(parameter.grad).all(), name
    model.eval().double()
    whole, again = (logits(model, ids, mask=mask, **options) for _ in range(2))
    assert torch.equal(again, whole), "evaluation is not deterministic"
    found, cache = logits_by_steps(model, ids, [LENGTH - 1], mask=mask, **options)
    assert_close(found[:, -1], whole[:, -1], rtol=1e-6, atol=1e-6)
    assert cache.get_seq_length() == LENGTH


def check(family: str, options: dict[str, Any]) -> None:
    """A configuration is refused if and only if fields are wrong, and otherwise runs."""
    torch.manual_seed(0)
    sizes = {"n_positions": POSITIONS, "n_embd": WIDTH}
    if family == "llama":
        sizes = {"max_position_embeddings": POSITIONS, "hidden_size": WIDTH}
    if has_encoder(family):
        sizes = {"max_position_embeddings": POSITIONS, "d_model": WIDTH}
    base, declared, wrong = base_config(family, **sizes), FAMILIES[family], wrong_fields(family, options)
    if wrong:
        with pytest.raises((StrictDataclassError, ValueError)) as error:
            declared.rfa_config.from_base(base, **options)
        assert_named(str(error.value), wrong, options)
    else:
        model_class = declared.architectures[declared.default_architecture][1]
        assert_runs(family, model_class(declared.rfa_config.from_base(base, **options)))


@pytest.mark.parametrize(
    ("family", "count"),
    [
        ("gpt2", 60),
        ("bart", 40),
        ("marian", 10),  # whose fields are BART's
        ("llama", 40),
        *(pytest.param(family, 2000 if family == "gpt2" else 1000, marks=pytest.mark.slow) for family in COMMON),
    ],
)
def test_drawn_configurations_run_or_are_refused(family, count):
    @settings(max_examples=count)
    @given(drawn(family))
    def run(options: dict[str, Any]) -> None:
        check(family, options)

    run()


@every_family
def test_every_bad_value_is_refused(family):
    for name, (_, bad) in DRAWN[family][0].items():
        for value in bad:
            check(family, {name: value})


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gpt2", {"feature_seed": 20261121}),
        ("gpt2", {"n_head": WIDTH}),
        ("llama", {"chunk_size": 2**63 - 1}),
        *((family, {"encoder_layers": 0, "softmax_encoder_layers": []}) for family in ("bart", "marian")),
    ],
)
def test_unusual_configurations_run(family, options):
    check(family, options)


@every_family
def test_every_field_of_rfa_is_drawn(family):
    declared = FAMILIES[family]
    assert set(declared.rfa_config().to_dict()) - set(declared.base_config().to_dict()) <= set(DRAWN[family][0])
