"""The exact window: softmax attention to the last W tokens and random features for all before them, under one normaliser.

    y_t ∝ Σ_{t−W < j ≤ t} exp(q_t·k_j·s + o_t) c_tj v_j  +  φ(q_t)ᵀ S_{t−W}        c_tj = w_j g_{j+1} … g_t

A token's key and value are kept as they are for W steps, and then join the recurrent state: the state lags W tokens behind,
and what is kept does not grow.  The offset o_t makes both kinds of weights commensurate: it takes out of exp(q·k·s) the
factor that φ leaves out (`hf_rfa.models.feature_maps.FeatureMap.forward`).

A window [B, H, W, 2d + 1] holds keys, values and log-weights (log c, `UNSEEN` for empty places and padding).  Followed by
the new tokens it is the stream: query t, at place W + t of it, sees places t + 1 to W + t exactly, and place t joins the
state.  Padding is moved to the front of the stream, so that it takes no token's place in the window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention_weights import UNSEEN, implied_weights
from .feature_maps import Features
from .linear_attention import DEFAULT_CHUNK_SIZE, differentiable, divide, rescale, rfa_sums, segment_sums

#: (queries, keys) → their features, with an offset.
FeatureFunction = Callable[[Tensor, Tensor], Features]


def window_shape(size: int, head_dim: int) -> tuple[int, int]:
    """Return the (rows, columns) of one head's window: keys, values and log-weights."""
    return size, 2 * head_dim + 1


