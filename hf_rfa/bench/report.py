"""Tables and pictures of what was timed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.table import Table

from .tasks import Point

COLOURS = {"softmax": "#b3432b", "RFA": "#1f6f8b"}
STYLES = {"": "-", ", static cache": ":", ", compiled": "--"}
UNITS = {"decoding": "position", "prefill": "tokens", "training": "tokens"}


def table(points: Sequence[Point], caption: str | None = None) -> Table:
    """Return the points of one task as a table to print, a row a contestant; the caption says how they were measured.

    "speed-up" is the time of the fastest softmax contestant over the row's, "/ floor" the row's over the least possible one.
    """
    task = points[0].task
    shown = Table(
        title={"decoding": "one decoding step", "prefill": "prefill", "training": "step of training"}[task],
        caption=caption,
    )
    columns = {
        "batch": any(point.batch != points[0].batch for point in points),
        "source": any(point.source for point in points),
        UNITS[task]: True,
        "": True,
        "ms": True,
        "tokens/s": True,
        "speed-up": True,
        "cache, MiB" if task == "decoding" else "peak, MiB": bool(points[0].cache_bytes),
        "/ floor": bool(points[0].floor),
    }
    for column, wanted in columns.items():
        if wanted:
            shown.add_column(column, justify="left" if not column else "right")
    for point in points:
        tokens = point.batch * (1 if task == "decoding" else point.length)
        for name, taken in point.milliseconds.items():
            cells = [f"{point.batch}", f"{point.source:,}", f"{point.length:,}", name, f"{taken:,.1f}"]
            cells += [f"{1000 * tokens / taken:,.0f}", f"{point.milliseconds[point.softmax] / taken:.2f} ×"]
            cells += [f"{point.cache_bytes[name] / 2**20:,.1f}" if point.cache_bytes else ""]
            cells += [f"{taken / point.floor[name]:.2f} ×" if point.floor else ""]
            shown.add_row(*(cell for cell, wanted in zip(cells, columns.values(), strict=True) if wanted))
        shown.add_section()
    return shown


def plot(points: Sequence[Point], path: Path, title: str) -> None:
    """Draw the times of one task, one panel a batch and source, and beside them the caches, to a PNG.

    The dotted grey line is the least time that the machine could take (decoding).
    """
    groups: dict[tuple[int, int], list[Point]] = {}
    for point in points:
        groups.setdefault((point.batch, point.source), []).append(point)
    task, caches = points[0].task, bool(points[0].cache_bytes)
    figure = Figure(figsize=(4.8 * (len(groups) + caches), 3.6))
    panels = figure.subplots(1, len(groups) + caches, squeeze=False)[0]
    for axes, ((batch, source), group) in zip(panels, groups.items(), strict=False):
        lengths = [point.length for point in group]
        for name in group[0].milliseconds:
            base = name.partition(",")[0]
            values = [point.milliseconds[name] for point in group]
            style = STYLES[name.removeprefix(base)]
            axes.plot(lengths, values, style, marker="o", color=COLOURS[base], label=name)
        if group[0].floor:
            axes.plot(lengths, [point.floor["RFA"] for point in group], ":", color="#888888", label="RFA, floor")
        axes.set_ylabel("ms")
        axes.set_title(f"batch {batch}" + (f", source {source:,}" if source else ""), fontsize=9)
    if caches:
        axes, group = panels[-1], next(iter(groups.values()))
        for name in ("softmax", "RFA"):
            values = [point.cache_bytes[name] / 2**20 for point in group]
            axes.plot([point.length for point in group], values, marker="o", color=COLOURS[name], label=name)
        axes.set_ylabel("MiB")
        axes.set_title(f"{'cache' if task == 'decoding' else 'peak memory'}, batch {group[0].batch}", fontsize=9)
    for axes in panels:
        ticks = sorted({point.length for point in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=7)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(UNITS[task])
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
