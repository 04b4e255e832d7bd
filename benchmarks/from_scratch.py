"""Models of one size trained from scratch on one budget: softmax, RFA and elu, by a recipe of `hf-rfa finetune`.

    python -m benchmarks.from_scratch wikitext103-scratch --small --tokenizer T --train TEXT --evaluate TEXT
    python -m benchmarks.from_scratch listops --small --lengths 1024 2048 4096 --output docs/lengths.json

The first form trains every row with the recipe and gives its metrics, steps per second and peak memory. The second trains
every row for a few steps on ListOps expressions of each length, for time and memory alone. Every row is a process of its
own, so that its peak memory is its own; what lies in ``--work`` is not done again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from hf_rfa.convert.atomic_io import new_file
from hf_rfa.finetune.recipe import load_settings, merge, to_words
from hf_rfa.finetune.synthetic import listops
from hf_rfa.models.configuration_rfa import RFAConfigMixin, RFASeq2SeqConfigMixin

RFA_FIELDS = {field.name for mixin in (RFAConfigMixin, RFASeq2SeqConfigMixin) for field in fields(mixin)}
#: What a row changes in the recipe's configuration; None for softmax attention.
ROWS: dict[str, dict[str, Any] | None] = {
    "softmax": None,
    "RFA-Gaussian": {"feature_map": "gaussian", "unit_norm": True, "gate": False},
    "RFA-arccos": {"feature_map": "arccos", "unit_norm": True, "gate": False},
    "RFA-Gate-Gaussian": {"feature_map": "gaussian", "unit_norm": True, "gate": True},
    "RFA-positive": {"feature_map": "positive", "unit_norm": False, "gate": False, "trainable_projection": True},
    "RFA-exponential": {"feature_map": "exponential", "unit_norm": False, "gate": False},
    "elu": {"feature_map": "elu", "num_features": None, "unit_norm": False, "gate": False},
}
DEFAULT_ROWS = ["softmax", "RFA-Gaussian", "RFA-arccos", "RFA-Gate-Gaussian", "elu"]
#: Steps of a run that measures time and memory at a length.
STEPS_AT_A_LENGTH = 8


def settings_of(row: str, recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe's settings for a row."""
    change = ROWS[row]
    if change is not None:
        return merge(recipe, {"config_overrides": change})
    shared = {name: value for name, value in recipe["config_overrides"].items() if name not in RFA_FIELDS}
    return {**recipe, "model_type": recipe["model_type"].removeprefix("rfa_"), "config_overrides": shared}


def train(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run `hf-rfa finetune` in a process of its own, and return its metrics and the peak of its memory."""
    measured = folder.parent / f"{folder.name}.json"
    if measured.is_file():
        return json.loads(measured.read_text())
    words = [
        sys.executable,
        "-m",
        "hf_rfa.cli",
        "finetune",
        *to_words(settings),
        "--output",
        str(folder),
        "--overwrite",
    ]
    with (folder.parent / f"{folder.name}.log").open("w") as log:
        actions = [(os.POSIX_SPAWN_DUP2, log.fileno(), number) for number in (1, 2)]
        process = os.posix_spawn(sys.executable, words, dict(os.environ), file_actions=actions)
        _, status, used = os.wait4(process, 0)
    if status:
        raise SystemExit(f"training ended with status {os.waitstatus_to_exitcode(status)}: see {log.name}.")
    found = json.loads((folder / "finetuning.json").read_text())
    result = {"metrics": found["metrics"], "log": found["log"], "peak_bytes": used.ru_maxrss * 1024}
    with new_file(measured) as file:
        json.dump(result, file)
    return result


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
    rows, console = arguments.row or DEFAULT_ROWS, Console()
    results: dict[str, Any] = {}
    for length in arguments.lengths or [None]:
        for row in rows:
            settings, name = settings_of(row, recipe), f"{arguments.recipe}, {row}"
            if length is not None:
                settings, name = _at_length(settings, length, arguments.work), f"{name}, {length}"
            results[row if length is None else f"{row}, {length}"] = train(settings, arguments.work / name)
            console.print(name, results[row if length is None else f"{row}, {length}"]["metrics"])
    console.print(_table(results))
    if arguments.output is not None:
        with new_file(arguments.output) as file:
            json.dump({"settings": _without_folders(recipe), "results": results}, file, indent=1)
        if arguments.lengths is None:
            _plot(results, arguments.output.with_suffix(".png"))


def _without_folders(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with names instead of the paths of files and folders, which are of one machine alone."""
    return {
        name: Path(value).name if isinstance(value, str) and Path(value).exists() else value
        for name, value in settings.items()
    }


def _at_length(settings: dict[str, Any], length: int, work: Path) -> dict[str, Any]:
    """Return settings that train for a few steps on rows of exactly ``length`` tokens, the end of a text included."""
    data = work / f"listops-{length}.jsonl"
    if not data.is_file():
        with new_file(data) as file:
            for row in listops(64, min_length=length - 1, max_length=length - 1, seed=0):
                file.write(json.dumps(row) + "\n")
    few = {"train": str(data), "block_length": length, "max_steps": STEPS_AT_A_LENGTH, "save_strategy": "no"}
    return merge({**settings, **few}, {"config_overrides": {"n_positions": length}})


def _table(results: dict[str, Any]) -> Table:
    names = [
        name
        for name in ("eval_perplexity", "eval_accuracy", "eval_bleu")
        if name in next(iter(results.values()))["metrics"]
    ]
    table = Table()
    for name in ("row", *names, "steps/s", "peak memory, MB"):
        table.add_column(name)
    for row, found in results.items():
        metrics = found["metrics"]
        cells = [f"{metrics[name]:.4g}" for name in names]
        table.add_row(row, *cells, f"{metrics['train_steps_per_second']:.3g}", f"{found['peak_bytes'] / 1e6:,.0f}")
    return table


def _plot(results: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    for row, found in results.items():
        points = [(entry["step"], entry["loss"]) for entry in found["log"] if "loss" in entry]
        axes.plot(*zip(*points, strict=True), label=row, linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, nats")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
