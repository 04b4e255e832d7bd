"""How much memory a call takes at most."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from hf_rfa.memory import give_back_memory

#: Writing 5 to it sets the peak of a process's memory back (Linux, ``man proc_pid_clear_refs``).
RESET = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")


def peak_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """Return the bytes that a call took at most, beside what was in memory before, such as weights.

    Args:
        run: the call; it is made once.
        device: an accelerator, on which what torch allocates is counted, or the CPU, where all of the process is.

    Returns:
        None for the CPU where the system cannot tell: anywhere but on Linux.
    """
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        run()
        return torch.accelerator.max_memory_allocated(device) - before
    give_back_memory()  # what is free, but still the process's, would be used unseen
    try:
        RESET.write_text("5")
        before, _ = _status("VmRSS"), _status("VmHWM")
    except OSError:
        run()
        return None
    run()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    """Return one of the process's figures in bytes."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"{STATUS} has no {name}.")
