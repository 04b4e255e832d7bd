"""Figures that are written row by row, so that a run goes on where it was stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from hf_rfa.io.atomic_io import new_file


class RowFile:
    """A JSON file with a list of rows, each written as soon as it is measured.

    Attributes:
        rows: the rows of the file, those of earlier runs first.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else []

    def has(self, key: Mapping[str, Any]) -> bool:
        """Return whether there is a row with these entries."""
        return any(key.items() <= row.items() for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        """Add a row, and write the file."""
        self.rows.append(row)
        with new_file(self.path) as file:
            file.write(json.dumps(self.rows, indent=1) + "\n")


def print_as_is(text: str, console: Console | None = None) -> None:
    """Print a text whose lines are neither broken nor colored."""
    (console or Console()).print(text, markup=False, highlight=False, soft_wrap=True)
