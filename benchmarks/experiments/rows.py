"""The models that an experiment compares, and the training of one of them by `hf-rfa finetune`."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file

from hf_rfa.finetune.recipe import merge
from hf_rfa.finetune.run_folder import training_folder
from hf_rfa.models.configuration_rfa import RFAConfigMixin
from hf_rfa.models.configuration_rfa_seq2seq import RFASeq2SeqConfigMixin

RFA_FIELDS = {field.name for mixin in (RFAConfigMixin, RFASeq2SeqConfigMixin) for field in fields(mixin)}
SOFTMAX = "softmax"
GAUSSIAN = {"feature_map": "gaussian", "unit_norm": True, "gate": False}
#: Random features in one kind of a decoder's attention alone, and the field with the layers whose other kind stays softmax.
ALONE = {
    "RFA-Gaussian in causal attention": "softmax_cross_layers",
    "RFA-Gaussian in cross attention": "softmax_layers",
}
#: What a row changes in the recipe's configuration; None for softmax attention.
ROWS: dict[str, dict[str, Any] | None] = {
    SOFTMAX: None,
    "RFA-Gaussian": GAUSSIAN,
    "RFA-arccos": {"feature_map": "arccos", "unit_norm": True, "gate": False},
    "RFA-Gate-Gaussian": {**GAUSSIAN, "gate": True},
    "elu": {"feature_map": "elu", "num_features": None, "unit_norm": False, "gate": False},
    **dict.fromkeys(ALONE, GAUSSIAN),
}
#: The rows of most experiments.
USUAL = ("softmax", "RFA-Gaussian", "RFA-arccos", "RFA-Gate-Gaussian", "elu")


def settings_of(row: str, recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe's settings for a row."""
    change = ROWS[row]
    if change is not None:
        if row == "elu" and "num_cross_features" in recipe["config_overrides"]:
            change = change | {"num_cross_features": None}  # as many features as a head has dimensions
        return merge(recipe, {"config_overrides": change})
    shared = {name: value for name, value in recipe["config_overrides"].items() if name not in RFA_FIELDS}
    return {**recipe, "model_type": recipe["model_type"].removeprefix("rfa_"), "config_overrides": shared}


def train(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run `hf-rfa finetune` in a process of its own, and return its metrics, the tokens of the inputs and the parameters.

    What was interrupted goes on. Tokens are those of an encoder where there is one, padding counted.

    Args:
        settings: options of `hf-rfa finetune`.
        folder: of the checkpoint; the recipe and the log go beside it.

    Raises:
        SystemExit: if the training fails; its output is in the log.
    """
    recipe, log = (folder.with_name(f"{folder.name}.{kind}") for kind in ("yaml", "log"))
    options = {"output_dir": str(folder), "overwrite": True, "resume": training_folder(folder).is_dir()}
    options |= {"disable_tqdm": True, "include_num_input_tokens_seen": True}
    recipe.write_text(yaml.safe_dump({**settings, **options}))
    command = [sys.executable, "-m", "hf_rfa_cli", "finetune", "--recipe", str(recipe)]
    with log.open("a") as file:
        status = subprocess.run(command, stdout=file, stderr=file).returncode
    if status:
        raise SystemExit(f"training ended with status {status}: see {log}.")
    found = json.loads((folder / "finetuning.json").read_text())
    tensors = [tensor for path in folder.glob("*.safetensors") for tensor in load_file(path).values()]
    return {
        "metrics": found["metrics"],
        "tokens": found["log"][-1]["num_input_tokens_seen"],
        "parameters": sum(tensor.numel() for tensor in tensors),
    }
