"""What the gate buys and costs: copying and language modelling with gates of one fixed time scale, and with learned ones.

A gate g forgets what is older than about 1/(1 − g) tokens (Peng et al. 2021, section 3.3). Copying needs all of a sequence;
the next word of a text needs the last ones most. Fixed gates have the same g in every head and at every token.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_rfa  # noqa: F401  # registers the RFA models
from hf_rfa.convert.perplexity import IGNORED_LABEL
from hf_rfa.finetune.arguments import FinetuneArguments
from hf_rfa.finetune.data import single_documents
from hf_rfa.finetune.finetune import load_config_and_tokenizer
from hf_rfa.finetune.synthetic import copy_task
from hf_rfa.models.attention import Gate

from . import language
from .experiment import Column, Experiment, Options
from .rows import settings_of

#: Time scales of fixed gates, in tokens.
TIME_SCALES = (4, 16, 64, 256)
NO_GATE, LEARNED = "no gate", "learned gate"
FIXED = {f"gate of {scale} tokens": scale for scale in TIME_SCALES}
ROWS = (NO_GATE, LEARNED, *FIXED)
#: Copies: pairs to train on and held out, and the digits of the held-out sequences.
TRAINED_ON, HELD_OUT, LENGTHS = 40_000, 200, (4, 8, 16, 24, 31)
BATCH = 100


def gate_settings(row: str, recipe: dict[str, Any], work: Path, seed: int) -> dict[str, Any]:
    """Return a recipe's settings for a row. A fixed gate is set in a new model, which the training starts from."""
    settings = settings_of("RFA-Gaussian" if row == NO_GATE else "RFA-Gate-Gaussian", recipe)
    if row not in FIXED:
        return settings
    overrides = settings.pop("config_overrides")
    start = {"model_type": settings.pop("model_type"), "config_overrides": json.dumps(overrides)}
    start |= {name: settings[name] for name in ("task", "train", "tokenizer", "byte_tokenizer") if name in settings}
    config, _ = load_config_and_tokenizer(FinetuneArguments(**start))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for module in model.modules():
        if isinstance(module, Gate):
            torch.nn.init.zeros_(module.weight)
            torch.nn.init.constant_(module.bias, math.log(FIXED[row] - 1))
    folder = work / f"{row}, seed {seed}, new"
    model.save_pretrained(folder)
    return {**settings, "model": str(folder), "gate_rate": 0.0}


def prepare_copies(data: Path | None, work: Path) -> Options:
    """Write sequences of up to 31 digits and their copies."""
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
        columns = {"text_column": "text", "prompt_column": "prompt"}
        batch = single_documents(rows, tokenizer, length=10**6, **columns).with_format("torch")[:]
        logits = model(torch.stack(list(batch["input_ids"])), use_cache=False).logits[:, :-1]
        labels = torch.stack(list(batch["labels"]))[:, 1:]
        counted = labels != IGNORED_LABEL
        counted[:, -1] = False  # the end is no digit
        found[f"copied_{length}"] = float((logits.argmax(-1) == labels)[counted].double().mean())
    return found


def draw(whole: dict[str, Any], path: Path) -> None:
    """Draw copying and language modelling by time scale, as far as both were run, beside each other."""
    figure = Figure(figsize=(9, 3.6), layout="tight")
    left, right = figure.subplots(1, 2)
    for name in ("copying", "gated-language"):
        if not (path.parent / f"{name}.json").is_file():
            continue
        rows = json.loads((path.parent / f"{name}.json").read_text())["rows"]
        copies = name == "copying"
        axes = left if copies else right
        lines = [(f"copied_{length}", f"{length} digits") for length in LENGTHS] if copies else [("perplexity_1", "")]
        for index, (value, title) in enumerate(lines):
            color = f"C{index}" if copies else "C0"
            points = [(scale, run["values"][value]) for row, scale in FIXED.items() for run in rows.get(row, ())]
            axes.plot(*zip(*sorted(points), strict=True), "o-", color=color, markersize=3, label=title or "fixed gate")
            for row, marker, place in ((NO_GATE, "s", 2048), (LEARNED, "*", 1024)):
                each = [run["values"][value] for run in rows.get(row, ())]
                axes.plot([place] * len(each), each, marker, color=color, markersize=6, linestyle="none")
        axes.set_xscale("log", base=2)
        axes.set_xticks([*TIME_SCALES, 1024, 2048], [*map(str, TIME_SCALES), "learned", "none"], rotation=45)
        axes.set(xlabel="time scale of the gate, tokens", ylabel="digits copied" if copies else "perplexity")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, frameon=False)
    figure.savefig(path.parent / "gate.png", dpi=130)


COPYING = Experiment(
    recipe="copy",
    rows=ROWS,
    columns=tuple(Column(f"copied_{length}", f"{length} digits", ".3f", "copied") for length in LENGTHS),
    prepare=prepare_copies,
    measure=measure_copies,
    chance=lambda options: {"copied": 0.1},
    draw=draw,
    settings=gate_settings,
    options={"block_length": 72, "config_overrides": {"n_positions": 72}},
)
LANGUAGE = Experiment(
    recipe="wikitext103-scratch",
    rows=ROWS,
    columns=language.EXPERIMENT.columns,
    prepare=language.prepare,
    measure=language.measure,
    chance=language.chance,
    draw=draw,
    settings=gate_settings,
)
