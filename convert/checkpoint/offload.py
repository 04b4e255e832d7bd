"""Models whose blocks stay in their checkpoint's files: accelerate reads a matrix when it is needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate.hooks import add_hook_to_module
from accelerate.utils import has_offloaded_params
from torch import nn
from transformers import PreTrainedModel

from hf_rfa.models.rfa_classes import own_prefixes
from hf_rfa.process_memory import give_back_memory

#: Least bytes of a block's output after which freed memory is returned to the operating system.
MIN_OUTPUT_BYTES = 4_000_000


def blocks_on_disk(cls: Any, config: Any, device: torch.device) -> dict[str, str]:
    """Return the device map that leaves a model's blocks on disk, except for feature maps and gates.

    Embeddings and heads are on ``device``, which also computes with the blocks: they may be tied, or have to be extended.
    """
    with torch.device("meta"):
        model = cls(config)
    modules = dict(model.named_modules())
    blocks = tuple(f"{name}." for name, module in modules.items() if isinstance(module, nn.ModuleList))
    new = own_prefixes(model)
    devices = {}
    for key in model.state_dict():
        # A module has one device; one that has modules in it, such as the model itself, has one for each of its tensors.
        owner = key.rpartition(".")[0]
        name = key if any(modules[owner].children()) else owner
        devices[name] = "disk" if key.startswith(blocks) and not key.startswith(new) else str(device)
    return devices


def offloaded_shapes(model: nn.Module) -> Iterator[tuple[str, torch.Size, torch.Size]]:
    """Yield the name of every tensor on disk, its shape there, and the shape that the model needs."""
    for name, module in model.named_modules():
        if has_offloaded_params(module):
            hook: Any = module._hf_hook
            for key, tensor in module.named_parameters(recurse=False):
                yield f"{name}.{key}", hook.weights_map[key].shape, tensor.shape


def tensor_of(module: Any, name: str) -> torch.Tensor:
    """Return a tensor of a module, also of one that stays on disk, as the module computes with it."""
    tensor = getattr(module, name)
    if not tensor.is_meta:
        return tensor
    return module._hf_hook.weights_map[name].to(module._hf_hook.execution_device)


def give_back_after_blocks(model: nn.Module) -> None:
    """Return freed memory to the operating system after every block that has a large output."""

    def after(block: nn.Module, args: Any, output: Any) -> None:
        hidden_states = output[0] if isinstance(output, tuple) else output
        if hidden_states.nbytes >= MIN_OUTPUT_BYTES:
            give_back_memory()

    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for block in module:
                block.register_forward_hook(after)


def share_offloaded(model: PreTrainedModel, other: PreTrainedModel) -> None:
    """Let a model read the tensors from disk that ``model`` reads."""
    if not hasattr(model, "hf_device_map"):
        return
    modules: dict[str, Any] = dict(model.named_modules())
    for name, module in other.named_modules():
        if name in modules and has_offloaded_params(modules[name]):
            add_hook_to_module(module, modules[name]._hf_hook)
    other.hf_device_map = model.hf_device_map  # `save_pretrained` reads from it whether weights are on disk
    give_back_after_blocks(other)
