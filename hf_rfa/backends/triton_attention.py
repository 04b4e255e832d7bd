"""Attention in a few kernels: features, recurrence and normaliser without writing features to memory (Triton).

The kernels themselves are in `hf_rfa.backends.triton_kernels`; here they become functions of tensors, with gradients.
"""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from hf_rfa.models.attention import SEGMENT_LENGTH, RFAAttentionMixin
from hf_rfa.models.feature_maps import (
    MAX_EXPONENT,
    MIN_DIFFERENTIABLE_EXPONENT,
    QUERY_EXPONENT,
    EluMap,
    FeatureMap,
    compute_dtype,
    least_shift_above,
)
from hf_rfa.models.linear_attention import (
    denominator,
    divide,
    key_norm_sums,
    rescale,
    with_norm_row,
)
from hf_rfa.models.masking import MASKED_LOGIT
from hf_rfa.models.projected_feature_maps import (
    ArcCosMap,
    GaussianMap,
    HedgehogMap,
    PositiveMap,
    ProjectedFeatureMap,
    T2RMap,
    from_heads,
    to_heads,
)

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


@dataclass(frozen=True)
class KernelInputs:
    """Features as f(A q + a) and w f(A'k + a' − n), for kernels that compute them where they are used.

    Attributes:
        kind: f, "exp" (as `exponentiate_keys` and `exponentiate_queries` of `hf_rfa.models.projected_feature_maps`), "sin",
            "relu", or "elu", to which 1 is added.
        query: prepared queries, [B, H, T, d].
        key: prepared keys, [B, H, T, d].
        query_weight: A, [H, F, d].
        query_bias: a, [H, F].
        key_weight: A', [H, F, d].
        key_bias: a', [H, F].
        key_norm: n, [B, H, T], or None for 0.
        key_log_scale: log w, [B, H, T], to be kept under 25, or None for 0.
    """

    kind: str
    query: Tensor
    key: Tensor
    query_weight: Tensor
    query_bias: Tensor
    key_weight: Tensor
    key_bias: Tensor
    key_norm: Tensor | None = None
    key_log_scale: Tensor | None = None


