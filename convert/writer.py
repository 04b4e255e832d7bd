"""Writing a folder so that it is there whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from hf_rfa.errors import InputError


def check_destination(destination: Path, *, overwrite: bool, sources: tuple[Path, ...] = ()) -> None:
    """Raise a `InputError` if a folder cannot be written to ``destination``.

    Args:
        destination: the folder to be.
        overwrite: whether a folder that is there may be replaced.
        sources: folders that are read from, and so may not be replaced.
    """
    if any(destination.resolve() == source.resolve() for source in sources):
        raise InputError(f"{destination} is the source itself. Choose another destination.")
    if destination.is_symlink() or destination.is_file():
        raise InputError(f"{destination} is {'a link' if destination.is_symlink() else 'a file'}, not a folder.")
    if destination.is_dir() and any(destination.iterdir()):
        if not overwrite:
            raise InputError(f"{destination} exists and is kept. Choose another folder, or pass --overwrite.")
        if not (destination / "config.json").is_file():
            raise InputError(
                f"{destination} holds no checkpoint (no config.json), so --overwrite does not replace it. Choose another "
                "folder, or empty this one."
            )
    parent = destination.resolve().parent
    existing = next(path for path in (parent, *parent.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise InputError(f"cannot write to {existing}, where {destination} is to be.")


def check_space(destination: Path, num_bytes: int) -> None:
    """Raise a `InputError` if the disk of ``destination`` has less than ``num_bytes`` free."""
    parent = destination.resolve().parent
    existing = next(path for path in (parent, *parent.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise InputError(
            f"{existing} has {free / 1e9:.2f} GB free, but the result needs about {num_bytes / 1e9:.2f} GB. Free some "
            "space or choose another destination."
        )


@contextmanager
def new_folder(destination: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``destination``, and rename it to ``destination`` at the end.

    On any error or interrupt the folder is removed, and what was at ``destination`` before is still there.
    """
    destination = destination.resolve()
    destination.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", suffix=".partial", dir=destination.parent))
    try:
        yield work
        work.chmod(0o755)
        _replace(work, destination)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise InputError(f"the disk of {destination} is full; nothing was written. Free some space.") from error
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def new_file(destination: Path) -> Iterator[IO[str]]:
    """Open a text file (UTF-8) beside ``destination``, and rename it to ``destination`` at the end.

    On any error or interrupt the file is removed.
    """
    destination = destination.resolve()
    handle, name = tempfile.mkstemp(prefix=f".{destination.name}.", suffix=".partial", dir=destination.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            yield file
        os.chmod(name, 0o644)
        os.replace(name, destination)
    finally:
        Path(name).unlink(missing_ok=True)


def check_new_file(destination: Path) -> None:
    """Raise an `InputError` if a new file cannot be written to ``destination``."""
    if destination.exists() or destination.is_symlink():
        raise InputError(f"{destination} exists and is kept. Choose another name, or remove it.")
    parent = destination.resolve().parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise InputError(f"cannot write to {parent}, where {destination} is to be. Choose a folder that is there.")


def _replace(work: Path, destination: Path) -> None:
    """Rename ``work`` to ``destination``, and put an old folder there back if that fails."""
    if not destination.exists():
        work.rename(destination)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", suffix=".old", dir=destination.parent))
    destination.rename(old / "folder")
    try:
        work.rename(destination)
    except BaseException:
        (old / "folder").rename(destination)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)
