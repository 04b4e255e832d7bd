"""Run one experiment: ``python -m benchmarks.experiments NAME [--small] [--data FOLDER] --output FOLDER``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hf_rfa.finetune.recipe import read_overrides

from . import gate, images, language, listops, reviews, translation
from .experiment import run
from .rows import ROWS, SPECIAL

EXPERIMENTS = {
    "translation": translation.EXPERIMENT,
    "language": language.EXPERIMENT,
    "reviews": reviews.EXPERIMENT,
    "listops": listops.EXPERIMENT,
    "images": images.EXPERIMENT,
    "copying": gate.COPYING,
}


def _value(name: str, word: str) -> Any:
    """Return a number, a truth value or fields of a configuration as a recipe has them, and other words as they are."""
    if name == "config_overrides":
        return read_overrides(word)
    try:
        return json.loads(word)
    except json.JSONDecodeError:
        return word


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.experiments", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument("name", choices=EXPERIMENTS)
    parser.add_argument("--small", action="store_true", help="the recipe's small variant, for a processor")
    parser.add_argument("--data", type=Path, help="folder with the data, where the experiment does not make its own")
    parser.add_argument("--row", action="append", help="default: those of the experiment")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: those of the experiment")
    parser.add_argument("--processes", type=int, default=1, help="processes that train a row together, by accelerate")
    parser.add_argument("--work", type=Path, help="folder for checkpoints; default: NAME-work")
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/experiments"), help="folder for JSON and PNG"
    )
    arguments, others = parser.parse_known_args()  # the rest are options of hf-rfa finetune
    experiment = EXPERIMENTS[arguments.name]
    unknown = sorted({*(arguments.row or ())} - {*experiment.rows, *(ROWS.keys() - SPECIAL)})
    if unknown:
        parser.error(f"there is no row {unknown[0]!r}. There are: {', '.join(experiment.rows)}.")
    names = [word.removeprefix("--").replace("-", "_") for word in others[::2]]
    changes = {name: _value(name, word) for name, word in zip(names, others[1::2], strict=True)}
    run(
        experiment,
        arguments.name,
        data=arguments.data,
        work=arguments.work or Path(f"{arguments.name}-work"),
        output=arguments.output,
        small=arguments.small,
        rows=arguments.row or experiment.rows,
        seeds=arguments.seeds or experiment.seeds,
        processes=arguments.processes,
        changes=changes,
    )


if __name__ == "__main__":
    main()
