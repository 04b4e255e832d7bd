"""Evaluation of models with an encoder: answers to sources are generated, and scored against references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from sacrebleu import BLEU
from transformers import PreTrainedModel

from hf_rfa.errors import InputError
from hf_rfa.inference import check_length

from .metrics import BleuMetric, RougeMetric

GenerationTask = Literal["translation", "summarization"]


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


def score(
    task: GenerationTask, predictions: list[str], references: list[str], *, bleu_tokenizer: str = "13a"
) -> tuple[dict[str, float], str]:
    """Return the metrics of a task by name, and how they count, in words."""
    texts = {"predictions": predictions, "references": references}
    if task == "translation":
        found: Any = BleuMetric(keep_in_memory=True).compute(**texts, tokenize=bleu_tokenizer)
        return {"sacreBLEU": found["bleu"]}, f"signature {found['signature']}"
    found = RougeMetric(keep_in_memory=True).compute(**texts)
    return found, "ROUGE F1 × 100 by rouge_score, with stemming, a line of a text being a sentence"


def encode_sources(model: PreTrainedModel, tokenizer: Any, sources: list[str], *, truncate: bool) -> list[list[int]]:
    """Return the token ids of every source.

    Raises:
        InputError: naming the first source that is empty, or longer than the encoder's positions unless ``truncate``.
    """
    limit = int(model.config.max_position_embeddings)
    encoded = tokenizer(sources, truncation=truncate, max_length=limit if truncate else None, verbose=False)
    for number, (source, ids) in enumerate(zip(sources, encoded["input_ids"], strict=True), start=1):
        which = f"source {number} of {len(sources)}"
        if not source.strip():
            raise InputError(f"{which} is empty: there is nothing to start from.")
        if len(ids) > limit:
            raise InputError(
                f"{which} has {len(ids)} tokens, but the encoder has {limit} positions. Shorten it, pass --truncate to cut "
                f"such sources, or convert the softmax model with --max-positions {len(ids)} or more."
            )
    return encoded["input_ids"]


def answer_length(model: Any, default: int) -> int:
    """Return the most tokens of an answer, its start token among them.

    Args:
        model: a model with an encoder.
        default: taken where the model's generation configuration sets none; either is cut to the positions.
    """
    config = model.generation_config
    found = config.max_length if config.max_new_tokens is None else config.max_new_tokens + 1
    return min(found or default, int(model.config.max_position_embeddings))


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
        sources: texts to translate or to summarise.
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
    encoded = encode_sources(model, tokenizer, sources, truncate=truncate)

    order = sorted(range(len(encoded)), key=lambda index: len(encoded[index]), reverse=True)
    predictions = [""] * len(sources)
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        batch = tokenizer.pad({"input_ids": [encoded[row] for row in rows]}, return_tensors="pt").to(model.device)
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
    scores, counting = score(task, predictions, references, bleu_tokenizer=bleu_tokenizer)
    search = "greedy search" if num_beams == 1 else f"{num_beams} beams"
    protocol = f"{len(sources):,} sources, {search}, at most {max_new_tokens} new tokens; {counting}"
    return GenerationScores(scores, protocol, predictions)
