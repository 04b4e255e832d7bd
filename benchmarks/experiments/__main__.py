"""Run one experiment: ``python -m benchmarks.experiments NAME [--small] [--data FOLDER] --output FOLDER``.

Options of ``hf-rfa finetune`` such as ``--max-steps 100`` win over the recipe's.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import yaml

from . import copying, images, language, listops, reviews, translation
from .experiment import run

EXPERIMENTS = {
    "translation": translation.EXPERIMENT,
    "language": language.EXPERIMENT,
    "reviews": reviews.EXPERIMENT,
    "listops": listops.EXPERIMENT,
    "images": images.EXPERIMENT,
    "copying": copying.EXPERIMENT,
}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=EXPERIMENTS)
    parser.add_argument("--small", action="store_true", help="the recipe's small variant, for a CPU")
    parser.add_argument("--data", type=Path, help="folder with the data, where the experiment does not make its own")
    parser.add_argument("--row", action="append", help="default: those of the experiment")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: those of the experiment")
    parser.add_argument("--work", type=Path, help="folder for checkpoints; default: NAME-work")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/experiments"), help="folder for JSON")
    arguments, others = parser.parse_known_args()  # the rest are options of hf-rfa finetune
    experiment = EXPERIMENTS[arguments.name]
    unknown = sorted({*(arguments.row or ())} - {*experiment.rows})
    if unknown:
        parser.error(f"there is no row {unknown[0]!r}. There are: {', '.join(experiment.rows)}.")
    names = [word.removeprefix("--").replace("-", "_") for word in others[::2]]
    values = [yaml.safe_load(word) for word in others[1::2]]
    run(
        experiment,
        arguments.name,
        data=arguments.data,
        work=arguments.work or Path(f"{arguments.name}-work"),
        output=arguments.output,
        small=arguments.small,
        rows=arguments.row or experiment.rows,
        seeds=arguments.seeds or experiment.seeds,
        changes=dict(zip(names, values, strict=True)),
    )


if __name__ == "__main__":
    main()
