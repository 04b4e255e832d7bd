"""Tables and pictures of timed points."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from matplotlib.figure import Figure
from rich.table import Table

from .tasks import Point

COLORS = {"softmax": "#b3432b", "RFA": "#1f6f8b"}
STYLES = {"": "-", "static cache": ":", "compiled": "--"}
TITLES = {"decoding": "one decoding step", "prefill": "prefill", "training": "training step"}
UNITS = {"decoding": "position", "prefill": "tokens", "training": "tokens"}
MEMORY = {"decoding": "cache", "prefill": "peak", "training": "peak"}


def table(points: Sequence[Point], caption: str | None = None) -> Table:
    """Return the points of one task as a table, a row per contestant; the caption says how they were measured.

    "speed-up" is the time of the fastest softmax contestant over the row's.
    """
    task = points[0].task
    shown = Table(title=TITLES[task], caption=caption)
    position = f"source, {UNITS[task]}" if points[0].source else UNITS[task]
    for head in ("batch", position, "", "ms", "tokens/s", "speed-up", f"{MEMORY[task]}, MiB"):
        shown.add_column(head, justify="right" if head else "left", no_wrap=not head)
    for point in points:
        position = (f"{point.source:,}, " if point.source else "") + f"{point.length:,}"
        softmax = min(time for name, time in point.milliseconds.items() if name.startswith("softmax"))
        tokens = point.batch * (1 if task == "decoding" else point.length)
        for name, time in point.milliseconds.items():
            size = f"{point.cache_bytes[name] / 2**20:,.1f}" if name in point.cache_bytes else ""
            speeds = f"{time:,.1f}", f"{1000 * tokens / time:,.0f}", f"{softmax / time:.2f} ×"
            shown.add_row(f"{point.batch}", position, name, *speeds, size)
        shown.add_section()
    return shown


def plot(points: Sequence[Point], path: Path, title: str) -> None:
    """Draw the times of one task to a PNG, a panel per batch and source, and the memory of the first of them."""
    groups = [list(group) for _, group in groupby(points, key=lambda point: (point.source, point.batch))]
    panels = [(group, False) for group in groups] + [(group, True) for group in groups[:1] if group[0].cache_bytes]
    figure = Figure(figsize=(4.8 * len(panels), 3.6), layout="tight")
    for axes, (group, memory) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        first, lengths = group[0], [point.length for point in group]
        for name in first.cache_bytes if memory else first.milliseconds:
            model, _, variant = name.partition(", ")
            values = [point.cache_bytes[name] / 2**20 if memory else point.milliseconds[name] for point in group]
            axes.plot(lengths, values, STYLES[variant], marker="o", color=COLORS[model], label=name)
        source = f", source {first.source:,}" if first.source else ""
        axes.set_title(f"batch {first.batch}{source}", fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths], fontsize=7)
        axes.set(xlabel=UNITS[first.task], ylabel=f"{MEMORY[first.task]}, MiB" if memory else "ms")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)
