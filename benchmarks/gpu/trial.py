"""The setting that all parts share, and trials that may fail: on a device where nothing has run, anything can."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

#: The entry of a result that says why there is none.
FAILED = "failed"
#: Characters of a reason that are kept.
LENGTH = 400


@dataclass(frozen=True)
class Setting:
    """What the parts run on.

    Attributes:
        dry: tiny shapes.
        device: of all tensors.
        output: folder for what is written.
        model: checkpoint to convert and time, or None for random weights.
        data: text to calibrate and train on, or None for the demo's.
    """

    dry: bool
    device: torch.device
    output: Path
    model: Path | None = None
    data: Path | None = None

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Precisions that are compared and timed."""
        return ("float32",) if self.dry else ("float32", "bfloat16")


def attempt(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a call returns, or ``{"failed": reason}``; failed memory is given back."""
    try:
        return call()
    except Exception as error:  # compilers, drivers and allocators raise what they like; every one is shown and counted
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return {FAILED: f"{type(error).__name__}: {' '.join(str(error).split())[:LENGTH]}"}


def failures(results: Any, where: str = "") -> list[tuple[str, str]]:
    """Return (place, reason) of all that failed in nested results."""
    if isinstance(results, dict):
        if FAILED in results:
            return [(where, results[FAILED])]
        return [each for name, value in results.items() for each in failures(value, f"{where} {name}".strip())]
    if isinstance(results, list):
        return [each for index, value in enumerate(results) for each in failures(value, f"{where} {index}")]
    return []
