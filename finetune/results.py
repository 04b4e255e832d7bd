"""Evaluation results in the folder of a checkpoint: ``evaluation.json`` and the model card."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard

from hf_rfa.convert.atomic_io import check_file, new_file
from hf_rfa.errors import InputError

FILE = "evaluation.json"
HEADING = "## Evaluation"
#: Names that the hub has for our tasks.
HUB_TASKS = {"perplexity": "text-generation", "translation": "translation", "summarization": "summarization"}


def check_recordable(checkpoint: str) -> Path:
    """Return the folder of a checkpoint whose results are to be recorded.

    Raises:
        InputError: if it is not a folder, or its results cannot be written.
    """
    folder = Path(checkpoint).expanduser()
    if not (folder / "config.json").is_file():
        raise InputError(
            f"--record writes into the folder of the checkpoint, but {checkpoint} is not a folder with a checkpoint."
        )
    for name in (FILE, "README.md"):
        check_file(folder / name)
    return folder


def record(folder: Path, *, task: str, data: str, scores: dict[str, float], protocol: str) -> None:
    """Add a result to ``evaluation.json`` and the model card; one of the same task, data and protocol is replaced.

    Args:
        folder: of the checkpoint.
        task: perplexity, translation or summarization.
        data: name of the data.
        scores: by name of the metric.
        protocol: of the measurement, in words.
    """
    path, card_path = folder / FILE, folder / "README.md"
    results: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    new = {"task": task, "data": data, "protocol": protocol, "scores": scores}
    key = ("task", "data", "protocol")
    results = [each for each in results if any(each[name] != new[name] for name in key)] + [new]
    card = ModelCard.load(card_path) if card_path.is_file() else ModelCard("---\nlibrary_name: transformers\n---\n")
    metadata: Any = card.data
    metadata.model_name = metadata.model_name or folder.resolve().name
    metadata.eval_results = [
        EvalResult(
            task_type=HUB_TASKS[each["task"]],
            dataset_type=each["data"],
            dataset_name=each["data"],
            metric_type=name.lower(),
            metric_name=name,
            metric_value=round(value, 4),
        )
        for each in results
        for name, value in each["scores"].items()
    ]
    rows = [
        f"| {each['data']} | {name} | {value:.2f} | {each['protocol'].replace('|', ', ')} |"
        for each in results
        for name, value in each["scores"].items()
    ]
    section = "\n".join([HEADING, "", "| data | metric | | protocol |", "|---|---|---|---|", *rows, ""])
    text = re.sub(rf"(?ms)^{HEADING}$.*?(?=^## |\Z)", "", card.text).rstrip()
    card.text = f"{text}\n\n{section}" if text else section
    with new_file(path) as file:
        json.dump(results, file, indent=2)
    with new_file(card_path) as file:
        file.write(str(card))
