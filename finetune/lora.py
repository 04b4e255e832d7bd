"""LoRA for the end-to-end stage: small matrices are trained beside the parent's weights, and merged into them afterwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_rfa.errors import InputError

#: Names of linear layers that LoRA leaves alone: heads, which are trained themselves, or are the vocabulary's.
LEFT_OUT = ("lm_head", "score", "classifier")


def add_lora(model: nn.Module, rank: int) -> None:
    """Add LoRA matrices of ``rank`` to every projection of a model, in place (Hu et al. 2022); α is 2 × rank.

    The model stays what it is, so that the Trainer's checkpoints hold all of it and resume as ever.

    Raises:
        InputError: if peft is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise InputError("lora_rank needs peft: pip install 'hf-rfa[peft]', or set lora_rank to 0.") from error
    names = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and not set(LEFT_OUT) & set(name.split("."))
    }
    transposed = any(isinstance(module, Conv1D) for module in model.modules())
    config: Any = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=sorted(names),
        exclude_modules=[*LEFT_OUT],
        fan_in_fan_out=transposed,
    )
    inject_adapter_in_model(config, model)


@torch.no_grad()
def merge_lora(model: nn.Module) -> None:
    """Add what LoRA learned to the weights it stands beside, and remove it, in place."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge(safe_merge=True)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.get_base_layer())
    vars(model).pop("peft_config", None)
