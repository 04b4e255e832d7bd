"""Rotary positions of tokens that are kept: old ones move along with the text, so that no distance grows past L.

Rotary attention depends on the distance between a query and a key alone. Sinks and slots are kept for good, and would get
further away than anything that the model was trained for, where it falls apart (Han et al. 2023, arXiv 2308.16137). So old
tokens move along, in steps of B tokens. Query t of a text belongs to epoch

    e = 0 for t < L,   ⌊(t − L) / B⌋ + 1 from there on

and counts as at position t − eB, always below L. A token j that is kept is, for all queries of epoch e, at

    p_e(j) = max(j − eB, min(j, S))                          S = number of sinks

Sinks stay in their order at the beginning, recent tokens at their true distance, and all others right behind the sinks. Up
to L tokens nothing moves. The rule depends on t alone: pieces, chunks and single steps of a text give the same.

Keys are kept as their rotation left them, and turned where an epoch begins: by p_e − p_(e − 1) ≤ 0, and no more once they
are behind the sinks. A key is turned L / B times at most, however long the text, and no angle is formed of a position past
L: token 10⁷ is as exact as token 10. Scores (`hf_rfa.models.memory`) count from eB on as well.

Tokens are counted as they arrive, padding left out, and in packed rows from the beginning of their document.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .memory import MemoryLayout, Places


def origins(number: Tensor, layout: MemoryLayout) -> Tensor:
    """Return eB, what is taken off the positions of tokens, from how many came before each in its text."""
    step = layout.distance_step
    epoch = torch.div(number - layout.max_distance, step, rounding_mode="floor") + 1
    return epoch.clamp_min_(0).mul_(step)


def tokens_left(count: Tensor, layout: MemoryLayout) -> int:
    """Return how many tokens can follow in every text before an epoch begins in one, after ``count`` tokens each, [B]."""
    into = torch.remainder(count - layout.max_distance, layout.distance_step)
    left = torch.where(count <= layout.max_distance, layout.max_distance - count, -into % layout.distance_step)
    return int(left.amin())


def moved_positions(number: Tensor, origin: Tensor, sinks: int) -> Tensor:
    """Return p_e, where queries of an epoch with some origin eB see tokens, from how many came before each in its text."""
    return torch.maximum(number - origin, number.clamp_max(sinks))


@dataclass(frozen=True, eq=False)
class Rotation:
    """How a layer rotates queries and keys by their position (RoPE, Su et al. 2021, arXiv 2104.09864).

    Attributes:
        frequency: angle of a pair of columns for every position, in radians, [pairs] in float32; none without positions.
        interleaved: whether a pair are columns 2i and 2i + 1; else i and i + pairs. Columns behind them stay as they are.
        by_column: the frequency of every column, with the sign by which its partner in the pair is added to it.
    """

    frequency: Tensor
    interleaved: bool = False
    by_column: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        pairs = torch.stack([-self.frequency, self.frequency], -1 if self.interleaved else 0)
        object.__setattr__(self, "by_column", pairs.flatten())

    def turn(self, rows: Tensor, by: Tensor) -> Tensor:
        """Return keys or queries as they are some positions further.

        Args:
            rows: [..., columns], whose first columns are of keys or queries.
            by: the number of positions, rows' shape without the last dimension or what broadcasts to it.
        """
        return self.turn_by(rows, *self.waves(by, torch.promote_types(rows.dtype, torch.float32)))

    def waves(self, by: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the angles of all columns for some numbers of positions, [..., 2 pairs]."""
        angle = by[..., None].float() * self.by_column.to(by.device)
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def turn_by(self, rows: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Return keys or queries as they are some positions further, of which `waves` made cosines and sines."""
        width = 2 * self.frequency.shape[0]
        if not width:
            return rows
        turned = rows[..., :width]
        if self.interleaved:
            partners = turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            partners = turned.roll(width // 2, dims=-1)
        turned = torch.addcmul(turned * cosines, partners, sines).to(rows.dtype)
        return turned if width == rows.shape[-1] else torch.cat([turned, rows[..., width:]], dim=-1)


#: That of a layer without positions.
NO_ROTATION = Rotation(torch.empty(0))


class Motion(NamedTuple):
    """How a memory's tokens move when an epoch begins.

    Attributes:
        rotation: of the layer.
        sinks: S.
        recency: what a token's score grows by with every token before it, [H], or None without slots.
    """

    rotation: Rotation
    sinks: int
    recency: Tensor | None

    def move(self, places: Places, origin: Tensor, start: Tensor | None = None) -> Places:
        """Return places whose tokens are where queries of an epoch see them.

        Args:
            places: as they are at any other epoch.
            origin: eB of the epoch, [B] (`origins`).
            start: ordinal of the first token of the document that the memory is of, [B]; None for 0.
        """
        number = places.arrival if start is None else places.arrival - start[:, None, None]
        before, after = places.origin, origin.to(places.origin)
        now, then = (moved_positions(number, origin[:, None, None], self.sinks) for origin in (after, before))
        score = places.score
        if self.recency is not None:
            score = score - self.recency.to(score)[:, None] * (after - before)[:, None, None]
        return replace(
            places, keys_values=self.rotation.turn(places.keys_values, now - then), score=score, origin=after
        )
