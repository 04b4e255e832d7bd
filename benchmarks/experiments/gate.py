"""What the gate buys and costs: copying and language modelling with gates of one fixed time scale, and with learned ones.

A gate g forgets what is older than about 1/(1 − g) tokens (Peng et al. 2021, section 3.3). Copying needs all of a sequence;
the next word of a text needs the last ones most. Fixed gates have the same g in every head and at every token.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_rfa  # noqa: F401  # registers the RFA models
from hf_rfa.evaluation.perplexity import IGNORED_LABEL
from hf_rfa.finetune.arguments import FinetuneArguments
from hf_rfa.finetune.data import single_documents
from hf_rfa.finetune.finetune import load_config_and_tokenizer
from hf_rfa.models.gate import Gate

from ..synthetic import copy_task
from .charts import draw_losses, mark_values
from .experiment import Column, Experiment, Options
from .results import values_of
from .rows import FIXED_GATES, settings_of

#: Gates that are not fixed, and their place in the chart.
OTHERS = {"RFA-Gate-Gaussian": ("learned", "*", 1024), "RFA-Gaussian": ("none", "s", 2048)}
#: Copies: pairs to train on and held out, and the digits of the held-out sequences.
TRAINED_ON, HELD_OUT, LENGTHS = 40_000, 200, (3, 7, 11, 15)
BATCH = 100
COPIED = {f"copied_{length}": f"{length} digits" for length in LENGTHS}


def gate_settings(row: str, recipe: dict[str, Any], work: Path, seed: int) -> dict[str, Any]:
    """Return a recipe's settings for a row. A fixed gate is set in a new model, which the training starts from."""
    settings = settings_of(row, recipe)
    if row not in FIXED_GATES:
        return settings
    overrides = settings.pop("config_overrides")
    start = {"model_type": settings.pop("model_type"), "config_overrides": json.dumps(overrides)}
    start |= {name: settings[name] for name in ("task", "train", "tokenizer", "byte_tokenizer") if name in settings}
    config, _ = load_config_and_tokenizer(FinetuneArguments(**start), seed=seed)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for module in model.modules():
        if isinstance(module, Gate):
            torch.nn.init.zeros_(module.weight)
            torch.nn.init.constant_(module.bias, math.log(FIXED_GATES[row] - 1))
    folder = work / f"{row}, seed {seed}, new"
    model.save_pretrained(folder)
    return {**settings, "model": str(folder), "gate_rate": 0.0}


def prepare_copies(data: Path | None, work: Path) -> Options:
    """Write sequences of up to 15 digits and their copies."""
    paths = {"train": work / "train.jsonl", "evaluate": work / "valid.jsonl"}
    for seed, (path, count) in enumerate(zip(paths.values(), (TRAINED_ON, HELD_OUT), strict=True)):
        rows = copy_task(count, min_length=1, max_length=max(LENGTHS), seed=seed)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {name: str(path) for name, path in paths.items()}


@torch.no_grad()
def measure_copies(folder: Path, options: Options) -> dict[str, float]:
    """Return the share of the digits of new sequences that are copied, by the length of the sequence."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = {}
    for length in LENGTHS:
        rows = Dataset.from_list(list(copy_task(BATCH, min_length=length, max_length=length, seed=2)))
        batch = single_documents(rows, tokenizer, length=10**6).with_format("torch")[:]
        logits = model(torch.stack(list(batch["input_ids"])), use_cache=False).logits[:, :-1]
        labels = torch.stack(list(batch["labels"]))[:, 1:]
        counted = labels != IGNORED_LABEL
        counted[:, -1] = False  # the end is no digit
        found[f"copied_{length}"] = float((logits.argmax(-1) == labels)[counted].double().mean())
    return found


def draw_gates(folder: Path) -> None:
    """Draw copying and language modelling by time scale of the gate, as far as they were run, to ``gate.png``."""
    panels = {"copying": (COPIED, "digits copied"), "language": ({"perplexity_1": "fixed gate"}, "perplexity")}
    there = [name for name in panels if (folder / f"{name}.json").is_file()]
    figure = Figure(figsize=(4.5 * len(there), 3.6), layout="tight")
    for axes, name in zip(figure.subplots(1, len(there), squeeze=False)[0], there, strict=True):
        whole = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        values, title = panels[name]
        axes.set(xlabel="time scale of the gate, tokens", ylabel=title)
        axes.set_xscale("log", base=2)
        axes.set_xticks(
            [*FIXED_GATES.values(), *(place for _, _, place in OTHERS.values())],
            [*map(str, FIXED_GATES.values()), *(label for label, _, _ in OTHERS.values())],
            rotation=45,
        )
        axes.set_xlim(min(FIXED_GATES.values()) / 2, 4096)
        axes.grid(alpha=0.3)
        for index, (value, label) in enumerate(values.items()):
            values_by_row = {row: values_of(whole, row, value) for row in whole["rows"]}
            found = {row: [each for each in runs if each is not None] for row, runs in values_by_row.items()}
            fixed = {scale: found[row] for row, scale in FIXED_GATES.items() if found.get(row)}
            color = f"C{index}"
            axes.plot(list(fixed), [fmean(each) for each in fixed.values()], "-", color=color, label=label)
            for scale, runs in fixed.items():
                axes.plot([scale] * len(runs), runs, "o", color=color, markersize=3)
            for row, (_, marker, place) in OTHERS.items():
                runs = found.get(row, [])
                axes.plot([place] * len(runs), runs, marker, color=color, markersize=6)
        axes.legend(fontsize=7, frameon=False)
    figure.savefig(folder / "gate.png", dpi=130)


def draw(whole: dict[str, Any], path: Path) -> None:
    """Draw the training losses, and the share of the digits that are copied, by length; and the chart of the gates."""
    figure = Figure(figsize=(9, 3.6), layout="tight")
    left, right = figure.subplots(1, 2)
    draw_losses(left, whole)
    mark_values(right, whole, list(COPIED))
    right.axhline(whole["chance"]["copied"], color="#888888", linestyle="dotted")
    right.set_xticks(range(len(LENGTHS)), list(map(str, LENGTHS)))
    right.set(xlabel="digits of the sequence", ylabel="copied", ylim=(0, 1.03))
    figure.savefig(path, dpi=130)
    draw_gates(path.parent)


COPYING = Experiment(
    recipe="copy",
    rows=(
        "softmax",
        "RFA-Gaussian",
        "elu",
        "RFA-Gate-Gaussian",
        *list(FIXED_GATES)[:-1],
    ),  # 256 tokens forget nothing here
    columns=tuple(Column(value, title, ".3f", "copied") for value, title in COPIED.items()),
    prepare=prepare_copies,
    measure=measure_copies,
    chance=lambda options: {"copied": 0.1},
    draw=draw,
    settings=gate_settings,
)
