"""The check that a conversion has kept its source's weights: what transformers loads of the one and of the other."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_rfa.errors import InputError

from .offload import tensor_of

Digests = dict[str, str]


def digests(model: PreTrainedModel) -> Digests:
    """Return the SHA-256 of every tensor of a model's files by its names, those that stay on disk among them.

    Two models are compared by it without holding both. A buffer that is in no file follows from the configuration by a
    formula, which may be rounded otherwise every time (M2M100's positions).
    """
    names = model.state_dict().keys()
    return {name: _digest(tensor) for name, tensor in _tensors(model) if name in names}


def check_kept(result: Digests, source: Digests, name: str) -> None:
    """Raise an `InputError` if a result does not have the tensors of its source.

    Args:
        result: those of the converted model.
        source: those of the softmax model, but for what the conversion changes.
        name: the source, for the error.
    """
    for key, digest in source.items():
        if result.get(key) != digest:
            raise InputError(
                f"tensor {key} of the result is not that of {name} as transformers loads it; the result is not kept. "
                "Please report it."
            )


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and buffer, also by its second name."""
    for name, module in model.named_modules():
        for key, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            yield f"{name}.{key}" if name else key, tensor_of(module, key)


def _digest(tensor: Tensor) -> str:
    values = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{values.dtype} {tuple(values.shape)}".encode())
    content: Any = values.flatten().view(torch.uint8).numpy()
    digest.update(content)
    return digest.hexdigest()
