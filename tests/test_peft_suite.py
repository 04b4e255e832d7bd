"""PEFT's own tests of adapters for decoders, on RFA models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import peft
import pytest
import torch
from transformers import ByT5Tokenizer

from tests.conftest import ROOT
from tests.families import TINY_MEMORIES, make, softmax_model
from tests.packages import source_distribution

#: What RFA models refuse or cannot do, by the name of PEFT's configuration.
LEFT_OUT = {
    "PrefixTuningConfig": "a memory has no place for keys and values of virtual tokens, and refuses them",
    "ShadowConfig": "it builds a second, softmax model of the RFA model's configuration, whose cache is no RFA cache",
}
SETTINGS = {name: TINY_MEMORIES[name] for name in ("exact", "mixed")}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of PEFT's tests, of the installed version."""
    return source_distribution("peft", peft.__version__, tmp_path_factory.mktemp("sdist")) / "tests"


def outcomes(suite: Path, model: Path) -> dict[str, bool]:
    """Return whether a model passes PEFT's tests, by name; tests of other models and tests that are skipped are left out."""
    report = model.with_suffix(".xml")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**inherited, "PEFT_TESTS": str(suite), "MODEL": str(model), "PYTHONPATH": str(ROOT)}
    environment["HF_HUB_OFFLINE"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "-W", "ignore"]
    command += ["tests/peft_suite.py", "-k", model.name, f"--junitxml={report}"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert report.is_file(), run.stdout[-3000:] + run.stderr[-3000:]
    cases = ElementTree.parse(report).getroot().iter("testcase")
    return {
        case.attrib["name"].replace(str(model), "model"): case.find("failure") is None and case.find("error") is None
        for case in cases
        if case.find("skipped") is None
    }


@pytest.mark.slow
def test_what_peft_does_with_a_softmax_model_it_does_with_an_rfa_model(suite: Path, tmp_path: Path):
    """Every adapter is made, trained, saved, loaded, merged, switched off, combined and used for generation."""
    tokenizer = ByT5Tokenizer()
    size = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "initializer_range": 0.02}
    passed: dict[str, set[str]] = {}
    for setting, options in SETTINGS.items():
        torch.manual_seed(0)
        model = make("llama", {**size, **options})
        models = {setting: model, "softmax": softmax_model(model, "llama", **size)}
        for name in models.keys() - passed.keys():
            models[name].save_pretrained(tmp_path / f"llama-{name}")
            tokenizer.save_pretrained(tmp_path / f"llama-{name}")
            results = outcomes(suite, tmp_path / f"llama-{name}")
            passed[name] = {test for test, is_passed in results.items() if is_passed}
    expected = {test for test in passed["softmax"] if not any(name in test for name in LEFT_OUT)}
    assert len(expected) > 900  # of PEFT 0.21.2's
    for setting in SETTINGS:
        assert expected - passed[setting] == set()
