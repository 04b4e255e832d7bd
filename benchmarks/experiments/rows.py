"""The models that an experiment compares, and the training of one of them by a recipe of `hf-rfa finetune`."""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from hf_rfa import finetune
from hf_rfa.finetune.recipe import merge, to_words
from hf_rfa.finetune.run_folder import training_folder
from hf_rfa.inference.devices import find_device
from hf_rfa.io.atomic_io import new_file
from hf_rfa.models.configuration_rfa import RFAConfigMixin
from hf_rfa.models.configuration_rfa_seq2seq import RFASeq2SeqConfigMixin

from .results import check_same, described

RFA_FIELDS = {field.name for mixin in (RFAConfigMixin, RFASeq2SeqConfigMixin) for field in fields(mixin)}
SOFTMAX = "softmax"
#: The device of a run that used no accelerator.
PROCESSOR = "processor"
GAUSSIAN = {"feature_map": "gaussian", "unit_norm": True, "gate": False}
GATE = {**GAUSSIAN, "gate": True}
#: glibc keeps what it has freed: benchmarks/results/speed.md has what that gains.
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
    "MALLOC_TOP_PAD_": str(2**28),
}
#: Time scales of fixed gates, in tokens, by the name of the row.
FIXED_GATES = {f"gate of {scale} tokens": scale for scale in (4, 16, 64, 256)}
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
    "RFA-Gate-Gaussian": GATE,
    "RFA-positive": {"feature_map": "positive", "unit_norm": False, "gate": False, "trainable_projection": True},
    "RFA-exponential": {"feature_map": "exponential", "unit_norm": False, "gate": False},
    "elu": {"feature_map": "elu", "num_features": None, "unit_norm": False, "gate": False},
    **dict.fromkeys(FIXED_GATES, GATE),
    **dict.fromkeys(ALONE, GAUSSIAN),
}
#: What only the experiments that name them can train.
SPECIAL = {*FIXED_GATES, *ALONE}
COLORS = {
    SOFTMAX: "#555555",
    "RFA-Gaussian": "#174a80",
    "RFA-arccos": "#7ba7d4",
    "RFA-Gate-Gaussian": "#3f6f1d",
    "RFA-positive": "#b79bd6",
    "RFA-exponential": "#5b2f91",
    "elu": "#b3440f",
    **dict(zip(FIXED_GATES, ("#d9e8c8", "#b5d196", "#8bb561", "#639138"), strict=True)),
    **dict(zip(ALONE, ("#4f80b5", "#a9c8e6"), strict=True)),
}


def settings_of(row: str, recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe's settings for a row."""
    change = ROWS[row]
    if change is not None:
        if row == "elu" and "num_cross_features" in recipe["config_overrides"]:
            change = change | {"num_cross_features": None}  # as many features as a head has dimensions
        return merge(recipe, {"config_overrides": change})
    shared = {name: value for name, value in recipe["config_overrides"].items() if name not in RFA_FIELDS}
    return {**recipe, "model_type": recipe["model_type"].removeprefix("rfa_"), "config_overrides": shared}


def train(settings: dict[str, Any], folder: Path, *, processes: int = 1) -> dict[str, Any]:
    """Run `hf-rfa finetune` in processes of its own, and return its figures, the peak of its memory and its hours.

    What is there already is not trained again, and what was interrupted goes on; hours and the peak are then those of the
    last part. Tokens are those of the inputs (of an encoder's where there is one), padding counted.

    Args:
        settings: options of `hf-rfa finetune`.
        folder: of the checkpoint; the figures go beside it.
        processes: how many train together, by accelerate.

    Raises:
        InputError: if what is there was trained with other settings.
        SystemExit: if the training fails; its output is in a file beside the folder.
    """
    measured = folder.with_name(f"{folder.name}.json")
    settings = {**settings, "include_num_input_tokens_seen": "true"}
    identity = {**described(settings), "processes": processes}
    if measured.is_file():
        before = json.loads(measured.read_text())
        check_same(before["settings"], identity, f"{folder} was trained", "Pass another --work, or remove that folder.")
        return before["figures"]
    resumed = training_folder(folder).is_dir()
    words = to_words({**settings, "output": folder, "overwrite": True, "resume": resumed})
    launch = [sys.executable]
    if processes > 1:
        together = Path(finetune.__file__).parent / "launch" / "ddp.yaml"
        launch += ["-m", "accelerate.commands.launch", "--config_file", str(together)]
        launch += ["--num_processes", str(processes)]
    start = time.perf_counter()
    with folder.with_name(f"{folder.name}.log").open("a") as log:
        command = [*launch, "-m", "hf_rfa_cli", "finetune", *words]
        environment = {**KEEP_MEMORY, **os.environ}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, preexec_fn=_end_with_parent)
        _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"training ended with status {os.waitstatus_to_exitcode(status)}: see {log.name}.")
    found = json.loads((folder / "finetuning.json").read_text())
    result = {
        "metrics": found["metrics"],
        "losses": [[entry["step"], round(entry["loss"], 4)] for entry in found["log"] if "loss" in entry],
        "tokens": found["log"][-1]["num_input_tokens_seen"],
        "parameters": count_parameters(folder),
        "peak_bytes": used.ru_maxrss * 1024,
        "hours": (time.perf_counter() - start) / 3600,
        "cpu_hours": (used.ru_utime + used.ru_stime) / 3600,
        "resumed": resumed,
        "device": _device_name(),
    }
    with new_file(measured) as file:
        json.dump({"settings": identity, "figures": result}, file)
    return result


def _device_name() -> str:
    """Return what the accelerator calls itself, or `PROCESSOR` where there is none."""
    device = find_device("auto")
    return torch.cuda.get_device_name() if device.type == "cuda" else {"cpu": PROCESSOR}.get(device.type, device.type)


def _end_with_parent() -> None:
    """Let this process be killed as soon as its parent ends, however that ends: it would write where the next run writes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def count_parameters(folder: Path) -> int:
    """Return the number of weights in a checkpoint's files, feature maps included."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # not a dictionary
                total += math.prod(tensors.get_slice(name).get_shape())
    return total
