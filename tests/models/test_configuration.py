"""The configuration: defaults, round trips, and refusals that name the field, its value and what is allowed.

Configurations are drawn at random too: one that is accepted builds and runs, and of a refused one a field is named.
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
#: Fields that are at odds with others; `test_every_bad_value_is_refused` has those that are bad alone.
AT_ODDS: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {"trainable_projection": True, "feature_map": "exponential"}),
    ("gpt2", {"unit_norm": True, "feature_map": "summary", "window_size": 4}),
    ("gpt2", {"softmax_layers": [2]}),
    ("gpt2", {"num_features": 16, "feature_map": "elu"}),
    *(("gpt2", {name: 3}) for name in ("num_sinks", "num_slots")),
    ("gpt2", {"importance": "key_norm"}),
    ("gpt2", {"feature_map": "none"}),
    *(("gpt2", {**NO_FEATURES, **field}) for field in ({"gate": True}, {"unit_norm": True}, {"num_features": 8})),
    ("bart", {**NO_FEATURES, "softmax_cross_layers": [0]}),
    ("llama", {"retrieval_heads": [[0, 2]], "retrieval_window": 4}),
    ("llama", {"retrieval_heads": [[0, 0]], "retrieval_window": 4, "softmax_layers": [0]}),
    ("llama", {"retrieval_window": 4}),
    ("llama", {"retrieval_slots": 4}),
    ("llama", {"retrieval_heads": [[0, 1]]}),
    ("llama", {"max_distance": 9}),
]


def test_fields_given_while_loading_are_checked_too(tmp_path):
    """`from_pretrained` sets them after the configuration was checked."""
    make("gpt2").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"chunk_size must be from 1 .* got 0"):
        RFAGPT2LMHeadModel.from_pretrained(tmp_path, chunk_size=0)
    with pytest.raises(StrictDataclassError, match="'window_size' expected int, got float"):
        RFAGPT2LMHeadModel.from_pretrained(tmp_path, window_size=1.5)


@pytest.mark.parametrize("name", sorted(FEATURE_MAPS))
def test_the_number_of_features_is_the_maps_default_and_stated(name, tmp_path):
    options = {"window_size": 4} if name in ("none", "summary") else {"gate": True}
    config = RFAGPT2Config.from_base(tiny_parent_config(), feature_map=name, softmax_layers=[1], **options)
    config.save_pretrained(tmp_path)
    again = RFAGPT2Config.from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict()
    assert again.cache_layer_types() == ["rfa", "full_attention"]
    assert again.n_embd == 24
    known = {"none": 0, "elu": 8, "gaussian": 64, "positive": 128}
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


# Configurations drawn at random

WIDTH, POSITIONS, LENGTH = 24, 16, 9
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
    "retrieval_slots": ([0, 1, 4, POSITIONS], [-1, POSITIONS + 1, HUGE, None, 1.5, True]),
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
        **dict.fromkeys(("attention_dropout", "decoder_layerdrop"), CHANCE),
    }
)
DRAWN = {"gpt2": GPT2_FIELDS, "llama": LLAMA_FIELDS, "bart": SEQ2SEQ_FIELDS}  # Marian's fields are BART's
every_drawn = pytest.mark.parametrize("family", DRAWN)
REFUSALS = (StrictDataclassError, ValueError)


def configure(family: str, options: dict[str, Any]) -> Any:
    declared = FAMILIES[family]
    return declared.rfa_config.from_base(base_config(family, **{declared.positions_field: POSITIONS}), **options)


def named(message: str, options: dict[str, Any]) -> list[str]:
    """Return the fields that a refusal names, each with its value or the value's type; it says what is allowed, too."""
    assert re.search("must|expected|Known|match|does not fit|Leave", message), message
    found = []
    for name, value in options.items():
        values = (repr(value), str(value), f"got {type(value).__name__}")
        if re.search(rf"\b{name}\b", message) and any(each in message for each in values):
            found.append(name)
    return found


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


@pytest.mark.parametrize(
    ("family", "count"),
    [
        *((family, 25) for family in DRAWN),
        *(pytest.param(family, 1000, marks=pytest.mark.slow) for family in DRAWN),
    ],
)
def test_drawn_configurations_run_without_what_is_refused(family, count):
    """Of fields that are at odds one is named after the other, until the rest is a model."""

    @settings(max_examples=count)
    @given(
        st.fixed_dictionaries({}, optional={name: st.sampled_from(good) for name, (good, _) in DRAWN[family].items()})
    )
    def run(options: dict[str, Any]) -> None:
        config = None
        while config is None:
            try:
                config = configure(family, options)
            except REFUSALS as error:
                del options[named(str(error), options)[0]]
        torch.manual_seed(0)
        declared = FAMILIES[family]
        assert_runs(family, declared.architectures[declared.default_architecture][1](config))

    run()


@every_drawn
def test_every_bad_value_is_refused(family):
    for name, (_, bad) in DRAWN[family].items():
        for value in bad:
            with pytest.raises(REFUSALS) as error:
                configure(family, {name: value})
            assert named(str(error.value), {name: value}) == [name]


@pytest.mark.parametrize(("family", "options"), AT_ODDS)
def test_fields_at_odds_are_refused(family, options):
    with pytest.raises(REFUSALS) as error:
        configure(family, options)
    assert named(str(error.value), options)


@every_drawn
def test_every_field_of_rfa_is_drawn(family):
    declared = FAMILIES[family]
    assert set(declared.rfa_config().to_dict()) - set(declared.base_config().to_dict()) <= set(DRAWN[family])
