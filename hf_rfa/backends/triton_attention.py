"""Attention in a few kernels: features, recurrence and normaliser without writing features to memory (Triton).

The kernels themselves are in `hf_rfa.backends.triton_kernels`; here they become functions of tensors, with gradients.
"""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_rfa.models.attention_weights import UNSEEN
from hf_rfa.models.blockwise import BLOCK_LENGTH
from hf_rfa.models.feature_maps import (
    MAX_EXPONENT,
    MIN_DIFFERENTIABLE_EXPONENT,
    QUERY_EXPONENT,
    Affine,
    least_shift_above,
)
from hf_rfa.models.linear_attention import denominator, divide, masses, rescale

#: Kinds of features by name, as the kernels number them.
KINDS = {"exp": 0, "sin": 1, "relu": 2, "elu": 3}
#: Tokens of a chunk.
CHUNK = 64


#: What the kernels need, for messages.
NEEDS = "Triton (pip install triton)"


def available(device: torch.device) -> bool:
    """Return whether the kernels run on a device: on CUDA with Triton, elsewhere under its interpreter (tests)."""
    if importlib.util.find_spec("triton") is None:
        return False
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def _power(count: int) -> int:
    """Return the least power of 2 from 16 on that is not less."""
    return max(16, 1 << (count - 1).bit_length())


#: Bounds of exponents (`hf_rfa.models.feature_maps`).
LIMITS = {"TOP": QUERY_EXPONENT, "LEAST": MIN_DIFFERENTIABLE_EXPONENT, "MOST": MAX_EXPONENT}


def _shape(d: int, features: int, columns: int, chunk: int) -> dict[str, int]:
    return {"C": chunk, "BK": _power(d), "BF": _power(features), "BM": _power(columns)}


def _precision(dtype: torch.dtype) -> str:
    """Return how matrix products round: as float32 does, or as tensor cores do where the model is in 16 bits."""
    return "ieee" if dtype == torch.float32 else "tf32"


