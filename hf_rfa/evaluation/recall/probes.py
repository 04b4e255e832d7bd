"""Texts that can be continued only by what stands earlier in them, and how well a model does: a text said again, a needle.

The definitions follow Repeat After Me (arXiv 2402.01032: copying) and RULER (arXiv 2404.06654: needles), cut down to what a
small model that follows no instructions can complete: the answers are three digits, and the model has to go on with a
sentence. Needles are drawn from a `random.Random` alone, so that a seed gives the same rows on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hf_rfa.errors import InputError
from hf_rfa.evaluation.perplexity import nats_of_labels
from hf_rfa.io.text_io import start_tokens

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
#: Tokens that a model reads at once, unless a row alone is longer.
BATCH_TOKENS = 4096
#: Logits that are held at once, unless those of a row alone are more.
BATCH_LOGITS = 2**26


@dataclass(frozen=True)
class Rows:
    """Sequences of tokens, and which of them a model has to predict from those before."""

    ids: Tensor  # token ids, [N, T], padded at the end with any id
    scored: Tensor  # [N, T], True for the tokens to be predicted; never the first of a row


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


@dataclass(frozen=True)
class TokenScores:
    """Predictions of tokens, [N, T] each; what was not to be scored is 0."""

    nats: Tensor  # negative log-likelihood, float64
    correct: Tensor  # whether the token is the most likely one
    scored: Tensor  # which tokens were to be predicted

    @property
    def accuracy(self) -> float:
        """Share of the tokens predicted correctly."""
        return float(self.correct.sum() / self.scored.sum())

    @property
    def mean_nats(self) -> float:
        """Mean negative log-likelihood per token."""
        return float(self.nats.sum() / self.scored.sum())

    def answers(self) -> TokenScores:
        """Return the scores of rows as wholes, [N, 1]: correct are those that greedy decoding would complete."""
        parts = self.nats.sum(1), (self.correct | ~self.scored).all(1), self.scored.any(1)
        return TokenScores(*(part[:, None] for part in parts))


@torch.no_grad()
def score_tokens(model: PreTrainedModel, rows: Rows) -> TokenScores:
    """Return how well a causal model, in evaluation mode, predicts the scored tokens of some rows.

    Logits are computed where a token is to be predicted, and nowhere else.

    Raises:
        InputError: if a likelihood is not finite.
    """
    embeddings: Any = model.get_input_embeddings()
    columns = rows.scored.any(0).nonzero()[:, 0]  # [C]
    size = max(1, min(BATCH_TOKENS // rows.ids.shape[1], BATCH_LOGITS // (embeddings.num_embeddings * len(columns))))
    nats, correct = torch.zeros(rows.ids.shape, dtype=torch.float64), torch.zeros_like(rows.scored)
    for first in range(0, len(rows.ids), size):
        ids = rows.ids[first : first + size].to(model.device)
        before = (columns - 1).to(model.device)
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=before).logits  # [N, C, V]
        targets = ids[:, before + 1]
        losses = torch.stack([nats_of_labels(*row) for row in zip(logits, targets, strict=True)])
        nats[first : first + size, columns] = losses.double().cpu()
        correct[first : first + size, columns] = (logits.argmax(-1) == targets).cpu()
    nats = nats.where(rows.scored, 0.0)
    if not bool(nats.isfinite().all()):
        raise InputError("the model's likelihoods are not finite: its weights or its dtype are at fault.")
    return TokenScores(nats, correct & rows.scored, rows.scored)
