"""pip, for tests of packages that this environment lacks."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

#: Where source distributions are kept.
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hf-rfa"


def pip(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of pip."""
    options = ["--quiet", "--disable-pip-version-check", "--retries", "1"]
    return subprocess.run([sys.executable, "-m", "pip", command, *options, *arguments], capture_output=True, text=True)


def downloaded(pattern: str, *arguments: str) -> Path:
    """Return the file of a package, downloaded unless it is there."""
    if not list(CACHE.glob(pattern)):
        run = pip("download", "--no-deps", "--dest", str(CACHE), *arguments)
        if run.returncode:
            pytest.skip(f"pip finds no registry to download {arguments[-1]} from")
    return next(CACHE.glob(pattern))


def source_distribution(package: str, version: str, folder: Path) -> Path:
    """Extract the tests of a package's source distribution into a folder, and return its root there."""
    file = downloaded(f"{package}-{version}.tar.gz", "--no-binary", package, f"{package}=={version}")
    with tarfile.open(file) as archive:
        archive.extractall(folder, [member for member in archive if "/tests/" in member.name], filter="data")
    return folder / f"{package}-{version}"
