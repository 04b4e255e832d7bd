"""Tables and pictures of timed points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from matplotlib.figure import Figure
from rich.table import Table

from .tasks import Point

COLORS = {"softmax": "#b3432b", "RFA": "#1f6f8b"}
STYLES = {"": "-", "static cache": ":", "compiled": "--"}
TITLES = {"decoding": "one decoding step", "prefill": "prefill", "training": "training step"}
UNITS = {"decoding": "position", "prefill": "tokens", "training": "tokens"}


def table(points: Sequence[Point], caption: str | None = None) -> Table:
    """Return the points of one task as a table, a row per contestant.

    "speed-up" is the time of the fastest softmax contestant over the row's.

    Args:
        points: of one task.
        caption: says how they were measured.
    """
    task = points[0].task
    columns: dict[str, Callable[[Point, str], str]] = {
        "batch": lambda point, _: f"{point.batch}",
        UNITS[task]: lambda point, _: f"{point.length:,}",
        "": lambda _, name: name,
        "ms": lambda point, name: f"{point.milliseconds[name]:,.1f}",
        "tokens/s": lambda point, name: (
            f"{1000 * point.batch * (1 if task == 'decoding' else point.length) / point.milliseconds[name]:,.0f}"
        ),
        "speed-up": lambda point, name: f"{point.softmax_milliseconds / point.milliseconds[name]:.2f} ×",
    }
    if any(point.source for point in points):
        columns = {"source": lambda point, _: f"{point.source:,}"} | columns
    if points[0].cache_bytes:
        head = "cache, MiB" if task == "decoding" else "peak, MiB"
        columns[head] = lambda point, name: (
            f"{point.cache_bytes[name] / 2**20:,.1f}" if name in point.cache_bytes else ""
        )
    shown = Table(title=TITLES[task], caption=caption)
    for column in columns:
        shown.add_column(column, justify="right" if column else "left", no_wrap=not column)
    for point in points:
        for name in point.milliseconds:
            shown.add_row(*(cell(point, name) for cell in columns.values()))
        shown.add_section()
    return shown


def plot(points: Sequence[Point], path: Path, title: str) -> None:
    """Draw the times of one task to a PNG, a panel per batch and source, and the memory of the first of them."""
    groups = [list(group) for _, group in groupby(points, key=lambda point: (point.source, point.batch))]
    memory = bool(points[0].cache_bytes)
    figure = Figure(figsize=(4.8 * (len(groups) + memory), 3.6))
    panels = figure.subplots(1, len(groups) + memory, squeeze=False)[0]
    for axes, group in zip(panels, [*groups, *groups[:memory]], strict=True):
        lengths, first = [point.length for point in group], group[0]
        times = memory is False or axes is not panels[-1]
        for name in first.milliseconds if times else (each for each in COLORS if each in first.cache_bytes):
            model, _, variant = name.partition(", ")
            values = [point.milliseconds[name] if times else point.cache_bytes[name] / 2**20 for point in group]
            axes.plot(lengths, values, STYLES[variant], marker="o", color=COLORS[model], label=name)
        what = "" if times else "cache, " if first.task == "decoding" else "peak memory, "
        source = f", source {first.source:,}" if first.source else ""
        axes.set_title(f"{what}batch {first.batch}{source}", fontsize=9)
        axes.set_ylabel("ms" if times else "MiB")
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths], fontsize=7)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(UNITS[first.task])
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
