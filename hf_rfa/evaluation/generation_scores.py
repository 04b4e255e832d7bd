"""Answers that a model generates, scored by references, with the protocol."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import evaluate
import torch
from datasets import Features, Value
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu import BLEU
from transformers import PreTrainedModel

from ..errors import InputError
from ..inference.loading import check_length, check_tokens

GenerationTask = Literal["translation", "summarization"]


class _TextMetric(evaluate.Metric):
    """An `evaluate.Metric` that needs no download."""

    def _info(self) -> evaluate.MetricInfo:
        features = Features({"predictions": Value("string"), "references": Value("string")})
        return evaluate.MetricInfo(description=str(self.__doc__), citation="", features=features)


class BleuMetric(_TextMetric):
    """Corpus BLEU by sacreBLEU (Post 2018), cased, one reference each."""

    def _compute(self, predictions: list[str], references: list[str], tokenize: str = "13a") -> dict[str, Any]:
        metric = BLEU(tokenize=tokenize)
        score = metric.corpus_score(predictions, [references])
        return {"bleu": score.score, "signature": str(metric.get_signature())}


class RougeMetric(_TextMetric):
    """ROUGE-1, -2, -L and -Lsum (Lin 2004) by rouge_score, with stemming: mean F1 × 100.

    ROUGE-Lsum takes every line of a text as one sentence.
    """

    TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        scorer = RougeScorer(list(self.TYPES), use_stemmer=True)
        scores = [scorer.score(*pair) for pair in zip(references, predictions, strict=True)]
        return {name: 100.0 * sum(score[name].fmeasure for score in scores) / len(scores) for name in self.TYPES}


@dataclass(frozen=True)
class GenerationScores:
    """Scores of generated answers, and how they were made.

    Attributes:
        scores: metric by name, each out of 100.
        protocol: how the answers were generated and scored, in words; with sacreBLEU's signature for translation.
        predictions: the answers, in the order of the sources.
    """

    scores: dict[str, float]
    protocol: str
    predictions: list[str]


def answer_length(model: Any, default: int) -> int:
    """Return the most tokens of an answer, its start token among them, of a model with an encoder.

    They are those of its generation configuration, or else ``default``, but at most its positions.
    """
    config = model.generation_config
    length = config.max_length if config.max_new_tokens is None else config.max_new_tokens + 1
    return min(length or default, int(model.config.max_position_embeddings))


@torch.no_grad()
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
    truncate: bool = False,
    bleu_tokenizer: str = "13a",
    on_batch: Callable[[int, int], None] | None = None,
) -> GenerationScores:
    """Generate an answer to every source and score the answers.

    Args:
        model: a model with an encoder.
        tokenizer: its tokenizer.
        sources: texts to translate or to summarize.
        references: what is expected, one per source.
        task: "translation" (sacreBLEU) or "summarization" (ROUGE).
        num_beams: 1 for greedy search. What else the checkpoint's generation configuration sets (length penalty, forced
            tokens, …) holds.
        max_new_tokens: most tokens of an answer; None takes what the generation configuration sets, or else what the
            positions allow.
        batch_size: sources at a time, those of like length together.
        truncate: cut sources that are longer than the encoder's positions, instead of refusing them.
        bleu_tokenizer: sacreBLEU's tokenizer.
        on_batch: called with (sources done, sources in all) after each batch.

    Returns:
        The scores, their protocol and the answers.

    Raises:
        InputError: for sources that cannot be used, before anything is generated.
    """
    if task not in get_args(GenerationTask):
        raise InputError(f"task must be one of {', '.join(get_args(GenerationTask))}, got {task!r}.")
    if len(sources) != len(references):
        raise InputError(f"there are {len(sources)} sources and {len(references)} references: each source needs one.")
    if not sources:
        raise InputError("there is no source to start from.")
    if bleu_tokenizer not in BLEU.TOKENIZERS:
        raise InputError(f"bleu_tokenizer must be one of {', '.join(sorted(BLEU.TOKENIZERS))}, got {bleu_tokenizer!r}.")
    if max_new_tokens is None:
        max_new_tokens = answer_length(model, model.config.max_position_embeddings) - 1
    check_length(model, max_new_tokens + 1, what="the start token and the new tokens are")
    limit = int(model.config.max_position_embeddings)
    encoded = tokenizer(sources, truncation=truncate, max_length=limit if truncate else None, verbose=False)[
        "input_ids"
    ]
    check_tokens((index for ids in [*encoded, [tokenizer.pad_token_id or 0]] for index in ids), model.config)
    for number, (source, ids) in enumerate(zip(sources, encoded, strict=True), start=1):
        which = f"source {number} of {len(sources)}"
        if not source.strip():
            raise InputError(f"{which} is empty: there is nothing to start from.")
        if len(ids) > limit:
            raise InputError(
                f"{which} has {len(ids)} tokens, but the encoder has {limit} positions. Shorten it, pass --truncate to cut "
                f"such sources, or convert the softmax model with --max-positions {len(ids)} or more."
            )

    order = sorted(range(len(encoded)), key=lambda index: len(encoded[index]), reverse=True)
    predictions = [""] * len(sources)
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        # Positions of an encoder start with a source's first token, whatever side the tokenizer pads.
        batch = tokenizer.pad(
            {"input_ids": [encoded[row] for row in rows]}, return_tensors="pt", padding_side="right"
        ).to(model.device)
        outputs = model.generate(  # type: ignore[operator]
            batch["input_ids"],
            attention_mask=batch["attention_mask"],
            num_beams=num_beams,
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
        for row, text in zip(rows, tokenizer.batch_decode(outputs, skip_special_tokens=True), strict=True):
            predictions[row] = text.strip()
        if on_batch is not None:
            on_batch(start + len(rows), len(order))
    texts = {"predictions": predictions, "references": references}
    if task == "translation":
        bleu: Any = BleuMetric(keep_in_memory=True).compute(**texts, tokenize=bleu_tokenizer)
        scores, counting = {"sacreBLEU": bleu["bleu"]}, f"signature {bleu['signature']}"
    else:
        scores = RougeMetric(keep_in_memory=True).compute(**texts)
        counting = "ROUGE F1 × 100 by rouge_score, with stemming, a line of a text being a sentence"
    search = "greedy search" if num_beams == 1 else f"{num_beams} beams"
    protocol = f"{len(sources):,} sources, {search}, at most {max_new_tokens} new tokens; {counting}"
    return GenerationScores(scores, protocol, predictions)
