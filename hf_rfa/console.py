"""What the commands print to, and how they show progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

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


@contextmanager
def shown_steps() -> Iterator[Callable[[str | None, int], None]]:
    """Yield what `hf_rfa.convert.convert` and distillation tell of their steps: each step is shown as a bar of its own."""
    with progress_bar() as progress:
        tasks: list[TaskID] = []

        def finish() -> None:
            for task in tasks[-1:]:
                progress.update(task, completed=progress.tasks[task].total)

        def tell(step: str | None, number: int) -> None:
            if step is None:
                progress.advance(tasks[-1])
            else:
                finish()
                tasks.append(progress.add_task(step, total=number))

        yield tell
        finish()
