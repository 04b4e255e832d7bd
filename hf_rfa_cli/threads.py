"""How many threads torch computes with: no more than there are free cores, since its threads wait for each other."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import psutil

#: What torch reads when it is imported.
VARIABLE = "OMP_NUM_THREADS"
#: Seconds in which it is seen how busy the machine is.
SAMPLE = 0.2
#: Numbers that command lines have named: the last one stays.
NAMED: list[int] = []


def busy_cores() -> float:
    """Return how many cores other programs keep busy, while this one waits."""
    return psutil.cpu_percent(interval=SAMPLE) / 100 * (psutil.cpu_count() or 1)


@dataclass(frozen=True)
class Load:
    """What stands beside times: torch's threads on a CPU, the machine's cores, and how many of them others keep busy."""

    threads: int
    cores: int
    load: float

    @classmethod
    def now(cls) -> Load:
        """Return the present load: before a measurement, which is a load itself."""
        import torch

        return cls(torch.get_num_threads(), os.cpu_count() or 1, busy_cores())

    def __str__(self) -> str:
        """Return a line for a caption."""
        return f"{self.threads} thread{'s' if self.threads > 1 else ''} on {self.cores} cores, {self.load:.1f} of them busy"

    def warning(self) -> str | None:
        """Return a warning if there are fewer free cores than threads, or None."""
        if self.load <= self.cores - self.threads + 0.5:
            return None
        return (
            f"{self}: other processes take cores that this needs. Threads then wait for each other at every operation, which "
            "slows a step of many small ones most, RFA's more than softmax's: no figure holds, and no ratio. Wait until the "
            "machine is idle, or time fewer threads, say with OMP_NUM_THREADS=1."
        )


def name_threads(number: int) -> None:
    """Set the number of torch's threads to one that a command line names."""
    NAMED.append(number)
    os.environ[VARIABLE] = str(number)
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(number)


def take_threads() -> str | None:
    """Set the number of torch's threads before it is imported, and return what there is to say of it, or None.

    They are as many as cores are free, at least one, and no more than `OMP_NUM_THREADS` says. Where a number was named, torch
    is imported already, or one of several processes starts, nothing is decided.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = os.environ.get(VARIABLE, "").partition(",")[0]
    usable = min(allowed, int(asked)) if asked.isdigit() and int(asked) else allowed
    if NAMED or "torch" in sys.modules or "RANK" in os.environ or usable == 1:
        return None
    threads = max(1, min(usable, round((psutil.cpu_count() or 1) - busy_cores())))
    if threads == usable:
        return None
    os.environ[VARIABLE] = str(threads)
    return f"other programs keep the cores busy: {threads} of {usable} threads (--threads N for another number)"
