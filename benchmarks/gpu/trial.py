"""Cases that may fail or come too late: on a device where nothing has run, anything can happen."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import Timer, timer

#: The entries of a case's figures that say why there are none.
FAILED, LEFT_OUT = "failed", "left out"
#: Characters of a reason that are kept.
REASON_LENGTH = 400
#: Seconds that have to be left for a case to begin.
LEAST_SECONDS = 5.0
#: What is known of all cases: by part, conditions and contestant.
Results = dict[str, dict[str, dict[str, dict[str, Any]]]]


@dataclass(frozen=True)
class Setting:
    """What the cases run on.

    Attributes:
        dry: tiny shapes, and nothing is compiled.
        device: of all tensors.
        model: checkpoint to convert, or None for random weights.
        data: text to calibrate on, or None for the demo's.
    """

    dry: bool
    device: torch.device
    model: Path | None = None
    data: Path | None = None

    @property
    def shape(self) -> str:
        """The models' that are timed, by name (`models.SHAPES`)."""
        return "tiny" if self.dry else "SmolLM2"


@dataclass(frozen=True)
class Case:
    """One thing to find out.

    Attributes:
        part: the table it belongs to.
        conditions: what it shares with those it is compared with.
        contestant: what it does not.
        run: returns the figures by name.
    """

    part: str
    conditions: str
    contestant: str
    run: Callable[[], dict[str, Any]]


def run(cases: Iterable[Case], results: Results, seconds: float, save: Callable[[], None]) -> None:
    """Run the cases that have no figures yet, for at most some seconds, and ``save`` after each.

    A case for which no time is left, or which does not end in time, is left out. So are all that come after one that breaks
    the device, which serves a process no more.
    """
    end, broken = time.monotonic() + seconds, False
    for case in cases:
        contestants = results.setdefault(case.part, {}).setdefault(case.conditions, {})
        if LEFT_OUT not in contestants.get(case.contestant, {LEFT_OUT: ""}):
            continue
        start = time.monotonic()
        if broken:
            figures = {LEFT_OUT: "the device was broken"}
        elif end - start < LEAST_SECONDS:
            figures = {LEFT_OUT: "the deadline"}
        else:
            figures = attempt(case.run, end - start)
            if FAILED in figures and time.monotonic() >= end:
                figures = {LEFT_OUT: "the deadline"}
            figures |= attempt(peak_memory) if FAILED not in figures else {}
            broken = FAILED in attempt(free_memory)
        contestants[case.contestant] = figures | {"seconds": time.monotonic() - start}
        save()


def attempt(call: Callable[[], dict[str, Any]], seconds: float | None = None) -> dict[str, Any]:
    """Return what a call returns, or ``{"failed": reason}``; after some seconds it is interrupted."""
    try:
        with interrupted_after(seconds):
            return call()
    except Exception as error:  # compilers, drivers and allocators raise what they like; every one is shown and counted
        return {FAILED: f"{type(error).__name__}: {' '.join(str(error).split())[:REASON_LENGTH]}"}


@contextmanager
def interrupted_after(seconds: float | None) -> Iterator[None]:
    """Raise a TimeoutError in the block after some seconds, and again every five: whoever compiles may catch it."""

    def stop(*_: object) -> None:
        raise TimeoutError("the deadline")

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds or 0, 5)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def peak_memory() -> dict[str, Any]:
    """Return the most GiB that were allocated on the device since `free_memory`."""
    return {"peak GiB": torch.cuda.max_memory_allocated() / 2**30} if torch.cuda.is_available() else {}


def free_memory() -> dict[str, Any]:
    """Give back what nobody refers to; raises an error if the device is broken."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return {}


def failures(results: Results) -> list[tuple[str, str]]:
    """Return (place, reason) of all cases that failed."""
    return [
        (f"{part}, {conditions}, {contestant}", figures[FAILED])
        for part, by_conditions in results.items()
        for conditions, contestants in by_conditions.items()
        for contestant, figures in contestants.items()
        if FAILED in figures
    ]


def milliseconds(call: Callable[[], object], steps: int) -> float:
    """Return the mean milliseconds of some calls, after two that are not counted."""
    calls = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return 1000 * calls.timeit(steps).mean


def seconds_of(call: Callable[[], object]) -> float:
    """Return the seconds of one call, until the device has done it."""
    start = timer()  # when the device has done what it was given
    call()
    return timer() - start
