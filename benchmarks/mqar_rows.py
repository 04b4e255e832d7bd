"""Rows of multi-query associative recall (Arora et al. 2023), and how many of them a model answers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_rfa.convert.perplexity import IGNORED_LABEL

#: Token ids and labels, each [rows, T].
Rows = tuple[Tensor, Tensor]
#: Exponent a of the distribution of the slots in which keys return, p(g) ∝ a g^(a − 1).
POWER = 0.01
#: Rows whose answers are computed at once.
SCORED_ROWS = 50


def mqar_rows(count: int, length: int, pairs: int, *, vocab: int, seed: int, keys: int | None = None) -> Rows:
    """Return rows of multi-query associative recall.

    Keys are distinct, of 1 … V/2 − 1, and values distinct, of V/2 … V − 1. The first 2N tokens are pairs. The rest are slots
    of two tokens; key i stands first in slot g_i, of 1 … (T − 2N)/2, drawn without replacement with p(g) ∝ a g^(a − 1).

    Args:
        count: rows.
        length: T.
        pairs: N.
        vocab: V.
        seed: of the rows.
        keys: take keys and values from so many of the first ones alone; None takes all.

    Returns:
        Token ids, and labels: at the place where a key returns its value, and `IGNORED_LABEL` at all others. A label belongs
        to the logits of its own place: it is not to be shifted. All other tokens are random, of 0 … V − 1.

    Raises:
        ValueError: if the keys do not fit into the row (4N ≤ T, T even) or the vocabulary (N ≤ keys < V/2).
    """
    half = vocab // 2
    keys = half - 1 if keys is None else keys
    if length % 2 or not 4 * pairs <= length or not 1 <= pairs <= keys < half:
        raise ValueError(
            f"{pairs} pairs need an even length of at least {4 * pairs} and as many keys below {half}; got a length of "
            f"{length} and {keys} keys."
        )
    generator = torch.Generator().manual_seed(seed)

    def choose(weights: Tensor) -> Tensor:  # without replacement: the largest of log p + Gumbel noise
        noise = -torch.empty(count, len(weights), dtype=torch.double).exponential_(generator=generator).log()
        return (weights.double().log() + noise).topk(pairs).indices

    key, value = 1 + choose(torch.ones(keys)), half + choose(torch.ones(keys))
    slots = torch.arange(1, (length - 2 * pairs) // 2 + 1)
    place = 2 * pairs + 2 * choose(POWER * slots.double() ** (POWER - 1))
    ids = torch.zeros(count, length, dtype=torch.long)
    ids[:, 0 : 2 * pairs : 2], ids[:, 1 : 2 * pairs : 2] = key, value
    ids.scatter_(1, place, key)
    labels = torch.full_like(ids, IGNORED_LABEL).scatter_(1, place, value)
    return torch.where(ids == 0, torch.randint(vocab, ids.shape, generator=generator), ids), labels


def answers(model: Any, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return the logits at the places that have labels, [n, V], and these labels, [n]."""
    ids, labels = rows
    asked = labels != IGNORED_LABEL
    return model.lm_head(model.transformer(ids, use_cache=False).last_hidden_state[asked]), labels[asked]


@torch.no_grad()
def accuracy(model: Any, rows: Rows) -> float:
    """Return the share of right answers of a model in evaluation mode."""
    parts = [answers(model, part) for part in zip(*(each.split(SCORED_ROWS) for each in rows), strict=True)]
    right = torch.cat([logits.argmax(-1) == expected for logits, expected in parts])
    return right.double().mean().item()
