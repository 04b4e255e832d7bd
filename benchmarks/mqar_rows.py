"""Rows of multi-query associative recall (Arora et al. 2023) to train and to test with, and the share of right answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_rfa.evaluation.perplexity import IGNORED_LABEL

#: Token ids and labels, each [rows, T].
Rows = tuple[Tensor, Tensor]
#: Exponent a of the distribution of the slots in which keys return, p(g) ∝ a g^(a − 1).
POWER = 0.01
#: Tokens of a step.
TOKENS = 2048
#: Rows whose answers are computed at once.
SCORED_ROWS = 50


@dataclass(frozen=True)
class Plan:
    """How much is trained and measured: T tokens and N pairs of a row, and how many."""

    vocab: int = 2048
    # first new rows in every step: T, N, keys in use, steps
    curriculum: tuple[tuple[int, int, int, int], ...] = (
        *((32, 8, 32, 300), (64, 16, 64, 150), (128, 32, 256, 200), (256, 64, 1023, 350)),
    )
    # then fixed rows, once, all lengths mixed: T, N, rows
    train: tuple[tuple[int, int, int], ...] = (
        (64, 4, 20_000),
        (128, 8, 5_000),
        *((256, n, 1_664) for n in (16, 32, 64)),
    )
    tests: tuple[tuple[int, int], ...] = ((64, 4), (64, 8), (64, 16), (128, 8), (128, 32), (256, 64))
    test_rows: int = 200
    transfer: tuple[int, int, int] = (128, 8, 200)  # T, N, steps
    converted: tuple[int, ...] = (16, 32, 64, 128)  # D of the feature maps
    scratch: int = 64
    rate: float = 3e-3  # largest learning rate

    @property
    def steps(self) -> int:
        """Steps of training a model."""
        fixed = sum(rows // (TOKENS // length) for length, _, rows in self.train)
        return sum(steps for *_, steps in self.curriculum) + fixed


#: RFA leaves its first plateau only with few pairs and keys, and at a higher rate.
SCRATCH = Plan(
    curriculum=((16, 4, 16, 400), (32, 8, 64, 150), (64, 16, 256, 150), (128, 32, 1023, 250)),
    train=((64, 4, 6_400), (128, 8, 1_600), *((256, n, 528) for n in (16, 32, 64))),
    rate=6e-3,
)
QUICK = Plan(vocab=128, tests=((64, 4), (64, 16), (128, 8)), test_rows=50, converted=(32,), scratch=32)
QUICK = replace(QUICK, curriculum=((32, 8, 32, 400), (32, 8, 63, 200)), train=((64, 4, 1_280), (128, 8, 640)))
QUICK = replace(QUICK, transfer=(64, 8, 40))
QUICK_SCRATCH = replace(QUICK, curriculum=((16, 4, 16, 350), (32, 8, 63, 60)), train=((64, 4, 640),), rate=6e-3)


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


def measure(model: Any, plan: Plan) -> dict[str, float]:
    """Return the share of right answers by the kind of test rows, "T, N"."""
    model.eval()
    tests = {(length, pairs): 2**31 + 1000 * length + pairs for length, pairs in plan.tests}  # seeds of no other rows
    return {
        f"{kind[0]}, {kind[1]}": accuracy(model, mqar_rows(plan.test_rows, *kind, vocab=plan.vocab, seed=seed))
        for kind, seed in tests.items()
    }


def batches(plan: Plan, seed: int) -> Iterator[Rows]:
    """Yield the batches of a training: the curriculum, then the fixed rows once, batches of all lengths mixed."""
    number = 1_000_000 * (seed + 1)  # no test row has such a seed
    for length, pairs, keys, steps in plan.curriculum:
        for _ in range(steps):
            number += 1
            size = TOKENS // length
            yield mqar_rows(size, length, pairs, vocab=plan.vocab, seed=number, keys=min(keys, plan.vocab // 2 - 1))
    fixed: list[Rows] = []
    for length, pairs, count in plan.train:
        size = TOKENS // length
        parts = [part.split(size) for part in mqar_rows(count, length, pairs, vocab=plan.vocab, seed=number + length)]
        fixed += list(zip(*parts, strict=True))[: count // size]
    for index in torch.randperm(len(fixed), generator=torch.Generator().manual_seed(seed)).tolist():
        yield fixed[index]