def kernel_inputs(feature_map: FeatureMap, query: Tensor, key: Tensor) -> KernelInputs | None:
    """Return the features of queries and keys [B, H, T, d] as the kernels compute them, or None if they cannot."""
    dtype = compute_dtype(query.dtype)
    if isinstance(feature_map, EluMap):
        unit = torch.eye(feature_map.head_dim, dtype=dtype, device=query.device)
        unit = unit.expand(feature_map.num_heads, -1, -1)
        zeros = unit.new_zeros(unit.shape[:2])
        return KernelInputs("elu", feature_map.query_input(query), feature_map.key_input(key), unit, zeros, unit, zeros)
    if not isinstance(feature_map, ProjectedFeatureMap) or feature_map.projection.is_meta:
        return None
    spec = feature_map.current_spec(dtype)
    flat_key = spec.key_input(to_heads(key.to(dtype)))
    parts = {
        "query": from_heads(spec.query_input(to_heads(query.to(dtype))), query),
        "key": from_heads(flat_key, key),
        "query_weight": spec.query_weight.mT,
        "query_bias": spec.query_bias[:, 0],
        "key_weight": spec.key_weight.mT,
        "key_bias": spec.key_bias[:, 0],
    }
    matrices = ("query_weight", "query_bias", "key_weight", "key_bias")
    if isinstance(feature_map, PositiveMap) and spec.key_norm is not None:
        norm = torch.bmm(flat_key.square(), spec.key_norm)
        return KernelInputs("exp", **parts, key_norm=from_heads(norm, key)[..., 0])
    if isinstance(feature_map, HedgehogMap):
        parts |= {name: torch.cat([parts[name], -parts[name]], dim=1) for name in matrices}
        parts["key_bias"] = parts["key_bias"] - feature_map.log_scale[:, None]
        return KernelInputs("exp", **parts)
    if isinstance(feature_map, GaussianMap):  # cos x = sin(x + π/2)
        parts |= {name: torch.cat([parts[name], parts[name]], dim=1) for name in matrices}
        bias = torch.zeros_like(parts["query_bias"])
        bias[:, feature_map.num_features :] = math.pi / 2
        scale = None
        if not feature_map.unit_norm:
            scale = from_heads(flat_key.square().sum(-1, keepdim=True) / 2, key)[..., 0]
            scale = scale - feature_map.log_scale[:, None]
        return KernelInputs("sin", **(parts | {"query_bias": bias, "key_bias": bias}), key_log_scale=scale)
    return KernelInputs("relu", **parts) if isinstance(feature_map, (ArcCosMap, T2RMap)) else None


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
        The output and the new state, which one token without gradients updates in place; None for what the kernels cannot
        compute: float64, and maps of other kinds.
    """
    feature_map = layer.feature_map
    if compute_dtype(query.dtype) != torch.float32:
        return None
    inputs = kernel_inputs(feature_map, query, key)
    if inputs is None:
        return None
    one = query.shape[-2] == 1 and not torch.is_grad_enabled()
    if state is not None and one and not feature_map.signed and document_starts is None:
        return fused_step(inputs, value, state, log_decay=log_decay, input_scale=input_scale), state
    return fused_attention(
        inputs,
        value,
        log_decay=log_decay,
        input_scale=input_scale,
        document_starts=document_starts,
        initial_state=state,
        denominator_floor=feature_map.denominator_floor,
        least_shift=feature_map.least_shift(state),
    )


def _power(count: int) -> int:
    """Return the least power of 2 from 16 on that is not less."""
    return max(16, 1 << (count - 1).bit_length())


#: Bounds of exponents (`hf_rfa.models.feature_maps`).
LIMITS = {"TOP": QUERY_EXPONENT, "LEAST": MIN_DIFFERENTIABLE_EXPONENT, "MOST": MAX_EXPONENT}
#: Features, and columns of a state, that a program computes at once. More of them do not fit in a GPU's shared memory.
FEATURES, COLUMNS = 32, 32
#: How the kernels run: groups of 32 threads, and loads that run ahead (each would take as much shared memory again).
LAUNCH = {
    "states": {"num_warps": 4, "num_stages": 1},
    "outputs": {"num_warps": 4, "num_stages": 1},
    "gradients": {"num_warps": 8, "num_stages": 1},
}


def _shape(d: int, features: int, chunk: int) -> dict[str, int]:
    return {"C": chunk, "BK": _power(d), "BF": min(FEATURES, _power(features))}


def _precision(kind: str, dtype: torch.dtype) -> str:
    """Return how tensor cores multiply: with all bits in three products of 10 each, or with 10 bits in one.

    One is enough for a model in 16 bits whose normalisers are sums of exponentials. Those of the other kinds can come near
    zero, and divide what was rounded.
    """
    return "tf32" if kind == "exp" and dtype.itemsize == 2 else "tf32x3"


class _LinearAttention(torch.autograd.Function):
    """(q, k, A, a, A', a', n, values, log-gates, scales, state) → (numerators [B, H, T, d], normalisers [B, H, T], state)."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Run the two forward kernels."""
        from .triton_kernels import outputs_kernel

        *tensors, state, documents, kind, chunk, precision = inputs
        query, key, query_weight, query_bias, key_weight, key_bias, norm, value, gate, scale = tensors
        batch, heads, length, d = query.shape
        features, rows, chunks = query_weight.shape[1], batch * heads, -(-length // chunk)
        ctx.sizes, ctx.shape = (length, d, features, heads, chunks), _shape(d, features, chunk)
        ctx.options = {**LIMITS, "KIND": KINDS[kind], "PRECISION": precision}
        no = norm  # stands for the largest exponents and the normalisers' gradients, which are read in reverse alone
        states = _states(ctx, key, key_weight, key_bias, norm, no, value, no, gate, scale, documents, state)
        output = torch.empty(batch, heads, length, d, device=query.device, dtype=torch.float32)
        mass, top = torch.empty_like(norm), torch.empty_like(norm)
        outputs_kernel[(chunks * rows,)](
            query, key, query_weight, query_bias, key_weight, key_bias, norm, value, gate, scale, documents, *states,
            output, mass, top, *ctx.sizes, **ctx.options, **ctx.shape, **LAUNCH["outputs"],
        )  # fmt: skip
        ctx.save_for_backward(*tensors, documents, top, *states)
        ctx.has_state = state is not None
        return output, mass, _with_masses(states, -1, batch, heads)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """Run the two backward kernels, and multiply the exponents' gradients with what they came from."""
        from .triton_kernels import gradients_kernel

        doutput, dmass, dstate = (gradient.contiguous().float() for gradient in gradients)
        *inputs, documents, top, states, masses = ctx.saved_tensors
        query, key, query_weight, query_bias, key_weight, _, norm, value, gate, scale = inputs
        batch, heads, length, d = query.shape
        rows, (_, _, features, _, chunks) = batch * heads, ctx.sizes
        later = _states(
            ctx,
            query,
            query_weight,
            query_bias,
            norm,
            top,
            doutput,
            dmass,
            gate,
            scale,
            documents,
            dstate,
            reverse=True,
        )
        dquery_exponent, dkey_exponent = (
            torch.empty(batch, heads, length, features, device=query.device, dtype=torch.float32) for _ in range(2)
        )
        dvalue = torch.empty(batch, heads, length, d, device=query.device, dtype=torch.float32)
        dtotal, dscale = (torch.empty_like(norm) for _ in range(2))
        gradients_kernel[(chunks * rows,)](
            *inputs, documents, top, states, masses, *later, doutput, dmass,
            dquery_exponent, dkey_exponent, dvalue, dtotal, dscale, *ctx.sizes, **ctx.options, **ctx.shape,
            **LAUNCH["gradients"],
        )  # fmt: skip
        end = (_with_masses((states, masses), -1, batch, heads) * dstate).sum((-1, -2))[..., None]
        dgate = dtotal.flip(-1).cumsum(-1).flip(-1) + end
        asked = ctx.needs_input_grad  # sums over all tokens take a fifth of the time, and frozen maps need none
        return (
            (dquery_exponent @ query_weight).to(query.dtype),
            (dkey_exponent @ key_weight).to(key.dtype),
            torch.einsum("bhtf,bhtd->hfd", dquery_exponent, query.float()) if asked[2] else None,
            dquery_exponent.sum((0, 2)) if asked[3] else None,
            torch.einsum("bhtf,bhtd->hfd", dkey_exponent, key.float()) if asked[4] else None,
            dkey_exponent.sum((0, 2)) if asked[5] else None,
            -dkey_exponent.sum(-1) if asked[6] else None,
            dvalue.to(value.dtype),
            dgate,
            dscale,
            _with_masses(later, 0, batch, heads) if ctx.has_state else None,
            None,
            None,
            None,
            None,
        )


def _states(ctx: Any, *inputs: Any, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """Run the kernel of states, and return them [B·H, N + 1, F, d] and their normalisers' [B·H, N + 1, F]."""
    from .triton_kernels import states_kernel

    *tensors, start = inputs
    _, d, features, heads, chunks = ctx.sizes
    rows, like = tensors[0].shape[0] * heads, {"device": tensors[0].device, "dtype": torch.float32}
    states = torch.empty(rows, chunks + 1, features, d, **like)
    masses = torch.empty(rows, chunks + 1, features, **like)
    starts = (states, masses) if start is None else (start[..., :-1].contiguous(), start[..., -1].contiguous())
    columns = min(COLUMNS, ctx.shape["BK"])
    grid = (rows, -(-features // ctx.shape["BF"]), -(-d // columns))
    states_kernel[grid](
        *tensors, *starts, states, masses, *ctx.sizes, **ctx.options, **ctx.shape, BV=columns,
        REVERSE=reverse, HAS_START=start is not None, **LAUNCH["states"],
    )  # fmt: skip
    return states, masses


def _with_masses(states: tuple[Tensor, Tensor], place: int, batch: int, heads: int) -> Tensor:
    """Return the state [B, H, F, d + 1] at a boundary of chunks, its normaliser's column last."""
    whole = torch.cat([states[0][:, place], states[1][:, place, :, None]], dim=-1)
    return whole.unflatten(0, (batch, heads))


def _rows(tensor: Tensor | None, like: Tensor, default: float) -> Tensor:
    """Return [B, H, T] in float32, contiguous: a tensor broadcast to it, or a constant."""
    if tensor is None:
        return torch.full(like.shape[:-1], default, dtype=torch.float32, device=like.device)  # strides may be any
    return tensor.to(torch.float32).expand(like.shape[:-1]).contiguous()


def fused_attention(
    inputs: KernelInputs,
    value: Tensor,
    *,
    log_decay: Tensor | None = None,
    input_scale: Tensor | None = None,
    document_starts: Tensor | None = None,
    initial_state: Tensor | None = None,
    denominator_floor: float | None = None,
    chunk: int = CHUNK,
    least_shift: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend causally: what `hf_rfa.models.linear_attention.linear_attention` computes of the features.

    Args:
        inputs: queries, keys and the map to their features.
        value: [B, H, T, d].
        log_decay: as there, and so are input_scale, initial_state and denominator_floor.
        input_scale: [B, H or 1, T], 0 for padding, or None for ones.
        document_starts: [B, T], True where a document starts, or None.
        initial_state: the state so far, or None at the start.
        denominator_floor: None for features without negative entries.
        chunk: tokens of a chunk, a power of 2 from 16 on.
        least_shift: see `hf_rfa.models.feature_maps.FeatureMap.forward`.

    Returns:
        The outputs [B, H, T, d] in float32, and the new state.
    """
    shift = None if least_shift is None else _shift(inputs, least_shift)
    inputs = inputs if shift is None else _shifted(inputs, shift)
    state = rescale(initial_state, None, shift)
    query, key = inputs.query.contiguous(), inputs.key.contiguous()
    scale = _scale(inputs, input_scale)
    decay, norm = _rows(log_decay, query, 0.0), _rows(inputs.key_norm, query, 0.0)
    numbers = torch.zeros_like(decay[:, 0], dtype=torch.int32)
    if document_starts is not None:
        numbers = document_starts.cumsum(-1).to(torch.int32)
    documents = numbers[:, None].expand(decay.shape).contiguous()
    signed = denominator_floor is not None
    rows = state[..., :-1, :] if signed and state is not None else state
    output, mass, end = _LinearAttention.apply(
        query, key, inputs.query_weight.contiguous(), inputs.query_bias.contiguous(), inputs.key_weight.contiguous(),
        inputs.key_bias.contiguous(), norm, value.contiguous(), decay, scale,
        None if rows is None else rows.float(), documents, inputs.kind, chunk, _precision(inputs.kind, value.dtype),
    )  # fmt: skip
    if not signed:
        return divide(output, mass[..., None]), cast(Tensor, rescale(end, shift, None))
    gates = None if log_decay is None and document_starts is None else decay
    if document_starts is not None:
        gates = decay.masked_fill(document_starts[:, None], MASKED_LOGIT)
    # sin² + cos² = 1, so that the norm of D pairs of features is √D.
    query_norm = torch.full_like(scale, math.sqrt(inputs.query_weight.shape[1] / 2))[..., None]
    before = None if state is None else state[..., -1:, -1:].clone()
    norms, last = key_norm_sums(query_norm * scale[..., None], gates, None, before)
    output = divide(output, denominator(mass[..., None], query_norm, norms, denominator_floor))
    return output, cast(Tensor, rescale(with_norm_row(end, last), shift, None))


def _scale(inputs: KernelInputs, input_scale: Tensor | None) -> Tensor:
    """Return what keys are multiplied by, [B, H, T]."""
    scale = _rows(input_scale, inputs.query, 1.0)
    return scale if inputs.key_log_scale is None else scale * inputs.key_log_scale.clamp(max=MAX_EXPONENT).exp()


@torch.no_grad()
def _shift(inputs: KernelInputs, least: Tensor) -> Tensor | None:
    """Return the shift of the features (`hf_rfa.models.feature_maps.Features`), at least ``least``."""
    if inputs.key_log_scale is not None:
        return least_shift_above(inputs.key_log_scale.amax(dim=(0, 2))[:, None, None], least)
    if inputs.kind != "exp":
        return None
    largest = []
    for start in range(0, inputs.key.shape[-2], SEGMENT_LENGTH):
        here = slice(start, start + SEGMENT_LENGTH)
        exponent = torch.einsum("bhtd,hfd->bhtf", inputs.key[:, :, here], inputs.key_weight)
        if inputs.key_norm is not None:
            exponent = exponent - inputs.key_norm[:, :, here, None]
        largest.append((exponent + inputs.key_bias[:, None]).amax(dim=(0, 2)))
    return least_shift_above(torch.stack(largest).amax(0)[:, None], least)


def _shifted(inputs: KernelInputs, shift: Tensor) -> KernelInputs:
    """Return the inputs of features with a shift."""
    if inputs.key_log_scale is not None:
        return replace(inputs, key_log_scale=inputs.key_log_scale.clamp(max=MAX_EXPONENT) - shift[..., 0])
    return replace(inputs, query_bias=inputs.query_bias + shift[:, 0], key_bias=inputs.key_bias - shift[:, 0])


@torch.no_grad()
def fused_step(
    inputs: KernelInputs,
    value: Tensor,
    state: Tensor,
    *,
    log_decay: Tensor | None = None,
    input_scale: Tensor | None = None,
) -> Tensor:
    """Advance by one token in one launch; ``state`` [B, H, F, d + 1], float32, is updated in place (features without signs).

    Arguments as for `fused_attention`, with T = 1. Returns the outputs [B, H, 1, d] in float32.
    """
    from .triton_kernels import step_kernel

    query, key = inputs.query.contiguous(), inputs.key.contiguous()
    batch, heads, _, d = query.shape
    features = inputs.query_weight.shape[1]
    scale = _scale(inputs, input_scale)
    sums = torch.empty(batch, heads, 1, d + 1, device=query.device, dtype=torch.float32)
    step_kernel[(batch * heads,)](
        query, key, inputs.query_weight.contiguous(), inputs.query_bias.contiguous(), inputs.key_weight.contiguous(),
        inputs.key_bias.contiguous(), _rows(inputs.key_norm, query, 0.0), value.contiguous(),
        _rows(log_decay, query, 0.0), scale, state, sums, d, features, heads,
        KIND=KINDS[inputs.kind], **LIMITS, BK=_power(d), BF=_power(features),
    )  # fmt: skip
    return divide(sums[..., :-1], sums[..., -1:])
