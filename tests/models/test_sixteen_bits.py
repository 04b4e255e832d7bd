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
    every_head,
    inputs_for,
    is_own,
    logits,
    make_head,
    relative_error,
    tokens,
)

#: Options by which layers have every part of RFA's own: one with a gate, one with slots, whose importance excludes it.
GATED: dict[str, Any] = {"num_features": 8, "gate": True, "feature_map": "exponential"}
SLOTTED: dict[str, Any] = {"num_features": 8, "window_size": 3, "num_slots": 2}
every_option = pytest.mark.parametrize("options", [GATED, SLOTTED], ids=["gate", "slots"])
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
def test_a_new_model_draws_its_own_parts_in_float32(family, auto, options):
    config = FAMILIES[family].rfa_config.from_base(base_config(family, num_labels=3), **options)
    small, exact = auto.from_config(config, dtype=torch.bfloat16), auto.from_config(config)
    assert small.dtype == torch.bfloat16
    assert_own_parts_are_exact(small, exact)


@every_head
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_a_head_that_is_loaded_is_rounded_but_for_its_own_parts(family, head, dtype, tmp_path):
    model = make_head(family, head)
    model.save_pretrained(tmp_path)
    small = type(model).from_pretrained(tmp_path, dtype=dtype).eval()
    assert_own_parts_are_exact(small, model)
    found, expected = (each(**inputs_for(model), use_cache=False)[0] for each in (small, model))
    assert found.dtype == dtype
    assert relative_error(found, expected) < 0.3


@pytest.mark.skipif("afmoe" not in NAMES, reason="this transformers has no AFMoE")
def test_projections_whose_names_begin_as_a_gates_are_rounded(tmp_path):
    converted(parent("afmoe"), **GATED).save_pretrained(tmp_path)
    small = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    experts = {key for key in small.state_dict() if ".mlp." in key}
    assert any(".self_attn.gate_proj." in key for key in small.state_dict())
    assert kept_in_float32(small) - experts == own_names(small) - experts
    assert torch.isfinite(logits(small, tokens()).float()).all()
