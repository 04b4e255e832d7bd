"""Tokens that stay exact when they have left the window: sinks, the first ones, and slots, for the most important.

**Sinks.** Softmax heads that need no other token attend to the first tokens of a text (Xiao et al. 2024, arXiv 2309.17453).

**Slots.** A softmax head looks far back at few tokens, and which ones they will be can be told when they come. Per key-value
head, the importance of token s at token t is linear in the layer's input at s, and falls with age (`Importance`):

    i_ts = w·x_s − r (t − s)

Query t sees, besides sinks and window, those K tokens of highest importance that have left the window by then, under the same
normalizer. All tokens lose the same importance at a step, so that their order never changes, and what is kept depends on no
split of the text: it is the K first by importance, and the earlier of two that are equal. When a token leaves the window, one
of K + 1 loses: it joins the recurrent state, as all do without slots.

Choosing tokens by a score of their own that needs no later query follows Devoto et al. 2024 (arXiv 2406.11430), who take the
norm of the key; fitting it to the attention that is received, Huang et al. 2024 (Locret, arXiv 2410.01805).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .linear_attention import MASKED_LOGIT
from .masking import is_tracing, rows_per_token, to_rows


class Importance(nn.Module):
    """The importance of tokens, in nats: calibrated (`hf_rfa.convert.importance`), not trained by gradients.

    Attributes:
        weight: w, [H, width].
        recency: r, [H], the importance that a token loses with every further one.

    Both are zero until calibration; the slots then hold the first tokens that leave the window.
    """

    weight: Tensor
    recency: Tensor

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(num_heads, hidden_size))
        self.register_buffer("recency", torch.zeros(num_heads))

    def reset_parameters(self) -> None:
        """Set both to 0, where no checkpoint has set them."""
        init.zeros_(self.weight)
        init.zeros_(self.recency)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the importance of tokens when they come, and what all lose at each, for hidden states [B, T, width].

        Both are [B, H, T], in float32 or float64.
        """
        dtype = torch.promote_types(self.weight.dtype, hidden_states.dtype)
        importance = F.linear(hidden_states.detach().to(dtype), self.weight.to(dtype)).transpose(1, 2)
        return importance, self.recency.to(dtype)[:, None].expand_as(importance)


def with_importance(rows: Tensor, importance: Tensor) -> Tensor:
    """Return rows [B, H, n, ·] with importance [B, H, n] as their last columns: two in 16 bits, which hold its float32."""
    # In three dimensions: torch's compiler takes four with one column for a picture, and reorders all others' memory.
    column = importance.to(torch.promote_types(rows.dtype, torch.float32)).flatten(1)[..., None].contiguous()
    column = column if column.dtype == rows.dtype else column.view(rows.dtype)
    return torch.cat([rows.flatten(1, 2), column], dim=-1).unflatten(1, rows.shape[1:3])


