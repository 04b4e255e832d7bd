"""The recurrence of random feature attention: one definition, three forms.

With features of queries and keys, values, log-decays log g and input scales w, the recurrence is

    S_t = g_t S_{t-1} + w_t φ(k_t) v_tᵀ            (F × M)
    y_t = φ(q_t)ᵀ S_t                              (M)

(Peng et al. 2021, eq. 5 and 6; Katharopoulos et al. 2020, eq. 16 to 20). `parallel`, `chunked` and `recurrent` compute it in
quadratic time, in linear time, and for one token. They take and return the state, and they agree for any split of a sequence.
Padding has w = 0 and log g = 0, so that it neither adds to the state nor decays it (`mask_padding`).

`linear_attention` is the attention built on them: the values get a column of ones, whose output is the normalizer φ(q_t)·z_t,
and one rule, `denominator`, says what the numerator is divided by. `final_state` gives the state alone.

Shapes: B batch, H heads, T tokens, F features, d width of a head, M = d + 1 columns of values and ones. A state is
[B, H, F, d + 1], S with z as its last column; features with negative entries add a row for n (`with_norm_row`). Everything
is computed in the dtype of the features: float32, or float64. There may be G rows of queries per token, [B, H, T G, F]
(`hf_rfa.models.masking`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .masking import rows_per_token, to_rows, up_to_own_token
from .memory import updates_in_place

DEFAULT_CHUNK_SIZE = 64
#: Least divisor that gradients flow through, e^−45.
MIN_DIFFERENTIABLE_DIVISOR = 3e-20


class Tokens(NamedTuple):
    """Inputs of causal attention from some tokens, without their queries.

    Attributes:
        key: [B, H, T, d]; for the recurrence features of the keys, [B, H, T, F], float32 or float64.
        value: [B, H, T, M], any floating dtype; M is d, or T for one-hot values.
        log_decay: log g, [B, H, T], ≤ 0 and 0 for padding, or None for g = 1.
        input_scale: w, [B, H or 1, T], 0 for padding, or None for ones.
    """

    key: Tensor
    value: Tensor
    log_decay: Tensor | None = None
    input_scale: Tensor | None = None

    def scaled_value(self) -> Tensor:
        """Return w v, [B, H, T, M]."""
        return scale_rows(self.value, self.input_scale)

    def first(self, count: int) -> Tokens:
        """Return the first ``count`` tokens."""
        log_decay, input_scale = (None if scale is None else scale[..., :count] for scale in self[2:])
        return Tokens(self.key[..., :count, :], self.value[..., :count, :], log_decay, input_scale)

    @staticmethod
    def join(parts: list[Tokens]) -> Tokens:
        """Return tokens that follow one another."""
        keys, values, *scales = zip(*parts, strict=True)
        log_decay, input_scale = (None if parts[0] is None else torch.cat(parts, dim=-1) for parts in scales)
        return Tokens(torch.cat(keys, dim=-2), torch.cat(values, dim=-2), log_decay, input_scale)


def mask_padding(
    padding_mask: Tensor | None, log_decay: Tensor | None, input_scale: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return log_decay and input_scale, with which padding neither adds to the state nor decays it; see `Tokens`."""
    if padding_mask is None:
        return log_decay, input_scale
    keep = padding_mask[:, None, :] != 0
    if log_decay is not None:
        log_decay = log_decay.masked_fill(~keep, 0.0)
    if input_scale is None:
        return log_decay, keep.to(torch.get_default_dtype() if log_decay is None else log_decay.dtype)
    return log_decay, input_scale.masked_fill(~keep, 0.0)


def segment_sums(log_decay: Tensor) -> Tensor:
    """Return the sums of ``log_decay[s+1 .. t]`` as [..., t, s], −inf above the diagonal.

    Summed one by one instead of as a difference of two prefix sums, whose rounding error is relative to the prefix.
    """
    length = log_decay.shape[-1]
    rows = log_decay[..., :, None].expand(*log_decay.shape, length)
    below = torch.ones(length, length, dtype=torch.bool, device=log_decay.device).tril(-1)
    sums = rows.masked_fill(~below, 0.0).cumsum(dim=-2)
    return sums.masked_fill(~(below | torch.eye(length, dtype=torch.bool, device=log_decay.device)), float("-inf"))


