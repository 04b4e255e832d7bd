"""Accuracy of models that classify texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


@torch.no_grad()
def accuracy(
    model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]], batch: int, *, max_length: int | None = None
) -> float:
    """Return the share of rows with a "text" and a "label" that are classified rightly.

    Args:
        model: for sequence classification.
        tokenizer: its tokenizer.
        rows: the texts with their labels.
        batch: texts at a time.
        max_length: tokens to which texts are cut, or None to cut none.
    """
    right = 0
    for start in range(0, len(rows), batch):
        few = rows[start : start + batch]
        inputs = tokenizer(
            [row["text"] for row in few],
            truncation=max_length is not None,
            max_length=max_length,
            padding=True,
            return_tensors="pt",
        ).to(model.device)
        answers = model(**{key: inputs[key] for key in ("input_ids", "attention_mask")}).logits.argmax(-1).tolist()
        pairs = zip(answers, few, strict=True)
        right += sum(model.config.id2label[answer] == str(row["label"]) for answer, row in pairs)
    return right / len(rows)
