"""The recall suite: every probe on a model, on its softmax teacher, and on the teacher with a window of the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import count, product
from random import Random
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_rfa.errors import InputError
from hf_rfa.evaluation.memory import CacheMemory, cache_memory
from hf_rfa.inference.loading import check_length, check_tokens, position_limit

from .generation import agreement, continuations, nats_of, repeated_ngrams
from .probes import DEPTHS, Texts, blocks, needle, noise, phone_book, random_tokens, repeated, seen_bigrams
from .scoring import Rows, score_tokens
from .window_control import window_and_sinks

#: Most tokens of a row, unless asked for: beyond, a pass over a text costs more than it tells.
LONGEST = 2048
#: Entries of the phone books.
ENTRIES = (5, 10, 20, 40)
#: Tokens of a haystack at least, and so of a model's positions.
SHORTEST = 128
#: Tokens from the start of a text that is repeated to the next, where it is not longer: other places of the same documents.
SPACING = 1024
#: Tokens of text that a model continues.
PROMPT_TOKENS = 128
#: First tokens that the window of the same bytes keeps.
SINKS = 4


@dataclass(frozen=True)
class Effort:
    """How much is read.

    Attributes:
        text_tokens: tokens of the text scored at each context length.
        repeated_tokens: tokens of each length of repetitions.
        books: phone books of each size.
        needles: most haystacks of each length and depth; of long ones there are fewer, see `needles_of`.
        prompts: prompts that are continued.
        new_tokens: tokens of a continuation.
        every: which of the lengths are tried: every first, second or third, from the longest down.
    """

    text_tokens: int = 8192
    repeated_tokens: int = 8192
    books: int = 64
    needles: int = 8
    prompts: int = 16
    new_tokens: int = 64
    every: int = 1

    def needles_of(self, length: int) -> int:
        """Return the number of haystacks of a length and depth."""
        return max(1, min(self.needles, self.needles * 256 // length, 2048 // length + self.needles // 8))


FULL = Effort()
QUICK = Effort(text_tokens=4096, repeated_tokens=2048, books=16, needles=2, prompts=4, new_tokens=32, every=2)


@dataclass(frozen=True)
class Setting:
    """One setting of a probe.

    Attributes:
        probe: name of the probe.
        setting: in words, such as "20 entries".
        chance: accuracy of a guess; None for text, of which seen bigrams and other tokens are told apart instead.
    """

    probe: str
    setting: str
    chance: float | None


@dataclass(frozen=True)
class Probe(Setting):
    """The rows of a setting.

    Attributes:
        rows: the tokens.
        is_answer: whether the scored tokens of a row count together, as the digits of a number do, and not one by one.
    """

    rows: Rows
    is_answer: bool = False


@dataclass(frozen=True)
class Figure(Setting):
    """The result of a setting for one model.

    Attributes:
        accuracy: share of the tokens, or of the answers, that the model gives the highest probability; None for text.
        nats: mean negative log-likelihood per token, or per answer.
        count: tokens or answers scored.
    """

    accuracy: float | None
    nats: float
    count: int


@dataclass
class Column:
    """All results of one model.

    Attributes:
        name: what the column is called.
        memory: bytes by kind.
        num_bytes: bytes after the longest row.
        worth: the same in tokens of the teacher's cache; None without a softmax teacher, and where that does not grow.
        figures: by probe and setting.
        agreement: mean number of greedily decoded tokens until the first that differs from the teacher's. This and the next
            are None without a teacher, and all three where generation was left out.
        teacher_nats: mean negative log-likelihood that the teacher gives to sampled tokens.
        repeated: share of the 4-grams of sampled continuations that occurred before in the same continuation.
    """

    name: str
    memory: CacheMemory
    num_bytes: int
    worth: float | None
    figures: list[Figure] = field(default_factory=list)
    agreement: float | None = None
    teacher_nats: float | None = None
    repeated: float | None = None


@dataclass
class RecallReport:
    """Results of the suite.

    Attributes:
        columns: one per model.
        seed: of all that is drawn.
        protocol: what was read, in words.
        skipped: probes that did not apply, and why.
    """

    columns: list[Column]
    seed: int
    protocol: str
    skipped: dict[str, str]


def make_probes(
    tokenizer: Any, positions: int, text: Tensor | None, effort: Effort, seed: int
) -> tuple[list[Probe], dict[str, str]]:
    """Return the rows of all probes for a model, and why some are left out.

    Args:
        tokenizer: the model's.
        positions: most tokens of a row.
        text: token ids of a real text, [N], or None.
        effort: how much is read.
        seed: of all that is drawn.
    """
    probes, skipped = [], {}
    for probe in _drawn_probes(tokenizer, positions, text, effort, seed):
        count, length = probe.rows.ids.shape
        if not count:
            skipped[f"{probe.probe}, {probe.setting}"] = f"the text has {0 if text is None else len(text)} tokens"
        elif length > positions:
            skipped[f"{probe.probe}, {probe.setting}"] = f"{length} tokens, but only {positions} positions"
        else:
            probes.append(probe)
    if text is None:
        skipped |= dict.fromkeys(("text again", "needle in text", "text", "generation"), "no text was given")
    return probes, skipped


def _drawn_probes(tokenizer: Any, positions: int, text: Tensor | None, effort: Effort, seed: int) -> Iterator[Probe]:
    """Yield all probes, also those of more tokens than there are positions, or without rows where the text is too short."""
    texts = Texts(tokenizer)
    words = sorted(set(range(tokenizer.vocab_size)) - set(tokenizer.all_special_ids))

    def lengths(first: int, last: int) -> list[int]:  # powers of two
        return sorted([2**k for k in range(first.bit_length() - 1, last.bit_length())][:: -effort.every])

    def repetitions(length: int) -> int:
        return max(2, effort.repeated_tokens // (2 * length))

    for length in lengths(16, positions // 2):
        rows = repeated(random_tokens(words, length, repetitions(length), Random(f"{seed} random {length}")))
        yield Probe("random tokens again", f"{length} tokens", 1 / len(words), rows)
    for entries in ENTRIES:
        rows = phone_book(texts, entries, effort.books, Random(f"{seed} book {entries}"))
        yield Probe("phone book", f"{entries} entries", 1 / 900, rows, is_answer=True)
    hays = {"noise": noise(texts, positions, Random(f"{seed} noise"))}
    if text is not None:
        hays["text"] = text.tolist()
    for (kind, hay), length, depth in product(hays.items(), lengths(SHORTEST, positions), DEPTHS):
        random = Random(f"{seed} {kind} {length} {depth}")
        rows = needle(texts, hay, length, depth, effort.needles_of(length), random)
        yield Probe(f"needle in {kind}", f"{length} tokens, depth {depth:g}", 1 / 900, rows, is_answer=True)
    if text is None:
        return
    for length in lengths(64, positions // 2):
        rows = blocks(text, max(length, SPACING), repetitions(length))
        yield Probe("text again", f"{length} tokens", 1 / len(words), repeated(rows.ids[:, :length]))
    for length in lengths(SHORTEST, positions):
        rows = blocks(text, length, max(1, effort.text_tokens // length))
        yield Probe("text", f"context {length}", None, rows)


def run_probe(model: PreTrainedModel, probe: Probe) -> Iterator[Figure]:
    """Yield the results of one probe: one, or for text that of all tokens, of seen bigrams and of the others."""
    scores = score_tokens(model, probe.rows)
    parts = {"": scores.answers() if probe.is_answer else scores}
    if probe.chance is None:
        seen = seen_bigrams(probe.rows.ids)
        parts |= {", seen bigrams": scores.among(seen), ", others": scores.among(~seen)}
    for suffix, part in parts.items():
        if count := int(part.scored.sum()):
            accuracy = None if probe.chance is None else part.accuracy
            yield Figure(probe.probe, probe.setting + suffix, probe.chance, accuracy, part.mean_nats, count)


def recall_suite(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    teacher: PreTrainedModel | None = None,
    text: Tensor | None = None,
    controls: Sequence[tuple[int, int]] | None = None,
    max_length: int | None = None,
    effort: Effort = FULL,
    seed: int = 0,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> RecallReport:
    """Measure what a causal model recalls of its context, beside its teacher and a window of the same bytes.

    Args:
        model: a causal language model, RFA or softmax, in evaluation mode.
        tokenizer: its tokenizer.
        teacher: the softmax model that it was made from, or None. A softmax model without one is its own teacher.
        text: token ids of a text that the model has not been trained on, [N]; without one the probes of text are left out.
        controls: (window, sinks) of models to compare with, which are the teacher, or the model itself where there is no
            teacher, limited to that view. None compares with a window of the same bytes and `SINKS` sinks where there is a
            teacher, and with none where there is not.
        max_length: most tokens of a row; None takes the model's positions, but at most `LONGEST`. More than its positions are
            for models that read texts of any length.
        effort: how much is read.
        seed: of all that is drawn.
        progress: called with (settings done, settings in all).

    Returns:
        The figures, the same to the last digit for the same seed on the same machine.

    Raises:
        InputError: for a model with an encoder, without enough positions, or whose teacher is another kind of model.
    """
    length = check_model(model, tokenizer, teacher, max_length)
    drawn_from = tokenizer.vocab_size - 1
    check_tokens([drawn_from] if text is None else [drawn_from, int(text.max())], model.config)
    probes, skipped = make_probes(tokenizer, length, text, effort, seed)
    prompts = None
    if text is not None:
        prompts = blocks(text, PROMPT_TOKENS, effort.prompts).ids
        if not len(prompts) or PROMPT_TOKENS + effort.new_tokens > length:
            skipped["generation"] = f"it needs {PROMPT_TOKENS + effort.new_tokens} tokens of text and positions"
            prompts = None

    memory = cache_memory(model)
    judge = teacher if teacher is not None else None if memory.fixed else model
    base = memory if teacher is None else cache_memory(teacher)
    if controls is None:
        controls = [] if teacher is None else [(max(1, round(memory.worth(base, length)) - SINKS), SINKS)]
    models: list[tuple[str, CacheMemory, PreTrainedModel, tuple[int, int] | None]] = []
    if teacher is not None:
        models.append(("softmax", base, teacher, None))
    for window, sinks in controls:
        limited = replace(base, window=base.per_token * window, sinks=base.per_token * sinks, per_token=0)
        models.append((f"window {window} + {sinks} sinks", limited, teacher or model, (window, sinks)))
    models.append(("this model", memory, model, None))

    columns, total, done = [], len(models) * (len(probes) + (prompts is not None)), count(1)
    expected = None if prompts is None or judge is None else continuations(judge, prompts, effort.new_tokens)
    for name, memory, measured, view in models:
        worth = memory.worth(base, length) if base.per_token and not base.fixed else None
        column = Column(name, memory, memory.after(length), worth)
        columns.append(column)
        with nullcontext() if view is None else window_and_sinks(measured, *view):
            for probe in probes:
                column.figures += run_probe(measured, probe)
                progress(next(done), total)
            if prompts is not None:
                likely = continuations(measured, prompts, effort.new_tokens)
                drawn = continuations(measured, prompts, effort.new_tokens, seed=seed)
        if prompts is not None:
            column.repeated = repeated_ngrams(drawn)
            if judge is not None and expected is not None:
                column.agreement, column.teacher_nats = agreement(likely, expected), nats_of(judge, prompts, drawn)
            progress(next(done), total)
    protocol = (
        f"rows of at most {length} tokens; {effort.text_tokens:,} tokens of text per context length, the first of a row not "
        f"counted; {effort.books} phone books of each size; up to {effort.needles} needles of each length at {len(DEPTHS)} "
        f"depths; {effort.prompts} prompts of {PROMPT_TOKENS} tokens continued by {effort.new_tokens}; seed {seed}"
    )
    return RecallReport(columns, seed, protocol, skipped)


def check_model(model: Any, tokenizer: Any, teacher: Any, max_length: int | None) -> int:
    """Return the most tokens of a row.

    Raises:
        InputError: if the probes cannot be run on a model.
    """
    if model.config.is_encoder_decoder:
        raise InputError(
            "the recall suite is for decoders that stand alone: its probes are texts to be continued. For a model with an "
            "encoder use hf-rfa score."
        )
    if tokenizer is None:
        raise InputError(
            "the recall suite needs the model's tokenizer: phone books and needles are texts. Put its files into the folder."
        )
    positions = getattr(model.config, "max_position_embeddings", None) or LONGEST
    length = max_length or min(positions, LONGEST)
    if max_length is not None:
        check_length(model, max_length, what="the tokens of a row are")
    if length < SHORTEST:
        raise InputError(
            f"the model has {positions} positions, but the recall suite needs rows of at least {SHORTEST} tokens: its "
            f"shortest haystack.{' Ask for such a length.' if position_limit(model) is None else ''}"
        )
    if teacher is not None and teacher.config.vocab_size != model.config.vocab_size:
        raise InputError(
            f"the teacher has {teacher.config.vocab_size} tokens and the model {model.config.vocab_size}: they do not belong "
            "together."
        )
    return length
