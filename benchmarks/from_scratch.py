"""Models of one size trained from scratch on one budget: softmax, RFA and elu, by a recipe of `hf-rfa finetune`.

    python -m benchmarks.from_scratch wikitext103-scratch --small --tokenizer T --train TEXT --evaluate TEXT
    python -m benchmarks.from_scratch listops --small --lengths 1024 2048 4096 --output docs/lengths.json

The first form trains every row with the recipe and gives its metrics, steps per second and peak memory. The second trains
every row for a few steps on ListOps expressions of each length, for time and memory alone. Every row runs in a process of
its own, which has its own peak of memory. A run whose result is in ``--work`` is not repeated.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from hf_rfa.finetune.recipe import load_settings, merge
from hf_rfa.io.atomic_io import new_file

from .experiments.charts import draw_losses
from .experiments.results import described
from .experiments.rows import ROWS, settings_of, train
from .synthetic import listops

DEFAULT_ROWS = ["softmax", "RFA-Gaussian", "RFA-arccos", "RFA-Gate-Gaussian", "elu"]
#: Steps of a run that measures time and memory at a length.
STEPS_AT_A_LENGTH = 8


def main() -> None:
    """Train the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipe", help="a recipe of hf-rfa finetune that starts from scratch")
    parser.add_argument("--small", action="store_true", help="the recipe's small variant")
    parser.add_argument("--row", action="append", choices=[*ROWS], help=f"default: {', '.join(DEFAULT_ROWS)}")
    parser.add_argument("--lengths", type=int, nargs="+", help="measure time and memory at these lengths instead")
    parser.add_argument("--work", type=Path, default=Path("from-scratch-work"), help="folder for checkpoints")
    parser.add_argument("--output", type=Path, help="JSON to write; the picture goes beside it")
    arguments, others = parser.parse_known_args()  # the rest are options of hf-rfa finetune
    names = [word.removeprefix("--") for word in others[::2]]
    recipe = merge(load_settings(arguments.recipe, small=arguments.small), dict(zip(names, others[1::2], strict=True)))
    recipe |= {"disable_tqdm": "true"}
    arguments.work.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for length, row in product(arguments.lengths or [None], arguments.row or DEFAULT_ROWS):
        settings, name = settings_of(row, recipe), row
        if length is not None:
            settings, name = at_length(settings, length, arguments.work), f"{row}, {length}"
        results[name] = train(settings, arguments.work / f"{arguments.recipe}, {name}")
        print_table({name: results[name]})
    print_table(results)
    if arguments.output is not None:
        with new_file(arguments.output) as file:
            json.dump({"settings": described(recipe), "results": results}, file, indent=1)
        if arguments.lengths is None:
            plot(results, arguments.output.with_suffix(".png"))


def at_length(settings: dict[str, Any], length: int, work: Path) -> dict[str, Any]:
    """Return settings that train for a few steps on rows of exactly ``length`` tokens, the end-of-text token included."""
    data = work / f"listops-{length}.jsonl"
    rows = listops(64, min_length=length - 1, max_length=length - 1, seed=0)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    few = {"train": str(data), "block_length": length, "max_steps": STEPS_AT_A_LENGTH, "save_strategy": "no"}
    return merge({**settings, **few}, {"config_overrides": {"n_positions": length}})


def print_table(results: dict[str, Any]) -> None:
    """Print metrics, speed and memory, a row each."""
    metrics = next(iter(results.values()))["metrics"]
    names = [name for name in ("eval_perplexity", "eval_accuracy", "eval_bleu") if name in metrics]
    table = Table("row", *names, "steps/s", "peak memory, MB")
    for row, found in results.items():
        cells = [f"{found['metrics'][name]:.4g}" for name in names]
        speed = found["metrics"]["train_steps_per_second"]
        table.add_row(row, *cells, f"{speed:.3g}", f"{found['peak_bytes'] / 1e6:,.0f}")
    Console().print(table)


def plot(results: dict[str, Any], path: Path) -> None:
    """Draw the training losses."""
    figure = Figure(figsize=(6, 4), layout="tight")
    draw_losses(figure.subplots(), {"rows": {row: [result] for row, result in results.items()}})
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
