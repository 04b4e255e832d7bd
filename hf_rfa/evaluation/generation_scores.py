"""Answers that a model generates, scored by references, with the protocol."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, get_args

import evaluate
from datasets import Features, Value
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu import BLEU
from transformers import PreTrainedModel

from ..errors import InputError
from ..inference.generation import generate_text
from ..inference.loading import check_tokens

GenerationTask = Literal["translation", "summarization"]
#: Kinds of ROUGE. Lsum takes every line of a text as one sentence.
ROUGES = ("rouge1", "rouge2", "rougeL", "rougeLsum")


class _TextMetric(evaluate.Metric):
    """A metric of `evaluate` that needs no download."""

    def _info(self) -> evaluate.MetricInfo:
        features = Features({"predictions": Value("string"), "references": Value("string")})
        return evaluate.MetricInfo(description=str(self.__doc__), citation="", features=features)


class BleuMetric(_TextMetric):
    """Corpus BLEU by sacreBLEU (Post 2018), cased, one reference each, and its signature."""

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        metric = BLEU()
        score = metric.corpus_score(predictions, [references]).score
        return {"sacreBLEU": score, "signature": str(metric.get_signature())}


class RougeMetric(_TextMetric):
    """`ROUGES` (Lin 2004) by rouge_score, with stemming: mean F1 × 100."""

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        scorer = RougeScorer(ROUGES, use_stemmer=True)
        scores = [scorer.score(*pair) for pair in zip(references, predictions, strict=True)]
        return {name: 100.0 * fmean(score[name].fmeasure for score in scores) for name in ROUGES}


def bleu(predictions: list[str], references: list[str]) -> tuple[float, str]:
    """Return corpus BLEU and its signature."""
    figures: Any = BleuMetric(keep_in_memory=True).compute(predictions=predictions, references=references)
    return figures["sacreBLEU"], figures["signature"]


def rouge(predictions: list[str], references: list[str]) -> dict[str, float]:
    """Return `ROUGES` by name."""
    figures: Any = RougeMetric(keep_in_memory=True).compute(predictions=predictions, references=references)
    return figures


@dataclass(frozen=True)
class GenerationScores:
    """Scores of generated answers, and how they were made."""

    scores: dict[str, float]  # metric by name, each out of 100
    protocol: str  # how the answers were generated and scored, in words; with sacreBLEU's signature for translation
    predictions: list[str]  # the answers, in the order of the sources


def answer_length(model: Any, default: int) -> int:
    """Return the most tokens of an answer, its start token among them, of a model with an encoder.

    They are those of its generation configuration, or else ``default``, but at most its positions.
    """
    config = model.generation_config
    length = config.max_length if config.max_new_tokens is None else config.max_new_tokens + 1
    return min(length or default, int(model.config.max_position_embeddings))


def evaluate_generation(
    model: PreTrainedModel,
    tokenizer: Any,
    sources: list[str],
    references: list[str],
    *,
    task: GenerationTask,
    num_beams: int = 1,
    max_new_tokens: int | None = None,
    batch_size: int = 16,
    on_batch: Callable[[int, int], None] | None = None,
) -> GenerationScores:
    """Let a model with an encoder generate an answer to every source, and score the answers.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        sources: texts to translate or to summarize.
        references: what is expected, one per source.
        task: "translation" (sacreBLEU) or "summarization" (ROUGE).
        num_beams: 1 for greedy search. What else the checkpoint's generation configuration sets holds.
        max_new_tokens: most tokens of an answer; None takes the generation configuration's, or what the positions allow.
        batch_size: sources at a time, those of like length together.
        on_batch: called with (sources done, sources in all) after each batch.

    Raises:
        InputError: for sources that cannot be used, before anything is generated.
    """
    if task not in get_args(GenerationTask):
        raise InputError(f"task must be one of {', '.join(get_args(GenerationTask))}, got {task!r}.")
    if len(sources) != len(references):
        raise InputError(f"there are {len(sources)} sources and {len(references)} references: each source needs one.")
    if not sources:
        raise InputError("there is no source to start from.")
    limit = int(model.config.max_position_embeddings)
    if max_new_tokens is None:
        max_new_tokens = answer_length(model, limit) - 1
    encoded = tokenizer(sources, verbose=False)["input_ids"]
    check_tokens((index for ids in encoded for index in ids), model.config)
    for number, (source, ids) in enumerate(zip(sources, encoded, strict=True), start=1):
        which = f"source {number} of {len(sources)}"
        if not source.strip():
            raise InputError(f"{which} is empty: there is nothing to start from.")
        if len(ids) > limit:
            raise InputError(
                f"{which} has {len(ids)} tokens, but the encoder has {limit} positions. Shorten it, or convert the softmax "
                f"model with --max-positions {len(ids)} or more."
            )

    predictions = [""] * len(sources)
    order = sorted(range(len(encoded)), key=lambda index: len(encoded[index]), reverse=True)
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        batch = [sources[row] for row in rows]
        answers = generate_text(
            model, tokenizer, batch, max_new_tokens=max_new_tokens, num_beams=num_beams, do_sample=False
        )
        for row, text in zip(rows, answers.texts, strict=True):
            predictions[row] = text.strip()
        if on_batch is not None:
            on_batch(start + len(rows), len(order))
    if task == "translation":
        score, signature = bleu(predictions, references)
        scores, counting = {"sacreBLEU": score}, f"signature {signature}"
    else:
        scores = rouge(predictions, references)
        counting = "ROUGE F1 × 100 by rouge_score, with stemming, a line of a text being a sentence"
    search = "greedy search" if num_beams == 1 else f"{num_beams} beams"
    protocol = f"{len(sources):,} sources, {search}, at most {max_new_tokens} new tokens; {counting}"
    return GenerationScores(scores, protocol, predictions)
