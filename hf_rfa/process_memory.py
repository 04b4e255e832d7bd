"""Memory of the process: how much it takes, and giving it back."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

#: What Linux says of the process.
STATUS = Path("/proc/self/status")


def process_bytes(name: str = "VmRSS") -> int:
    """Return the bytes of memory that the process takes, or its most with VmHWM; an OSError where the system is not Linux."""
    return next(1024 * int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))


def give_back_memory() -> None:
    """Return what has been freed to the operating system, where the C library is glibc; others do it by themselves.

    glibc keeps freed blocks of up to 32 MB for later, and most tensors of a calibration are smaller. What it keeps grows to
    several times what is in use, because aligned blocks of other sizes do not fit between the small ones that stay.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
