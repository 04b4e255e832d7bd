"""The tests of caches and of generation with the newest transformers that pyproject.toml allows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from hf_rfa.version import NEWEST_TESTED_TRANSFORMERS
from tests.conftest import ROOT
from tests.packages import pip

#: What a new transformers has broken before: names of arguments, caches, masks, what `generate` does with them.
TESTS = (
    *("models/test_cache.py", "models/test_decoders.py", "models/test_padding.py"),
    *("inference/test_generation.py", "inference/test_assisted.py"),
)


def missing_packages(*arguments: str) -> list[str]:
    """Return what ``pip install`` would install, each as ``name==version``."""
    run = pip("install", "--dry-run", "--report", "-", *arguments)
    if run.returncode:
        pytest.skip(f"pip finds no registry to install {arguments[-1]} from: {run.stderr.strip().splitlines()[-1]}")
    packages: list[dict[str, Any]] = [package["metadata"] for package in json.loads(run.stdout)["install"]]
    return [f"{package['name']}=={package['version']}" for package in packages]


@pytest.mark.slow
def test_caches_and_generation_with_the_newest_transformers(tmp_path: Path):
    """It comes before the packages of this environment on the path, with those of its own that these are too old for."""
    allowed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (requirement,) = (each for each in allowed if each.startswith("transformers"))
    (newest,) = missing_packages("--ignore-installed", "--no-deps", requirement)
    if Version(newest.removeprefix("transformers==")) < Version(NEWEST_TESTED_TRANSFORMERS):
        pytest.skip(f"pip offers {newest} at most, from a folder: it has no registry")
    if packages := missing_packages(newest):
        installed = pip("install", "--no-deps", "--target", str(tmp_path), *packages)
        assert installed.returncode == 0, installed.stderr
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(ROOT)])
    code = "import hf_rfa, transformers; print(f'transformers=={transformers.__version__}')"
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).strip() == newest
    files = [f"tests/{name}" for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    tests = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert tests.returncode == 0, f"{newest}:\n{tests.stdout[-5000:]}"
