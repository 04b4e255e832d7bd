"""Giving memory back."""

from __future__ import annotations

import ctypes
import sys


def give_back_memory() -> None:
    """Return what has been freed to the operating system, where the C library is glibc; others do it by themselves.

    glibc keeps freed blocks of up to 32 MB for later, and most tensors of a calibration are smaller. What it keeps grows to
    several times what is in use, because aligned blocks of other sizes do not fit between the small ones that stay.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
