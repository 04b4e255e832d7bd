"""transformers' own tests of its models, on RFA models."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import transformers

from tests.conftest import ROOT
from tests.packages import downloaded, source_distribution


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which ``tests/transformers_suite.py`` finds transformers' tests, and what they import."""
    path = [str(ROOT)]
    if find_spec("parameterized") is None:
        path.append(str(downloaded("parameterized-*.whl", "parameterized")))
    checkout = os.environ.get("TRANSFORMERS_TESTS")
    if checkout is None:
        folder = tmp_path_factory.mktemp("sdist")
        checkout = str(source_distribution("transformers", transformers.__version__, folder))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return {**inherited, "TRANSFORMERS_TESTS": checkout, "PYTHONPATH": os.pathsep.join(path)}


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["Exact", "Mixed", "Whole"])
def test_what_transformers_asks_of_its_models(setting: str, environment: dict[str, str]):
    """What the suite asks of a model's class, it gets, but for the tests that ``LEFT_OUT`` names with their reasons."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
        "-o",
        "filterwarnings=",
    ]
    command += ["tests/transformers_suite.py", "-k", setting]
    tests = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert tests.returncode == 0, tests.stdout[-5000:]
    passed = re.search(r"(\d+) passed", tests.stdout)
    assert passed is not None
    assert int(passed[1]) > 400, tests.stdout[-500:]  # of transformers 5.24.0's
