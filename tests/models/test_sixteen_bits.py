"""Models in 16 bits: feature maps, gates and importance stay in float32, and nothing else does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_rfa import FAMILIES
from tests.decoders import NAMES, converted, parent
from tests.families import (
    COMMON,
    base_config,
    every_family,
    every_head,
    inputs_for,
    is_own,
    logits,
    make,
    make_head,
    relative_error,
    save_softmax_model,
    tokens,
)

#: Options by which layers have every part of RFA's own: one with a gate, one with slots, whose importance excludes it.
GATED: dict[str, Any] = {"num_features": 8, "gate": True, "feature_map": "exponential"}
SLOTTED: dict[str, Any] = {"num_features": 8, "window_size": 3, "num_slots": 2}
every_option = pytest.mark.parametrize("options", [GATED, SLOTTED], ids=["gate", "slots"])
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
every_auto_class = pytest.mark.parametrize(
    ("family", "auto"), [(family, auto) for family in COMMON for auto in FAMILIES[family].auto_models]
)


def kept_in_float32(model: Any) -> set[str]:
    """Return the names of a model's tensors that are in float32."""
    return {key for key, tensor in model.state_dict().items() if tensor.dtype == torch.float32}


def own_names(model: Any) -> set[str]:
    """Return the names of the tensors that the softmax model does not have."""
    return {key for key in model.state_dict() if is_own(key)}


def assert_own_parts_are_exact(small: Any, exact: Any) -> None:
    """Check that a model in 16 bits has the parts that the softmax model lacks as another one has them in 32."""
    assert kept_in_float32(small) == own_names(small)
    for key in own_names(small):
        assert torch.equal(small.state_dict()[key], exact.state_dict()[key]), key


@every_option
@every_auto_class
@every_dtype
def test_a_new_model_draws_its_own_parts_in_float32(family, auto, options, dtype):
    config = FAMILIES[family].rfa_config.from_base(base_config(family, num_labels=3), **options)
    small, exact = auto.from_config(config, dtype=dtype), auto.from_config(config)
    assert small.dtype == dtype
    assert_own_parts_are_exact(small, exact)


@every_head
@every_dtype
@torch.no_grad()
def test_a_head_that_is_loaded_is_rounded_but_for_its_own_parts(family, head, dtype, tmp_path):
    model = make_head(family, head)
    model.save_pretrained(tmp_path)
    small = type(model).from_pretrained(tmp_path, dtype=dtype).eval()
    assert_own_parts_are_exact(small, model)
    found, expected = (each(**inputs_for(model), use_cache=False)[0] for each in (small, model))
    assert found.dtype == dtype
    assert relative_error(found, expected) < 0.3


@every_option
@every_family
def test_softmax_weights_in_16_bits_get_own_parts_in_float32(family, options, tmp_path):
    save_softmax_model(family, tmp_path)
    cls = FAMILIES[family].architectures[FAMILIES[family].default_architecture][1]
    config = FAMILIES[family].rfa_config.from_base(base_config(family), **options)
    small, exact = (cls.from_pretrained(tmp_path, config=config, dtype=each) for each in (torch.bfloat16, None))
    assert_own_parts_are_exact(small, exact)


def test_a_new_model_in_64_bits_has_64_everywhere():
    made = AutoModelForCausalLM.from_config(make("llama", GATED).config, dtype=torch.float64)
    assert {tensor.dtype for tensor in made.state_dict().values()} == {torch.float64}


@every_option
@every_family
def test_what_is_kept_in_float32_is_named_by_whole_tensors_that_there_are(family, options):
    """A name means the same to whoever reads it: as a regular expression, as a part of a tensor's name, or as all of it."""
    model = make(family, options)
    base = FAMILIES[family].architectures[FAMILIES[family].default_architecture][0](base_config(family))
    named = set(model._keep_in_fp32_modules_strict) - set(base._keep_in_fp32_modules_strict)
    body = model.base_model_prefix
    assert own_names(model) <= named
    assert {name if name in own_names(model) else f"{body}.{name}" for name in named} == own_names(model)


@pytest.mark.skipif("afmoe" not in NAMES, reason="this transformers has no AFMoE")
def test_projections_whose_names_begin_as_a_gates_are_rounded(tmp_path):
    converted(parent("afmoe"), **GATED).save_pretrained(tmp_path)
    small = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    experts = {key for key in small.state_dict() if ".mlp." in key}
    assert any(".self_attn.gate_proj." in key for key in small.state_dict())
    assert kept_in_float32(small) - experts == own_names(small) - experts
    assert torch.isfinite(logits(small, tokens()).float()).all()
