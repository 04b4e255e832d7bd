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


def check_same(before: Mapping[str, Any], now: Mapping[str, Any], made: str, remedy: str) -> None:
    """Raise an `InputError` that names the first setting which differs from those that results were made with.

    Args:
        before: settings of the results.
        now: settings of this run.
        made: the results in words.
        remedy: what to do instead.
    """
    now = json.loads(json.dumps(now, default=str))  # as a file returns it
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            raise InputError(f"{made} with {name} {before.get(name)!r}, this run has {now.get(name)!r}. {remedy}")


def load(path: Path, *, settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was measured so far, empty if there is no file: ``rows`` with their runs, and values ``side_by_side``.

    Args:
        path: of the file.
        settings: of the experiment, as `described` returns them.
        changes: what rows change in these, by row.

    Raises:
        InputError: if the results were made with other settings, or a row changed others.
    """
    if not path.is_file():
        return {"rows": {}, "side_by_side": {}}
    found = json.loads(path.read_text(encoding="utf-8"))
    remedy = "Results of one file share all settings: pass the same, or another --output."
    check_same(found["settings"], settings, f"{path} was made", remedy)
    for row, runs in found["rows"].items():
        for run in runs:
            before, now = ({"attention": each} for each in (run["change"], changes.get(row)))
            check_same(before, now, f"{path} has a row {row}", remedy)
    return {name: found[name] for name in ("rows", "side_by_side")}


def save(path: Path, whole: Mapping[str, Any]) -> None:
    """Write results to a file, a run a line."""
    head = json.dumps({name: value for name, value in whole.items() if name != "rows"}, indent=1, default=str)
    rows = [
        f"  {json.dumps(row)}: [\n" + ",\n".join(f"   {json.dumps(run)}" for run in runs) + "\n  ]"
        for row, runs in whole["rows"].items()
    ]
    with new_file(path) as file:
        file.write(head.removesuffix("\n}") + ',\n "rows": {\n' + ",\n".join(rows) + "\n }\n}\n")


def values_of(whole: Mapping[str, Any], row: str, value: str) -> list[float | None]:
    """Return a measured value of a row: one a run, None where it is missing; or the one that was measured side by side."""
    together = whole["side_by_side"].get(row, {})
    return [together[value]] if value in together else [run["values"].get(value) for run in whole["rows"][row]]
