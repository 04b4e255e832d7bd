"""The recurrence by flash-linear-attention's ``chunk_simple_gla``, where that package and a CUDA device are.

Its recurrence is ours (`hf_rfa.models.linear_attention`), with features for queries and keys, w [v, 1] for values, and scale
1. Tensors have the shape [B, T, H, dim] there, states [B, H, F, d + 1] in float32. Its kernels do not run under Triton's
interpreter.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from hf_rfa.models.linear_attention import apply_weights

#: What it needs, for messages.
NEEDS = "flash-linear-attention (pip install flash-linear-attention)"


def available(device: torch.device) -> bool:
    """Return whether flash-linear-attention is installed and can run on a device."""
    return device.type == "cuda" and importlib.util.find_spec("fla") is not None


def fla_chunked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    log_gate: Tensor | None = None,
    weights: Tensor | None = None,
    state: Tensor | None = None,
    chunk_size: int = 0,
) -> tuple[Tensor, Tensor]:
    """Compute what `hf_rfa.models.linear_attention.chunked` computes; ``chunk_size`` is flash-linear-attention's own.

    Log-gates have to be finite and small: it takes differences of their cumulative sums, so that a document's start cannot be
    told by a gate of −∞, or nearly.
    """
    operations: Any = importlib.import_module("fla.ops.simple_gla")
    value = apply_weights(value, weights)
    query, key, value = (tensor.transpose(1, 2).contiguous() for tensor in (query, key, value))
    gate = None if log_gate is None else log_gate.to(query.dtype).transpose(1, 2).contiguous()
    output, state = operations.chunk_simple_gla(
        query, key, value, g=gate, scale=1.0, initial_state=state, output_final_state=True
    )
    return output.transpose(1, 2), state
