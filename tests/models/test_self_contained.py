"""Checkpoints hold the code of their model: they work where hf_rfa is not installed, for those who trust it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.models.auto import modeling_auto

from hf_rfa import FAMILIES
from hf_rfa.convert import convert
from tests.conftest import ROOT
from tests.families import COMMON, every_family, has_encoder, make

#: Runs without hf_rfa: loads every head of every checkpoint, and writes what the models say.
ELSEWHERE = """
import sys
sys.modules["hf_rfa"] = None  # importing it raises ModuleNotFoundError
import json, pathlib, torch, transformers
from safetensors.torch import save_file

folder, found = pathlib.Path(sys.argv[1]), {}
for name in ("gpt2", "bart", "marian", "llama"):
    heads = json.loads((folder / name / "config.json").read_text())["auto_map"]
    for head in reversed(heads):  # those first that build their body by an Auto class
        if head == "AutoConfig":
            continue
        cls = getattr(transformers, head)
        model = cls.from_pretrained(folder / name, trust_remote_code=True).eval()
        assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
        ids = torch.tensor([[*range(5, 16), 2]])
        with torch.no_grad():
            outputs = model(ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}))
        found[f"{name} {head}"] = outputs[0].contiguous()
with torch.no_grad():
    summary = transformers.AutoModelForCausalLM.from_pretrained(folder / "summary", trust_remote_code=True)
    found["summary"] = summary.eval()(ids).logits
save_file(found, folder / "found.safetensors")
tables = vars(transformers.models.auto.modeling_auto)
(folder / "tables.json").write_text(json.dumps({name: tables[name] for name in tables if name.endswith("_MAPPING_NAMES")}))
"""


@pytest.fixture(scope="module")
def converted(checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp("self-contained")
    for family in COMMON:
        fields = {"preset": "exact"} if family == "llama" else {"preset": "rfa", "num_features": 8}
        convert(checkpoints[family], folder / family, window_size=3, **fields)
    summary = make("llama", {"feature_map": "summary", "num_features": 3, "window_size": 3})
    for name, parameter in summary.named_parameters():
        if "feature_map" in name:
            torch.nn.init.normal_(parameter)
    summary.save_pretrained(folder / "summary")
    return folder


def test_every_head_works_without_the_package(converted, tmp_path):
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", ELSEWHERE, str(converted)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = load_file(converted / "found.safetensors")
    ids = torch.tensor([[*range(5, 16), 2]])
    for family in COMMON:
        auto = AutoModelForCausalLM if not has_encoder(family) else AutoModelForSeq2SeqLM
        model = auto.from_pretrained(converted / family).eval()
        options = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
        with torch.no_grad():
            torch.testing.assert_close(found[f"{family} {auto.__name__}"], model(ids, **options).logits)
    with torch.no_grad():
        summary = AutoModelForCausalLM.from_pretrained(converted / "summary").eval()(ids).logits
    torch.testing.assert_close(found["summary"], summary)
    assert len(found) == 6 + 7 + 3 + 5 + 1
    tables = json.loads((converted / "tables.json").read_text())
    for name, table in name_tables().items():
        for kind in (f"rfa_{family}" for family in COMMON):
            assert tables[name].get(kind) == table.get(kind), name


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


def name_tables() -> dict[str, dict[str, str]]:
    """Return the tables of class names by which transformers knows models, by their own names."""
    return {name: table for name, table in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")}


@every_family
def test_with_the_package_its_own_classes_are_loaded_without_trust(family, converted):
    auto = AutoModelForCausalLM if not has_encoder(family) else AutoModelForSeq2SeqLM
    assert type(auto.from_pretrained(converted / family)).__module__.startswith("hf_rfa.")
    config = json.loads((converted / family / "config.json").read_text())
    for place in config["auto_map"].values():
        module, _, cls = place.partition(".")
        assert hasattr(import_module(f"hf_rfa.models.{module}"), cls)
        assert (converted / family / f"{module}.py").is_file()


def test_no_module_of_a_checkpoint_imports_the_package(converted):
    files = sorted(path for name in ("gpt2", "llama") for path in converted.glob(f"{name}/*.py"))
    modules = {file.name for file in (ROOT / "hf_rfa" / "models").glob("*.py")}
    of_encoders = {name for name in modules if "seq2seq" in name} | {"merged_attention.py"}
    of_features = {name for name in modules if "feature" in name and name != "no_features.py"}
    of_features |= {"gate.py", "linear_attention.py", "modeling_rfa_state.py", "state_attention.py"}
    decoders = modules - of_encoders - {"__init__.py"}
    assert {file.name for file in files if file.parent.name == "gpt2"} == decoders
    assert {file.name for file in files if file.parent.name == "llama"} == decoders - of_features
    others = {"modeling_rfa_features.py", "learned_feature_maps.py", "projected_feature_maps.py"}
    assert {file.name for file in (converted / "summary").glob("*.py")} == decoders - others
    for file in files:
        assert "import hf_rfa" not in file.read_text()
        assert "from hf_rfa" not in file.read_text()
