"""The folder of a training in progress: its place, its checkpoints and its settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_rfa.errors import InputError
from hf_rfa.io.atomic_io import check_destination, new_file


def training_folder(destination: Path) -> Path:
    """Return the folder beside ``destination`` that holds the Trainer's checkpoints until training is finished."""
    return destination.resolve().parent / f".{destination.name}.training"


def check_run(destination: Path, *, sources: tuple[Path, ...], resume: bool, overwrite: bool) -> Path:
    """Return the training folder of a run.

    Raises:
        InputError: as `check_destination`; if there is such a folder and the run is not to be resumed, or the reverse.
    """
    check_destination(destination, overwrite=overwrite, sources=sources)
    work = training_folder(destination)
    if work.exists() and not resume:
        raise InputError(f"{work} holds an interrupted run. Pass --resume to continue it, or remove it.")
    if resume and not work.exists():
        raise InputError(f"there is no interrupted run to resume: {work} does not exist.")
    return work


def last_checkpoint(work: Path) -> str | None:
    """Return the folder of the Trainer's last whole checkpoint, or None if there is none yet.

    The Trainer writes into the folder itself, ``trainer_state.json`` last: a folder without it was being written when the
    run was killed.
    """
    checkpoints = []
    for folder in work.glob("checkpoint-*"):
        try:
            state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            continue
        checkpoints.append((state["global_step"], str(folder)))
    return max(checkpoints)[1] if checkpoints else None


def check_settings(work: Path, settings: dict[str, Any], *, resume: bool) -> None:
    """Write the settings of a run into its folder; raise an `InputError` if the interrupted run there had others."""
    path, now = work / "settings.json", json.loads(json.dumps(settings))
    if not path.exists():  # of an interrupted run too, if it was killed before
        work.mkdir(parents=True, exist_ok=resume)
        with new_file(path) as file:
            json.dump(settings, file, indent=2)
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    changed = [name for name in now if now[name] != before.get(name)]
    if changed:
        raise InputError(
            f"the interrupted run in {work} had other settings: {', '.join(changed)} "
            f"({before.get(changed[0])} there, {now[changed[0]]} here). Resume it with the same, or remove that folder."
        )
