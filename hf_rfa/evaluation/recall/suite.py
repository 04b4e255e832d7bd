"""The recall suite: every probe on a model, on its softmax teacher, and on the teacher with a window of the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import count, product
from random import Random
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_rfa.errors import InputError
from hf_rfa.evaluation.memory import CacheMemory, cache_memory
from hf_rfa.inference.loading import check_length, check_tokens, position_limit

from .probes import DEPTHS, Rows, blocks, needle, repeated, score_tokens
from .window_control import window_and_sinks

#: Most tokens of a row, unless asked for: beyond, a pass over a text costs more than it tells.
LONGEST = 2048
#: Tokens of a haystack at least, and so of a model's positions.
SHORTEST_HAYSTACK = 128
#: Tokens at least that are said again.
SHORTEST_REPETITION = 64
#: Tokens from the start of a text that is repeated to the next, where it is not longer: other places of the same documents.
SPACING = 1024
#: First tokens that the window of the same bytes keeps.
SINKS = 4


@dataclass(frozen=True)
class Probe:
    """Rows of one kind."""

    name: str  # "text again" or "needle in text"
    length: int  # tokens of the text that is said again, or of the haystack
    depth: float | None  # share of the haystack before the needle; None for a text that is said again
    rows: Rows  # the tokens


@dataclass(frozen=True)
class Figure:
    """The result of a probe for one model."""

    probe: str  # its name
    length: int  # its length
    depth: float | None  # its depth
    accuracy: float  # share of the tokens, or of the needles' numbers, that the model gives the highest probability
    nats: float  # mean negative log-likelihood per token, or per number


@dataclass(frozen=True)
class Column:
    """All results of one model."""

    name: str  # what the column is called
    num_bytes: int  # bytes of its cache after the longest row
    # the same in tokens of the teacher's cache; None without a softmax teacher, and where that does not grow
    worth: float | None
    figures: list[Figure]  # by probe


@dataclass(frozen=True)
class RecallReport:
    """Results of the suite."""

    columns: list[Column]  # one per model
    protocol: str  # what was read, in words


def make_probes(tokenizer: Any, positions: int, text: Tensor, *, quick: bool, seed: int) -> Iterator[Probe]:
    """Yield the probes for a model, of a text of at least `SPACING` and half of the positions, [N].

    ``positions`` are the most tokens of a row; ``quick`` takes fewer rows, and every other length.
    """
    every, most, repeated_tokens = (2, 2, 2048) if quick else (1, 8, 8192)

    def lengths(first: int, last: int) -> list[int]:  # powers of two, from the longest down
        return sorted([2**k for k in range(first.bit_length() - 1, last.bit_length())][::-every])

    hay = text.tolist()
    for length, depth in product(lengths(SHORTEST_HAYSTACK, positions), DEPTHS):
        number = max(1, min(most, most * 256 // length, 2048 // length + most // 8))  # of long ones there are fewer
        rows = needle(tokenizer, hay, length, depth, number, Random(f"{seed} text {length} {depth}"))
        yield Probe("needle in text", length, depth, rows)
    for length in lengths(SHORTEST_REPETITION, positions // 2):
        starts = blocks(text, max(length, SPACING), max(2, repeated_tokens // (2 * length))).ids[:, :length]
        yield Probe("text again", length, None, repeated(starts))


def run_probe(model: PreTrainedModel, probe: Probe) -> Figure:
    """Return the result of a probe. The tokens of a needle's number count together."""
    scores = score_tokens(model, probe.rows)
    scores = scores if probe.depth is None else scores.answers()
    return Figure(probe.name, probe.length, probe.depth, scores.accuracy, scores.mean_nats)


