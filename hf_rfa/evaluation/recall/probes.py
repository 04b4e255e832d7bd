"""Texts that can be continued only by what stands earlier in them: repetitions, a phone book, a needle in a haystack.

The definitions follow Zoology (arXiv 2312.04927: recall of bigrams), Repeat After Me (arXiv 2402.01032: copying and the phone
book) and RULER (arXiv 2404.06654: needles), cut down to what a small model that follows no instructions can complete: the
answers are three digits, and the model has to go on with a sentence. Every generator draws from a `random.Random` alone, so
that a seed gives the same rows on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_rfa.io.text_io import start_tokens

from .scoring import Rows

#: What the phone book's entries and the needles are named by: common words, a single token for most tokenizers.
# fmt: off
NAMES = (
    "Alice", "Anna", "Arthur", "Ben", "Carl", "Charles", "Daniel", "David", "Edward", "Emma", "Eric", "Frank",
    "George", "Grace", "Harry", "Helen", "Henry", "Jack", "James", "Jane", "John", "Joseph", "Julia", "Kate", "Kevin",
    "Laura", "Lewis", "Louis", "Lucy", "Maria", "Mark", "Martin", "Mary", "Max", "Michael", "Neil", "Oliver", "Oscar",
    "Paul", "Peter", "Philip", "Ralph", "Richard", "Robert", "Rose", "Sam", "Sarah", "Simon", "Sophie", "Stephen",
    "Susan", "Thomas", "Tom", "Victor", "Walter", "William",
)
# fmt: on
#: What the noise around a needle consists of.
NOISE = (
    "The river is wide. ",
    "The road is long. ",
    "The wind is cold. ",
    "The field is green. ",
    "The night is quiet. ",
)
#: Where needles are put: shares of the haystack that stand before them.
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Texts:
    """Makes rows of token ids out of texts, with a model's tokenizer.

    Attributes:
        tokenizer: of the model.
    """

    tokenizer: Any

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text without special tokens."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def completion(self, prompt: Sequence[int], ending: str, answer: str) -> tuple[list[int], int]:
        """Return the ids of a prompt, an ending and its answer, and where the answer begins.

        Args:
            prompt: ids of all that comes before.
            ending: the last words before the answer.
            answer: what the model is to say, with the space before it.
        """
        whole, short = self.ids(ending + answer), self.ids(ending)
        same = next((n for n, (a, b) in enumerate(zip(whole, short, strict=False)) if a != b), len(short))
        return [*prompt, *whole], len(prompt) + same


def rows_of(sequences: Sequence[tuple[list[int], int]]) -> Rows:
    """Return sequences of different lengths as rows of which the tokens from a place on are scored.

    Args:
        sequences: (ids, place of the first scored token) each.
    """
    ids = [torch.tensor(sequence) for sequence, _ in sequences]
    scored = [torch.arange(len(sequence)) >= start for sequence, start in sequences]
    return Rows(pad_sequence(ids, batch_first=True), pad_sequence(scored, batch_first=True))


def blocks(ids: Tensor, length: int, most: int) -> Rows:
    """Return at most ``most`` disjoint blocks of a text, [N, length], of which all tokens but the first are scored."""
    count = min(most, len(ids) // length)
    rows = ids[: count * length].view(count, length)
    return Rows(rows, (torch.arange(length) > 0).expand_as(rows))


def seen_bigrams(ids: Tensor) -> Tensor:
    """Return which tokens end a bigram that occurred before in their row, [N, T]: those that recall can predict."""
    occurred = torch.zeros_like(ids, dtype=torch.bool)
    for row, tokens in enumerate(ids.tolist()):
        earlier: set[tuple[int, int]] = set()
        for column, bigram in enumerate(pairwise(tokens), start=1):
            occurred[row, column] = bigram in earlier
            earlier.add(bigram)
    return occurred


def repeated(first: Tensor) -> Rows:
    """Return rows twice in succession, [N, 2 L]; scored is the second copy but for its first token.

    That one cannot be known: nothing says that the text begins again.
    """
    length = first.shape[1]
    ids = torch.cat([first, first], dim=1)
    return Rows(ids, (torch.arange(2 * length) > length).expand_as(ids))


def random_tokens(vocabulary: Sequence[int], length: int, count: int, random: Random) -> Tensor:
    """Return tokens drawn uniformly, [count, length]; repeat them with `repeated`."""
    return torch.tensor([random.choices(vocabulary, k=length) for _ in range(count)])


def phone_book(texts: Texts, entries: int, count: int, random: Random) -> Rows:
    """Return phone books of which one entry is asked for again; scored is its number.

    A row is ``entries`` lines of a name and three digits, two of them once more as examples, and a third name.

    Args:
        texts: the tokenizer.
        entries: lines of a book, from 3 to the number of `NAMES`.
        count: number of rows.
        random: what names and numbers are drawn with.
    """
    rows = []
    for _ in range(count):
        names = random.sample(NAMES, entries)
        lines = [f"{name}: {random.randint(100, 999)}\n" for name in names]
        one, two, asked = random.sample(range(entries), 3)
        book = "".join([*lines, "\n", lines[one], lines[two]])
        name, number = lines[asked].rstrip("\n").split(":")
        rows.append(texts.completion(start_tokens(texts.tokenizer) + texts.ids(book), f"{name}:", number))
    return rows_of(rows)


def needle(texts: Texts, haystack: Sequence[int], length: int, depth: float, count: int, random: Random) -> Rows:
    """Return haystacks with a sentence that gives a number, at whose end the sentence begins again; scored is the number.

    Args:
        texts: the tokenizer.
        haystack: tokens of the text around the needle, repeated if they are too few.
        length: tokens of a row.
        depth: share of the haystack before the needle, from 0 to 1.
        count: number of rows; each begins elsewhere in the haystack.
        random: what names and numbers are drawn with.
    """
    rows = []
    for _ in range(count):
        sentence, number = f"The secret number of {random.choice(NAMES)} is", f" {random.randint(100, 999)}"
        inner = texts.ids(f" {sentence}{number}.")
        outer, answer = texts.completion([], f" {sentence}", number)
        room = length - len(start_tokens(texts.tokenizer)) - len(inner) - len(outer)
        begin = random.randrange(max(1, len(haystack) - room))
        hay = list((list(haystack[begin:]) + list(haystack) * (room // len(haystack) + 1))[:room])
        before = round(depth * room)
        prompt = [*start_tokens(texts.tokenizer), *hay[:before], *inner, *hay[before:]]
        rows.append(([*prompt, *outer], len(prompt) + answer))
    return rows_of(rows)


def noise(texts: Texts, tokens: int, random: Random) -> list[int]:
    """Return at least some number of tokens of `NOISE`."""
    ids: list[int] = []
    while len(ids) < tokens:
        ids += texts.ids("".join(random.choices(NOISE, k=64)))
    return ids
