"""Charts that several experiments share."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .results import values_of
from .rows import COLORS

#: A value of the runs, and its title.
Titled = tuple[str, str]


def draw_values(whole: dict[str, Any], path: Path, values: list[Titled], *, chance: str | None = None) -> None:
    """Draw a panel for each value that was measured: a line a row of the experiment, a point a seed; chance is dotted."""
    measured = {value for value, _ in values for row in whole["rows"] if set(values_of(whole, row, value)) != {None}}
    values = [each for each in values if each[0] in measured]
    figure = Figure(figsize=(1.5 + 3.4 * len(values), 0.9 + 0.42 * len(whole["rows"])), layout="tight")
    panels = figure.subplots(1, len(values), squeeze=False, sharey=True)[0]
    for axes, (value, title) in zip(panels, values, strict=True):
        for place, row in enumerate(whole["rows"]):
            found = [each for each in values_of(whole, row, value) if each is not None]
            axes.plot(found, [place] * len(found), "o", color=COLORS[row], markersize=5)
        axes.set_xlabel(title)
        axes.grid(axis="x", alpha=0.3)
    panels[0].set_yticks(range(len(whole["rows"])), list(whole["rows"]))
    panels[0].invert_yaxis()
    if chance in whole["chance"]:
        panels[0].axvline(whole["chance"][chance], color="#888888", linestyle="dotted")
    figure.savefig(path, dpi=130)


def draw_losses(axes: Axes, whole: dict[str, Any]) -> None:
    """Draw the training losses, the mean over seeds of every row."""
    for row, runs in whole["rows"].items():
        losses = [dict(each["losses"]) for each in runs]
        steps = sorted(set.intersection(*map(set, losses)))
        means = [fmean(each[step] for each in losses) for step in steps]
        axes.plot(steps, means, color=COLORS[row], linewidth=1, label=row)
    axes.set(xlabel="step", ylabel="training loss, nats")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, frameon=False)


def mark_values(axes: Axes, whole: dict[str, Any], values: list[str]) -> None:
    """Draw values side by side: a line a run, in its row's color, and the levels of chance dotted."""
    for row, runs in whole["rows"].items():
        for index, each in enumerate(runs):
            found = [each["values"].get(value) for value in values]
            axes.plot(
                range(len(values)), found, "o-", color=COLORS.get(row), markersize=4, label=None if index else row
            )
    levels = [whole["chance"].get(value) for value in values]
    if None not in levels:
        axes.plot(range(len(values)), levels, color="#888888", linestyle="dotted", label="chance")
    axes.set_xlim(-0.3, len(values) - 0.7)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, frameon=False)
