"""Masks, positions and causality of a call: what says the same is the same, and what cannot be is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from hf_rfa import FAMILIES
from hf_rfa.families import has_rotary_positions
from hf_rfa.models.cache_names import cache_argument
from tests.conftest import refused
from tests.decoders import converted, parent
from tests.families import base_config, every_family, has_encoder, logits, make, read, relative_error, source, tokens

#: Masks that say the same of every token, by what they are made of; the last as packing code numbers documents.
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "bool": Tensor.bool,
    "float": Tensor.float,
    "bfloat16": Tensor.bfloat16,
    "numbers": lambda mask: mask * (1 + torch.arange(mask.shape[1]) * 3 // mask.shape[1]),
}
every_kind = pytest.mark.parametrize("kind", list(KINDS))


@every_kind
@pytest.mark.parametrize(("family", "variant"), [("llama", "hybrid"), ("bart", "per-layer")])
def test_what_is_not_zero_is_a_token(family, variant, kind):
    """Of a model with RFA layers of every kind and softmax layers, its source too."""
    model, ids, given = make(family, variant), tokens(), source(side="left")
    mask = torch.ones_like(ids)
    mask[1, :11] = mask[2, 20:] = 0
    others = {**given, "attention_mask": KINDS[kind](given["attention_mask"])}
    given, others = (given, others) if has_encoder(family) else ({}, {})
    found, expected = logits(model, ids, mask=KINDS[kind](mask), **others), logits(model, ids, mask=mask, **given)
    assert torch.equal(found, expected)


@torch.no_grad()
@every_kind
@pytest.mark.parametrize("name", ["llama", "opt", "stablelm"])
def test_positions_are_those_of_the_base_model_whatever_a_mask_is_made_of(name, kind):
    """Past 256 tokens too, where a count in 16 bits is rounded."""
    softmax = parent(name, max_position_embeddings=400)
    model = converted(softmax, feature_map="none", window_size=300)
    ids = tokens(2, 300)
    mask = torch.ones_like(ids)
    mask[1, 290:] = 0
    found, expected = logits(model, ids, mask=KINDS[kind](mask)), logits(softmax, ids, mask=mask)
    assert relative_error(found[mask > 0], expected[mask > 0]) < 1e-5


@torch.no_grad()
@every_family
def test_positions_past_the_table_are_refused(family):
    """So are rotary ones past the trained length, beside features; where all that is kept are tokens, there is no end."""
    model, too_many = make(family, {}), torch.full((1, 97), 5)
    if has_rotary_positions(model.config):
        assert torch.isfinite(read(make(family, "slots"), too_many).logits).all()
    with pytest.raises(ValueError, match=r"position 96.*96 positions.*--max-positions 97"):
        read(model, too_many)
    cache = read(model, too_many[:, :96]).past_key_values
    with pytest.raises(ValueError, match="--max-positions"):
        read(model, too_many[:, :1], **cache_argument(cache))
    if not has_encoder(family):
        padded = torch.arange(100).clamp_max(95)[None]  # more tokens than positions, none past the table
        assert torch.isfinite(model(torch.ones(1, 100, dtype=torch.long), position_ids=padded).logits).all()


# Attention of decoders is causal: a base model, a configuration or a call that has it otherwise is refused

#: Fields by which attention of these families becomes bidirectional, and what its error begins with.
FIELDS = [("is_causal", False), ("use_bidirectional_attention", True), ("use_bidirectional_attention", "all")]


@every_family
def test_a_configuration_of_a_bidirectional_model_is_refused(family):
    for name, value in FIELDS:
        config = base_config(family)
        setattr(config, name, value)
        with pytest.raises(StrictDataclassError, match=f"{name}={value!r}"):
            FAMILIES[family].rfa_config.from_base(config)
    config.is_causal, config.use_bidirectional_attention = True, False
    assert FAMILIES[family].rfa_config.from_base(config).any_rfa("causal")


@torch.no_grad()
@every_family
def test_a_field_that_is_set_later_is_refused(family):
    """When a model is made, and in one that is there: transformers' own models read it at every call."""
    model = make(family)
    model.config.is_causal = False
    with pytest.raises(ValueError, match="is_causal=False"):
        type(model)(model.config)
    with pytest.raises(ValueError, match="is_causal=False"):
        read(model, tokens())


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "fields"), [("qwen3", {"is_causal": False}), ("gemma3_text", {"use_bidirectional_attention": True})]
)
def test_a_bidirectional_model_is_not_converted(family, fields, tmp_path):
    """An embedder, as it is published: a body without a head, which sees what comes after a token."""
    softmax, ids = parent(family, **fields).model, tokens(1, 12)
    other = torch.cat([ids[:, :8], ids[:, 8:].flip(1)], dim=1)
    assert not torch.equal(*(softmax(each).last_hidden_state[:, 0] for each in (ids, other)))
    softmax.save_pretrained(tmp_path / "base")
    refused(f"{next(iter(fields))}=.*bidirectional", tmp_path / "base", tmp_path)


@torch.no_grad()
@every_family
def test_a_call_for_bidirectional_attention_is_refused(family):
    model, ids = make(family), tokens()
    with pytest.raises(ValueError, match="is_causal=False"):
        read(model, ids, is_causal=False)
    assert torch.equal(logits(model, ids, is_causal=None), logits(model, ids))
    if not has_encoder(family):
        assert torch.equal(logits(model, ids, is_causal=True), logits(model, ids))


@torch.no_grad()
def test_a_call_for_causal_attention_to_a_source_is_refused():
    """transformers' own models read the argument in every attention: a decoder's, that to the source, and the encoder's."""
    crossing = make("bart", "cross-only")
    with pytest.raises(ValueError, match="is_causal=True"):
        read(crossing, tokens(), is_causal=True)
    encoding = make("bart", "everything")
    with pytest.raises(ValueError, match="is_causal=True"):
        encoding.model.encoder(**source(), is_causal=True)
    alone = make("bart", "decoder-alone")
    ids = tokens()
    assert torch.equal(logits(alone, ids, is_causal=True), logits(alone, ids))
