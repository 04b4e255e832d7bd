"""Output and progress bars of the commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

console = Console()
errors = Console(stderr=True)


def warn(message: str) -> None:
    """Print a warning on stderr."""
    errors.print(f"warning: {message}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def progress_bar() -> Progress:
    """Return a progress bar on stderr, with the time elapsed and an estimate of the time left."""
    bar, count = BarColumn(), MofNCompleteColumn()
    return Progress(
        TextColumn("{task.description}"), bar, count, TimeElapsedColumn(), TimeRemainingColumn(), console=errors
    )


@contextmanager
def shown_count(description: str) -> Iterator[Callable[[int, int], None]]:
    """Show one bar, and yield the function that sets it to (done, total)."""
    with progress_bar() as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def shown_steps() -> Iterator[Callable[[str | None, int], None]]:
    """Show a bar per step, and yield the ``progress`` argument of `hf_rfa.convert.convert` and of distillation."""
    with progress_bar() as progress:

        def finish() -> None:
            for task in progress.tasks[-1:]:
                progress.update(task.id, completed=task.total)

        def report(step: str | None, number: int) -> None:
            if step is None:
                progress.advance(progress.task_ids[-1])
            else:
                finish()
                progress.add_task(step, total=number)

        yield report
        finish()
