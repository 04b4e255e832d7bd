"""Results of evaluations in a checkpoint's folder and in its model card."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard

from ..errors import InputError
from ..io.atomic_io import check_file, new_file

#: File with the results of evaluations, beside a checkpoint, and their section in its card.
EVALUATION_FILE, EVALUATION_HEADING = "evaluation.json", "## Evaluation"
#: The section on what the recall suite found (`hf_rfa.evaluation.recall`), of these weights too.
RECALL_HEADING = "## Recall"
#: Names that the hub has for our tasks.
HUB_TASKS = {
    "perplexity": "text-generation",
    "transcription": "automatic-speech-recognition",
    "translation": "translation",
    "summarization": "summarization",
}


def check_recordable(checkpoint: str) -> Path:
    """Return the folder of a checkpoint; raise an `InputError` if it is none, or if results cannot be written into it."""
    folder = Path(checkpoint).expanduser()
    if not (folder / "config.json").is_file():
        raise InputError(
            f"--record writes into the folder of the checkpoint, but {checkpoint} is not a folder with a checkpoint."
        )
    for name in (EVALUATION_FILE, "README.md"):
        check_file(folder / name)
    return folder


def record_result(folder: Path, *, task: str, data: str, scores: dict[str, float], protocol: str) -> None:
    """Add scores by metric to ``evaluation.json`` and the model card; those of the same task, data and protocol are replaced.

    The task is one of `HUB_TASKS`, the data a name, the protocol a description in words.
    """
    path, card_path = folder / EVALUATION_FILE, folder / "README.md"
    results: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    new = {"task": task, "data": data, "protocol": protocol, "scores": scores}
    results = [result for result in results if {**result, "scores": scores} != new] + [new]
    scored = [(result, *score) for result in results for score in result["scores"].items()]
    card = load_card(folder)
    metadata: Any = card.data
    metadata.model_name = metadata.model_name or folder.resolve().name
    metadata.eval_results = [
        EvalResult(
            task_type=HUB_TASKS[result["task"]],
            dataset_type=result["data"],
            dataset_name=result["data"],
            metric_type=name.lower(),
            metric_name=name,
            metric_value=round(value, 4),
        )
        for result, name, value in scored
    ]
    rows = [
        [result["data"], name, f"{value:.2f}", result["protocol"].replace("|", ", ")] for result, name, value in scored
    ]
    replace_section(card, EVALUATION_HEADING, markdown_table(["data", "metric", "", "protocol"], rows))
    with new_file(path) as file:
        json.dump(results, file, indent=2)
    with new_file(card_path) as file:
        file.write(str(card))


def load_card(folder: Path) -> ModelCard:
    """Return the card of a checkpoint, or an empty one."""
    path = folder / "README.md"
    return ModelCard.load(path) if path.is_file() else ModelCard("---\nlibrary_name: transformers\n---\n")


def replace_section(card: ModelCard, heading: str, body: str) -> None:
    """Put a section at the end of a card, in place of one with the same heading."""
    text = re.sub(rf"(?ms)^{heading}$.*?(?=^## |\Z)", "", card.text).rstrip()
    section = f"{heading}\n\n{body}\n"
    card.text = f"{text}\n\n{section}" if text else section


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    first, *others = ("".join(f"| {cell} " if cell else "| " for cell in cells) + "|" for cells in (head, *rows))
    return "\n".join([first, "|" + "---|" * len(head), *others])
