"""Time and peak memory of calls."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch.utils.benchmark import timer

from hf_rfa.process_memory import give_back_memory, process_bytes

#: Calls that `interleaved` makes first and does not count.
WARMUP_CALLS = 2
#: Writing 5 to it resets the peak of a process's memory (Linux, ``man proc_pid_clear_refs``).
RESET = Path("/proc/self/clear_refs")


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
