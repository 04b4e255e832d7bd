"""The checkpoints of `benchmarks.memory`: converted, and trained on the same tokens in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_rfa.convert import convert
from hf_rfa.errors import InputError
from hf_rfa.finetune.distill import distill
from hf_rfa.finetune.run_folder import training_folder
from hf_rfa_cli.console import report_of


def options_of(row: str) -> dict[str, Any]:
    """Return the options of the conversion that a row names: ``64`` for a memory, ``31+4+28`` for W + S + K tokens.

    Raises:
        InputError: if it is neither.
    """
    parts = row.split("+")
    if not all(part.isdigit() for part in parts) or len(parts) > 3:
        raise InputError(f"a row is a memory in tokens such as 64, or window+sinks+slots such as 31+4+28, got {row!r}.")
    if len(parts) == 1:
        return {"memory": int(row)}
    sizes = dict(zip(("window_size", "num_sinks", "num_slots"), map(int, parts), strict=False))
    return {"feature_map": "none", **sizes}


def make_checkpoints(
    model: Path, rows: list[str], *, train: Path, recipe: str, steps: int | None, folder: Path
) -> Iterator[Path]:
    """Yield the checkpoint of every row, and the same trained, each made unless it is there.

    Args:
        model: the softmax model, which is also the teacher.
        rows: see `options_of`.
        train: text to calibrate and to train on.
        recipe: of the distillation, whose end-to-end stage alone is run.
        steps: its steps, instead of the recipe's; 0 trains nothing.
        folder: where the checkpoints are.
    """
    options = {row: options_of(row) for row in rows}
    folder.mkdir(parents=True, exist_ok=True)
    for row in rows:
        converted = folder / row
        if not converted.exists():
            report_of(convert, model, converted, calibrate_on=train, **options[row])
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
                recipe=recipe,
                transfer_steps=0,
                end_to_end_steps=steps,
                resume=training_folder(trained).exists(),
            )
        yield trained