def windowed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    features: FeatureFunction,
    size: int,
    scaling: float,
    log_gate: Tensor | None = None,
    weights: Tensor | None = None,
    padding: Tensor | None = None,
    state: Tensor | None = None,
    window: Tensor | None = None,
    signed: bool = False,
    floor: float = 0.0,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    output_weights: bool = False,
    window_only: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Attend causally: queries, keys and values in; outputs, state, window and implied weights out.

    Args:
        query: [B, H, T, d], float32 or float64.
        key: [B, H, T, d].
        value: [B, H, T, d].
        features: the feature map.
        size: W ≥ 1, the query's own position included.
        scaling: s.
        log_gate: [B, H, T], ≤ 0 and 0 for padding, or None for no gate.
        weights: [B, H or 1, T], 0 for padding, or None for ones.
        padding: [B, T], 0 for padding, or None where nothing is padded.
        state: sums over the tokens that have left the window (`hf_rfa.models.linear_attention.state_shape`), or None.
        window: the last W tokens before these, [B, H, W, 2d + 1], or None at the start.
        signed: see `hf_rfa.models.linear_attention.rfa_attention`.
        floor: likewise.
        chunk_size: queries handled at once.
        output_weights: whether to return the implied weights, at quadratic cost.
        window_only: leave out all that has left the window, to see what it does alone.

    Returns:
        The outputs [B, H, T, d], the new state, the new window, and the weights [B, H, T, T] or None.
    """
    length, width = query.shape[-2:]
    stream, gates = _stream(key, value, log_gate, weights, window, size)
    if padding is not None:
        places, stream_places = _padding_first(padding), _padding_first(stream[:, 0, :, -1] > UNSEEN / 2)
        query, stream = _take(query, places), _take(stream, stream_places)
        gates = None if gates is None else _take(gates[..., None], stream_places)[..., 0]

    leaving = stream[..., :length, :]
    query_features, key_features, offset, shift = features(query, leaving[..., :width])
    state = rescale(state, None, shift)
    log_weights = leaving[..., -1]
    if gates is not None:  # a token has decayed W times when it joins the state
        log_weights = log_weights + gates[..., 1:].unfold(-1, size, 1).sum(-1)
    options: dict[str, Any] = {
        "log_gate": None if gates is None else gates[..., size:],
        "weights": log_weights.exp(),
        "signed": signed,
        "floor": floor,
    }
    implied = None
    if output_weights:
        implied = implied_weights(query_features, key_features, state=state, **options)
    far, divisor, state = rfa_sums(
        query_features, key_features, leaving[..., width:-1], state=state, chunk_size=chunk_size, **options
    )
    state = cast(Tensor, rescale(state, shift, None))
    far = divide(far, divisor)
    divisor = differentiable(divisor, divisor)
    seen = divisor > 0
    log_far = torch.where(seen, torch.where(seen, divisor, 1.0).log(), UNSEEN)

    chunk = length if output_weights else chunk_size
    near, log_near, near_weights = _near(query * scaling, stream, gates, cast(Tensor, offset), size, chunk)
    share = torch.zeros_like(log_near) if window_only else torch.sigmoid(log_far - log_near)
    output = near + share * (far - near)
    if implied is not None:
        implied = F.pad(implied * share, (0, size)) + near_weights * (1 - share)

    window = stream[..., length:, :]
    if gates is not None:
        decay = F.pad(gates[..., length + 1 :], (0, 1)).flip(-1).cumsum(-1).flip(-1)
        window = torch.cat([window[..., :-1], (window[..., -1] + decay)[..., None]], dim=-1)
    elif not torch.is_grad_enabled():
        window = window.clone()  # not a view of the stream, which would keep all of a long text's keys and values
    if padding is not None:
        back = places.argsort(dim=1)
        output = _take(output, back)
        if implied is not None:
            columns = stream_places.argsort(dim=1)[:, None, None].expand_as(implied)
            implied = _take(implied.gather(-1, columns), back)
    return output, state, window, None if implied is None else implied[..., size:]


def _stream(
    key: Tensor,
    value: Tensor,
    log_gate: Tensor | None,
    weights: Tensor | None,
    window: Tensor | None,
    size: int,
) -> tuple[Tensor, Tensor | None]:
    """Return the window followed by the new tokens, [B, H, W + T, 2d + 1], and their log-gates [B, H, W + T]."""
    log_weights = torch.zeros_like(key[..., 0])
    if weights is not None:
        weights = weights.to(key.dtype).expand_as(log_weights)
        log_weights = weights.clamp_min(torch.finfo(key.dtype).tiny).log().masked_fill(weights == 0, UNSEEN)
    new = torch.cat([key, value.to(key.dtype), log_weights[..., None]], dim=-1)
    if window is None:
        # Empty places hold copies of a token: a key of zeros can have larger features than all keys of a trained head.
        window = F.pad(new[..., :1, :-1].expand(-1, -1, size, -1), (0, 1), value=UNSEEN)
    gates = None if log_gate is None else F.pad(log_gate.to(key.dtype), (size, 0))
    return torch.cat([window.to(new.dtype), new], dim=-2), gates


def _padding_first(tokens: Tensor) -> Tensor:
    """Return the order [B, T] that moves padding to the front and keeps the order of the tokens; 0 or False is padding."""
    return (tokens != 0).long().argsort(dim=1, stable=True)


def _take(x: Tensor, places: Tensor) -> Tensor:
    """Return x [B, H, T, n] with its tokens in the order ``places`` [B, T]."""
    return x.gather(2, places[:, None, :, None].expand_as(x))


def _near(
    query: Tensor, stream: Tensor, gates: Tensor | None, offset: Tensor, size: int, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend exactly to the last ``size`` places of the stream, ``chunk`` queries at a time.

    Returns:
        The outputs [B, H, T, d], the logarithms of their normalisers [B, H, T, 1], and the weights, of which a chunk has
        [B, H, chunk, size + chunk].
    """
    length, width = query.shape[-2:]
    if isinstance(length, torch.SymInt):  # left open: as in `hf_rfa.models.linear_attention._chunked_at_once`
        short, places = (length // chunk + 2) * chunk - length, torch.arange(length, device=query.device)
        query, offset = (F.pad(x, (0, 0, 0, short)).unfold(2, chunk, chunk).mT for x in (query, offset))
    else:
        chunk = min(chunk, length)
        short, places = -length % chunk, slice(length)
        query, offset = (F.pad(x, (0, 0, 0, short)).unflatten(2, (-1, chunk)) for x in (query, offset))
    blocks = F.pad(stream, (0, 0, 0, short)).unfold(2, size + chunk, chunk)  # [B, H, chunks, 2d + 1, size + chunk]
    logits = query @ blocks[..., :width, :] + blocks[..., -1:, :] + offset
    if gates is not None:
        logits = logits + segment_sums(F.pad(gates, (0, short)).unfold(2, size + chunk, chunk))[..., size:, :]
    band = torch.ones(chunk, size + chunk, dtype=torch.bool, device=query.device).triu(1).tril(size)
    logits = logits.masked_fill(~band, UNSEEN)
    log_total = logits.logsumexp(-1, keepdim=True)
    weights = (logits - log_total).exp() * (log_total > UNSEEN / 2)  # padding may see nothing at all
    output = weights @ blocks[..., width:-1, :].transpose(-1, -2)
    output, log_total = (x.flatten(2, 3)[:, :, places] for x in (output, log_total))
    return output, log_total, weights[:, :, 0]
