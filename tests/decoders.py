"""Tiny models of every decoder that `hf_rfa.families.DECODERS` names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_rfa import FAMILIES
from hf_rfa.families import DECODERS
from hf_rfa.models.rfa_classes import OWN_PARTS
from tests.tiny_models import tiny_model

#: Tokens of a text.
LENGTH = 29
#: What makes a family's tiny shape one that can be converted.
FIELDS: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": None, "final_logit_softcapping": None},  # which makes large logits equal
    "vaultgemma": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
}
#: Attention that rounds to float32, where masks of float64 are infinite: rows of padding are NaN, in softmax models too.
IN_FLOAT32 = ("gemma2", "granite_swa", "granitemoe_swa", "vaultgemma")
#: A text that is seen through features but for its last tokens.
WINDOWED = {"num_features": 16, "window_size": 5, "gate": True, "chunk_size": 7}
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


def converted(softmax: Any, **options: Any) -> Any:
    """Return an RFA model with the weights of a softmax model."""
    declared = FAMILIES[softmax.config.model_type]
    cls = declared.architectures[type(softmax).__name__][1]
    model = cls(declared.rfa_config.from_base(softmax.config, **options)).to(softmax.dtype).eval()
    absent, unknown = model.load_state_dict(softmax.state_dict(), strict=False)
    assert not unknown
    assert all({*OWN_PARTS} & {*key.split(".")} for key in absent)
    return with_plain_experts(model)


def pair(name: str, options: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Return a softmax model and an RFA model with its weights, by default with features and a small window."""
    softmax = parent(name).to(torch.float32 if name in IN_FLOAT32 else dtype)
    return softmax, converted(softmax, **(WINDOWED if options is None else options))


def saved(name: str, folder: Path, **fields: Any) -> Path:
    """Write a tiny softmax model into a folder; return this."""
    parent(name, **fields).save_pretrained(folder)
    return folder


def rfa_indices(model: Any) -> list[int]:
    """Return the indices of the RFA layers."""
    return [index for index in range(model.config.num_hidden_layers) if model.config.is_rfa("causal", index)]
