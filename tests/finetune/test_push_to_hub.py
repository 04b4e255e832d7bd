"""Uploads to the hub, with the calls that need the network replaced."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_rfa.convert.card import UNTRAINED
from tests.training import save_checkpoints

PARENTS_CARD = """---
license: other
license_name: tiny
license_link: LICENSE.md
language:
- en
pipeline_tag: text-generation
---
# A parent
"""


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    return save_checkpoints(folder, "gpt2", card=PARENTS_CARD, preset="rfa", num_features=8, gate=True) / "gpt2-rfa"


@pytest.fixture
def hub(monkeypatch) -> dict[str, bytes]:
    """A repository, by path, that `HfApi` writes to instead of the hub's."""
    files: dict[str, bytes] = {}

    def create_commit(self, repo_id, operations, **options):
        assert repo_id == "me/rfa"
        for operation in operations:
            with operation.as_file() as file:
                files[operation.path_in_repo] = file.read()
        return SimpleNamespace(commit_url="", oid="", pr_url=None)

    def load_card(name, **options):
        if "README.md" not in files:
            raise EntryNotFoundError("no card yet")
        return ModelCard(files["README.md"].decode())

    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo_id, **options: SimpleNamespace(repo_id=repo_id))
    monkeypatch.setattr(HfApi, "create_commit", create_commit)
    monkeypatch.setattr(HfApi, "_validate_yaml", lambda *args, **options: None)  # the hub's own check of a card
    monkeypatch.setattr("huggingface_hub.hf_api.is_xet_available", lambda: False)  # one commit, by `create_commit`
    monkeypatch.setattr("transformers.utils.hub.ModelCard.load", load_card)
    return files


def assert_is_the_model(folder: Path, files: dict[str, bytes], destination: Path) -> None:
    """The repository loads where this package is not, and is the model in ``folder``."""
    code = {name for name in files if name.endswith(".py")}
    config = json.loads(files["config.json"])
    for place in config["auto_map"].values():
        assert f"{place.partition('.')[0]}.py" in code
    assert code == {path.name for path in folder.glob("*.py")}
    expected = load((folder / "model.safetensors").read_bytes())
    found = load(files["model.safetensors"])
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    for name, content in files.items():
        destination.mkdir(exist_ok=True)
        (destination / name).write_bytes(content)
    script = (
        "import sys; sys.modules['hf_rfa'] = None\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "assert type(model).__module__.startswith('transformers_modules')\n"
    )
    subprocess.run([sys.executable, "-c", script, str(destination)], check=True, capture_output=True)


def test_a_model_and_its_tokenizer_are_pushed_whole(converted, hub, tmp_path):
    AutoModelForCausalLM.from_pretrained(converted).push_to_hub("me/rfa")
    AutoTokenizer.from_pretrained(converted).push_to_hub("me/rfa")
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= hub.keys()
    assert b"automatically generated" in hub["README.md"]
    assert_is_the_model(converted, hub, tmp_path / "there")


def test_the_folder_is_uploaded_with_its_card_which_a_push_leaves(converted, hub):
    """As docs/guide.md has it: upload the folder first."""
    HfApi().upload_folder(repo_id="me/rfa", folder_path=converted)  # as `hf upload` does
    assert hub == {path.name: path.read_bytes() for path in converted.iterdir()}
    assert {"README.md", "conversion.json", "tokenizer.json"} <= hub.keys()
    AutoModelForCausalLM.from_pretrained(converted).push_to_hub("me/rfa", tags=["more"])
    card = ModelCard(hub["README.md"].decode())
    assert UNTRAINED in card.content
    data = card.data
    assert {"hf-rfa", "linear-attention", "more"} <= set(data.tags)
    assert (data.library_name, data.pipeline_tag, data.language) == ("transformers", "text-generation", ["en"])
    assert (data.license, data["license_name"], data["license_link"]) == ("other", "tiny", "LICENSE.md")
    assert data.base_model is None, "a folder is no name on the hub"
