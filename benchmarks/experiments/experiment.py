"""What an experiment is, and its run: every row and seed trained and measured, a table and a picture of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console

from hf_rfa.errors import InputError
from hf_rfa.evaluation.cards import markdown_table
from hf_rfa.finetune.recipe import load_settings, merge

from ..figures import print_as_is
from .results import described, load, save, values_of
from .rows import PROCESSOR, ROWS, settings_of, train

#: Options of a recipe as an experiment adds them: data, lengths.
Options = dict[str, Any]
#: Rows of an experiment by name, and of a row its runs, one a seed.
Results = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Column:
    """A column of the table: a measured value by its name, its title, and its format.

    ``chance`` is the level of chance, by name. A value that is measured ``side_by_side`` comes from `Experiment.finish`.
    """

    value: str
    title: str
    format: str = ".2f"
    chance: str | None = None
    side_by_side: bool = False


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
        finish: called at the end with the checkpoint of every row's first seed, as far as there is one, the options and the
            folder of the output; returns values of rows that are measured side by side, such as speed, and draws pictures.
        draw: draws the results to a PNG file.
        settings: returns a recipe's settings for a row and a seed, given the folder for what the training starts from.
        seeds: of the training: they draw weights, random vectors and the order of the data.
        options: of the recipe, that this experiment changes.
        constants: what else every figure depends on, by name.
    """

    recipe: str
    rows: Sequence[str]
    columns: Sequence[Column]
    prepare: Callable[[Path | None, Path], Options]
    measure: Callable[[Path, Options], dict[str, float]]
    draw: Callable[[dict[str, Any], Path], None]
    chance: Callable[[Options], dict[str, float]] = lambda options: {}
    finish: Callable[[dict[str, Path], Options, Path], dict[str, dict[str, float]]] = lambda folders, options, output: {}
    settings: Callable[[str, dict[str, Any], Path, int], dict[str, Any]] = lambda row, recipe, work, seed: settings_of(
        row, recipe
    )
    seeds: Sequence[int] = (0, 1, 2)
    options: Mapping[str, Any] = field(default_factory=dict)
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
    processes: int,
    changes: Mapping[str, Any],
) -> dict[str, Any]:
    """Train and measure what is missing, and return all results.

    ``NAME.json`` and ``NAME.png`` are written after every run. Runs that ``NAME.json`` holds are taken from it, with or
    without their checkpoints, if it was made with the same settings.

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

    Raises:
        InputError: if ``NAME.json`` was made with other settings, or if another command is training the same.
    """
    work.mkdir(parents=True, exist_ok=True)
    output.mkdir(parents=True, exist_ok=True)
    options = {**experiment.options, **experiment.prepare(data, work), "disable_tqdm": "true"}
    recipe = merge(merge(load_settings(experiment.recipe, small=small), options), dict(changes))
    settings = {**described(recipe), **experiment.constants, "processes": processes}
    path, console = output / f"{name}.json", Console()
    whole: dict[str, Any] = {"experiment": name, "settings": settings, "chance": experiment.chance(recipe)}
    whole |= load(path, settings=settings, changes=ROWS)
    # All rows of a seed before the next seed: a run that is stopped has a whole comparison.
    for seed, row in product(seeds, rows):
        if any(run["seed"] == seed for run in whole["rows"].get(row, ())):
            console.print(f"{row}, seed {seed}: taken from {path}.", highlight=False)
            continue
        folder = work / f"{row}, seed {seed}"
        with _alone(folder):
            figures = train({**experiment.settings(row, recipe, work, seed), "seed": seed}, folder, processes=processes)
            run = {"seed": seed, "change": ROWS.get(row), "values": experiment.measure(folder, recipe), **figures}
        whole |= load(path, settings=settings, changes=ROWS)  # another process may have added rows
        whole["rows"] = _with_run(whole["rows"], row, run, [*experiment.rows, *rows])
        _write(experiment, whole, path)
        print_as_is(table(experiment, whole), console)
    together = _measure_together(experiment, whole, recipe, work, output, console)
    whole |= load(path, settings=settings, changes=ROWS)
    whole["side_by_side"] |= together
    _write(experiment, whole, path)
    print_as_is(table(experiment, whole), console)
    return whole


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other commands from training what goes into a folder, until the block or the process ends."""
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        acquired = lock.acquire(timeout=0)
    except Timeout as error:
        raise InputError(f"another command is training {folder}. Wait for it, or pass another --work.") from error
    with acquired:
        yield


def _with_run(results: Results, row: str, run: dict[str, Any], order: Sequence[str]) -> Results:
    """Return results with one more run: rows in a given order, the runs of a row by seed."""
    runs = [each for each in results.get(row, ()) if each["seed"] != run["seed"]]
    found = {**results, row: sorted([*runs, run], key=lambda each: each["seed"])}
    return {name: found[name] for name in [*dict.fromkeys(order), *found] if name in found}


def _write(experiment: Experiment, whole: dict[str, Any], path: Path) -> None:
    save(path, whole)
    experiment.draw(whole, path.with_suffix(".png"))


def _measure_together(
    experiment: Experiment, whole: dict[str, Any], recipe: Options, work: Path, output: Path, console: Console
) -> dict[str, Any]:
    """Return values of rows that are measured side by side, unless every row has them; say which have no checkpoint."""
    what = ", ".join(column.title for column in experiment.columns if column.side_by_side)
    measured, rows = whole["side_by_side"], whole["rows"]
    if not what or rows.keys() <= measured.keys():
        return {}
    folders = {row: work / f"{row}, seed {runs[0]['seed']}" for row, runs in rows.items()}
    there = {row: folder for row, folder in folders.items() if (folder / "config.json").is_file()}
    for row in rows.keys() - there.keys():
        state = "of an earlier run" if row in measured else "missing"
        console.print(f"{row}: there is no checkpoint in {work}, so {what} is {state}.", highlight=False)
    found = experiment.finish(there, recipe, output) if there else {}
    return {row: {**values, "measured_with": list(found)} for row, values in found.items()}


def table(experiment: Experiment, whole: Mapping[str, Any]) -> str:
    """Return the results as a Markdown table: means over seeds, with their standard deviation where there are several."""
    titles = [column.title for column in experiment.columns]
    last = ("parameters", "tokens", "CPU minutes", "seeds")
    lines = []
    for row, runs in whole["rows"].items():
        cells = [mean(values_of(whole, row, column.value), column.format) for column in experiment.columns]
        cells += [f"{fmean(each[name] for each in runs) / 1e6:.2f} M" for name in ("parameters", "tokens")]
        cells += [_minutes(runs), str(len(runs))]
        lines.append([row, *cells])
    if chance := whole["chance"]:
        levels = [chance.get(each.chance or "") for each in experiment.columns]
        cells = [
            "" if level is None else format(level, each.format)
            for level, each in zip(levels, experiment.columns, strict=True)
        ]
        lines.append(["chance", *cells, *[""] * len(last)])
    return markdown_table(["", *titles, *last], lines)


def _minutes(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the minutes of processor time by device: beside an accelerator they are few, and say nothing of its own time."""
    devices = dict.fromkeys(run.get("device", PROCESSOR) for run in runs)
    parts = []
    for device in devices:
        minutes = [60 * run["cpu_hours"] for run in runs if run.get("device", PROCESSOR) == device]
        parts.append(mean(minutes, ".1f") + ("" if device == PROCESSOR else f" beside {device}"))
    return "; ".join(parts)


def mean(values: Sequence[float | None], form: str) -> str:
    """Return the mean of some values, with their standard deviation where there are several; nothing where one is missing."""
    numbers = [value for value in values if value is not None]
    if len(numbers) < len(values) or not numbers:
        return ""
    return format(fmean(numbers), form) + (f" ± {format(stdev(numbers), form)}" if len(numbers) > 1 else "")
