"""LoRA in the end-to-end stage: small matrices are trained beside the model's weights, and merged into them afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_rfa.errors import InputError

from .param_groups import is_rfa_parameter

#: Linear layers without LoRA: heads, which are trained themselves, or are the vocabulary's.
HEADS = ("lm_head", "score", "classifier")


@contextmanager
def lora(model: nn.Module, rank: int) -> Iterator[None]:
    """Train LoRA matrices of ``rank`` (Hu et al. 2022; α is 2 × rank), feature maps and gates, and no other weights.

    The model is changed in place, so the Trainer's checkpoints hold all of it. At the end the matrices are merged into the
    weights of their layers and removed.

    Raises:
        InputError: if peft is not installed.
    """
    try:
        from peft import LoraConfig, LoraModel
    except ImportError as error:
        raise InputError("lora_rank needs peft: pip install 'hf-rfa[peft]', or set lora_rank to 0.") from error
    linear = {name: each for name, each in model.named_modules() if isinstance(each, (nn.Linear, Conv1D))}
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=sorted({name.rpartition(".")[2] for name in linear if not {*HEADS} & {*name.split(".")}}),
        exclude_modules=[*HEADS],
        fan_in_fan_out=any(isinstance(each, Conv1D) for each in linear.values()),
    )
    tuner: Any = LoraModel(model, config, "default")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or is_rfa_parameter(name))
    try:
        yield
    finally:
        tuner.merge_and_unload(safe_merge=True)
        vars(model).pop("peft_config", None)
