"""Checkpoints hold the code of their model: they work where hf_rfa is not installed, for those who trust it."""

from __future__ import annotations

import json
from importlib import import_module

import pytest
import torch

from hf_rfa import FAMILIES
from hf_rfa.convert import convert
from tests.conftest import ROOT
from tests.decoders import NAMES, QUICK, pair
from tests.families import COMMON, every_family, make, make_head
from tests.without_package import assert_load_without_package, auto_classes, name_tables


@pytest.fixture(scope="module")
def folder(checkpoints, tmp_path_factory):
    """A folder of checkpoints: one of `convert`, the others saved as it saves them."""
    folder = tmp_path_factory.mktemp("self-contained")
    convert(checkpoints["llama"], folder / "llama", preset="exact", window_size=3)
    for family in (*{*COMMON} - {"llama"}, "m2m_100", "whisper"):
        make_head(family, window_size=3).save_pretrained(folder / family)
    summary = make("llama", {"feature_map": "summary", "num_features": 3, "window_size": 3})
    for name, parameter in summary.named_parameters():
        if "feature_map" in name:
            torch.nn.init.normal_(parameter)
    summary.save_pretrained(folder / "summary")
    return folder


def test_checkpoints_work_without_the_package(folder, family_from_outside, tmp_path):
    """All heads of the families that differ most, and the language models of others."""
    others = [folder / "summary", folder / "m2m_100", folder / "whisper", family_from_outside[1]]
    for name in sorted({*QUICK} - {*COMMON}):
        pair(name)[1].save_pretrained(tmp_path / name)
        others.append(tmp_path / name)
    common = [folder / family for family in COMMON]
    assert sum(len(auto_classes(each)) for each in common) == 6 + 7 + 3 + 5
    folders = dict.fromkeys(common, True) | dict.fromkeys(others, False)
    tables = assert_load_without_package(folders, tmp_path)
    for name, table in name_tables().items():
        for kind in (f"rfa_{family}" for family in COMMON):
            assert tables[name].get(kind) == table.get(kind), name


@pytest.mark.slow
def test_every_decoder_works_without_the_package(tmp_path):
    for name in NAMES:
        pair(name)[1].save_pretrained(tmp_path / name)
    assert_load_without_package({tmp_path / name: False for name in NAMES}, tmp_path)


@every_family
def test_classes_stand_in_transformers_tables_of_names_where_their_base_classes_do(family):
    """By them the Trainer shifts labels, pipelines and servers take a model, and model cards name its task."""
    declared = FAMILIES[family]
    assert any(declared.default_architecture in table.values() for table in name_tables().values())
    declared.rfa_config()  # classes are made when they are first needed
    for base, model in declared.architectures.values():
        standing = {
            name: [each for each, table in name_tables().items() if name in table.values()]
            for name in (base.__name__, model.__name__)
        }
        assert standing[model.__name__] == standing[base.__name__]


@every_family
def test_the_modules_and_classes_that_a_checkpoint_names_are_there(family, folder):
    config = json.loads((folder / family / "config.json").read_text())
    for place in config["auto_map"].values():
        module, _, cls = place.partition(".")
        assert hasattr(import_module(f"hf_rfa.models.{module}"), cls)
        assert (folder / family / f"{module}.py").is_file()


def test_no_module_of_a_checkpoint_imports_the_package(folder):
    files = sorted(path for name in ("gpt2", "llama") for path in folder.glob(f"{name}/*.py"))
    modules = {file.name for file in (ROOT / "hf_rfa" / "models").glob("*.py")}
    of_encoders = {name for name in modules if "seq2seq" in name} | {"merged_attention.py"}
    of_features = {name for name in modules if "feature" in name and name != "no_features.py"}
    of_features |= {"gate.py", "linear_attention.py", "modeling_rfa_state.py", "state_attention.py"}
    decoders = modules - of_encoders - {"__init__.py"}
    assert {file.name for file in files if file.parent.name == "gpt2"} == decoders
    assert {file.name for file in files if file.parent.name == "llama"} == decoders - of_features
    others = {"modeling_rfa_features.py", "learned_feature_maps.py", "projected_feature_maps.py"}
    assert {file.name for file in (folder / "summary").glob("*.py")} == decoders - others
    for file in files:
        assert "import hf_rfa" not in file.read_text()
        assert "from hf_rfa" not in file.read_text()
