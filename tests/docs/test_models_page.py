"""Every causal language model of the installed transformers: as its base model, or refused with a reason."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from docs.make_models import LATENT, NO_ATTENTION, OUTSIDE, PAGE, REASONS, UNCHECKED, check, page, problem
from hf_rfa.families import DECODERS
from tests.tiny_models import UNBUILDABLE, model_types, tiny_model

KNOWN = [name for name in model_types() if name not in UNBUILDABLE]


@pytest.mark.parametrize("model_type", [name for name in DECODERS if name in CONFIG_MAPPING])
def test_a_window_of_the_texts_length_gives_the_base_models_logits_and_tokens(model_type):
    check(model_type)


def test_the_page_says_what_becomes_of_every_model():
    """It is written with the newest transformers: an older one lacks some of its models."""
    problems = {name: None if name in DECODERS else problem(name) for name in model_types()}
    assert UNCHECKED not in problems.values()
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in problems if not re.search(rf"\b{name}\b", text)] == []
    if f"{len(problems)} model types" in text:
        assert text == page(problems), "run python -m docs.make_models"


@pytest.mark.parametrize("model_type", [name for name in KNOWN if REASONS.get(name) in (OUTSIDE, NO_ATTENTION, LATENT)])
def test_the_reason_of_a_refusal_is_what_a_call_shows(model_type):
    widths = []

    def probe(module, query, key, value, mask, **kwargs):
        widths.append((key.shape[-1], value.shape[-1]))
        return torch.zeros(*query.shape[:-1], value.shape[-1]).transpose(1, 2), None

    AttentionInterface.register("probe", probe)
    AttentionMaskInterface.register("probe", sdpa_mask)
    try:
        model = tiny_model(model_type, attn_implementation="probe")
        with torch.no_grad():
            model(torch.randint(3, 61, (2, 12)), use_cache=False)
    except (KeyError, AttributeError, TypeError):  # families with a table of their own attention
        assert not widths
    if REASONS[model_type] == LATENT:
        assert any(key != value for key, value in widths)
    else:
        assert not widths
