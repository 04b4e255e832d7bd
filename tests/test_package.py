"""The package: import time, layout, and what its modules may import."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from glob import glob
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import hf_rfa
from hf_rfa.version import NEWEST_TESTED_TRANSFORMERS
from tests.conftest import ROOT

#: The tree from the bottom up: a module imports those of its own entry and of the entries before it. A folder stands for all
#: that is in it and in no later entry.
LAYERS = [
    ["hf_rfa.models"],
    ["hf_rfa"],
    ["hf_rfa.inference"],
    ["hf_rfa.export", "hf_rfa.serving"],
    ["hf_rfa.evaluation", "hf_rfa.bench"],
    ["hf_rfa.convert"],
    ["hf_rfa.finetune"],
    ["hf_rfa_cli"],
]
#: Most lines of Python by folder, without those of its subfolders that are named too. They fall with what goes; a number
#: rises with its reason in a comment beside it.
LINES = {
    "hf_rfa": 474,
    "hf_rfa/export": 2_093,  # 746 more: layers repeated in the graph, steps prepared for all; ExecuTorch; retrieval slots
    "hf_rfa/models": 6_292,  # 242 more: slots of retrieval heads; the summary, in whole texts and in steps of few operations
    "hf_rfa/io": 482,
    "hf_rfa/serving": 1_048,  # hf-rfa chat and serve: rows of one batch, sessions, errors of files by name, a whole secret
    "hf_rfa/inference": 1_129,  # 16 more: checksums of cache files, conversations of several messages
    "hf_rfa/evaluation": 1_122,  # 30 more: scores are metrics of the evaluate library
    "hf_rfa/bench": 277,  # 10 more: a step is timed with a full memory
    "hf_rfa/convert": 4_146,  # 418 more: the summary is fitted in closed form, layers side by side; text, too, chooses heads
    "hf_rfa/finetune": 2_096,  # 11 more: products are timed in bf16
    "hf_rfa_cli": 1_498,  # 150 more: chat and serve
    "hf-rfa-vllm": 1_239,  # 80 more: prefix caching, mostly its check; sizes of blocks that have no effect are refused
    "tests": 16_066,  # 1,216 more: a server of conversations; exports and who runs them; the summary; retrieval heads
    "benchmarks": 3_690,  # 340 more: servers, llama.cpp's too, and what sleeps on them; exported graphs beside softmax ones
    "docs": 625,  # 52 more: tables of options and of rules of importance; StreamingLLM and times in pictures
    "examples": 463,  # 85 more: a book as one stream, drawn
}
#: Lines by which a folder may be below its number, before that is lowered.
SLACK = 40
#: All that a checkpoint's code may need besides its own files.
CHECKPOINT_MAY_IMPORT = {"torch", "transformers", "huggingface_hub"} | set(sys.stdlib_module_names)


def files() -> list[str]:
    """Return the files of the packages, below `ROOT`, those behind links in hf_rfa/ among them."""
    found = (glob(f"{folder}/**", root_dir=ROOT, recursive=True) for folder in ("hf_rfa", "hf_rfa_cli"))
    return [name for names in found for name in names if "__pycache__" not in name and (ROOT / name).is_file()]


@functools.cache
def modules() -> dict[str, Path]:
    """Return the packages' modules by their names."""
    names = [name for name in files() if name.endswith(".py")]
    return {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): ROOT / name for name in names}


def imports_of(name: str, path: Path) -> set[str]:
    """Return the absolute names of all modules that one imports, in functions too."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            known = {f"{module}.{alias.name}" for alias in node.names} & modules().keys()
            found |= known or {module}
    return found


def layer_of(name: str) -> int:
    entries = {entry: number for number, layer in enumerate(LAYERS) for entry in layer}
    while name not in entries:
        name = name.rpartition(".")[0]
    return entries[name]


def lines_of(folder: str) -> int:
    """Return the lines of Python of a folder, without those of subfolders that have a budget of their own."""
    others = [other for other in LINES if other.startswith(f"{folder}/")]
    names = glob(f"{folder}/**/*.py", root_dir=ROOT, recursive=True)
    counted = [name for name in names if not any(name.startswith(f"{other}/") for other in others)]
    return sum(len((ROOT / name).read_text().splitlines()) for name in counted)


@pytest.mark.parametrize("folder", LINES)
def test_folders_keep_to_their_budget(folder):
    lines, budget = lines_of(folder), LINES[folder]
    assert lines <= budget, (
        f"{folder} has {lines - budget} lines too many: remove what nobody uses, or say why they stay"
    )
    assert lines > budget - SLACK, f"{folder} has {lines} lines: lower its budget"


def test_imports_run_one_way():
    """No module imports one of a later layer, and none imports another in a circle: function-level imports count."""
    tree = {name: imports_of(name, path) & modules().keys() for name, path in modules().items()}
    assert len(tree) > 70
    against = [(name, used) for name, uses in tree.items() for used in uses if layer_of(used) > layer_of(name)]
    assert against == []
    assert len(list(graphlib.TopologicalSorter(tree).static_order())) == len(tree)  # raises CycleError


@pytest.mark.parametrize("path", sorted((ROOT / "hf_rfa" / "models").glob("*.py")), ids=lambda path: path.stem)
def test_what_a_checkpoint_carries_stands_alone(path):
    """Checkpoints hold copies of these files, flattened into one folder."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1
            assert (path.parent / f"{node.module}.py").is_file()
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            named = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            assert {each.split(".")[0] for each in named} <= CHECKPOINT_MAY_IMPORT


