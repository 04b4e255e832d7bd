"""The sliding window: softmax attention to the last W tokens and features for all before them, under one normalizer.

    y_t ∝ Σ_{t−W < j ≤ t} exp(q_t·k_j·s + o_t) c_tj v_j  +  φ(q_t)ᵀ S_{t−W}        c_tj = w_j g_{j+1} … g_t

The first tokens of a text, its sinks, may be kept exactly for good. They have c_tj = 1, neither scaled nor decayed, and never
join the state. Those of the tokens before the window that matter most may be kept as well, in slots
(`hf_rfa.models.sinks_and_slots`).

A token's key and value are kept as they are for W steps, and then join the recurrent state: the state lags W tokens behind,
and what is kept does not grow. The offset o_t makes both kinds of weights commensurate: it takes out of exp(q·k·s) the factor
that φ leaves out (`hf_rfa.models.feature_maps.Features`).

A window [B, H, S + K + W, 2d + 1] holds keys, values and log-weights (log c, `MASKED_LOGIT` for empty places and padding)
of S sinks, of the tokens in K slots and of W last tokens; with slots the tokens' importance follows (`with_importance`). The
last tokens followed by the new ones are the stream: query t, at place W + t of it, sees places t + 1 to W + t exactly, and
place t joins the state, or competes for a slot. Padding is moved to the front of the stream, so that it takes no token's
place in the window. A sink weighs nothing in the stream, in front of which it stands as padding does.

There may be G rows of queries per token, [B, H, T G, d] (`hf_rfa.models.masking`).

Retrieval heads have no features: they see sinks and a window of their own, or all tokens (`exact_attention`).

Some models have a learned sink as well, which is no token (gpt-oss): a logit per query head that every query sees, with a
value of zero. It joins the exact weights, exp(logit + o_t).
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .feature_maps import Features
from .linear_attention import (
    DEFAULT_CHUNK_SIZE,
    MASKED_LOGIT,
    Tokens,
    decay_to_end,
    differentiable,
    linear_attention,
    rescale,
    segment_sums,
)
from .masking import rows_per_token, to_rows
from .sinks_and_slots import (
    Sinks,
    Slots,
    attend_to_sinks,
    attend_to_slots,
    choose,
    lower_importance,
    padding_first,
    split_importance,
    take,
    take_places,
    take_sinks,
    take_tokens,
    weighted_mean,
    with_importance,
)

#: Tokens that a window which grows takes in at once.
GROWTH = 512


class WindowSizes(NamedTuple):
    """Numbers of tokens that are kept exactly: W last ones, S first ones, and K most important ones of the others."""

    window: int
    sinks: int = 0
    slots: int = 0


class Stream(NamedTuple):
    """The window followed by the new tokens, padding moved to the front.

    Attributes:
        rows: keys, values and log-weights, [B, H, W + T, d + M + 1].
        log_decay: [B, H, W + T], or None.
        order: the places of the new tokens in the order of the stream, [B, T], or None where nothing is padded.
        head_dim: d.
        size: W.
        sinks: the first tokens, or None for S = 0.
        importance: that of the places, [B, H, W + T], or None for K = 0.
        candidates: keys, values and log-weights of the tokens in slots before the new ones and of those that leave the
            window, [B, H, K + T, d + M + 1], or None.
        slots: what the slots hold meanwhile, or None.
        dtype: that of the window as it is kept.
        document: numbers of the documents of the places, [B, W + T], where decays do not keep them apart, or None.
    """

    rows: Tensor
    log_decay: Tensor | None
    order: Tensor | None
    head_dim: int
    size: int
    sinks: Sinks | None
    importance: Tensor | None
    candidates: Tensor | None
    slots: Slots | None
    dtype: torch.dtype
    document: Tensor | None = None

    @property
    def length(self) -> int:
        """T."""
        return self.rows.shape[-2] - self.size

    def leaving(self) -> Tokens:
        """Return the tokens that leave the window and slots for the state, as they join it."""
        rows, log_decay = self.rows[..., : self.length, :], None
        if self.slots is not None:  # which leave no gate to decay anything but other documents, and these lose nothing
            rows = take(cast(Tensor, self.candidates), self.slots.lost)
            log_decay = None if self.log_decay is None else self.log_decay[..., self.size :]
            return Tokens(rows[..., : self.head_dim], rows[..., self.head_dim : -1], log_decay, rows[..., -1].exp())
        log_weights = rows[..., -1]
        if self.log_decay is not None:  # they have decayed W times by then
            log_weights = log_weights + self.log_decay[..., 1:].unfold(-1, self.size, 1).sum(-1)
            log_decay = self.log_decay[..., self.size :]
        return Tokens(rows[..., : self.head_dim], rows[..., self.head_dim : -1], log_decay, log_weights.exp())

    def window(self) -> Tensor:
        """Return the window after the new tokens, [B, H, S + K + W, d + M + 1]; with slots, d + M + 2 columns."""
        rows = self.rows[..., self.length :, :]
        if self.log_decay is not None:
            decay = decay_to_end(self.log_decay[..., self.length :])
            rows = torch.cat([rows[..., :-1], (rows[..., -1] + decay)[..., None]], dim=-1)
        if self.document is not None:
            past = (self.document[:, self.length :] != self.document[:, -1:])[:, None]
            rows = torch.cat([rows[..., :-1], rows[..., -1].masked_fill(past, MASKED_LOGIT)[..., None]], dim=-1)
        if self.slots is not None:
            rows = torch.cat([take(cast(Tensor, self.candidates), self.slots.held), rows], dim=-2)
        if self.sinks is not None:
            rows = torch.cat([self.sinks.held, rows], dim=-2)
        if self.slots is not None:
            importance = cast(Tensor, self.importance)[..., self.length :]
            held = take(self.slots.importance[..., None], self.slots.held)[..., 0]
            importance = torch.cat([held, importance], dim=-1)
            sinks = rows.shape[-2] - importance.shape[-1]
            return with_importance(rows.to(self.dtype), F.pad(importance, (sinks, 0)))
        # Not a view of the stream, which would keep all of a long sequence's keys and values.
        copied = self.sinks is not None or self.document is not None or torch.is_grad_enabled()
        return rows.to(self.dtype) if copied or self.dtype != rows.dtype else rows.clone()

    def attend(self, query: Tensor, offset: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
        """Attend exactly to all that is kept; see `Step.attend`."""
        output, log_total = _attend_to_window(query, self, offset, chunk_size)
        found = []
        if self.sinks is not None:
            found.append(attend_to_sinks(query, self.sinks, offset))
        if self.slots is not None:
            found.append(attend_to_slots(query, cast(Tensor, self.candidates), self.slots, offset))
        for each, log_each in found:
            output = output + torch.sigmoid(log_each - log_total) * (each - output)
            log_total = torch.logaddexp(log_total, log_each)
        return output, log_total


class Step(NamedTuple):
    """One token and what it sees exactly, where there are neither gates nor padding: a `Stream` in far fewer operations.

    Attributes:
        kept: the window after the token, [B, H, S + K + W, ·].
        leaves: rows of which one joins the state, [B, H, K + 1, ·]: those in slots, and the one that leaves the window.
        lost: the place of that row, [B, H, 1], or None without slots.
        head_dim: d.
        value_dim: M.
        dtype: the computing dtype.
    """

    kept: Tensor
    leaves: Tensor
    lost: Tensor | None
    head_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def order(self) -> None:
        """None: nothing is padded."""
        return None

    @property
    def length(self) -> int:
        """T."""
        return 1

    def _split(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, values and log-weights [B, H, n, 1]."""
        rows = rows[..., : self.head_dim + self.value_dim + 1].to(self.dtype)
        key, value, log_weights = rows.split([self.head_dim, self.value_dim, 1], dim=-1)
        if self.kept.dtype == torch.float16:  # in which `MASKED_LOGIT` is minus infinity
            log_weights = log_weights.clamp_min(MASKED_LOGIT)
        return key, value, log_weights

    def leaving(self) -> Tokens:
        """Return the token that leaves for the state."""
        gone = self.leaves if self.lost is None else take_places(self.leaves, self.lost)
        key, value, log_weights = self._split(gone)
        return Tokens(key, value, None, log_weights[..., 0].exp())

    def window(self) -> Tensor:
        """Return the window after the token."""
        return self.kept

    def attend(self, query: Tensor, offset: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
        """Attend exactly to all that is kept.

        Args:
            query: scaled, in the order of the stream, [B, H, T G, d].
            offset: makes the weights commensurate with those of features, [B, H, T G, 1].
            chunk_size: queries handled at once.

        Returns:
            The outputs [B, H, T G, M], and the logarithms of their normalizers [B, H, T G, 1].
        """
        key, value, log_weights = self._split(self.kept)
        return weighted_mean(query @ key.mT + log_weights.mT + offset, value)

    def attend_alone(self, query: Tensor, scaling: float) -> Tensor:
        """Return the outputs of queries that are not scaled yet, where nothing joins them and no normalizer is needed."""
        key, value, log_weights = self._split(self.kept)
        if key.is_cuda:  # its kernels take no rows that are a number of bytes apart which 16 does not divide
            key, value = key.contiguous(), value.contiguous()
        return F.scaled_dot_product_attention(query, key, value, attn_mask=log_weights.mT.contiguous(), scale=scaling)


def _step_of(tokens: Tokens, window: Tensor, sizes: WindowSizes, dtype: torch.dtype, sinks_held: bool) -> Step:
    """Return a window [B, H, S + K + W, ·], kept in ``dtype``, followed by one token."""
    _, num_sinks, num_slots = sizes
    key, importance = tokens.key, tokens.importance
    plain = _rows_of(tokens)
    row = plain if plain.dtype == dtype else plain.to(dtype)
    if num_sinks and not sinks_held:  # a sink weighs nothing in the stream
        held, column = window[..., :num_sinks, :], row.shape[-1] - 1
        number_held = (held[..., column : column + 1] > MASKED_LOGIT / 2).sum(-2, keepdim=True)
        is_sink = number_held < num_sinks
        sink = row
        if num_slots:
            sink = with_importance(row, torch.zeros_like(plain[..., 0]))
            importance = cast(Tensor, importance).to(key.dtype).masked_fill(is_sink[..., 0], MASKED_LOGIT)
        held = torch.where(torch.arange(num_sinks, device=held.device)[:, None] == number_held, sink, held)
        window = torch.cat([held, window[..., num_sinks:, :]], dim=-2)
        row = torch.cat([plain[..., :-1], plain[..., -1:].masked_fill(is_sink, MASKED_LOGIT)], dim=-1).to(dtype)
    widths = key.shape[-1], tokens.value.shape[-1], key.dtype
    last = num_sinks + num_slots  # the place of what leaves the window, after the slots
    parts, leaves, lost = [window[..., last + 1 :, :], row], window[..., num_sinks : last + 1, :], None
    if num_slots:
        rank = split_importance(leaves)[1]
        lost = num_slots - rank.flip(-1).argmin(dim=-1, keepdim=True)  # of several, the last
        moves = torch.arange(num_slots, device=window.device) >= lost
        slots = torch.where(moves[..., None], leaves[..., 1:, :], leaves[..., :-1, :])
        parts = [slots, parts[0], with_importance(row, cast(Tensor, importance))]
    if num_sinks:
        parts.insert(0, window[..., :num_sinks, :])
    kept = torch.cat(parts, dim=-2)
    if num_slots:
        lower_importance(kept[..., num_sinks:-1, :], cast(Tensor, tokens.recency))
    return Step(kept, leaves, lost, *widths)


def stream_of(
    tokens: Tokens,
    window: Tensor | None,
    sizes: WindowSizes,
    document_starts: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    sinks_held: bool = False,
) -> Stream | Step:
    """Return a window, or None at the start, followed by tokens with keys in float32 or float64.

    Args:
        tokens: the new tokens.
        window: [B, H, S + K + W, ·], or None.
        sizes: W, S and K.
        document_starts: [B, T], True where a text begins that has sinks and slots of its own; the decays, if there are any,
            let nothing of the texts before it through.
        dtype: that of the window as it is kept; None takes that of the keys.
        chunk_size: queries handled at once.
        sinks_held: whether the window is known to have all sinks (`sinks_are_held`), which saves a step some operations.
    """
    key, _, log_decay, input_scale, padding_mask, importance, _ = tokens
    size, num_sinks, num_slots = sizes
    dtype = dtype or key.dtype
    plain = log_decay is None and input_scale is None and padding_mask is None and document_starts is None
    if plain and window is not None and key.shape[-2] == 1:
        return _step_of(tokens, window, sizes, dtype, sinks_held)
    rows = _rows_of(tokens)
    window, known = _unpacked(window, rows, sizes, dtype)
    held, in_slots, last = window.split([num_sinks, num_slots, size], dim=-2)
    sinks = document = None
    if num_sinks:
        sinks, rows = take_sinks(held, rows, padding_mask, document_starts)
    if num_slots:
        known, importance = _importance_at_the_end(tokens, known, rows[..., -1] <= MASKED_LOGIT / 2)
        importance = torch.cat([known[..., num_sinks + num_slots :], importance], dim=-1)
    if document_starts is not None and (num_slots or log_decay is None):
        document = F.pad(document_starts.cumsum(-1), (size, 0))
    rows = torch.cat([last, rows], dim=-2)
    log_decay = None if log_decay is None else F.pad(log_decay.to(key.dtype), (size, 0))
    order = None
    if padding_mask is not None:
        filled = torch.cat([last[:, 0, :, -1] > MASKED_LOGIT / 2, padding_mask != 0], dim=1)
        places, order = padding_first(filled), padding_first(padding_mask)
        rows = take_tokens(rows, places)
        log_decay = None if log_decay is None else take_tokens(log_decay[..., None], places)[..., 0]
        importance = None if importance is None else take_tokens(importance[..., None], places)[..., 0]
        document = None if document is None else document.gather(1, places)
        if sinks is not None:
            sinks = sinks._replace(seen=sinks.seen.gather(1, order[..., None].expand_as(sinks.seen)))
    stream = Stream(rows, log_decay, order, key.shape[-1], size, sinks, importance, None, None, dtype)
    if log_decay is None:
        stream = stream._replace(document=document)
    if not num_slots:
        return stream
    length = stream.length
    leaving = cast(Tensor, importance)[..., :length]
    scores = torch.cat([known[..., num_sinks : num_sinks + num_slots], leaving], dim=-1)
    if document is not None:  # of the tokens in slots, of those that leave, and of the queries
        document = torch.cat([F.pad(document[:, :length], (num_slots, 0)), document[:, size:]], dim=1)
    candidates = torch.cat([in_slots, rows[..., :length, :]], dim=-2)
    return stream._replace(candidates=candidates, slots=choose(scores, num_slots, document, chunk_size))


def _rows_of(tokens: Tokens) -> Tensor:
    """Return the keys, values and log-weights of tokens, [B, H, T, d + M + 1]."""
    key, scale = tokens.key, tokens.input_scale
    rows = torch.cat([key, tokens.value.to(key.dtype)], dim=-1)
    if scale is None:
        return F.pad(rows, (0, 1))
    scale = scale.to(key.dtype).expand_as(key[..., 0])
    log_weights = scale.clamp_min(torch.finfo(key.dtype).tiny).log().masked_fill(scale == 0, MASKED_LOGIT)
    return torch.cat([rows, log_weights[..., None]], dim=-1)


def _unpacked(window: Tensor | None, rows: Tensor, sizes: WindowSizes, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a window that is kept in ``dtype``, or an empty one, in the dtype of ``rows``, and the importance in it."""
    if window is None:
        # Empty places hold copies of a token: a key of zeros can have larger features than all keys of a trained head.
        window = F.pad(rows[..., :1, :-1].expand(-1, -1, sum(sizes), -1), (0, 1), value=MASKED_LOGIT)
        return window, window[..., -1]
    window, known = split_importance(window) if sizes.slots else (window, window[..., -1])
    window = window.to(rows.dtype)
    if dtype == torch.float16:  # in which `MASKED_LOGIT` is minus infinity
        window = torch.cat([window[..., :-1], window[..., -1:].clamp_min(MASKED_LOGIT)], dim=-1)
    return window, known


def _importance_at_the_end(tokens: Tokens, known: Tensor, empty: Tensor) -> tuple[Tensor, Tensor]:
    """Return the importance of tokens ``known`` before the new ones, and of these, as it is at the last of them.

    ``known`` is [B, H, S + K + W]; of the new tokens those that are ``empty`` [B, H, T] have none.
    """
    lost = cast(Tensor, tokens.recency).to(tokens.key.dtype)
    importance = cast(Tensor, tokens.importance).to(lost.dtype) - (lost.flip(-1).cumsum(-1).flip(-1) - lost)
    return known.to(lost.dtype) - lost.sum(-1, keepdim=True), importance.masked_fill(empty, MASKED_LOGIT)


def first_to_leave(key_features: Tensor, count: int, padding_mask: Tensor | None) -> Tensor:
    """Return φ(k), [B, H, count, F], of what leaves the window when the first ``count`` of some tokens enter it.

    ``key_features`` [B, H, T, F] are of what left when all of them entered, whose padding mask is [B, T], or None.
    """
    if padding_mask is None:
        return key_features[..., :count, :]
    # Padding stands in front: without that of the other tokens, all that follows it moves up.
    dropped = (padding_mask[:, count:] == 0).sum(1, keepdim=True)
    return take_tokens(key_features, dropped + torch.arange(count, device=padding_mask.device))


def sliding_window_attention(
    query: Tensor,
    stream: Stream | Step,
    leaving: Tokens,
    features: Features,
    *,
    scaling: float,
    initial_state: Tensor | None = None,
    denominator_floor: float | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    window_only: bool = False,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend causally to the window, to the sinks and to what has left the window.

    Args:
        query: [B, H, T G, d], in the order of the stream (`in_stream_order`).
        stream: the window and the new tokens.
        leaving: what leaves the window (`Stream.leaving`).
        features: of these queries and of the keys that leave, with an offset.
        scaling: s.
        initial_state: the state of all tokens that left the window before, or None at the start.
        denominator_floor: see `hf_rfa.models.linear_attention.denominator`.
        chunk_size: queries handled at once.
        window_only: leave out all that has left the window.
        sink_logits: logits of the query heads' learned sinks, [H G], or None.

    Returns:
        The outputs [B, H, T G, M], in the order in which the tokens came, and the new state.
    """
    offset = cast(Tensor, features.offset)
    output, log_exact = stream.attend(query * scaling, offset, chunk_size)
    if sink_logits is not None:
        output, log_exact = _with_learned_sinks(output, log_exact, sink_logits, offset)
    far, state, divisor = linear_attention(
        features.query,
        leaving._replace(key=features.key),
        initial_state=rescale(initial_state, None, features.shift),
        denominator_floor=denominator_floor,
        chunk_size=chunk_size,
    )
    if torch.is_grad_enabled():
        divisor = differentiable(divisor, divisor)
    seen = divisor > 0
    log_far = torch.where(seen, torch.where(seen, divisor, 1.0).log(), MASKED_LOGIT)
    share = torch.zeros_like(log_exact) if window_only else torch.sigmoid(log_far - log_exact)
    output = output + share * (far - output)
    return in_order_of_tokens(output, stream), cast(Tensor, rescale(state, features.shift, None))


def exact_attention(
    query: Tensor,
    tokens: Tokens,
    window: Tensor | None,
    sizes: WindowSizes,
    document_starts: Tensor | None = None,
    *,
    scaling: float,
    dtype: torch.dtype | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    sink_logits: Tensor | None = None,
    sinks_held: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attend causally to what is kept exactly, and to nothing else; a window of size 0 grows and holds all tokens.

    Args:
        query: [B, H, T G, d], in the order of the tokens.
        tokens: the new tokens, keys in float32 or float64.
        window: [B, H, S + K + W, ·], or None at the start.
        sizes: W, S and K; a window that grows comes alone.
        document_starts: [B, T], True where a text begins that sees nothing before it, or None.
        scaling: s.
        dtype: that of the window as it is kept; None takes that of the keys.
        chunk_size: queries handled at once.
        sink_logits: logits of the query heads' learned sinks, [H G], or None.
        sinks_held: see `stream_of`.

    Returns:
        The outputs [B, H, T G, M], and the new window.
    """
    options: dict[str, Any] = {"scaling": scaling, "dtype": dtype, "chunk_size": chunk_size, "sink_logits": sink_logits}
    length = tokens.key.shape[-2]
    if not sizes.window:
        outputs, groups = [], rows_per_token(query, tokens.key)
        for start in range(0, length, GROWTH):
            stop = min(length, start + GROWTH)
            starts = None if document_starts is None else document_starts[:, start:stop]
            window, size = with_room(window, stop - start)
            part = query[..., start * groups : stop * groups, :], tokens.part(start, stop)
            output, window = exact_attention(*part, window, WindowSizes(size), starts, **options)
            outputs.append(output)
        return torch.cat(outputs, dim=-2), cast(Tensor, window)
    known: Any = {"dtype": dtype, "chunk_size": chunk_size, "sinks_held": sinks_held}
    stream = stream_of(tokens, window, sizes, document_starts, **known)
    if isinstance(stream, Step) and sink_logits is None:
        return stream.attend_alone(query, scaling), stream.window()
    query = in_stream_order(query, stream) * scaling
    offset = query.new_zeros(*query.shape[:-1], 1)
    output, log_total = stream.attend(query, offset, chunk_size)
    if sink_logits is not None:
        output, _ = _with_learned_sinks(output, log_total, sink_logits, offset)
    return in_order_of_tokens(output, stream), stream.window()


def with_room(window: Tensor | None, count: int) -> tuple[Tensor | None, int]:
    """Return a window [B, H, W, ·] with ``count`` empty places in front, which new tokens push out, and its new size."""
    if window is None:
        return None, count
    log_weight = torch.full((), MASKED_LOGIT, device=window.device).to(window.dtype)  # minus infinity in float16
    empty = torch.cat([window[..., -1:, :-1], log_weight.expand_as(window[..., -1:, -1:])], dim=-1)
    return torch.cat([empty.expand(-1, -1, count, -1), window], dim=-2), window.shape[-2] + count


def _with_learned_sinks(
    output: Tensor, log_total: Tensor, sink_logits: Tensor, offset: Tensor
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, H, T G, M] and logarithms of their normalizers with learned sinks [H G] in these."""
    heads, rows = output.shape[1:3]
    log_sink = sink_logits.to(offset).view(heads, -1)
    log_sink = log_sink.repeat(1, rows // log_sink.shape[1])[..., None] + offset
    return output * torch.sigmoid(log_total - log_sink), torch.logaddexp(log_total, log_sink)


def in_stream_order(query: Tensor, stream: Stream | Step) -> Tensor:
    """Return queries [B, H, T G, d] with padding in front, as in the stream."""
    return query if stream.order is None else _take_rows(query, stream.order)


def in_order_of_tokens(output: Tensor, stream: Stream | Step) -> Tensor:
    """Return outputs [B, H, T G, M] in the order in which the tokens came: the inverse of `in_stream_order`."""
    return output if stream.order is None else _take_rows(output, stream.order.argsort(dim=1))


def _attend_to_window(query: Tensor, stream: Stream, offset: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Attend exactly to the last W places of the stream, the queries of ``chunk`` tokens at a time.

    Returns:
        The outputs [B, H, T G, M], and the logarithms of their normalizers [B, H, T G, 1].
    """
    (rows, width), length = query.shape[-2:], stream.length
    groups, size, log_decay = rows // length, stream.size, stream.log_decay
    if isinstance(rows, torch.SymInt):  # as in `hf_rfa.models.linear_attention._chunked_at_once`
        short, places = (length // chunk + 2) * chunk - length, torch.arange(rows, device=query.device)
        pad, chunk_rows = (0, 0, 0, short * groups), chunk * groups
        query, offset = (F.pad(x, pad).unfold(2, chunk_rows, chunk_rows).mT for x in (query, offset))
    else:
        chunk = min(chunk, length)
        short, places = -length % chunk, slice(rows)
        pad, chunk_rows = (0, 0, 0, short * groups), chunk * groups
        query, offset = (F.pad(x, pad).unflatten(2, (-1, chunk_rows)) for x in (query, offset))
    blocks = F.pad(stream.rows, (0, 0, 0, short)).unfold(2, size + chunk, chunk)  # [B, H, chunks, d + M + 1, W + chunk]
    logits = query @ blocks[..., :width, :] + blocks[..., -1:, :] + offset
    if log_decay is not None:
        sums = segment_sums(F.pad(log_decay, (0, short)).unfold(2, size + chunk, chunk))[..., size:, :]
        logits = logits + to_rows(sums, groups)
    band = torch.ones(chunk, size + chunk, dtype=torch.bool, device=query.device).triu(1).tril(size)
    if stream.document is not None:
        documents = F.pad(stream.document, (0, short)).unfold(1, size + chunk, chunk)[:, None]
        band = band & (documents[..., size:, None] == documents[..., None, :])  # [B, 1, chunks, chunk, W + chunk]
    outside = ~to_rows(band, groups)
    output, log_total = weighted_mean(
        logits.masked_fill(outside, MASKED_LOGIT), blocks[..., width:-1, :].transpose(-1, -2)
    )
    return output.flatten(2, 3)[:, :, places], log_total.flatten(2, 3)[:, :, places]


def _take_rows(rows: Tensor, places: Tensor) -> Tensor:
    """Return rows [B, H, T G, n] with their tokens in the order ``places`` [B, T]."""
    by_token = rows.reshape(*rows.shape[:2], places.shape[1], -1)
    return take_tokens(by_token, places).view(rows.shape)
