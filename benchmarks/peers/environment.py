"""An environment with kvpress, whose transformers is older than hf-rfa's: a folder made once, beside this environment."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

from rich.console import Console

from hf_rfa.errors import InputError

#: What the environment has of its own; all else, torch among it, is that of the environment that runs this.
PACKAGES = ("kvpress==0.5.5", "transformers==5.2.0")


def python_with_kvpress(folder: Path) -> Path:
    """Return the interpreter of an environment, made unless it is there.

    Raises:
        InputError: if its packages cannot be installed.
    """
    python, done = folder / "bin" / "python", folder / "installed"
    if done.is_file():
        return python
    Console(stderr=True).print(f"{folder}: installing {', '.join(PACKAGES)}")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    own = next(folder.glob("lib/python*/site-packages"))
    # What is installed there comes first on the path, and after it what this environment has.
    (own / "base.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [str(python), "-m", "pip", "install", "--quiet", *PACKAGES]
    run = subprocess.run(install, capture_output=True, text=True)
    if run.returncode:
        raise InputError(
            f"{' '.join(install)} failed: {run.stderr.strip().splitlines()[-1]} It needs a package index, and pip in this "
            "environment."
        )
    done.touch()
    return python
