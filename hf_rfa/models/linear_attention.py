"""The recurrence of random feature attention: one definition, three forms.

With features of queries and keys, values, log-gates and per-token weights, the recurrence is

    S_t = g_t S_{t-1} + w_t φ(k_t) v_tᵀ            (F × M)
    y_t = φ(q_t)ᵀ S_t                              (M)

(Peng et al. 2021, eq. 5 and 6; Katharopoulos et al. 2020, eq. 16 to 20).  `parallel`, `chunked` and `recurrent`
compute it in quadratic time, in linear time, and for one token.  They take and return the state, and they agree for any
split of a sequence.  A token of weight 0 (padding) adds nothing; its log-gate has to be 0 too, so that it does not decay
the state either (`mask_padding` does both).

`rfa_attention` is the attention built on them: the values get a column of ones, whose output is the normaliser
φ(q_t)·z_t, and one rule, in `denominator`, says what happens where the normaliser is too small to divide by.
`source_state` and `attend_with_state` are its two halves where every query sees every key (`noncausal`).

Shapes: B batch, H heads, T tokens, F features, M = d + 1 columns of values and ones.  Everything is computed in the
dtype of the features: float32, or float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

DEFAULT_CHUNK_SIZE = 64
#: Least divisor that gradients flow through, e^−45.
SMALLEST_DIVISOR = 3e-20

#: Computes the recurrence of several tokens, as `chunked` does.
Form = Callable[..., tuple[Tensor, Tensor]]


def mask_padding(padding: Tensor | None, log_gate: Tensor | None, weights: Tensor | None) -> tuple[Tensor | None, ...]:
    """Make padded tokens neither add to the state nor decay it.

    Args:
        padding: [B, T], 1 for a token and 0 for padding, or None where nothing is padded.
        log_gate: [B, H, T] or None.
        weights: [B, H, T] or None (all ones).

    Returns:
        (log_gate, weights), with weights [B, 1, T] where only the padding sets them.
    """
    if padding is None:
        return log_gate, weights
    keep = padding[:, None, :] != 0
    if log_gate is not None:
        log_gate = log_gate.masked_fill(~keep, 0.0)
    if weights is None:
        dtype = torch.get_default_dtype() if log_gate is None else log_gate.dtype
        return log_gate, keep.to(dtype)
    return log_gate, weights.masked_fill(~keep, 0.0)


def segment_sums(log_gate: Tensor) -> Tensor:
    """Return the sums of ``log_gate[s+1 .. t]`` as [..., t, s], −inf above the diagonal.

    Summed one by one instead of as a difference of two prefix sums, whose rounding error is relative to the prefix.
    """
    length = log_gate.shape[-1]
    rows = log_gate[..., :, None].expand(*log_gate.shape, length)
    below = torch.ones(length, length, dtype=torch.bool, device=log_gate.device).tril(-1)
    sums = rows.masked_fill(~below, 0.0).cumsum(dim=-2)
    return sums.masked_fill(~(below | torch.eye(length, dtype=torch.bool, device=log_gate.device)), float("-inf"))


def apply_weights(rows: Tensor, weights: Tensor | None) -> Tensor:
    """Return rows [B, H, T, …], those of keys or of values, times ``weights`` [B, H or 1, T]."""
    return rows if weights is None else rows * weights[..., None].to(rows.dtype)


def parallel_weights(
    query: Tensor, key: Tensor, *, log_gate: Tensor | None = None, weights: Tensor | None = None, causal: bool = True
) -> Tensor:
    """Return the unnormalised attention weights φ(q_t)·φ(k_s) w_s Π g, as [B, H, Tq, Tk].

    Args:
        query: features of the queries, [B, H, Tq, F].
        key: features of the keys, [B, H, Tk, F].
        log_gate: [B, H, Tk], ≤ 0; only with ``causal=True``.
        weights: [B, H or 1, Tk], 0 for padding.
        causal: whether a query sees only the keys up to its own position (then Tq = Tk).
    """
    scores = query @ apply_weights(key, weights).transpose(-1, -2)
    if not causal:
        return scores
    if log_gate is not None:
        return scores * segment_sums(log_gate.to(scores.dtype)).exp()
    return scores.tril()


def parallel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    log_gate: Tensor | None = None,
    weights: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence in its quadratic form: the definition that the other forms are tested against.

    Args:
        query: features of the queries, [B, H, T, F].
        key: features of the keys, [B, H, T, F].
        value: [B, H, T, M].
        log_gate: logarithms of the gates, [B, H, T], ≤ 0, or None for no gate.
        weights: [B, H or 1, T], or None for ones.
        state: [B, H, F, M], or None for zeros.

    Returns:
        The outputs [B, H, T, M] and the state after the last token [B, H, F, M].
    """
    value = apply_weights(value, weights)  # scalars go to values and outputs, which are narrower than features
    output = parallel_weights(query, key, log_gate=log_gate) @ value
    if log_gate is None:
        new_state = key.transpose(-1, -2) @ value
        return (output, new_state) if state is None else (output + query @ state, new_state + state)
    log_gate = log_gate.to(key.dtype)
    to_end = F.pad(log_gate[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)
    new_state = key.transpose(-1, -2) @ (value * to_end.exp()[..., None])
    if state is None:
        return output, new_state
    from_start = log_gate.cumsum(-1).exp()[..., None]
    return output + (query @ state) * from_start, new_state + from_start[..., -1:, :] * state


def chunked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    log_gate: Tensor | None = None,
    weights: Tensor | None = None,
    state: Tensor | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence chunk by chunk: quadratic within a chunk, a state from chunk to chunk.

    Time and memory are linear in T.  Arguments and results are those of `parallel`; ``chunk_size`` changes the speed and
    the rounding, not the result.
    """
    if query.shape[-2] == 0:
        raise ValueError(f"the recurrence got no tokens: query has shape {tuple(query.shape)}")
    if isinstance(query.shape[-2], torch.SymInt):
        return _chunked_at_once(query, key, apply_weights(value, weights), log_gate, state, chunk_size)
    if log_gate is None and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _chunked_in_place(query, key, apply_weights(value, weights), state, chunk_size)
    count = -(-query.shape[-2] // chunk_size)

    def pieces(tensor: Tensor | None, dim: int) -> Sequence[Tensor] | Sequence[None]:
        # Split once, not slice by slice: the gradient of each slice would be as long as the sequence.
        return [None] * count if tensor is None else tensor.split(chunk_size, dim=dim)

    outputs = []
    for q, k, v, g, w in zip(
        query.split(chunk_size, dim=-2),
        key.split(chunk_size, dim=-2),
        value.split(chunk_size, dim=-2),
        pieces(log_gate, -1),
        pieces(weights, -1),
        strict=True,
    ):
        output, state = parallel(q, k, v, log_gate=g, weights=w, state=state)
        outputs.append(output)
    return torch.cat(outputs, dim=-2), cast(Tensor, state)


def _chunked_at_once(
    query: Tensor, key: Tensor, value: Tensor, log_gate: Tensor | None, state: Tensor | None, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """Compute `chunked` for a length that is left open: all chunks side by side, so that one graph serves any number.

    The last chunks are filled with tokens that add nothing. There are two at least, since a graph is not the same for one.
    """
    length = query.shape[-2]
    count = length // chunk_size + 2

    def split(x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, count * chunk_size - length)).unfold(2, chunk_size, chunk_size).transpose(-1, -2)

    query, key, value = (split(x) for x in (query, key, value))
    log_gate = None if log_gate is None else split(log_gate.to(key.dtype)[..., None])[..., 0]
    output, sums = parallel(query, key, value, log_gate=log_gate)
    first = torch.zeros_like(sums[:, :, :1]) if state is None else state[:, :, None]
    sums = torch.cat([first, sums], dim=2).flatten(-2)
    if log_gate is None:
        sums, read = sums.cumsum(dim=2), query
    else:  # the recurrence once more, of chunks instead of tokens
        sums = segment_sums(F.pad(log_gate.sum(-1), (1, 0))).exp() @ sums
        read = query * log_gate.cumsum(-1).exp()[..., None]
    sums = sums.unflatten(-1, (key.shape[-1], value.shape[-1]))
    output = output + read @ sums[:, :, :-1]
    # Taken by their places: that there are as many is more than a tracer can tell of a slice.
    return output.flatten(2, 3).index_select(2, torch.arange(length, device=output.device)), sums[:, :, -1]


def _chunked_in_place(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor | None, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """Compute `chunked` without gates and gradients: sums are added to where they lie, and no pass is made to add them."""
    batch, heads, length, features = query.shape
    columns = value.shape[-1]
    query, key, value = (tensor.reshape(batch * heads, length, -1) for tensor in (query, key, value))
    if state is None:
        sums = query.new_zeros(batch * heads, features, columns)
    else:
        sums = state.reshape(batch * heads, features, columns).clone()
    outputs = query.new_empty(batch * heads, length, columns)
    for start in range(0, length, chunk_size):
        here = slice(start, start + chunk_size)
        q, k, v = query[:, here], key[:, here], value[:, here]
        scores = torch.bmm(q, k.transpose(1, 2)).tril_()
        outputs[:, here] = torch.bmm(scores, v).baddbmm_(q, sums)
        sums.baddbmm_(k.transpose(1, 2), v)
    return outputs.view(batch, heads, length, columns), sums.view(batch, heads, features, columns)


def steps_in_place() -> bool:
    """Return whether a step may update its state where it lies: not with gradients, nor in torch's old tracer.

    That tracer, which ``torch.onnx.export(…, dynamo=False)`` uses, loses such updates.
    """
    return not (torch.is_grad_enabled() or torch.jit.is_tracing())


def recurrent(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    log_gate: Tensor | None = None,
    weights: Tensor | None = None,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Advance the recurrence by one token (T = 1).

    Without gradients ``state`` is updated in place, so that decoding allocates no new state.  Arguments and results are
    those of `parallel`.
    """
    value = apply_weights(value, weights)
    gate = None if log_gate is None else log_gate.to(state.dtype).exp()[..., None]
    if not steps_in_place():
        state = state if gate is None else state * gate
        state = state + key.transpose(-1, -2) * value
    else:
        if gate is not None:
            state.mul_(gate)
        flat = state.view(-1, *state.shape[-2:])
        flat.baddbmm_(key.reshape(-1, key.shape[-1], 1), value.reshape(-1, 1, value.shape[-1]))
    return query @ state, state


def noncausal(
    query: Tensor, key: Tensor, value: Tensor, *, weights: Tensor | None = None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Let every query see every key, and the keys summed in ``state``: cross and bidirectional attention.

    Arguments and results are those of `parallel`; the number of queries need not be that of keys.
    """
    sums = key.transpose(-1, -2) @ apply_weights(value, weights)
    state = sums if state is None else state + sums
    return query @ state, state


def denominator(normaliser: Tensor, query: Tensor, mass: Tensor | None, floor: float) -> Tensor:
    """Return what the numerator is divided by: the one rule for the denominator.

    The normaliser φ(q)·z is raised to ``floor`` × ‖φ(q)‖ × n, where n = Σ w ‖φ(k)‖ ≥ ‖z‖ decays as the state does.  The
    bound scales with φ, with the gates and with the number of tokens, so that rescaling any of them changes nothing.
    Features without negative entries cannot cancel, and need no floor.

    Args:
        normaliser: φ(q)·z, [B, H, T, 1].
        query: features of the queries, [B, H, T, F].
        mass: n, [B, H, T, 1], or None for features without negative entries.
        floor: smallest cosine between φ(q) and z that is divided by.

    Returns:
        [B, H, T, 1]; 0 where nothing has been seen yet (all padding).
    """
    if mass is None:
        return normaliser
    return torch.maximum(normaliser, floor * query.norm(dim=-1, keepdim=True) * mass)


def divide(numerator: Tensor, divisor: Tensor) -> Tensor:
    """Return numerator [B, H, T, d] over divisor [B, H, T, 1], and 0 where nothing has been seen yet.

    No gradient flows where the divisor is below `SMALLEST_DIVISOR`.
    """
    if torch.is_grad_enabled():
        numerator, divisor = (differentiable(each, divisor) for each in (numerator, divisor))
    unseen = divisor <= 0  # not where it is NaN, which has to go on
    return (numerator / divisor).masked_fill_(unseen, 0.0)


def differentiable(x: Tensor, divisor: Tensor) -> Tensor:
    """Return ``x`` itself, detached where ``divisor`` is so small that its gradient would overflow."""
    return torch.where(divisor < SMALLEST_DIVISOR, x.detach(), x)


def rescale(state: Tensor | None, before: Tensor | None, after: Tensor | None) -> Tensor | None:
    """Return a state of features with the shift ``before`` as one of features with the shift ``after``.

    Args:
        state: [B, H, rows, d + 1], or None at the start.
        before: [H, 1, rows or 1] (`hf_rfa.models.feature_maps.Features.shift`), or None for 0.
        after: likewise.
    """
    if state is None or (before is None and after is None):
        return state
    log_factor = (0.0 if before is None else before) - (0.0 if after is None else after)
    half = (cast(Tensor, log_factor).transpose(-1, -2) / 2).exp()  # all of it may overflow where the product does not
    return state * half * half


def normalise(output: Tensor, query: Tensor, mass: Tensor | None, floor: float) -> Tensor:
    """Return the numerator over the `denominator`; ``output`` [B, H, T, d + 1] holds the normaliser in its last column."""
    return divide(output[..., :-1], denominator(output[..., -1:], query, mass, floor))


def state_shape(num_features: int, head_dim: int, *, signed: bool) -> tuple[int, int]:
    """Return the (rows, columns) of one head's state: S with z as a last column, and a row for n if φ has signs."""
    return num_features + signed, head_dim + 1


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor | None,
    weights: Tensor | None,
    state: Tensor | None,
    chunk_size: int,
    form: Form = chunked,
) -> tuple[Tensor, Tensor]:
    """Run the causal form that fits: recurrent for one token on a state, else ``form``."""
    if state is not None and query.shape[-2] == 1:
        return recurrent(query, key, value, log_gate=log_gate, weights=weights, state=state)
    return form(query, key, value, log_gate=log_gate, weights=weights, state=state, chunk_size=chunk_size)


def _with_ones(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [value, 1] in ``dtype``: the column whose output is the normaliser."""
    return F.pad(value.to(dtype), (0, 1), value=1.0)


def _with_mass(rows: Tensor, mass_row: Tensor) -> Tensor:
    """Return the state of signed features: ``rows`` [B, H, F, d + 1], and n [B, H, 1, 1] in the last column of a row more."""
    return torch.cat([rows, F.pad(mass_row, (rows.shape[-1] - 1, 0))], dim=-2)


def masses(
    norm: Tensor,
    *,
    log_gate: Tensor | None = None,
    weights: Tensor | None = None,
    mass: Tensor | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
) -> tuple[Tensor, Tensor]:
    """Return n of `denominator` for features with signs: the recurrence with one feature, ‖φ(k)‖, and no values but ones.

    Args:
        norm: ‖φ(k)‖, [B, H, T, 1].
        log_gate: see `rfa_attention`.
        weights: see there.
        mass: n so far, [B, H, 1, 1], or None at the start; updated in place as a state is.
        chunk_size: see there.

    Returns:
        n after every token, [B, H, T, 1], and after the last, [B, H, 1, 1].
    """
    ones = torch.ones_like(norm)
    return _run(ones, norm, ones, log_gate, weights, mass, chunk_size)


def rfa_sums(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    log_gate: Tensor | None = None,
    weights: Tensor | None = None,
    state: Tensor | None = None,
    signed: bool = False,
    floor: float = 0.0,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    form: Form = chunked,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the recurrence on values and ones, and leave the division to the caller.

    Args:
        query: see `rfa_attention`, as all arguments.
        key: see there.
        value: see there.
        log_gate: see there.
        weights: see there.
        state: see there.
        signed: see there.
        floor: see there.
        chunk_size: see there.
        form: see there.

    Returns:
        The numerators [B, H, T, d], what they are to be divided by [B, H, T, 1] (`denominator`), and the new state.
    """
    value = _with_ones(value, key.dtype)
    if not signed:
        output, state = _run(query, key, value, log_gate, weights, state, chunk_size, form)
        return output[..., :-1], output[..., -1:], state

    rows, mass_row = (None, None) if state is None else (state[..., :-1, :], state[..., -1:, -1:])
    output, rows = _run(query, key, value, log_gate, weights, rows, chunk_size, form)
    norm = key.norm(dim=-1, keepdim=True)
    mass, mass_row = masses(norm, log_gate=log_gate, weights=weights, mass=mass_row, chunk_size=chunk_size)
    divisor = denominator(output[..., -1:], query, mass, floor)
    in_place = state is not None and query.shape[-2] == 1 and steps_in_place()
    # `recurrent` updates its rows in place.
    return output[..., :-1], divisor, cast(Tensor, state) if in_place else _with_mass(rows, mass_row)


def rfa_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Attend causally with random features: features and values in, normalised outputs and state out.

    Args:
        query: features of the queries, [B, H, T, F], float32 or float64.
        key: features of the keys, [B, H, T, F].
        value: [B, H, T, d], any floating dtype.
        **options: ``log_gate`` [B, H, T], ≤ 0, or None for no gate; ``weights`` [B, H or 1, T], 0 for padding, or None for
            ones; ``state``, the state so far (`state_shape`), or None at the start, updated in place for one token without
            gradients; ``signed``, whether the features have negative entries, so that their normaliser needs a floor;
            ``floor``, see `denominator`; ``chunk_size``, tokens handled at once in the quadratic form; ``form``, which
            computes several tokens, `chunked` unless told otherwise.

    Returns:
        The outputs [B, H, T, d] in the dtype of the features, and the new state.
    """
    numerator, divisor, state = rfa_sums(query, key, value, **options)
    return divide(numerator, divisor), state


def source_state(
    key: Tensor,
    value: Tensor,
    *,
    weights: Tensor | None = None,
    state: Tensor | None = None,
    signed: bool = False,
) -> Tensor:
    """Sum keys and values that every query will see: the state of cross and bidirectional attention.

    Args:
        key: features of the keys, [B, H, S, F].
        value: [B, H, S, d].
        weights: [B, H or 1, S], 0 for padding, or None for ones.
        state: of the keys before these (`state_shape`), or None.
        signed: see `rfa_attention`.

    Returns:
        [B, H, rows, d + 1] (`state_shape`), for `attend_with_state`.
    """
    rows = key.transpose(-1, -2) @ apply_weights(_with_ones(value, key.dtype), weights)
    if signed:
        norms = apply_weights(key.norm(dim=-1, keepdim=True), weights)
        rows = _with_mass(rows, norms.sum(-2, keepdim=True))
    return rows if state is None else state + rows


def attend_with_state(query: Tensor, state: Tensor, *, signed: bool = False, floor: float = 0.0) -> Tensor:
    """Read a finished state without changing it: cross and bidirectional attention.

    Args:
        query: features of the queries, [B, H, T, F].
        state: from `source_state`, [N, H, rows, d + 1]; every row of N serves B / N rows of ``query`` in succession, as the
            beams of one sequence are.
        signed: see `rfa_attention`.
        floor: see `denominator`.

    Returns:
        [B, H, T, d].
    """
    batch, heads, length, features = query.shape
    groups = state.shape[0]
    if batch != groups:  # the queries of one state row become one longer list of queries
        query = query.view(groups, -1, heads, length, features).transpose(1, 2).reshape(groups, heads, -1, features)
    if signed:
        output = normalise(query @ state[..., :-1, :], query, state[..., -1:, -1:], floor)
    else:
        output = normalise(query @ state, query, None, floor)
    if batch != groups:
        output = output.view(groups, heads, -1, length, output.shape[-1]).transpose(1, 2)
        output = output.reshape(batch, heads, length, -1)
    return output
