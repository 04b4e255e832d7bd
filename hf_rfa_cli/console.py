"""Output and progress bars of the commands."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from .threads import take_threads

console = Console(markup=False, highlight=False)
errors = Console(stderr=True, markup=False, highlight=False)


def starting(what: str) -> None:
    """Say on stderr what a command does, before it imports torch, which takes seconds; of several processes one says it.

    Then torch's threads are chosen, and bars of transformers for what takes no time turned off.
    """
    if os.environ.get("RANK", "0") == "0":
        errors.print(f"{what} …", soft_wrap=True)
    if note := take_threads():
        errors.print(note, soft_wrap=True)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


def warn(message: str) -> None:
    """Print a warning on stderr."""
    errors.print(f"warning: {message}", style="yellow", soft_wrap=True)


def print_speed(what: str, tokens: int, seconds: float, cache: str = "") -> None:
    """Print how many tokens were read or written, and what the cache holds."""
    errors.print(f"{tokens:,} tokens {what}in {seconds:.2f} s ({tokens / seconds:,.1f} tokens/s){cache}")


class Warnings(logging.Handler):
    """Prints what hf_rfa's loggers warn of."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a warning on stderr, as the commands do."""
        warn(record.getMessage())


def _progress(*counts: ProgressColumn) -> Progress:
    """Return progress bars on stderr, with some counts, the time elapsed and an estimate of the time left."""
    columns = (BarColumn(), *counts, TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(TextColumn("{task.description}"), *columns, console=errors)


@contextmanager
def shown_count(description: str) -> Iterator[Callable[[int, int], None]]:
    """Show one bar, and yield the function that sets it to (done, total)."""
    with _progress(MofNCompleteColumn()) as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def shown_stream(
    description: str, begin: int
) -> Iterator[tuple[Callable[[int, int | None], None], Callable[[int], None]]]:
    """Show one bar, and yield the functions that set it to (bytes done, all or None), and to tokens after ``begin``."""
    with _progress(TaskProgressColumn(), TextColumn("{task.fields[count]}")) as progress:
        task, start = progress.add_task(description, total=None, count=""), time.perf_counter()

        def show_tokens(tokens: int) -> None:
            speed = (tokens - begin) / (time.perf_counter() - start)
            progress.update(task, count=f"{tokens - begin:,} tokens, {speed:,.0f}/s")

        yield lambda done, total: progress.update(task, completed=done, total=total), show_tokens


def report_of(work: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Do a conversion or a distillation with a bar per step, print the table of its report, and return the report."""
    with _progress(MofNCompleteColumn()) as progress:

        def finish() -> None:
            for task in progress.tasks[-1:]:
                progress.update(task.id, completed=task.total)

        def report_progress(step: str | None, number: int) -> None:
            if step is None:
                progress.advance(progress.task_ids[-1])
            else:
                finish()
                progress.add_task(step, total=number)

        report = work(*args, progress=report_progress, **options)
        finish()
    table = Table(show_header=False)
    for row in report.rows():
        table.add_row(*row)
    console.print(table)
    return report
