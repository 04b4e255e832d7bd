"""pip, for tests of packages that this environment lacks."""

from __future__ import annotations

import subprocess
import sys


def pip(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of pip."""
    options = ["--quiet", "--disable-pip-version-check", "--retries", "1"]
    return subprocess.run([sys.executable, "-m", "pip", command, *options, *arguments], capture_output=True, text=True)
