"""Attention of decoders is causal: a base model, a configuration or a call that has it otherwise is refused."""

from __future__ import annotations

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING

from hf_rfa import FAMILIES
from tests.conftest import refused
from tests.decoders import NAMES, parent
from tests.families import base_config, every_family, has_encoder, logits, make, read, source, tokens

#: Fields by which attention of these families becomes bidirectional, and what its error begins with.
FIELDS = [("is_causal", False), ("use_bidirectional_attention", True), ("use_bidirectional_attention", "all")]
#: The families of this package whose configurations declare such a field.
DECLARED = [name for name in NAMES if hasattr(CONFIG_MAPPING[name](), "use_bidirectional_attention")]


@every_family
@pytest.mark.parametrize(("name", "value"), FIELDS)
def test_a_configuration_of_a_bidirectional_model_is_refused(family, name, value):
    config = base_config(family)
    setattr(config, name, value)
    with pytest.raises(StrictDataclassError, match=f"{name}={value!r}"):
        FAMILIES[family].rfa_config.from_base(config)


@every_family
@pytest.mark.parametrize(("name", "value"), [("is_causal", True), ("use_bidirectional_attention", False)])
def test_a_configuration_that_says_causal_is_one(family, name, value):
    config = base_config(family)
    setattr(config, name, value)
    assert FAMILIES[family].rfa_config.from_base(config).any_rfa("causal")


@pytest.mark.parametrize("family", DECLARED)
def test_the_field_that_families_declare_is_read(family):
    assert FAMILIES[family].rfa_config()
    with pytest.raises(StrictDataclassError, match="use_bidirectional_attention=True"):
        FAMILIES[family].rfa_config(use_bidirectional_attention=True)


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
