"""Tiny models of every decoder that `hf_rfa.families.DECODERS` names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_rfa import FAMILIES
from hf_rfa.families import DECODERS
from tests.tiny_models import tiny_model

#: Tokens of a text.
LENGTH = 29
#: What makes a family's tiny shape one that can be converted.
FIELDS: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": None, "final_logit_softcapping": None},  # which makes large logits equal
    "ministral": {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "mistral": {"sliding_window": None},  # else every layer has one
    "vaultgemma": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
}
#: Attention with learned sinks needs a window.
WITH_SINKS = ("flint", "gpt_oss", "granite_swa", "granitemoe_swa")
#: The families that differ most; the others, and what compiles, are left to `pytest -m slow`.
QUICK = ("gemma3_text", "gpt_neox", "gpt_oss", "lfm2", "llama", "opt", "qwen3_moe")
NAMES = [name for name in DECODERS if name in FAMILIES]  # an older transformers lacks some


def case(name: str, *more: Any) -> Any:
    """Return a case of a test, a slow one unless the family is among the quick."""
    return pytest.param(name, *more, marks=[] if name in QUICK else [pytest.mark.slow])


every_decoder = pytest.mark.parametrize("name", [case(name) for name in NAMES])


def parent(name: str, **fields: Any) -> Any:
    """Return a tiny softmax model whose attention, norms and biases all matter."""
    model = tiny_model(name, seed=1, **{**FIELDS.get(name, {}), "pad_token_id": 1, "eos_token_id": 2, **fields})
    with torch.no_grad():
        for parameter in model.parameters():
            added = torch.randn_like(parameter)
            parameter.copy_(0.25 * added if parameter.ndim > 1 else parameter + 0.1 * added)
    return with_plain_experts(model)


def with_plain_experts(model: Any) -> Any:
    """Let experts compute in any dtype."""
    if getattr(model.config, "_experts_implementation", None) not in (None, "eager"):
        model.set_experts_implementation("eager")
    return model


def saved(name: str, folder: Path, **fields: Any) -> Path:
    """Write a tiny softmax model into a folder; return this."""
    parent(name, **fields).save_pretrained(folder)
    return folder


def rfa_indices(model: Any) -> list[int]:
    """Return the indices of the RFA layers."""
    return [index for index in range(model.config.num_hidden_layers) if model.config.is_rfa("causal", index)]
