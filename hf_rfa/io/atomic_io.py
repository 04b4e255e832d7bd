"""Atomic writing of folders and files: a destination holds the old content or the new one, whole."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil

from ..errors import InputError

#: Suffix of the names of folders that are being written.
PARTIAL = ".partial"
#: Folders that this process is writing.
_MINE: set[Path] = set()


def check_destination(destination: Path, *, overwrite: bool, sources: tuple[Path, ...] = ()) -> None:
    """Raise an `InputError` if a folder cannot be written to ``destination``, or would replace one of the ``sources``.

    With ``overwrite`` it may replace a checkpoint.
    """
    for source in sources:
        if destination.resolve() == source.resolve():
            raise InputError(f"{destination} is the source itself. Choose another destination.")
        if source.resolve().is_relative_to(destination.resolve()):
            raise InputError(f"the source, {source}, is inside {destination}. Choose another destination.")
    _check_folder(destination)
    if destination.is_dir() and any(destination.iterdir()):
        if not overwrite:
            raise InputError(f"{destination} exists and is kept. Choose another folder, or pass --overwrite.")
        if not (destination / "config.json").is_file():
            raise InputError(
                f"{destination} holds no checkpoint (no config.json), so --overwrite does not replace it. Choose another "
                "folder, or empty this one."
            )
    existing = _existing_parent(destination)
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise InputError(f"cannot write to {existing}, where {destination} is to be.")


def _existing_parent(path: Path) -> Path:
    return next(parent for parent in path.resolve().parents if parent.exists())


def _check_folder(destination: Path) -> None:
    """Raise an `InputError` if what is at ``destination`` is no folder: a file, a link, a device, a pipe, a socket."""
    if destination.is_symlink():
        raise InputError(f"{destination} is a link, and is kept. Choose another folder, or the one that it leads to.")
    if destination.exists() and not destination.is_dir():
        raise InputError(f"{destination} exists and is not a folder; it is kept. Choose another name.")


def check_space(destination: Path, num_bytes: int) -> None:
    """Raise an `InputError` if the disk of ``destination`` has less than ``num_bytes`` free."""
    existing = _existing_parent(destination)
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise InputError(
            f"{existing} has {free / 1e9:.2f} GB free, but the result needs about {num_bytes / 1e9:.2f} GB. Free some "
            "space or choose another destination."
        )


@contextmanager
def folder_beside(destination: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``destination``, for intermediate results, and remove the folder at the end.

    A process that is killed leaves it behind, ``.NAME.PID.….partial``; the next one to write to ``destination`` removes it.
    """
    destination = destination.resolve()
    destination.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(destination)
    work = Path(tempfile.mkdtemp(prefix=f".{destination.name}.{os.getpid()}.", suffix=PARTIAL, dir=destination.parent))
    _MINE.add(work)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        _MINE.discard(work)


@contextmanager
def new_folder(destination: Path) -> Iterator[Path]:
    """Yield a `folder_beside` ``destination``, and put it there at the end.

    On any error or interrupt what was at ``destination`` before is still there.
    """
    try:
        with folder_beside(destination) as work:
            yield work
            work.chmod(0o755)
            _check_folder(destination)  # again: the work may have taken hours
            _replace(work, destination.resolve())
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise InputError(f"the disk of {destination} is full; nothing was written. Free some space.") from error
        raise


def remove_leftovers(destination: Path) -> None:
    """Remove the folders of processes that were killed while they wrote to ``destination``."""
    name = re.compile(rf"\.{re.escape(destination.name)}\.(\d{{1,9}})\.\w+{re.escape(PARTIAL)}")
    for path in destination.parent.glob(".*"):
        match = name.fullmatch(path.name)
        if match is None or not path.is_dir() or path in _MINE:
            continue
        pid = int(match[1])
        if pid == os.getpid() or not psutil.pid_exists(pid):  # in a container every run may have the same number
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def new_file(destination: Path) -> Iterator[IO[str]]:
    """Open a text file (UTF-8) in a `folder_beside` ``destination``, and move it there at the end, after `check_file`.

    On any error or interrupt the file is removed. Where ``destination`` is a link, the file that it leads to is written.
    """
    check_file(destination)
    destination = destination.resolve()
    with folder_beside(destination) as work:
        path = work / "file"
        with path.open("w", encoding="utf-8") as file:
            yield file
        path.chmod(0o644)
        path.replace(destination)


def check_file(destination: Path) -> None:
    """Raise an `InputError` if a file cannot be written to ``destination``, where it may replace another file."""
    if destination.exists() and not destination.is_file():
        raise InputError(f"{destination} exists and is not a file; it is kept. Choose another name.")
    parent = destination.resolve().parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise InputError(f"cannot write to {parent}, where {destination} is to be. Choose a folder that is there.")


def _replace(work: Path, destination: Path) -> None:
    """Put ``work`` at ``destination``, by two renames where an old folder is there.

    Between them nothing is at ``destination``: a process that is killed there leaves the old folder, whole, as ``folder`` in
    one whose name ends in ``.old``.
    """
    if not destination.exists():
        work.rename(destination)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", suffix=".old", dir=destination.parent))
    destination.rename(aside / "folder")
    try:
        work.rename(destination)
    except BaseException:
        (aside / "folder").rename(destination)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
