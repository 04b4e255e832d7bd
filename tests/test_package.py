"""The package: import time, layout, and what its modules may import."""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys

import pytest

from .conftest import ROOT

FAMILIES = ["bart", "gpt2", "marian"]
MODEL_MODULES = [
    "attention",
    "cache",
    "configuration_rfa",
    "errors",
    "feature_maps",
    "folded",
    "fused",
    "gate",
    "implied",
    "kernels",
    "learned_maps",
    "masks",
    "fla_backend",
    "peers",
    "random_maps",
]
MODEL_MODULES += ["blockwise", "seq2seq", "window"]
MODEL_MODULES += [f"modeling_rfa_{family}" for family in FAMILIES]


def imported(path) -> set[str]:
    """Return the modules that a file imports, relative ones with their dot."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or "").split(".")[0])
    return found


@pytest.mark.parametrize("name", MODEL_MODULES)
def test_modules_that_a_model_needs_stand_alone(name):
    """A checkpoint's code is copied into one folder: these files may import torch, transformers and each other."""
    allowed = (
        {f".{other}" for other in MODEL_MODULES}
        | {"torch", "transformers", "huggingface_hub", ".fused_kernels"}  # the last only where it is used
        | sys.stdlib_module_names
    )
    assert imported(ROOT / "hf_rfa" / f"{name}.py") <= allowed


def test_arrows_run_one_way():
    for path in (ROOT / "convert").glob("*.py"):
        assert "finetune" not in path.read_text()
    for name in MODEL_MODULES:
        text = (ROOT / "hf_rfa" / f"{name}.py").read_text()
        assert "finetune" not in text
        assert "from .convert" not in text


def test_import_adds_little_to_transformers():
    """`import hf_rfa` takes at most a twentieth of the time that importing transformers' GPT-2 model takes before it."""
    code = (
        "import time; start = time.perf_counter(); from transformers import GPT2LMHeadModel; "
        "middle = time.perf_counter(); import hf_rfa; print((time.perf_counter() - middle) / (middle - start))"
    )
    ratios = [float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(5)]
    assert statistics.median(ratios) <= 0.05, ratios


def test_a_family_with_an_encoder_is_a_short_file():
    """What Marian shares with BART is written once: its file holds class lines and docstrings."""
    for family in ("bart", "marian"):
        tree = ast.parse((ROOT / "hf_rfa" / f"modeling_rfa_{family}.py").read_text())
        functions = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        assert functions == []
