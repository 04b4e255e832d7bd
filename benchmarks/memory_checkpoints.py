"""The checkpoints of `benchmarks.memory`: converted, and trained on the same tokens in the same order."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from hf_rfa.convert import convert
from hf_rfa.errors import InputError
from hf_rfa.finetune.distill import distill
from hf_rfa.finetune.recipe import Recipe, Stage
from hf_rfa.finetune.run_folder import training_folder
from hf_rfa_cli.console import report_of


def options_of(row: str) -> dict[str, Any]:
    """Return the options of the conversion that a row names.

    That is ``64`` for a memory, ``31+4+28`` for W + S + K tokens, and ``31+4+28r4x500`` for those and 4 retrieval heads
    with a window of 500.

    Raises:
        InputError: if it is none of these.
    """
    found = re.fullmatch(r"(\d+)(?:\+(\d+)(?:\+(\d+))?(?:r(\d+)x([1-9]\d*))?)?", row)
    if found is None:
        raise InputError(
            "a row is a memory in tokens such as 64, window+sinks+slots such as 31+4+28, or these with retrieval heads and "
            f"their window such as 31+4+28r4x500, got {row!r}."
        )
    if row.isdigit():
        return {"memory": int(row)}
    names = ("window_size", "num_sinks", "num_slots", "retrieval_heads", "retrieval_window")
    sizes = {name: int(each) for name, each in zip(names, found.groups(), strict=True) if each is not None}
    return {"preset": "exact", "num_slots": 0, **sizes}


def make_checkpoints(
    model: Path,
    rows: list[str],
    *,
    train: Path,
    recipe: str,
    steps: int | None,
    seed: int,
    folder: Path,
    calibration_tokens: int | None = None,
) -> Iterator[Path]:
    """Yield the checkpoint of every row, and the same trained, each made unless it is there.

    Args:
        model: the softmax model, which is also the teacher.
        rows: see `options_of`.
        train: text to calibrate and to train on.
        recipe: of the distillation, whose end-to-end stage alone is run.
        steps: its steps, instead of the recipe's; 0 trains nothing.
        seed: of the conversion and of the training.
        folder: where the checkpoints are.
        calibration_tokens: of the text; None takes the conversion's default.

    Raises:
        InputError: if a row names no options, if the model cannot be trained by the recipe, or if a row's checkpoint there
            was trained otherwise.
    """
    options = {row: options_of(row) | {"calibration_tokens": calibration_tokens} for row in rows}
    loaded = replace(Recipe.load(recipe), seed=seed)
    if rows and steps != 0:
        settings = loaded.with_steps(transfer=0, end_to_end=steps)
        config = AutoConfig.from_pretrained(model)
        settings.resolve(config, config.max_position_embeddings)  # an error now rather than after a conversion
        for row in rows:
            _check_training(folder / f"{row} trained", settings.end_to_end)
    folder.mkdir(parents=True, exist_ok=True)
    for row in rows:
        converted = folder / row
        if not converted.exists():
            report_of(convert, model, converted, calibrate_on=train, seed=seed, force=True, **options[row])
        yield converted
        trained = folder / f"{row} trained"
        if steps == 0:
            continue
        if not trained.exists():
            report_of(
                distill,
                converted,
                trained,
                teacher=model,
                data=train,
                recipe=loaded,
                transfer_steps=0,
                end_to_end_steps=steps,
                resume=training_folder(trained).exists(),
            )
        yield trained


def _check_training(trained: Path, asked: Stage) -> None:
    """Raise an `InputError` if a checkpoint is there that was trained with other settings than those asked for."""
    path = trained / "distillation.json"
    if not path.is_file():
        return
    found = asdict(Stage()) | json.loads(path.read_text(encoding="utf-8"))["recipe"]["end_to_end"]
    for name, value in asdict(asked).items():
        if value not in (None, "auto") and found[name] != value:
            raise InputError(
                f"{trained} was trained with {name} {found[name]}, and {value} is asked for. Pass the recipe that it was "
                "trained with, or another folder with --output."
            )