def recall_suite(
    model: PreTrainedModel,
    tokenizer: Any,
    text: Tensor,
    *,
    teacher: PreTrainedModel | None = None,
    controls: Sequence[tuple[int, int]] | None = None,
    max_length: int | None = None,
    quick: bool = False,
    seed: int = 0,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> RecallReport:
    """Measure what a causal model recalls of its context, beside its teacher and a window of the same bytes.

    Args:
        model: a causal language model, RFA or softmax, in evaluation mode.
        tokenizer: its tokenizer.
        text: token ids of a text that the model has not been trained on, [N].
        teacher: the softmax model that it was made from, or None.
        controls: (window, sinks) of models to compare with, which are the teacher, or the model itself where there is no
            teacher, limited to that view. None compares with a window of the same bytes and `SINKS` sinks where there is a
            teacher, and with none where there is not.
        max_length: most tokens of a row; None takes the model's positions, but at most `LONGEST`. More than its positions are
            for models that read texts of any length.
        quick: fewer rows, and every other length: about a fifth of the time.
        seed: of all that is drawn.
        progress: called with (probes done, probes in all).

    Returns:
        The figures, the same to the last digit for the same seed on the same machine.

    Raises:
        InputError: for a model with an encoder, without enough positions, or whose teacher is another kind of model, and for
            a text that is too short.
    """
    length = check_model(model, teacher, max_length)
    least = max(SPACING, length // 2)
    if len(text) < least:
        raise InputError(f"the text has {len(text):,} tokens, but the recall suite needs {least:,}: pass a longer one.")
    check_tokens([tokenizer.vocab_size - 1, int(text.max())], model.config)
    probes = list(make_probes(tokenizer, length, text, quick=quick, seed=seed))

    memory = cache_memory(model)
    base = memory if teacher is None else cache_memory(teacher)
    if controls is None:
        controls = [] if teacher is None else [(max(1, round(memory.worth(base, length)) - SINKS), SINKS)]
    models: list[tuple[str, CacheMemory, PreTrainedModel, AbstractContextManager]] = []
    if teacher is not None:
        models.append(("softmax", base, teacher, nullcontext()))
    for window, sinks in controls:
        limited = replace(base, fixed=base.per_token * (window + sinks), per_token=0)
        softmax = teacher or model
        models.append((f"window {window} + {sinks} sinks", limited, softmax, window_and_sinks(softmax, window, sinks)))
    models.append(("this model", memory, model, nullcontext()))

    columns, total, done = [], len(models) * len(probes), count(1)
    for name, held, measured, view in models:
        figures = []
        with view:
            for probe in probes:
                figures.append(run_probe(measured, probe))
                progress(next(done), total)
        worth = held.worth(base, length) if base.per_token and not base.fixed else None
        columns.append(Column(name, held.after(length), worth, figures))
    depths = f"needles of each length at {len(DEPTHS)} depths, text said again after each length"
    protocol = f"{'quick: ' if quick else ''}rows of at most {length} tokens; {depths}; seed {seed}"
    return RecallReport(columns, protocol)


def check_model(model: Any, teacher: Any, max_length: int | None) -> int:
    """Return the most tokens of a row.

    Raises:
        InputError: if the probes cannot be run on a model.
    """
    if model.config.is_encoder_decoder:
        raise InputError(
            "the recall suite is for decoders that stand alone: its probes are texts to be continued. For a model with an "
            "encoder use hf-rfa evaluate --task translation."
        )
    positions = getattr(model.config, "max_position_embeddings", None) or LONGEST
    length = max_length or min(positions, LONGEST)
    if max_length is not None:
        check_length(model, max_length, what="the tokens of a row are")
    if length < SHORTEST_HAYSTACK:
        raise InputError(
            f"the model has {positions} positions, but the recall suite needs rows of at least {SHORTEST_HAYSTACK} tokens: "
            f"its shortest haystack.{' Ask for such a length.' if position_limit(model) is None else ''}"
        )
    if teacher is not None and teacher.config.vocab_size != model.config.vocab_size:
        raise InputError(
            f"the teacher has {teacher.config.vocab_size} tokens and the model {model.config.vocab_size}: they do not belong "
            "together."
        )
    return length
