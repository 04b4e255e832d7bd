"""How many threads torch computes with: no more than there are free cores, since its threads wait for each other."""

from __future__ import annotations

import os
import sys

import psutil

#: What torch reads when it is imported.
VARIABLE = "OMP_NUM_THREADS"
#: Seconds in which it is seen how busy the machine is.
SAMPLE = 0.2
#: Numbers that command lines have named: the last one stays.
NAMED: list[int] = []


def free_cores() -> float:
    """Return how many cores other programs leave free, while this one waits."""
    cores = psutil.cpu_count() or 1
    return cores * (1 - psutil.cpu_percent(interval=SAMPLE) / 100)


def usable_cores() -> int:
    """Return how many threads torch would take by itself."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = os.environ.get(VARIABLE, "").partition(",")[0]
    return min(allowed, int(asked)) if asked.isdigit() and int(asked) else allowed


def take_threads(asked: int | None = None) -> str | None:
    """Set the number of torch's threads before it is imported.

    By default these are as many as cores are free, at least one, and no more than `OMP_NUM_THREADS` says. Where torch is
    imported already, or one of several processes starts, nothing is decided by itself.

    Args:
        asked: the number; None for the default.

    Returns:
        What there is to say, or None.
    """
    if asked is not None:
        NAMED.append(asked)
        os.environ[VARIABLE] = str(asked)
        if "torch" in sys.modules:
            import torch

            torch.set_num_threads(asked)
        return None
    usable = usable_cores()
    if NAMED or "torch" in sys.modules or "RANK" in os.environ or usable == 1:
        return None
    threads = max(1, min(usable, round(free_cores())))
    if threads == usable:
        return None
    os.environ[VARIABLE] = str(threads)
    return f"other programs keep the cores busy: {threads} of {usable} threads (--threads N for another number)"
