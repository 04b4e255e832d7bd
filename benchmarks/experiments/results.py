"""The results of an experiment in one file, written after every run: what is finished is taken from it, on any machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_rfa.errors import InputError
from hf_rfa.io.atomic_io import new_file


def described(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that mean the same on every machine: a path is its last part and a digest of what is there."""
    return {
        name: f"{Path(value).name}, sha256 {_digest(Path(value))}"
        if isinstance(value, str) and Path(value).exists()
        else value
        for name, value in settings.items()
    }


def _digest(path: Path) -> str:
    """Return a digest of a file, or of all files in a folder and their names."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            digest.update(str(file.relative_to(path)).encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def load(path: Path, *, settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the runs that were measured so far by their row; none if there is no file.

    Args:
        path: of the file.
        settings: of the experiment, as `described` returns them.
        changes: what rows change in these, by row.

    Raises:
        InputError: if the results were made with other settings, or a row changed others.
    """
    if not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    _check_same(found["settings"], settings, f"{path} was made")
    for row, runs in found["rows"].items():
        for run in runs:
            _check_same({"attention": run["change"]}, {"attention": changes.get(row)}, f"{path} has a row {row}")
    return found["rows"]


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any], made: str) -> None:
    """Raise an `InputError` that names the first setting which differs from those that results were ``made`` with."""
    now = json.loads(json.dumps(now, default=str))  # as a file returns it
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            raise InputError(
                f"{made} with {name} {before.get(name)!r}, this run has {now.get(name)!r}. Results of one file share all "
                "settings: pass the same, or another --output."
            )


def save(path: Path, whole: Mapping[str, Any]) -> None:
    """Write results to a file."""
    with new_file(path) as file:
        file.write(json.dumps(whole, indent=1, default=str) + "\n")