def decay_to_end(log_decay: Tensor) -> Tensor:
    """Return the sums of ``log_decay[t+1 ..]``, [..., t]: the logarithm of what is left of a token at the end."""
    return F.pad(log_decay[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)


def scale_rows(rows: Tensor, input_scale: Tensor | None) -> Tensor:
    """Return rows [B, H, T, …], those of keys or of values, times ``input_scale`` [B, H or 1, T]."""
    return rows if input_scale is None else rows * input_scale[..., None].to(rows.dtype)


def parallel(query: Tensor, tokens: Tokens, initial_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute the recurrence in its quadratic form: the definition that the other forms are tested against.

    Args:
        query: features of the queries, [B, H, T G, F].
        tokens: features of the keys, values [B, H, T, M] of the same dtype, log-decays and input scales.
        initial_state: [B, H, F, M], or None for zeros.

    Returns:
        The outputs [B, H, T G, M] and the state after the last token.
    """
    key, value, log_decay = tokens.key, tokens.scaled_value(), tokens.log_decay  # values are narrower than features
    groups, scores = rows_per_token(query, key), query @ key.transpose(-1, -2)
    if log_decay is None:
        scores = up_to_own_token(scores, groups)
    else:
        log_decay = log_decay.to(key.dtype)
        scores = scores * to_rows(segment_sums(log_decay).exp(), groups)
    output = scores @ value
    if initial_state is not None:
        past = query @ initial_state
        output = output + (past if log_decay is None else past * _decay_so_far(log_decay, groups))
    return output, _advance(key, value, log_decay, initial_state)


def _decay_so_far(log_decay: Tensor, groups: int) -> Tensor:
    """Return what is left of the initial state at every query row, [..., T G, 1], from log-decays [..., T]."""
    return to_rows(log_decay.cumsum(-1).exp()[..., None], groups)


def _advance(key: Tensor, value: Tensor, log_decay: Tensor | None, initial_state: Tensor | None) -> Tensor:
    """Return the state [B, H, F, M] after some tokens, whose values are scaled already."""
    if log_decay is not None:
        value = value * decay_to_end(log_decay).exp()[..., None]
        if initial_state is not None:
            initial_state = initial_state * log_decay.sum(-1).exp()[..., None, None]
    state = key.transpose(-1, -2) @ value
    return state if initial_state is None else state + initial_state


def chunked(
    query: Tensor, tokens: Tokens, initial_state: Tensor | None = None, chunk_size: int = DEFAULT_CHUNK_SIZE
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence in chunks: quadratic within a chunk, a state from chunk to chunk.

    Time and memory are linear in T. Arguments and results are those of `parallel`; ``chunk_size`` changes the speed and the
    rounding, not the result. On a CPU chunk follows chunk, so that what is computed stays in its caches. An accelerator takes
    all at once, since each of its kernels costs a launch.
    """
    if query.shape[-2] == 0:
        raise ValueError(f"the recurrence got no tokens: query has shape {tuple(query.shape)}")
    if query.device.type != "cpu" or isinstance(query.shape[-2], torch.SymInt):
        return _chunked_at_once(query, tokens, initial_state, chunk_size)
    if tokens.log_decay is None and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _chunked_in_place(query, tokens, initial_state, chunk_size)
    outputs, state = [], initial_state
    for queries, chunk in split_tokens(chunk_size, query, tokens):
        output, state = parallel(queries, chunk, state)
        outputs.append(output)
    return torch.cat(outputs, dim=-2), cast(Tensor, state)


def split_tokens(size: int, query: Tensor, tokens: Tokens) -> Iterator[tuple[Tensor, Tokens]]:
    """Return queries and tokens, ``size`` at a time.

    Each tensor is split once, not sliced: the gradient of each slice would be as long as the sequence.
    """
    groups, size = rows_per_token(query, tokens.key), min(size, tokens.key.shape[-2])
    count = -(-tokens.key.shape[-2] // size)
    rows = (query.split(size * groups, dim=-2), *(tensor.split(size, dim=-2) for tensor in tokens[:2]))
    scales = ([None] * count if scale is None else scale.split(size, dim=-1) for scale in tokens[2:])
    return ((queries, Tokens(*rest)) for queries, *rest in zip(*rows, *scales, strict=True))


def _chunked_at_once(query: Tensor, tokens: Tokens, state: Tensor | None, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Compute `chunked` for all chunks at once, in batched products.

    The last chunk is filled with tokens that add nothing. A length that an exporter leaves open gives two chunks at least, so
    that one graph serves any number: a graph for one chunk differs.
    """
    groups, length = rows_per_token(query, tokens.key), tokens.key.shape[-2]
    is_open = isinstance(length, torch.SymInt)
    if not is_open and length <= chunk_size:
        return parallel(query, tokens, state)
    count = (length - 1) // chunk_size + (2 if is_open else 1)
    missing = count * chunk_size - length

    def split(x: Tensor, rows: int = 1) -> Tensor:
        size = chunk_size * rows
        if is_open:  # a tracer can prove neither that chunks divide the rows, nor that a slice has the length
            return F.pad(x, (0, 0, 0, missing * rows)).unfold(2, size, size).transpose(-1, -2)
        x = F.pad(x, (0, 0, 0, missing * rows)) if missing else x
        return x.unflatten(2, (count, size))

    query, key, value = split(query, groups), split(tokens.key), split(tokens.scaled_value())
    log_decay = None if tokens.log_decay is None else split(tokens.log_decay.to(key.dtype)[..., None])[..., 0]
    output, sums = parallel(query, Tokens(key, value, log_decay))
    first = torch.zeros_like(sums[:, :, :1]) if state is None else state[:, :, None]
    sums = torch.cat([first, sums], dim=2).flatten(-2)
    if log_decay is None:
        sums, read = sums.cumsum(dim=2), query
    else:  # the recurrence once more, of chunks instead of tokens
        sums = segment_sums(F.pad(log_decay.sum(-1), (1, 0))).exp() @ sums
        read = query * _decay_so_far(log_decay, groups)
    sums = sums.unflatten(-1, (key.shape[-1], value.shape[-1]))
    output = (output + read @ sums[:, :, :-1]).flatten(2, 3)
    last = sums[:, :, -1].clone()  # a cache that keeps it is not to keep all others
    if is_open:
        return output.index_select(2, torch.arange(length * groups, device=output.device)), last
    return output[:, :, : length * groups], last


def _chunked_in_place(query: Tensor, tokens: Tokens, state: Tensor | None, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Compute `chunked` without gates and gradients: products are added to the sums in place."""
    batch, heads, length, features = tokens.key.shape
    groups, columns = rows_per_token(query, tokens.key), tokens.value.shape[-1]
    inputs = (query, tokens.key, tokens.scaled_value())
    query, key, value = (tensor.reshape(batch * heads, tensor.shape[2], -1) for tensor in inputs)
    sums = query.new_zeros(batch * heads, features, columns)
    if state is not None:
        sums.copy_(state.reshape(sums.shape))
    outputs = query.new_empty(batch * heads, length * groups, columns)
    for start in range(0, length, chunk_size):
        here = slice(start, start + chunk_size)
        rows = slice(start * groups, (start + chunk_size) * groups)
        q, k, v = query[:, rows], key[:, here], value[:, here]
        scores = up_to_own_token(torch.bmm(q, k.transpose(1, 2)), groups, in_place=True)
        outputs[:, rows] = torch.bmm(scores, v).baddbmm_(q, sums)
        sums.baddbmm_(k.transpose(1, 2), v)
    return outputs.view(batch, heads, length * groups, columns), sums.view(batch, heads, features, columns)


def recurrent(query: Tensor, tokens: Tokens, initial_state: Tensor) -> tuple[Tensor, Tensor]:
    """Advance the recurrence by one token (T = 1); arguments and results are those of `parallel`.

    Without gradients ``initial_state`` is updated in place, so that decoding allocates no new state.
    """
    key, value, state = tokens.key, tokens.scaled_value(), initial_state
    decay = None if tokens.log_decay is None else tokens.log_decay.to(state.dtype).exp()[..., None]
    if not updates_in_place():
        state = state if decay is None else state * decay
        state = state + key.transpose(-1, -2) * value
    else:
        if decay is not None:
            state.mul_(decay)
        flat = state.view(-1, *state.shape[-2:])
        flat.baddbmm_(key.reshape(-1, key.shape[-1], 1), value.reshape(-1, 1, value.shape[-1]))
    return query @ state, state


def _recurrence(query: Tensor, tokens: Tokens, state: Tensor | None, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Compute the form that fits: `recurrent` for one token on a state, else `chunked`."""
    if state is not None and tokens.key.shape[-2] == 1:
        return recurrent(query, tokens, state)
    return chunked(query, tokens, state, chunk_size)


def denominator(normalizer: Tensor, query: Tensor, key_norm_sum: Tensor | None, floor: float | None) -> Tensor:
    """Return what the numerator is divided by, [B, H, T G, 1]; 0 where nothing has been seen yet (all padding).

    Features without negative entries cannot cancel, and need neither n nor a floor: it is the normalizer. Others raise it to
    ``floor`` × ‖φ(q)‖ × n, where n = Σ w ‖φ(k)‖ ≥ ‖z‖ decays as the state does, so that rescaling φ, the gates or the number
    of tokens changes nothing.

    Args:
        normalizer: φ(q)·z, [B, H, T G, 1].
        query: features of the queries, [B, H, T G, F].
        key_norm_sum: n at the token of every query, [B, H, T G or 1, 1], or None.
        floor: smallest cosine between φ(q) and z that is divided by, or None.
    """
    if key_norm_sum is None or floor is None:
        return normalizer
    return torch.maximum(normalizer, floor * query.norm(dim=-1, keepdim=True) * key_norm_sum)


def divide(numerator: Tensor, divisor: Tensor) -> Tensor:
    """Return numerator [B, H, T G, d] over divisor [B, H, T G, 1], and 0 where nothing has been seen yet.

    No gradient flows where the divisor is below `MIN_DIFFERENTIABLE_DIVISOR`.
    """
    if torch.is_grad_enabled():
        numerator, divisor = (differentiable(sums, divisor) for sums in (numerator, divisor))
    unseen = divisor <= 0  # not where it is NaN, which has to show
    return (numerator / divisor).masked_fill_(unseen, 0.0)


def differentiable(x: Tensor, divisor: Tensor) -> Tensor:
    """Return ``x`` itself, detached where ``divisor`` is so small that its gradient would overflow."""
    return torch.where(divisor < MIN_DIFFERENTIABLE_DIVISOR, x.detach(), x)


def rescale(state: Tensor | None, before: Tensor | None, after: Tensor | None) -> Tensor | None:
    """Return a state [B, H, rows, d + 1] of features with one shift as a state of features with another.

    Both shifts are [H, 1, rows or 1] (`hf_rfa.models.feature_maps.Features.shift`), or None for 0.
    """
    if state is None or (before is None and after is None):
        return state
    log_factor = (0.0 if before is None else before) - (0.0 if after is None else after)
    half = (cast(Tensor, log_factor).transpose(-1, -2) / 2).exp()  # all of it may overflow where the product does not
    return state * half * half


def with_ones(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [value, 1] in ``dtype``: the column whose output is the normalizer."""
    return F.pad(value.to(dtype), (0, 1), value=1.0)


def with_norm_row(rows: Tensor, key_norm_sum: Tensor) -> Tensor:
    """Return the state of signed features: ``rows`` [B, H, F, d + 1], and n [B, H, 1, 1] in the last column of one more."""
    return torch.cat([rows, F.pad(key_norm_sum, (rows.shape[-1] - 1, 0))], dim=-2)


def key_norm_sums(
    key_norm: Tensor,
    log_decay: Tensor | None,
    input_scale: Tensor | None,
    initial: Tensor | None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
) -> tuple[Tensor, Tensor]:
    """Return n of `denominator` after every token, [B, H, T, 1], and after the last, [B, H, 1, 1].

    n is the recurrence with one feature, ``key_norm`` = ‖φ(k)‖ [B, H, T, 1], and ones for values. ``initial`` is n before
    these tokens, updated in place as a state is. The other arguments are those of `linear_attention`.
    """
    if log_decay is None and key_norm.shape[-2] > 1:
        sums = key_norm[..., 0] if input_scale is None else key_norm[..., 0] * input_scale
        sums = sums.cumsum(-1)[..., None]  # along memory: many times faster on a GPU
        sums = sums if initial is None else sums + initial
        return sums, sums[..., -1:, :]
    ones = torch.ones_like(key_norm)
    return _recurrence(ones, Tokens(key_norm, ones, log_decay, input_scale), initial, chunk_size)


def running_sums(
    key: Tensor,
    log_decay: Tensor | None,
    input_scale: Tensor | None,
    initial_state: Tensor | None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
) -> Tensor:
    """Return z of the recurrence after every token, [B, H, T, F]; arguments are those of `linear_attention`.

    ``key`` has the features of the keys. The state stays as it is.
    """
    initial = None if initial_state is None else initial_state[..., -1]
    rows = scale_rows(key, input_scale)
    if log_decay is None:
        sums = rows if rows.shape[-2] == 1 else rows.cumsum(-2)
        return sums if initial is None else sums + initial[..., None, :]
    before = None if initial is None else initial[..., None, :].clone()
    return _recurrence(
        torch.ones_like(rows[..., :1]), Tokens(torch.ones_like(rows[..., :1]), rows, log_decay), before, chunk_size
    )[0]


def split_norm_row(state: Tensor | None, floor: float | None) -> tuple[Tensor | None, Tensor | None]:
    """Return a state's rows [B, H, F, d + 1] and its n [B, H, 1, 1], which that of signed features has (`with_norm_row`)."""
    if state is None or floor is None:
        return state, None
    return state[..., :-1, :], state[..., -1:, -1:]


def linear_attention(
    query: Tensor,
    tokens: Tokens,
    *,
    initial_state: Tensor | None = None,
    denominator_floor: float | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    beside: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend causally with random features.

    Args:
        query: features of the queries, [B, H, T G, F], float32 or float64.
        tokens: features of the keys, values [B, H, T, d], log-decays and input scales.
        initial_state: the state so far, or None at the start; updated in place for one token without gradients.
        denominator_floor: see `denominator`; None for features without negative entries.
        chunk_size: tokens handled at once in the quadratic form.
        beside: what is attended to beside the features, under one denominator: outputs [B, H, T G, d] and their normalizers
            [B, H, T G, 1], in units of φ(q)·φ(k); or None.

    Returns:
        The outputs [B, H, T G, d] in the dtype of the features, and the new state.
    """
    rows, norms = split_norm_row(initial_state, denominator_floor)
    key, value, log_decay, input_scale = tokens
    sums, state = _recurrence(query, tokens._replace(value=with_ones(value, key.dtype)), rows, chunk_size)
    numerator, divisor = sums[..., :-1], sums[..., -1:]
    if denominator_floor is not None:
        norms, last = key_norm_sums(key.norm(dim=-1, keepdim=True), log_decay, input_scale, norms, chunk_size)
        norms = to_rows(norms, rows_per_token(query, key))
        divisor = denominator(divisor, query, norms, denominator_floor)
        in_place = initial_state is not None and key.shape[-2] == 1 and updates_in_place()
        state = cast(Tensor, initial_state) if in_place else with_norm_row(state, last)
    if beside is not None:
        output, normalizer = beside
        numerator, divisor = torch.addcmul(numerator, output, normalizer), divisor + normalizer
    return divide(numerator, divisor), state


def final_state(
    tokens: Tokens, *, initial_state: Tensor | None = None, denominator_floor: float | None = None
) -> Tensor:
    """Return the state after some tokens, without their outputs. Arguments are those of `linear_attention`."""
    key, value, log_decay, input_scale = tokens
    value = scale_rows(with_ones(value, key.dtype), input_scale)
    log_decay = None if log_decay is None else log_decay.to(key.dtype)
    rows, norms = split_norm_row(initial_state, denominator_floor)
    rows = _advance(key, value, log_decay, rows)
    if denominator_floor is None:
        return rows
    key_norm = scale_rows(key.norm(dim=-1, keepdim=True), input_scale)
    return with_norm_row(rows, _advance(torch.ones_like(key_norm), key_norm, log_decay, norms))


class Absorbed(NamedTuple):
    """Tokens that joined a state, which can join it again.

    Attributes:
        tokens: features of their keys, values, decays and scales.
        denominator_floor: that of the feature map.
    """

    tokens: Tokens
    denominator_floor: float | None

    def state_after(self, count: int, state: Tensor | None) -> Tensor:
        """Return a state after the first ``count`` of the tokens."""
        return final_state(self.tokens.first(count), initial_state=state, denominator_floor=self.denominator_floor)
