"""Tables of timed points."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from .tasks import Point

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
