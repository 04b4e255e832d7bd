"""What an experiment is, and its run: every row and seed trained and measured, and a table of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console

from hf_rfa.evaluation.cards import markdown_table
from hf_rfa.finetune.recipe import load_settings, merge

from ..figures import print_as_is
from .results import described, load, save
from .rows import ROWS, settings_of, train

#: Options of a recipe as an experiment adds them: data, lengths.
Options = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """A column of the table: a measured value by its name, its title, and its format.

    ``chance`` is the level of chance, by name.
    """

    value: str
    title: str
    format: str = ".2f"
    chance: str | None = None


@dataclass(frozen=True)
class Experiment:
    """An experiment.

    Attributes:
        recipe: the recipe of `hf-rfa finetune` that trains every row.
        rows: names of `benchmarks.experiments.rows.ROWS`, or names that ``settings`` knows.
        columns: of the table.
        prepare: writes the data into a folder, from another with data, and returns the options that name them.
        measure: returns the values of a trained checkpoint, given its folder and the options.
        chance: returns what a model that learned nothing would reach, by name, given the options.
        settings: returns a recipe's settings for a row and a seed, given the folder for what the training starts from.
        seeds: of the training: they draw weights, random vectors and the order of the data.
        constants: what else every figure depends on, by name.
    """

    recipe: str
    rows: Sequence[str]
    columns: Sequence[Column]
    prepare: Callable[[Path | None, Path], Options]
    measure: Callable[[Path, Options], dict[str, float]]
    chance: Callable[[Options], dict[str, float]] = lambda options: {}
    settings: Callable[[str, dict[str, Any], Path, int], dict[str, Any]] = lambda row, recipe, work, seed: settings_of(
        row, recipe
    )
    seeds: Sequence[int] = (0, 1, 2)
    constants: Mapping[str, Any] = field(default_factory=dict)


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
    changes: Mapping[str, Any],
) -> dict[str, Any]:
    """Train and measure what is missing, and return all results.

    ``NAME.json`` is written after every run. Runs that it holds are taken from it if it was made with the same settings.

    Args:
        experiment: what to run.
        name: its name.
        data: folder with data, for an experiment that does not make its own.
        work: folder for prepared data and checkpoints.
        output: folder for the results.
        small: take the small variant of the recipe.
        rows: which rows.
        seeds: which seeds.
        changes: options of the recipe that win over all others.

    Raises:
        InputError: if ``NAME.json`` was made with other settings.
    """
    work.mkdir(parents=True, exist_ok=True)
    output.mkdir(parents=True, exist_ok=True)
    recipe = merge(load_settings(experiment.recipe, small=small), experiment.prepare(data, work))
    recipe = merge(recipe, dict(changes))
    settings = {**described(recipe), **experiment.constants}
    path, console = output / f"{name}.json", Console()
    whole: dict[str, Any] = {"experiment": name, "settings": settings, "chance": experiment.chance(recipe)}
    whole["rows"] = load(path, settings=settings, changes=ROWS)
    # All rows of a seed before the next seed: a run that is stopped has a whole comparison.
    for seed, row in product(seeds, rows):
        runs = whole["rows"].setdefault(row, [])
        if any(run["seed"] == seed for run in runs):
            console.print(f"{row}, seed {seed}: taken from {path}.", highlight=False)
            continue
        folder = work / f"{row}, seed {seed}"
        figures = train({**experiment.settings(row, recipe, work, seed), "seed": seed}, folder)
        values = experiment.measure(folder, recipe)
        runs.append({"seed": seed, "change": ROWS.get(row), "values": values, **figures})
        save(path, whole)
        print_as_is(table(experiment, whole), console)
    return whole


def table(experiment: Experiment, whole: Mapping[str, Any]) -> str:
    """Return the results as a Markdown table: means over seeds, with their standard deviation where there are several."""
    lines = []
    for row, runs in whole["rows"].items():
        values = {column: [run["values"].get(column.value) for run in runs] for column in experiment.columns}
        cells = [mean(of_column, column.format) for column, of_column in values.items()]
        cells += [f"{fmean(run[name] for run in runs) / 1e6:.2f} M" for name in ("parameters", "tokens")]
        lines.append([row, *cells, str(len(runs))])
    if chance := whole["chance"]:
        levels = [
            format(chance[column.chance], column.format) if column.chance else "" for column in experiment.columns
        ]
        lines.append(["chance", *levels, "", "", ""])
    titles = [column.title for column in experiment.columns]
    return markdown_table(["", *titles, "parameters", "tokens", "seeds"], lines)


def mean(values: Sequence[float | None], form: str) -> str:
    """Return the mean of some values, with their standard deviation where there are several; nothing where one is missing."""
    numbers = [value for value in values if value is not None]
    if len(numbers) < len(values):
        return ""
    return format(fmean(numbers), form) + (f" ± {format(stdev(numbers), form)}" if len(numbers) > 1 else "")
