"""What the commands print to, and how they show progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

console = Console()
errors = Console(stderr=True)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Show progress, with the time gone and an estimate of the time left."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=errors) as progress:
        yield progress