#: Importing registers the models, and loads nothing but the package and the models that it subclasses. Of the decoders that
#: are made when they are asked for these are the configurations, and the packages that hold them.
WHERE_IT_IS_INSTALLED = """
import sys
from transformers import AutoConfig, BartModel, GPT2Model, MarianModel

before = set(sys.modules)
import hf_rfa

new = {tuple(name.split(".")) for name in set(sys.modules) - before}
made = {name for name in new if name[:2] == ("transformers", "models")}
kept = new - {name for name in made if not name[3:] or "configuration" in name[3]}
print({name[0] for name in kept})
print(AutoConfig.for_model("rfa_gpt2").feature_map)

import hf_rfa.convert
from hf_rfa.finetune import recipe

recipe.load_settings("copy")
print(recipe.__file__)
"""


def test_sdist_and_wheel_hold_each_file_once_and_run_where_they_are_installed(tmp_path):
    """The links in hf_rfa/ become folders: nothing of convert/ or finetune/ is installed at the top."""
    pytest.importorskip("setuptools", minversion="77")
    tree = tmp_path / "tree"
    for name in ("hf_rfa", "hf_rfa_cli", "convert", "finetune"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for kind in ("sdist", "wheel"):  # the wheel is made of the unpacked sdist
        code = f"from setuptools import build_meta; build_meta.build_{kind}({str(tmp_path)!r})"
        subprocess.run([sys.executable, "-c", code], cwd=tree, check=True, capture_output=True)
        if kind == "sdist":
            shutil.unpack_archive(next(tmp_path.glob("*.tar.gz")), tmp_path / "unpacked", filter="data")
            (tree,) = (tmp_path / "unpacked").iterdir()
            assert not (tree / "convert").exists()
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = wheel.namelist()
        wheel.extractall(tmp_path / "installed")
    assert sorted(name for name in names if ".dist-info/" not in name) == sorted(files())
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    found = subprocess.check_output(
        [sys.executable, "-c", WHERE_IT_IS_INSTALLED], cwd=tmp_path, env=environment, text=True
    )
    assert found.splitlines() == ["{'hf_rfa'}", "positive", str(tmp_path / "installed/hf_rfa/finetune/recipe.py")]


def test_the_newest_tested_transformers_is_the_pinned_one():
    pinned = re.findall(r"^transformers==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned == [NEWEST_TESTED_TRANSFORMERS]


def test_a_transformers_newer_than_the_tested_is_warned_of_once(monkeypatch, recwarn):
    monkeypatch.setattr(transformers, "__version__", NEWEST_TESTED_TRANSFORMERS)
    importlib.reload(hf_rfa)
    assert list(recwarn) == []
    monkeypatch.setattr(transformers, "__version__", "5.99.0.dev0")
    importlib.reload(hf_rfa)
    (warning,) = recwarn
    assert f"5.99.0.dev0 is newer than {NEWEST_TESTED_TRANSFORMERS}" in str(warning.message)


def test_model_classes_of_every_family_are_names_of_the_package():
    config = hf_rfa.FAMILIES["qwen3"].rfa_config(vocab_size=61, hidden_size=16, num_hidden_layers=1)
    with torch.device("meta"):
        assert type(AutoModelForCausalLM.from_config(config)) is hf_rfa.RFAQwen3ForCausalLM
    assert hf_rfa.RFAGPT2DoubleHeadsModel.config_class is hf_rfa.RFAGPT2Config
    for name, reason in (
        ("RFABloomForCausalLM", ": BloomForCausalLM is not supported"),
        ("RFANothing", "$"),
        ("x", "$"),
    ):
        with pytest.raises(AttributeError, match=f"module 'hf_rfa' has no attribute '{name}'{reason}"):
            getattr(hf_rfa, name)


def test_a_release_has_one_version():
    """That of the package: CITATION.cff and CHANGELOG.md name it too."""
    citation = re.search(r"(?m)^version: (\S+)$", (ROOT / "CITATION.cff").read_text())
    assert citation is not None
    assert citation[1] == hf_rfa.__version__
    assert hf_rfa.__version__ in (ROOT / "CHANGELOG.md").read_text()
