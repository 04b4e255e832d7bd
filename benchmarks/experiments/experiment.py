"""What an experiment is, and its run: every row and seed trained and measured, a table and a picture of all."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console

from hf_rfa.convert.atomic_io import new_file
from hf_rfa.finetune.recipe import load_settings, merge

from .rows import settings_of, train

#: Options of a recipe as an experiment adds them: data, lengths.
Options = dict[str, Any]
#: Rows of an experiment by name, and of a row its runs, one a seed.
Results = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Column:
    """A column of the table: a measured value by its name, its title, and its format; ``chance`` is the level of chance."""

    value: str
    title: str
    format: str = ".2f"
    chance: str | None = None


@dataclass(frozen=True)
class Experiment:
    """An experiment.

    Attributes:
        recipe: the recipe of `hf-rfa finetune` that trains every row.
        rows: names of `benchmarks.experiments.rows.ROWS`.
        columns: of the table.
        prepare: writes the data into a folder, from another with data, and returns the options that name them.
        measure: returns the values of a trained checkpoint, given its folder and the options.
        chance: returns what a model that learned nothing would reach, by name, given the options.
        finish: called at the end with the folder of every row's first seed, its options and the folder of the output; returns
            values of rows that are measured side by side, such as speed, and draws pictures.
        draw: draws the results to a PNG file.
        settings: returns a recipe's settings for a row and a seed, given the folder for what the training starts from.
        seeds: of the training.
        options: of the recipe, that this experiment changes.
    """

    recipe: str
    rows: Sequence[str]
    columns: Sequence[Column]
    prepare: Callable[[Path | None, Path], Options]
    measure: Callable[[Path, Options], dict[str, float]]
    draw: Callable[[dict[str, Any], Path], None]
    chance: Callable[[Options], dict[str, float]] = lambda options: {}
    finish: Callable[[dict[str, Path], Options, Path], dict[str, dict[str, float]]] = lambda *given: {}
    settings: Callable[[str, dict[str, Any], Path, int], dict[str, Any]] = lambda row, recipe, work, seed: settings_of(
        row, recipe
    )
    seeds: Sequence[int] = (0, 1, 2)
    options: Mapping[str, Any] = field(default_factory=dict)


def run(
    experiment: Experiment,
    name: str,
    *,
    data: Path | None,
    work: Path,
    output: Path,
    small: bool,
    rows: Sequence[str],
    seeds: Sequence[int],
    processes: int,
    changes: Mapping[str, Any],
) -> dict[str, Any]:
    """Train and measure what is missing, write ``NAME.json`` and ``NAME.png``, and return all results.

    Args:
        experiment: what to run.
        name: its name.
        data: folder with data, for an experiment that does not make its own.
        work: folder for prepared data and checkpoints.
        output: folder for the results.
        small: take the small variant of the recipe.
        rows: which rows.
        seeds: which seeds.
        processes: how many train a row together.
        changes: options of the recipe that win over all others.
    """
    work.mkdir(parents=True, exist_ok=True)
    output.mkdir(parents=True, exist_ok=True)
    own = {**experiment.options, **experiment.prepare(data, work), "disable_tqdm": "true"}
    recipe = merge(merge(load_settings(experiment.recipe, small=small), own), dict(changes))
    chance = experiment.chance(recipe)
    results: Results = {}
    console = Console()
    # All rows of a seed before the next seed: a run that is stopped has a whole comparison.
    for seed, row in product(seeds, rows):
        folder = work / f"{row}, seed {seed}"
        settings = {**experiment.settings(row, recipe, work, seed), "seed": seed}
        figures = train(settings, folder, processes=processes)
        measured = work / f"{folder.name}, measured.json"
        if not measured.is_file():
            with new_file(measured) as file:
                json.dump(experiment.measure(folder, recipe), file)
        values = json.loads(measured.read_text())
        results.setdefault(row, []).append({"seed": seed, "values": values, **figures})
        console.print(table(experiment, results, chance), markup=False, highlight=False, soft_wrap=True)
    together = experiment.finish({row: work / f"{row}, seed {seeds[0]}" for row in rows}, recipe, output)
    for row, values in together.items():
        for each in results[row]:
            each["values"] |= values
    # a path is of one machine alone: its last part is enough
    named = {
        key: Path(value).name if isinstance(value, str) and Path(value).exists() else value
        for key, value in recipe.items()
    }
    whole = {"experiment": name, "settings": named, "chance": chance, "rows": results}
    with new_file(output / f"{name}.json") as file:
        file.write(json.dumps(whole, indent=1, default=str) + "\n")
    experiment.draw(whole, output / f"{name}.png")
    console.print(table(experiment, results, chance), markup=False, highlight=False, soft_wrap=True)
    return whole


def table(experiment: Experiment, results: Results, chance: Mapping[str, float]) -> str:
    """Return the results as a Markdown table: means over seeds, with their standard deviation where there are several."""
    titles = [column.title for column in experiment.columns]
    lines = [f"| | {' | '.join(titles)} | parameters | CPU hours |", "|---|" + "---|" * (len(titles) + 2)]
    for row, runs in results.items():
        cells = [
            mean([each["values"].get(column.value) for each in runs], column.format) for column in experiment.columns
        ]
        size = f"{fmean(each['parameters'] for each in runs) / 1e6:.2f} M"
        lines.append(f"| {row} | {' | '.join(cells)} | {size} | {mean([each['cpu_hours'] for each in runs], '.2f')} |")
    if chance:
        levels = [chance.get(each.chance or "") for each in experiment.columns]
        cells = [
            "" if level is None else format(level, each.format)
            for level, each in zip(levels, experiment.columns, strict=True)
        ]
        lines.append(f"| chance | {' | '.join(cells)} | | |")
    return "\n".join(lines)


def mean(values: Sequence[float | None], form: str) -> str:
    """Return the mean of some values, with their standard deviation where there are several; nothing where one is missing."""
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return ""
    return format(fmean(known), form) + (f" ± {format(stdev(known), form)}" if len(known) > 1 else "")