def split_importance(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows without importance, and the importance: the inverse of `with_importance`."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    if dtype == rows.dtype:
        return rows[..., :-1], rows[..., -1]
    return rows[..., :-2], rows[..., -2:].contiguous().view(dtype)[..., 0]


def lower_importance(rows: Tensor, by: Tensor) -> None:
    """Lower the importance of rows [B, H, n, ·] in place, by [B, H, 1]."""
    importance = split_importance(rows)[1]
    if importance.dtype == rows.dtype:  # it lies in the rows
        importance.sub_(by.to(rows.dtype))
        return
    lowered = (importance - by.to(importance.dtype))[..., None].view(rows.dtype)
    rows[..., rows.shape[-1] - lowered.shape[-1] :] = lowered


class Sinks(NamedTuple):
    """The first tokens of every text: those held before the new tokens, and those among them.

    Attributes:
        rows: keys, values and log-weights, [B, H, n, d + M + 1].
        seen: which of them the new tokens see, in the order of the stream, [B, T, n].
        held: the sinks to be held from now on, [B, H, S, d + M + 1].
    """

    rows: Tensor
    seen: Tensor
    held: Tensor


def sinks_are_held(window: Tensor, num_sinks: int, head_dim: int) -> bool:
    """Return whether every row of a window has all of its sinks, whose values are ``head_dim`` wide as their keys.

    A compiler or a CUDA graph cannot know, and takes the general path, which is right in any case.
    """
    if is_tracing(window) or (window.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return False
    return bool((window[:, 0, :num_sinks, 2 * head_dim] > MASKED_LOGIT / 2).all())


def take_sinks(
    held: Tensor, rows: Tensor, padding_mask: Tensor | None, document_starts: Tensor | None
) -> tuple[Sinks, Tensor]:
    """Return the sinks with those among some tokens, and the tokens' rows [B, H, T, ·], in which sinks weigh nothing.

    ``held`` [B, H, S, ·] are the sinks before them; there are fewer than S while a text is shorter than that.
    """
    (batch, _, length, _), count, device = rows.shape, held.shape[-2], rows.device
    number_held = (held[:, 0, :, -1] > MASKED_LOGIT / 2).sum(-1, keepdim=True)  # [B, 1]
    token = torch.ones(batch, length, dtype=torch.bool, device=device) if padding_mask is None else padding_mask != 0
    before = token.cumsum(-1) - 1  # tokens of the row before each
    document = torch.zeros_like(before)
    if document_starts is None:
        ordinal = before + number_held
    else:  # counted from the start of the token's own document
        document = document_starts.cumsum(-1)
        ordinal = before - torch.where(document_starts, before, -number_held).cummax(-1).values
    is_sink = token & (ordinal < count)
    most = min(count, length) if document_starts is None else int(is_sink.sum(-1).max())
    places = padding_first(~is_sink)[:, :most]
    log_weights = torch.where(is_sink.gather(1, places), 0.0, MASKED_LOGIT).to(rows)[:, None, :, None]
    found = torch.cat([take_tokens(rows, places)[..., :-1], log_weights.expand(-1, rows.shape[1], -1, -1)], dim=-1)

    slots = torch.arange(count, device=device).expand(batch, -1)
    row_ordinal = torch.cat([slots, ordinal.gather(1, places)], dim=1)  # [B, n]
    row_document = torch.cat([torch.zeros_like(slots), document.gather(1, places)], dim=1)
    sinks = torch.cat([held, found], dim=-2)
    seen = (row_document[:, None] == document[..., None]) & (row_ordinal[:, None] <= ordinal[..., None])
    last = (row_document == document[:, -1:]) & (sinks[:, 0, :, -1] > MASKED_LOGIT / 2)
    fills = last[:, None] & (row_ordinal[:, None] == slots[..., None])  # [B, S, n]
    kept = take_tokens(sinks, fills.int().argmax(-1))
    log_weights = torch.where(fills.any(-1), 0.0, MASKED_LOGIT).to(rows)[:, None, :, None]
    kept = torch.cat([kept[..., :-1], log_weights.expand(-1, rows.shape[1], -1, -1)], dim=-1)
    log_weights = rows[..., -1].masked_fill(is_sink[:, None], MASKED_LOGIT)
    return Sinks(sinks, seen, kept), torch.cat([rows[..., :-1], log_weights[..., None]], dim=-1)


def attend_to_sinks(query: Tensor, sinks: Sinks, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Attend exactly to the sinks up to each query's own; see `_attend_to_window` for what is returned."""
    width = query.shape[-1]
    logits = query @ sinks.rows[..., :width].mT + sinks.rows[..., -1:].mT + offset  # [B, H, T G, n]
    seen = to_rows(sinks.seen, rows_per_token(query, sinks.seen))
    return weighted_mean(logits.masked_fill(~seen[:, None], MASKED_LOGIT), sinks.rows[..., width:-1])


class Slots(NamedTuple):
    """What the slots hold while some tokens come: places among n = K + T candidates, held before or leaving the window.

    Attributes:
        importance: of the candidates, [B, H, n]; `MASKED_LOGIT` for empty places.
        chunks: for the queries of some tokens each, the places that they choose from, [B, H, K + C] or None for all, and
            which of these they see, [B, H, C, K + C].
        held: the places held from now on, [B, H, K]; n for an empty one.
        lost: the place that loses at every token, [B, H, T]; n for none.
    """

    importance: Tensor
    chunks: list[tuple[Tensor | None, Tensor]]
    held: Tensor
    lost: Tensor


def choose(importance: Tensor, count: int, document: Tensor | None, chunk_size: int) -> Slots:
    """Return what ``count`` slots hold while tokens leave the window, one with every query.

    Args:
        importance: of the tokens held, [B, H, K], followed by those that leave, [B, H, T].
        count: K.
        document: numbers of the documents of these n = K + T tokens, followed by those of the queries, [B, n + T], or None
            where there is one document. A query sees its own.
        chunk_size: queries handled at once.
    """
    length = importance.shape[-1] - count
    if length == 1 and document is None:
        return _choose_one(importance, count)
    # An exporter leaves the length open: one graph, in quadratic time.
    starts = [0] if isinstance(length, torch.SymInt) else range(0, length, chunk_size)
    held = torch.arange(count, device=importance.device).expand(*importance.shape[:2], -1)
    chunks: list[tuple[Tensor | None, Tensor]] = []
    lost = []
    for start in starts:
        size = length if len(starts) == 1 else min(chunk_size, length - start)
        new = torch.arange(size, device=importance.device) + start + count
        places = torch.cat([held, new.expand(*held.shape[:2], -1)], dim=-1)
        scores = importance.gather(-1, places.clamp_max(count + length - 1))
        scores = scores.masked_fill(places == count + length, MASKED_LOGIT)
        left = torch.ones(size, count + size, dtype=torch.bool, device=scores.device).tril(count)
        if document is None:
            own = left[None, None]
        else:
            theirs = document[:, None].expand(-1, places.shape[1], -1).gather(-1, places)
            asked = document[:, count + length + start : count + length + start + size]
            own = left & (theirs[:, :, None] == asked[:, None, :, None])
        order = scores.argsort(dim=-1, descending=True, stable=True)
        ranked = own.expand(*scores.shape[:2], -1, -1).gather(-1, order[:, :, None].expand(-1, -1, size, -1))
        ranked = ranked & (ranked.cumsum(-1) <= count)
        kept = torch.zeros_like(ranked).scatter(-1, order[:, :, None].expand(-1, -1, size, -1), ranked)
        chunks.append((places, kept))
        # One of those kept before and the newcomer loses.
        first = (torch.arange(count + size, device=scores.device) < count).expand(*scores.shape[:2], 1, -1)
        before = torch.cat([first, kept], dim=-2)[..., :-1, :] | left.triu(count)
        loses = before & ~kept & own
        place = places.gather(-1, loses.int().argmax(-1))
        lost.append(place.masked_fill(~loses.any(-1), count + length))
        last = kept[..., -1, :]
        first_kept = (~last).int().argsort(dim=-1, stable=True)[..., :count]
        held = places.gather(-1, first_kept).masked_fill(~last.gather(-1, first_kept), count + length)
    return Slots(importance, chunks, held, torch.cat(lost, dim=-1))


def _choose_one(importance: Tensor, count: int) -> Slots:
    """Compute `choose` for one token."""
    lost = count - importance.flip(-1).argmin(dim=-1, keepdim=True)  # of several, the last
    places = torch.arange(count + 1, device=importance.device).expand_as(importance)
    held = places[..., :-1]
    return Slots(importance, [(None, (places != lost)[..., None, :])], held + (held >= lost), lost)


def take(rows: Tensor, places: Tensor) -> Tensor:
    """Return the rows [B, H, m, ·] at some places of ``rows`` [B, H, n, ·], whose last column is a log-weight; n is empty."""
    number = rows.shape[-2]
    index = places.clamp_max(number - 1)[..., None].expand(*places.shape, rows.shape[-1])
    taken = rows.gather(2, index)
    log_weights = taken[..., -1:].masked_fill((places == number)[..., None], MASKED_LOGIT)
    return torch.cat([taken[..., :-1], log_weights], dim=-1)


def attend_to_slots(query: Tensor, rows: Tensor, slots: Slots, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Attend exactly to the tokens in slots.

    Args:
        query: scaled, [B, H, T G, d].
        rows: keys, values and log-weights of the candidates, [B, H, K + T, d + M + 1].
        slots: which of them the queries see.
        offset: makes the weights commensurate with those of features, [B, H, T G, 1].

    Returns:
        The outputs [B, H, T G, M], and the logarithms of their normalizers [B, H, T G, 1].
    """
    groups, width = query.shape[-2] // slots.lost.shape[-1], query.shape[-1]
    sizes = [kept.shape[-2] * groups for _, kept in slots.chunks]
    found = []
    split = zip(query.split(sizes, dim=-2), offset.split(sizes, dim=-2), slots.chunks, strict=True)
    for queries, offsets, (places, kept) in split:
        candidates = rows if places is None else take(rows, places)
        logits = queries @ candidates[..., :width].mT + candidates[..., -1:].mT + offsets
        logits = logits.masked_fill(~to_rows(kept, groups), MASKED_LOGIT)
        found.append(weighted_mean(logits, candidates[..., width:-1]))
    outputs, log_totals = zip(*found, strict=True)
    return torch.cat(outputs, dim=-2), torch.cat(log_totals, dim=-2)


def weighted_mean(logits: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of values by softmax weights, and the logarithm of the normalizer; zeros where nothing is seen."""
    weights = logits.softmax(dim=-1)
    # Of one weight: on a processor logsumexp takes longer than all the rest.
    highest, place = logits.max(dim=-1, keepdim=True)
    log_total = highest - weights.gather(-1, place).log()
    return (weights @ value) * (log_total > MASKED_LOGIT / 2), log_total


def padding_first(tokens: Tensor) -> Tensor:
    """Return the order [B, T] that moves padding to the front and keeps the order of the tokens; 0 or False is padding."""
    return (tokens != 0).long().argsort(dim=1, stable=True)


def take_tokens(x: Tensor, places: Tensor) -> Tensor:
    """Return x [B, H, T, n] with its tokens in the order ``places`` [B, T]."""
    return x.gather(2, places[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def take_places(rows: Tensor, places: Tensor) -> Tensor:
    """Return the rows [B, H, m, ·] at some places [B, H, m] of ``rows`` [B, H, n, ·]."""
    return rows.gather(2, places[..., None].expand(*places.shape, rows.shape[-1]))
