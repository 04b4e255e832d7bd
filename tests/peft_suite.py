"""PEFT's own tests of adapters for decoders, on RFA models and a softmax model: run by `tests/test_peft_suite.py`.

The environment variable ``PEFT_TESTS`` names the ``tests`` of PEFT's source distribution, and ``MODEL`` the folder of the
model. PEFT's tests of all adapters take their models from lists of names, in whose place there is this one.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import hf_rfa  # noqa: F401  # registers the RFA models

# Under a name of their own: this folder is called `tests` too.
sys.modules["peft_tests"] = ModuleType("peft_tests")
sys.modules["peft_tests"].__path__ = [os.environ["PEFT_TESTS"]]
if "diffusers" not in sys.modules:  # of which the tests of decoders have no model
    sys.modules["diffusers"] = SimpleNamespace(StableDiffusionPipeline=type("StableDiffusionPipeline", (), {}))  # type: ignore[assignment]
suite: Any = importlib.import_module("peft_tests.test_decoder_models")
for models in (suite.PEFT_DECODER_MODELS_TO_TEST, suite.SMALL_GRID_MODELS):
    models[:] = [os.environ["MODEL"]]
TestDecoderModels = suite.TestDecoderModels
