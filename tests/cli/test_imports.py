"""A feature map from outside the package: on the command line, in the card, and where its module has not been imported."""

from __future__ import annotations

import re
import shlex
import shutil
import sys

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

from hf_rfa import FEATURE_MAPS
from hf_rfa.convert import convert
from tests.conftest import DEMO_MODEL, tiny_parent_config

MODULE = """
import torch.nn.functional as F
from hf_rfa import FeatureMap, register_feature_map

@register_feature_map("squares")
class SquaresMap(FeatureMap):
    has_sigma = True

    def query(self, query):
        return F.relu(self.query_input(query)) ** 2 + 0.01

    def key(self, key):
        return F.relu(self.key_input(key)) ** 2 + 0.01
"""


def forget() -> None:
    """Make this process as one that has not imported the module."""
    FEATURE_MAPS.pop("squares", None)
    sys.modules.pop("my_squares", None)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory, with the module in it; the module is on Python's path only if a test puts it there."""
    (tmp_path / "my_squares.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    forget()


@pytest.fixture
def hf_rfa(run_cli):
    """A command, run as in a process of its own; it returns its status."""
    return lambda *words: forget() or run_cli(*words)


def test_a_command_imports_a_map_from_a_file(folder, hf_rfa, checkpoints, capsys):
    """The card says what it takes, and its command does it again."""
    own = ["--import", "my_squares.py"]
    assert hf_rfa("convert", checkpoints["gpt2"], "out", "--feature-map", "squares", *own) == 0
    said = " ".join(capsys.readouterr().out.split())  # lines are broken where the console ends
    assert "the checkpoint does not hold its code" in said
    card = ModelCard.load(folder / "out" / "README.md").content
    assert "import my_squares  # registers the feature map squares" in card
    (note,) = re.findall(r"The feature map squares is not hf-rfa's own.*", card)
    assert " ".join(note.split()) in said
    assert hf_rfa("generate", "out", "--prompt", "w5", "--max-new-tokens", 2, *own) == 0
    (command,) = re.findall(r"hf-rfa convert .*", card)
    shutil.rmtree("out")
    assert hf_rfa(*shlex.split(command)[1:]) == 0
    assert (folder / "out" / "config.json").is_file()


def test_python_imports_a_map(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    forget()
    __import__("my_squares")
    GPT2LMHeadModel(tiny_parent_config()).save_pretrained("parent")
    report = convert("parent", "out", feature_map="squares")
    assert report.command.endswith("--import my_squares")
    assert len(report.notes) == 1 + len(convert("parent", "elu", feature_map="elu").notes)
    model = AutoModelForCausalLM.from_pretrained("out")
    assert torch.isfinite(model(torch.ones(1, 5, dtype=torch.long)).logits).all()

    forget()
    with pytest.raises(
        Exception, match=r"feature_map='squares' is unknown. Known: arccos, elu.*import its module.*--import"
    ):
        AutoModelForCausalLM.from_pretrained("out")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("no_such_module", "No module named 'no_such_module'"),
        ("my_squares", "my_squares.py"),  # which Python does not find by its name
        ("nowhere/maps.py", "nowhere/maps.py"),
        ("torch.py", "is another module's name"),
        ("broken.py", "No module named 'no_such_module'"),
        ("no_family.py", "transformers knows no model_type 'nosuch'"),
    ],
)
def test_what_cannot_be_imported_is_refused_before_anything_starts(word, said, folder, hf_rfa, capsys):
    (folder / "torch.py").write_text(MODULE)
    (folder / "broken.py").write_text("import no_such_module")
    (folder / "no_family.py").write_text("from hf_rfa.families import family_of\nfamily_of('nosuch')")
    before = sorted(folder.iterdir())
    torch_itself = sys.modules["torch"]
    assert hf_rfa("convert", DEMO_MODEL, "out", "--import", word) == 1
    error = capsys.readouterr().err
    assert f"--import {word}" in error
    assert said in error
    assert sys.modules["torch"] is torch_itself
    assert "broken" not in sys.modules
    assert sorted(path for path in folder.iterdir() if path.name != "__pycache__") == before
