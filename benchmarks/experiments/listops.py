"""ListOps (Nangia & Bowman 2018; Tay et al. 2021) in a form that is learned here: expressions of 4 to 16 symbols.

Those of 500 to 2,000 symbols, the benchmark's, teach small models nothing in hours. Accuracy is that of held-out expressions
of the same lengths, and of 17 to 32 symbols.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from ..synthetic import listops
from .classification import accuracy
from .experiment import Column, Experiment, Options
from .rows import USUAL

#: Least and most symbols of the expressions to train on, and of those held out.
LENGTHS, TWICE = (4, 16), (17, 32)
RANGES = {"right": LENGTHS, "right_twice": TWICE}
TRAINED_ON, HELD_OUT, BATCH = 64_000, 2000, 200


def expressions(count: int, lengths: tuple[int, int], seed: int) -> list[dict[str, Any]]:
    """Return expressions with their values."""
    return list(listops(count, min_length=lengths[0], max_length=lengths[1], seed=seed))


def held_out(lengths: tuple[int, int]) -> list[dict[str, Any]]:
    """Return held-out expressions of some lengths."""
    return expressions(HELD_OUT, lengths, seed=1)


def prepare(data: Path | None, work: Path) -> Options:
    """Write the expressions; none to train on is held out."""
    texts_held_out = {row["text"] for row in held_out(LENGTHS)}
    rows = {
        "train": [row for row in expressions(TRAINED_ON, LENGTHS, seed=0) if row["text"] not in texts_held_out],
        "evaluate": held_out(LENGTHS),
    }
    paths = {name: work / f"{name}.jsonl" for name in rows}
    for name, path in paths.items():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
    return {name: str(path) for name, path in paths.items()}


def measure(folder: Path, options: Options) -> dict[str, float]:
    """Return the share of right values, at the lengths of the training and at twice these."""
    return {name: accuracy(folder, held_out(lengths), BATCH) for name, lengths in RANGES.items()}


def chance(options: Options) -> dict[str, float]:
    """Return the share of the commonest value."""
    counts = {name: Counter(row["label"] for row in held_out(lengths)) for name, lengths in RANGES.items()}
    return {name: max(count.values()) / count.total() for name, count in counts.items()}


EXPERIMENT = Experiment(
    recipe="listops-short",
    rows=USUAL,
    columns=(
        Column("right", "right, 4 to 16 symbols", ".3f", "right"),
        Column("right_twice", "17 to 32 symbols", ".3f", "right_twice"),
    ),
    prepare=prepare,
    measure=measure,
    chance=chance,
    constants={"lengths": LENGTHS, "twice": TWICE, "held_out": HELD_OUT},
)
