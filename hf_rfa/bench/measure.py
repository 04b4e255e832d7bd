"""Time and peak memory of calls, and the load of the machine that they run on."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from torch.utils.benchmark import timer

from hf_rfa.process_memory import give_back_memory, process_bytes

#: Calls that `interleaved` makes first and does not count.
WARMUP_CALLS = 2
#: Seconds in which it is seen how busy the machine is.
SAMPLE = 0.2
#: Writing 5 to it resets the peak of a process's memory (Linux, ``man proc_pid_clear_refs``).
RESET = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Load:
    """Load of the machine, of the present one by default: made before a measurement, which is a load itself.

    Attributes:
        threads: torch's threads on a CPU.
        cores: cores of the machine.
        load: cores that other programs keep busy, seen for `SAMPLE` seconds in which this one waits.
    """

    threads: int = field(default_factory=lambda: torch.get_num_threads())
    cores: int = field(default_factory=lambda: os.cpu_count() or 1)
    load: float = field(default_factory=lambda: psutil.cpu_percent(SAMPLE) / 100 * (psutil.cpu_count() or 1))

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


def interleaved(calls: Mapping[str, Callable[[], object]], steps: int, warmup: int = WARMUP_CALLS) -> dict[str, float]:
    """Return the median milliseconds of some calls, made in turn ``steps`` times after ``warmup`` times not counted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for step in range(-warmup, steps):
        for name, call in calls.items():
            start = timer()  # when the accelerator has done what it was given
            call()
            if step >= 0:
                times[name].append(1000 * (timer() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Return the most bytes that one call takes in addition to what was allocated before it, such as weights.

    On an accelerator torch's allocations are counted, on a CPU the whole process, which Linux alone reports: None elsewhere.
    """
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        call()
        return torch.accelerator.max_memory_allocated(device) - before
    give_back_memory()  # freed memory that the process keeps would be reused without being counted
    try:
        RESET.write_text("5")
        before = process_bytes()
    except OSError:
        call()
        return None
    call()
    return process_bytes("VmHWM") - before