class _LinearAttention(torch.autograd.Function):
    """(q, k, A, a, A', a', n, values with ones, log-gates, scales, state) → (sums [B, H, T, d + 1], state)."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        """Run the two forward kernels."""
        from .triton_kernels import outputs_kernel, states_kernel

        *tensors, state, documents, kind, chunk = inputs
        query, key, query_weight, query_bias, key_weight, key_bias, norm, value, gate, scale = tensors
        batch, heads, length, d = query.shape
        features, columns = query_weight.shape[1], value.shape[-1]
        rows, chunks = batch * heads, -(-length // chunk)
        sizes = (length, d, features, columns, heads, chunks)
        options = {**LIMITS, "KIND": KINDS[kind], "PRECISION": _precision(query.dtype)}
        shape = _shape(d, features, columns, chunk)
        states = torch.empty(rows, chunks + 1, features, columns, device=query.device, dtype=torch.float32)
        block = min(64, shape["BM"])
        states_kernel[(rows, -(-columns // block))](
            key, key_weight, key_bias, norm, value, gate, scale, documents, states if state is None else state, states,
            *sizes, **options, **{**shape, "BM": block}, REVERSE=False, HAS_START=state is not None,
        )  # fmt: skip
        output = torch.empty(batch, heads, length, columns, device=query.device, dtype=torch.float32)
        outputs_kernel[(chunks, rows)](
            query, key, query_weight, query_bias, key_weight, key_bias, norm, value, gate, scale, documents, states,
            output, *sizes, **options, **shape,
        )  # fmt: skip
        ctx.save_for_backward(
            query, key, query_weight, query_bias, key_weight, key_bias, norm, value, gate, scale, documents, states
        )
        ctx.sizes, ctx.options, ctx.shape, ctx.has_state = sizes, options, shape, state is not None
        return output, states[:, -1].view(batch, heads, features, columns).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """Run the two backward kernels, and multiply the exponents' gradients with what they came from."""
        from .triton_kernels import gradients_kernel, states_kernel

        doutput, dstate = (gradient.contiguous().float() for gradient in gradients)
        *inputs, documents, states = ctx.saved_tensors
        query, key, query_weight, query_bias, key_weight, _, norm, value, gate, scale = inputs
        batch, heads, length, _ = query.shape
        rows, chunks, (_, _, features, columns, _, _) = batch * heads, ctx.sizes[-1], ctx.sizes
        later = torch.empty_like(states)
        block = min(64, ctx.shape["BM"])
        states_kernel[(rows, -(-columns // block))](
            query, query_weight, query_bias, norm, doutput, gate, scale, documents, dstate, later,
            *ctx.sizes, **ctx.options, **{**ctx.shape, "BM": block}, REVERSE=True, HAS_START=True,
        )  # fmt: skip
        dquery_exponent, dkey_exponent = (
            torch.empty(batch, heads, length, features, device=query.device, dtype=torch.float32) for _ in range(2)
        )
        dvalue = torch.empty(batch, heads, length, columns, device=query.device, dtype=torch.float32)
        dtotal, dscale = (torch.empty_like(norm) for _ in range(2))
        gradients_kernel[(chunks, rows)](
            *inputs, documents, states, later, doutput,
            dquery_exponent, dkey_exponent, dvalue, dtotal, dscale, *ctx.sizes, **ctx.options, **ctx.shape,
        )  # fmt: skip
        end = (states[:, -1] * dstate.flatten(0, 1)).sum((-1, -2)).view(batch, heads, 1)
        dgate = dtotal.flip(-1).cumsum(-1).flip(-1) + end
        dstart = later[:, 0].view(batch, heads, features, columns) if ctx.has_state else None
        return (
            (dquery_exponent @ query_weight).to(query.dtype),
            (dkey_exponent @ key_weight).to(key.dtype),
            torch.einsum("bhtf,bhtd->hfd", dquery_exponent, query.float()),
            dquery_exponent.sum((0, 2)),
            torch.einsum("bhtf,bhtd->hfd", dkey_exponent, key.float()),
            dkey_exponent.sum((0, 2)),
            -dkey_exponent.sum(-1),
            dvalue.to(value.dtype),
            dgate,
            dscale,
            dstart,
            None,
            None,
            None,
        )


def _rows(tensor: Tensor | None, like: Tensor, default: float) -> Tensor:
    """Return [B, H, T] in float32, contiguous: a tensor broadcast to it, or a constant."""
    if tensor is None:
        return torch.full_like(like[..., 0], default, dtype=torch.float32)
    return tensor.to(torch.float32).expand(like.shape[:-1]).contiguous()


def fused_attention(
    affine: Affine,
    value: Tensor,
    *,
    log_gate: Tensor | None = None,
    weights: Tensor | None = None,
    starts: Tensor | None = None,
    state: Tensor | None = None,
    floor: float = 0.0,
    chunk: int = CHUNK,
    least_shift: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend causally: what `hf_rfa.models.linear_attention.rfa_attention` computes of the features.

    Args:
        affine: queries, keys and the map to their features (`hf_rfa.models.feature_maps.FeatureMap.affine_form`).
        value: [B, H, T, d].
        log_gate: [B, H, T], ≤ 0, or None for no gate.
        weights: [B, H or 1, T], 0 for padding, or None for ones.
        starts: [B, T], True where a document starts, or None.
        state: the state so far (`hf_rfa.models.linear_attention.state_shape`), or None at the start.
        floor: see `hf_rfa.models.linear_attention.denominator`; for features with signs.
        chunk: tokens of a chunk, a power of 2 from 16 on.
        least_shift: see `hf_rfa.models.feature_maps.FeatureMap.forward`.

    Returns:
        The outputs [B, H, T, d] in float32, and the new state.
    """
    shift = None if least_shift is None else _shift(affine, least_shift)
    if shift is not None:
        affine, state = _shifted(affine, shift), rescale(state, None, shift)
    query, key = affine.query.contiguous(), affine.key.contiguous()
    scale = _scale(affine, weights)
    gate, norm = _rows(log_gate, query, 0.0), _rows(affine.key_norm, query, 0.0)
    numbers = torch.zeros_like(gate[:, 0], dtype=torch.int32) if starts is None else starts.cumsum(-1).to(torch.int32)
    documents = numbers[:, None].expand(gate.shape).contiguous()
    values = F.pad(value.float(), (0, 1), value=1.0)
    signed = affine.kind == "sin"
    rows = state[..., :-1, :] if signed and state is not None else state
    sums, end = _LinearAttention.apply(
        query, key, affine.query_weight.contiguous(), affine.query_bias.contiguous(), affine.key_weight.contiguous(),
        affine.key_bias.contiguous(), norm, values, gate, scale, None if rows is None else rows.float().contiguous(),
        documents, affine.kind, chunk,
    )  # fmt: skip
    if not signed:
        return divide(sums[..., :-1], sums[..., -1:]), cast(Tensor, rescale(end, shift, None))
    if starts is not None:
        gate = gate.masked_fill(starts[:, None], UNSEEN)
    length, mass, end = _with_masses(affine, scale, gate, None if state is None else state[..., -1:, -1:].clone(), end)
    output = divide(sums[..., :-1], denominator(sums[..., -1:], length, mass, floor))
    return output, cast(Tensor, rescale(end, shift, None))


def _scale(affine: Affine, weights: Tensor | None) -> Tensor:
    """Return what keys are multiplied by, [B, H, T]."""
    scale = _rows(weights, affine.query, 1.0)
    return scale if affine.key_log_scale is None else scale * affine.key_log_scale.clamp(max=MAX_EXPONENT).exp()


@torch.no_grad()
def _shift(affine: Affine, least: Tensor) -> Tensor | None:
    """Return the shift of the features (`hf_rfa.models.feature_maps.Features`), at least ``least``."""
    if affine.key_log_scale is not None:
        return least_shift_above(affine.key_log_scale.amax(dim=(0, 2))[:, None, None], least)
    if affine.kind != "exp":
        return None
    largest = []
    for start in range(0, affine.key.shape[-2], BLOCK_LENGTH):
        exponent = torch.einsum("bhtd,hfd->bhtf", affine.key[:, :, start : start + BLOCK_LENGTH], affine.key_weight)
        if affine.key_norm is not None:
            exponent = exponent - affine.key_norm[:, :, start : start + BLOCK_LENGTH, None]
        largest.append((exponent + affine.key_bias[:, None]).amax(dim=(0, 2)))
    return least_shift_above(torch.stack(largest).amax(0)[:, None], least)


def _shifted(affine: Affine, shift: Tensor) -> Affine:
    """Return the map to features with a shift."""
    if affine.key_log_scale is not None:
        return replace(affine, key_log_scale=affine.key_log_scale.clamp(max=MAX_EXPONENT) - shift[..., 0])
    return replace(affine, query_bias=affine.query_bias + shift[:, 0], key_bias=affine.key_bias - shift[:, 0])


def _with_masses(
    affine: Affine, scale: Tensor, gate: Tensor, mass: Tensor | None, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ‖φ(q)‖, the masses n of `denominator`, and the state with its row for n.

    sin² + cos² = 1, so that the norm of D pairs of features is √D.
    """
    norm = math.sqrt(affine.query_weight.shape[1] / 2)
    ones = torch.full_like(scale, norm)[..., None]
    found, last = masses(ones * scale[..., None], log_gate=gate, mass=mass)
    return ones, found, torch.cat([rows, F.pad(last, (rows.shape[-1] - 1, 0))], dim=-2)


@torch.no_grad()
def fused_step(
    affine: Affine, value: Tensor, state: Tensor, *, log_gate: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """Advance by one token in one launch; ``state`` [B, H, F, d + 1], float32, is updated in place (features without signs).

    Arguments as for `fused_attention`, with T = 1. Returns the outputs [B, H, 1, d] in float32.
    """
    from .triton_kernels import step_kernel

    query, key = affine.query.contiguous(), affine.key.contiguous()
    batch, heads, _, d = query.shape
    features = affine.query_weight.shape[1]
    scale = _scale(affine, weights)
    sums = torch.empty(batch, heads, 1, d + 1, device=query.device, dtype=torch.float32)
    step_kernel[(batch * heads,)](
        query, key, affine.query_weight.contiguous(), affine.query_bias.contiguous(), affine.key_weight.contiguous(),
        affine.key_bias.contiguous(), _rows(affine.key_norm, query, 0.0), value.contiguous(),
        _rows(log_gate, query, 0.0), scale, state, sums, d, features, heads,
        KIND=KINDS[affine.kind], **LIMITS, BK=_power(d), BF=_power(features),
    )  # fmt: skip
    return divide(sums[..., :-1], sums[..., -1:])
