"""Configurations drawn at random: what the validator accepts builds and runs, what it refuses is named.

Which fields are wrong is said here a second time, by lists of values and a few rules.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hf_rfa import FEATURE_MAPS, RFABartConfig, RFAGPT2Config, RFAGPT2LMHeadModel, RFAMarianConfig

from .conftest import tiny_parent_config, tiny_seq2seq_config
from .test_seq2seq import FAMILIES

WIDTH, POSITIONS, LENGTH = 24, 16, 9
RANDOM_MAPS, LEARNED_MAPS, OWN_SIZE = ("positive", "gaussian", "arccos"), ("t2r", "hedgehog"), ("elu", "hedgehog")
HUGE = 2**70

FLAG = ([True, False], [None, 1, "yes", 0.0])
COUNT = ([None, 1, 2, 7, 8, 16, 33], [0, -3, 2.5, "8", True])
LAYERS = ([[], [0], [1], [0, 1], [1, 0], [2]], [None, "all", 0, (0,), [0, 0], [-1], [3], [0.0], [True], [None], [HUGE]])
HEADS = ([1, 2, 3, 4, 6, 24], [0, -1, 5, 2.0, "3", None])
NUM_LAYERS = ([1, 2, 3], [0, -1, None, "2", 1.5])
CHANCE = ([0, 0.0, 0.4, 1.0], [-0.1, 1.5, math.nan, "0.1", None])
DEVIATION = ([0.0, 0.02, 0.3], [-1.0, math.inf, math.nan, "1", None])
ACTIVATION = (["gelu_new", "relu", "silu", "tanh"], ["nope", None, 3])

#: Good and bad values of a field.
RFA_FIELDS: dict[str, tuple[list[Any], list[Any]]] = {
    "feature_map": (sorted(FEATURE_MAPS), [None, 3, "cosine", "", ["positive"]]),
    "num_features": COUNT,
    "unit_norm": FLAG,
    "orthogonal": FLAG,
    "trainable_projection": FLAG,
    "redraw_pool": ([0, 1, 7, 1_000_000], [-1, 2.0, None, HUGE, True]),
    "feature_seed": ([0, 1, 20261121, 2**32 - 1], [-1, 2**32, 1.5, None, "0"]),
    "gate": FLAG,
    "window": ([0, 1, 2, 5, POSITIONS], [-1, POSITIONS + 1, HUGE, None, 1.5, True]),
    "softmax_layers": LAYERS,
    "chunk_size": ([1, 2, 3, 64, 2**63 - 1], [0, -1, None, 2.5, HUGE]),
    "state_dtype": (["float32", "float64"], ["bfloat16", None, 32, ""]),
}
GPT2_FIELDS = RFA_FIELDS | {
    "n_head": HEADS,
    "n_layer": NUM_LAYERS,
    "n_embd": ([WIDTH], [0, -24, None, "24"]),
    "n_positions": ([POSITIONS], [0, -1, None]),
    "vocab_size": ([61], [0, -61, None]),
    "attn_pdrop": CHANCE,
    "resid_pdrop": CHANCE,
    "initializer_range": DEVIATION,
    "activation_function": ACTIVATION,
    **dict.fromkeys(
        (
            "scale_attn_weights",
            "scale_attn_by_inverse_layer_idx",
            "reorder_and_upcast_attn",
            "tie_word_embeddings",
            "add_cross_attention",
        ),
        FLAG,
    ),
}
SEQ2SEQ_FIELDS = RFA_FIELDS | {
    "num_cross_features": COUNT,
    "num_encoder_features": COUNT,
    "softmax_cross_layers": LAYERS,
    "softmax_encoder_layers": ([*LAYERS[0], None], LAYERS[1][1:]),
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_layers": ([0, 1, 2, 3], NUM_LAYERS[1][1:]),
    "decoder_layers": NUM_LAYERS,
    "d_model": ([WIDTH], [0, -24, None, "24"]),
    "max_position_embeddings": ([POSITIONS], [0, -1, None]),
    "dropout": CHANCE,
    "attention_dropout": CHANCE,
    "decoder_layerdrop": (
        [0.0, 0.4],
        [-0.1, 1.5, math.nan, "0.1"],
    ),  # a float in BART, and None is refused with a dropout
    "init_std": DEVIATION,
    "activation_function": ACTIVATION,
    "scale_embedding": ([True, False], [1, "yes"]),
    "tie_word_embeddings": FLAG,
}
GPT2_KINDS = {"num_features": ("n_head", 3)}
SEQ2SEQ_KINDS = {
    "num_features": ("decoder_attention_heads", 3),
    "num_cross_features": ("decoder_attention_heads", 3),
    "num_encoder_features": ("encoder_attention_heads", 2),
}
GPT2_STACKS = {"softmax_layers": ("n_layer", 2)}
SEQ2SEQ_STACKS = {
    "softmax_layers": ("decoder_layers", 3),
    "softmax_cross_layers": ("decoder_layers", 3),
    "softmax_encoder_layers": ("encoder_layers", 2),
}


@st.composite
def drawn(draw: st.DrawFn, fields: dict[str, tuple[list[Any], list[Any]]]) -> dict[str, Any]:
    """Some fields with good values, and every third time one bad value."""
    good = {name: st.sampled_from(values) for name, (values, _) in fields.items()}
    options = draw(st.fixed_dictionaries({}, optional=good))
    # Half of all combinations are at odds with the feature map: let most be told apart by something else.
    if draw(st.integers(0, 3)) and options.get("feature_map") not in (None, *RANDOM_MAPS):
        for name in ("redraw_pool", "trainable_projection", "unit_norm", *GPT2_KINDS, *SEQ2SEQ_KINDS):
            options.pop(name, None)
    if draw(st.integers(0, 2)) == 0:
        name = draw(st.sampled_from(sorted(fields)))
        options[name] = draw(st.sampled_from(fields[name][1]))
    return options


def wrong_fields(options: dict[str, Any], fields: dict[str, Any], kinds: dict[str, Any], stacks: dict[str, Any]) -> set:
    """Return the fields that have to be refused: bad by themselves, or at odds with others."""

    def is_in(value: Any, values: list[Any]) -> bool:  # 1 is not True, and nan is nan
        return any(type(value) is type(each) and repr(value) == repr(each) for each in values)

    wrong = {name for name, value in options.items() if not is_in(value, fields[name][0])}
    options = {name: value for name, value in options.items() if name not in wrong}
    name = options.get("feature_map", "positive")
    for count, (heads, default) in kinds.items():
        if name in OWN_SIZE and options.get(count) not in (None, WIDTH // options.get(heads, default)):
            wrong.add(count)
    for layers, (count, default) in stacks.items():
        if any(index >= options.get(count, default) for index in options.get(layers) or []):
            wrong.add(layers)
    pool, trained = options.get("redraw_pool"), options.get("trainable_projection")
    for field in ("redraw_pool", "trainable_projection"):
        if options.get(field) and (name not in RANDOM_MAPS or (pool and trained)):
            wrong.add(field)
    if options.get("unit_norm") and name in LEARNED_MAPS:
        wrong.add("unit_norm")
    return wrong


def assert_named(message: str, wrong: set, options: dict[str, Any]) -> None:
    """A refusal names a field, its value or the value's type, and what is allowed."""
    named = [
        name
        for name in wrong
        if re.search(rf"\b{name}\b", message)
        and any(
            each in message for each in (repr(options[name]), str(options[name]), f"got {type(options[name]).__name__}")
        )
    ]
    assert named, (message, wrong)
    assert re.search("must|expected|Known|match|does not fit|Leave", message), message


