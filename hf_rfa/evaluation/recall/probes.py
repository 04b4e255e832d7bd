"""Texts that can be continued only by what stands earlier in them: a text said again, and a needle in a haystack.

The definitions follow Repeat After Me (arXiv 2402.01032: copying) and RULER (arXiv 2404.06654: needles), cut down to what a
small model that follows no instructions can complete: the answers are three digits, and the model has to go on with a
sentence. Needles are drawn from a `random.Random` alone, so that a seed gives the same rows on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_rfa.io.text_io import start_tokens

from .scoring import Rows

#: What the needles are named by: common words, a single token for most tokenizers.
# fmt: off
NAMES = (
    "Alice", "Anna", "Arthur", "Ben", "Carl", "Charles", "Daniel", "David", "Edward", "Emma", "Eric", "Frank",
    "George", "Grace", "Harry", "Helen", "Henry", "Jack", "James", "Jane", "John", "Joseph", "Julia", "Kate", "Kevin",
    "Laura", "Lewis", "Louis", "Lucy", "Maria", "Mark", "Martin", "Mary", "Max", "Michael", "Neil", "Oliver", "Oscar",
    "Paul", "Peter", "Philip", "Ralph", "Richard", "Robert", "Rose", "Sam", "Sarah", "Simon", "Sophie", "Stephen",
    "Susan", "Thomas", "Tom", "Victor", "Walter", "William",
)
# fmt: on
#: Where needles are put: shares of the haystack that stand before them.
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def blocks(ids: Tensor, length: int, most: int) -> Rows:
    """Return at most ``most`` disjoint blocks of a text, [N, length], of which all tokens but the first are scored."""
    count = min(most, len(ids) // length)
    rows = ids[: count * length].view(count, length)
    return Rows(rows, (torch.arange(length) > 0).expand_as(rows))


def repeated(first: Tensor) -> Rows:
    """Return rows twice in succession, [N, 2 L]; scored is the second copy but for its first token.

    That one cannot be known: nothing says that the text begins again.
    """
    length = first.shape[1]
    ids = torch.cat([first, first], dim=1)
    return Rows(ids, (torch.arange(2 * length) > length).expand_as(ids))


def needle(tokenizer: Any, haystack: Sequence[int], length: int, depth: float, count: int, random: Random) -> Rows:
    """Return haystacks with a sentence that gives a number, at whose end the sentence begins again; scored is the number.

    Args:
        tokenizer: the model's.
        haystack: tokens of the text around the needle, repeated if they are too few.
        length: tokens of a row.
        depth: share of the haystack before the needle, from 0 to 1.
        count: number of rows; each begins elsewhere in the haystack.
        random: what names and numbers are drawn with.
    """
    rows, scored = [], []
    start = start_tokens(tokenizer)
    for _ in range(count):
        sentence, number = f"The secret number of {random.choice(NAMES)} is", f" {random.randint(100, 999)}"
        inner, asked, outer = (
            tokenizer(f" {sentence}{end}", add_special_tokens=False, verbose=False)["input_ids"]
            for end in (f"{number}.", "", number)
        )
        same = next(place for place, index in enumerate(outer) if asked[place : place + 1] != [index])
        room = length - len(start) - len(inner) - len(outer)
        begin = random.randrange(max(1, len(haystack) - room))
        hay = list((list(haystack[begin:]) + list(haystack) * (room // len(haystack) + 1))[:room])
        before = round(depth * room)
        row = [*start, *hay[:before], *inner, *hay[before:], *outer]
        rows.append(torch.tensor(row))
        scored.append(torch.arange(len(row)) >= len(row) - len(outer) + same)
    return Rows(pad_sequence(rows, batch_first=True), pad_sequence(scored, batch_first=True))
