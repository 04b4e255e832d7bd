"""The recurrence by flash-linear-attention's ``chunk_simple_gla``, where that package and a CUDA device are.

Its recurrence is ours (`hf_rfa.models.linear_attention`), with features for queries and keys, w [v, 1] for values, and scale
1. Tensors have the shape [B, T, H, dim] there, states [B, H, F, d + 1] in float32. Its kernels do not run under Triton's
interpreter.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, cast

import torch
from torch import Tensor

from hf_rfa.models.attention import RFAAttentionMixin
from hf_rfa.models.linear_attention import (
    Tokens,
    denominator,
    divide,
    key_norm_sums,
    rescale,
    with_norm_row,
    with_ones,
)

#: What it needs, for messages.
NEEDS = "flash-linear-attention (pip install flash-linear-attention)"


def available(device: torch.device) -> bool:
    """Return whether flash-linear-attention is installed and can run on a device."""
    return device.type == "cuda" and importlib.util.find_spec("fla") is not None


def fla_chunked(query: Tensor, tokens: Tokens, initial_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute what `hf_rfa.models.linear_attention.chunked` computes.

    Log-decays have to be finite and small: it takes differences of their cumulative sums, so that a decay of −∞, or nearly,
    cannot mark a document's start.
    """
    operations: Any = importlib.import_module("fla.ops.simple_gla")
    inputs = (query, tokens.key, tokens.scaled_value())
    query, key, value = (tensor.transpose(1, 2).contiguous() for tensor in inputs)
    gate = None if tokens.log_decay is None else tokens.log_decay.to(query.dtype).transpose(1, 2).contiguous()
    output, state = operations.chunk_simple_gla(
        query, key, value, g=gate, scale=1.0, initial_state=initial_state, output_final_state=True
    )
    return output.transpose(1, 2), state


def attend(
    layer: RFAAttentionMixin,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor | None,
    input_scale: Tensor | None,
    document_starts: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor] | None:
    """Attend causally to tokens, and to those before them in the state; see `RFAAttentionMixin.attend`.

    Returns:
        The output and the new state; None for what torch does better: one token, packed documents, float64.
    """
    feature_map = layer.feature_map
    one = state is not None and query.shape[-2] == 1
    dtype = torch.promote_types(query.dtype, torch.float32)
    if one or document_starts is not None or dtype != torch.float32:
        return None
    features = feature_map(query, key, least_shift=feature_map.least_shift(state))
    state = rescale(state, None, features.shift)
    floor = feature_map.denominator_floor
    rows = state if state is None or floor is None else state[..., :-1, :]
    inputs = Tokens(features.key, with_ones(value, torch.float32), log_decay, input_scale)
    sums, rows = fla_chunked(features.query, inputs, rows)
    norms = None
    if floor is not None:
        before = None if state is None else state[..., -1:, -1:].clone()
        norms, last = key_norm_sums(features.key.norm(dim=-1, keepdim=True), log_decay, input_scale, before)
        rows = with_norm_row(rows, last)
    output = divide(sums[..., :-1], denominator(sums[..., -1:], features.query, norms, floor))
    return output, cast(Tensor, rescale(rows, features.shift, None))