def assert_runs(model: Any, inputs: dict[str, torch.Tensor], tokens: str) -> None:
    """Forward with padding, backward with finite gradients, and a cached step equal to the uncached forward."""
    model.train()
    outputs = model(**inputs, use_cache=False)
    assert torch.isfinite(outputs.logits).all()
    outputs.logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or torch.isfinite(parameter.grad).all(), name
    model.eval().double()
    with torch.no_grad():
        whole = model(**inputs, use_cache=False).logits
        assert torch.equal(model(**inputs, use_cache=False).logits, whole), "evaluation is not deterministic"
        mask = "decoder_attention_mask" if tokens == "decoder_input_ids" else "attention_mask"
        first = {**inputs, tokens: inputs[tokens][:, :-1], mask: inputs[mask][:, :-1]}
        cache = model(**first, use_cache=True).past_key_values
        step = model(**{**inputs, tokens: inputs[tokens][:, -1:]}, past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(step[:, 0], whole[:, -1], rtol=1e-6, atol=1e-6)
    assert cache.get_seq_length() == LENGTH


def refused(config_class: Any, parent: Any, options: dict[str, Any], wrong: set) -> bool:
    """Return whether the configuration is refused; it has to be if and only if fields are ``wrong``."""
    if not wrong:
        return False
    with pytest.raises((StrictDataclassError, ValueError)) as error:
        config_class.from_parent(parent, **options)
    assert_named(str(error.value), wrong, options)
    return True


def check_gpt2(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    parent = tiny_parent_config(n_positions=POSITIONS, n_embd=WIDTH)
    wrong = wrong_fields(options, GPT2_FIELDS, GPT2_KINDS, GPT2_STACKS)
    if refused(RFAGPT2Config, parent, options, wrong):
        return
    model = RFAGPT2LMHeadModel(RFAGPT2Config.from_parent(parent, **options))
    ids = torch.randint(1, 61, (2, LENGTH))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    assert_runs(model, {"input_ids": ids, "attention_mask": mask}, "input_ids")


def check_seq2seq(family: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    parent = tiny_seq2seq_config(family, max_position_embeddings=POSITIONS, d_model=WIDTH)
    config_class, model_class = FAMILIES[family]
    wrong = wrong_fields(options, SEQ2SEQ_FIELDS, SEQ2SEQ_KINDS, SEQ2SEQ_STACKS)
    if refused(config_class, parent, options, wrong):
        return
    model = model_class(config_class.from_parent(parent, **options))
    source, target = torch.randint(3, 61, (2, 6)), torch.randint(3, 61, (2, LENGTH))
    source_mask, mask = torch.ones_like(source), torch.ones_like(target)
    source_mask[0, 4:], mask[0, 2:4] = 0, 0
    inputs = {"input_ids": source, "attention_mask": source_mask}
    assert_runs(model, {**inputs, "decoder_input_ids": target, "decoder_attention_mask": mask}, "decoder_input_ids")


# Found by these tests: types of RFA fields were not checked; a date as the seed overflowed torch's; a window longer than any
# text was allocated; heads that do not divide were not named; heads of width 1 failed in GPT-2; BART's sizes may be None.
@settings(max_examples=120)
@example({"num_features": 8.0})
@example({"gate": "yes"})
@example({"softmax_layers": (0,)})
@example({"softmax_layers": [0.0]})
@example({"feature_map": ["positive"]})
@example({"feature_seed": 20261121})
@example({"window": HUGE})
@example({"chunk_size": HUGE})
@example({"redraw_pool": HUGE})
@example({"n_head": 5})
@example({"n_head": WIDTH})
@example({"n_layer": -1})
@example({"activation_function": "nope"})
@given(drawn(GPT2_FIELDS))
def test_gpt2(options):
    check_gpt2(options)


@settings(max_examples=80)
@example({"decoder_layers": None})
@example({"encoder_attention_heads": None})
@example({"decoder_attention_heads": 5})
@example({"dropout": None})
@example({"encoder_layers": 0, "softmax_encoder_layers": []})
@given(drawn(SEQ2SEQ_FIELDS))
@pytest.mark.parametrize("family", list(FAMILIES))
def test_seq2seq(family, options):
    if family == "marian":  # its types do not allow None at all, which is refused as any wrong type
        options = {name: value for name, value in options.items() if value is not None or name in RFA_FIELDS}
    check_seq2seq(family, options)


@pytest.mark.slow
@settings(max_examples=2000)
@given(drawn(GPT2_FIELDS))
def test_many_of_gpt2(options):
    check_gpt2(options)


@pytest.mark.slow
@settings(max_examples=1000)
@given(drawn(SEQ2SEQ_FIELDS))
@pytest.mark.parametrize("family", list(FAMILIES))
def test_many_of_seq2seq(family, options):
    check_seq2seq(family, options)


def test_fields_given_while_loading_are_checked_too(tmp_path):
    """`from_pretrained` sets them after the configuration was checked."""
    RFAGPT2LMHeadModel(RFAGPT2Config.from_parent(tiny_parent_config())).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"chunk_size must be from 1 .* got 0"):
        RFAGPT2LMHeadModel.from_pretrained(tmp_path, chunk_size=0)
    with pytest.raises(StrictDataclassError, match="'window' expected int, got float"):
        RFAGPT2LMHeadModel.from_pretrained(tmp_path, window=1.5)


@pytest.mark.parametrize("config_class", [RFAGPT2Config, RFABartConfig, RFAMarianConfig])
def test_every_field_of_rfa_is_drawn(config_class):
    parent = next(cls for cls in config_class.__mro__ if cls.__module__.startswith("transformers.models"))
    drawn_here = GPT2_FIELDS if config_class is RFAGPT2Config else SEQ2SEQ_FIELDS
    assert set(config_class().to_dict()) - set(parent().to_dict()) <= set(drawn_here)
