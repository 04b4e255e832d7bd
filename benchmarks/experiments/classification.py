"""Accuracy of models that classify texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, pipeline

import hf_rfa  # noqa: F401  # registers the RFA models
from hf_rfa.inference.loading import find_device


def accuracy(folder: Path, rows: Sequence[dict[str, Any]], batch: int, *, max_length: int | None = None) -> float:
    """Return the share of rows with a "text" and a "label" that are classified rightly.

    Args:
        folder: of a model for sequence classification, with its tokenizer.
        rows: the texts with their labels.
        batch: texts at a time.
        max_length: tokens to which texts are cut, or None to cut none.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    classify = pipeline("text-classification", str(folder), tokenizer=tokenizer, device=find_device("auto"))
    texts = [row["text"] for row in rows]
    answers = classify(texts, batch_size=batch, truncation=max_length is not None, max_length=max_length)
    return sum(answer["label"] == str(row["label"]) for answer, row in zip(answers, rows, strict=True)) / len(rows)
