"""Long texts classified by a language model that was converted: film reviews, at contexts of 256, 1,024 and 4,096 tokens.

``--data`` is a folder with ``train.jsonl.gz`` and ``valid.jsonl.gz``, a review a line with "text" and "label"; ``--model`` a
GPT-2 or another decoder. A review that is longer than the context is cut to its end, where the verdict is. All rows are
fine-tuned alike: the decoder itself, what it is converted to, and random features after attention transfer on the reviews to
train on. What it is converted to is random features alone, the default for decoders other than GPT-2, and a window with
sinks, all of as many bytes. A table of positions that is too short is stretched by interpolation, for all rows.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_rfa.convert import convert
from hf_rfa.convert.checkpoint.base_model import extend_positions
from hf_rfa.errors import InputError
from hf_rfa.families import FAMILIES, position_count
from hf_rfa.finetune.distill import distill
from hf_rfa.finetune.recipe import Recipe
from hf_rfa.finetune.run_folder import training_folder
from hf_rfa.inference.loading import find_device
from hf_rfa.io.atomic_io import new_folder
from hf_rfa.io.text_io import open_text

from .classification import accuracy
from .experiment import Column, Experiment, Options
from .language import prepare

CONTEXTS = (256, 1024, 4096)
SOFTMAX, CONVERTED, TRANSFERRED = "softmax", "RFA", "RFA after attention transfer"
SLOTS, WINDOW = "window, sinks and slots", "window and sinks"
KINDS = (SOFTMAX, CONVERTED, TRANSFERRED, SLOTS, WINDOW)
#: What is converted without any training before the fine-tuning, by the options of the conversion.
CONVERSIONS: dict[str, dict[str, Any]] = {
    CONVERTED: {"preset": "rfa"},
    SLOTS: {"preset": "exact"},
    WINDOW: {"preset": "exact", "window_size": 60, "num_slots": 0},
}
ROWS = tuple(f"{kind}, {context}" for context in CONTEXTS for kind in KINDS)
#: Steps of attention transfer, of 2,048 tokens each, and the reviews that are classified at once.
TRANSFER_STEPS, BATCH = 120, 8
#: Tokens of a step that a processor and an accelerator hold at once: a step of more is taken in pieces.
TOKENS_AT_ONCE, TOKENS_ON_ACCELERATOR = 2**11, 2**14


def settings(row: str, recipe: dict[str, Any], work: Path, seed: int) -> dict[str, Any]:
    """Return the recipe's settings for a row, whose model is made unless it is there."""
    if "model" not in recipe:
        raise InputError("pass --model, the folder of a language model that is converted and fine-tuned.")
    kind, _, context = row.rpartition(", ")
    changed = {"model": str(_start(kind, int(context), recipe, work, seed)), "block_length": int(context)}
    changed |= _pieces(recipe["per_device_train_batch_size"], int(context))
    rates = () if kind in (CONVERTED, TRANSFERRED) else ("feature_map_rate", "sigma_rate")  # others have neither
    return {name: value for name, value in recipe.items() if name not in rates} | changed


def _pieces(batch: int, context: int) -> dict[str, int]:
    """Return a batch as pieces of so few reviews that memory holds their activations; the step is the same."""
    tokens = TOKENS_AT_ONCE if find_device("auto").type == "cpu" else TOKENS_ON_ACCELERATOR
    piece = math.gcd(batch, max(1, tokens // context))
    return {"per_device_train_batch_size": piece, "gradient_accumulation_steps": batch // piece}


def _start(kind: str, context: int, recipe: dict[str, Any], work: Path, seed: int) -> Path:
    """Return the model that a row's fine-tuning starts from; a seed draws its random vectors and the transfer's data."""
    folder = work / (f"start, {kind}, {context}" + ("" if kind == SOFTMAX else f", seed {seed}"))
    if folder.is_dir():
        return folder
    if kind == SOFTMAX:
        model: Any = AutoModelForCausalLM.from_pretrained(recipe["model"], dtype="float32")
        if position_count(model.config) < context:
            extend_positions(FAMILIES[model.config.model_type], model, context)
        with new_folder(folder) as place:
            model.save_pretrained(place)
            AutoTokenizer.from_pretrained(recipe["model"], truncation_side="left").save_pretrained(place)
        return folder
    base, text = _start(SOFTMAX, context, recipe, work, seed), recipe["train"]
    if kind in CONVERSIONS:
        convert(base, folder, calibrate_on=text, seed=seed, force=True, **CONVERSIONS[kind])
        return folder
    converted = folder.with_name(f"{folder.name}, untrained")
    if not converted.is_dir():
        convert(base, converted, calibrate_on=text, trained="features", seed=seed)
    steps = {"transfer_steps": TRANSFER_STEPS, "end_to_end_steps": 0}
    transfer = replace(Recipe.load("default"), seed=seed)
    resume = training_folder(folder).is_dir()
    distill(converted, folder, teacher=base, data=text, recipe=transfer, resume=resume, **steps)  # type: ignore[arg-type]
    return folder


def measure(folder: Path, options: Options) -> dict[str, float]:
    """Return the share of held-out reviews that are classified rightly."""
    context = json.loads((folder / "finetuning.json").read_text())["settings"]["block_length"]
    return {"right": accuracy(folder, held_out(options), BATCH, max_length=context)}


def held_out(options: Options) -> list[dict[str, Any]]:
    """Return the held-out reviews."""
    with open_text(Path(options["evaluate"])) as file:
        return [json.loads(line) for line in file]


def chance(options: Options) -> dict[str, float]:
    """Return the share of the commoner label among the held-out reviews."""
    labels = [row["label"] for row in held_out(options)]
    return {"right": max(labels.count(label) for label in labels) / len(labels)}


EXPERIMENT = Experiment(
    recipe="reviews",
    rows=ROWS,
    columns=(Column("right", "classified rightly", ".3f", "right"),),
    prepare=prepare,
    measure=measure,
    chance=chance,
    settings=settings,
    constants={"transfer_steps": TRANSFER_STEPS},
)
