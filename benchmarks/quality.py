"""Perplexity by feature map and stage of training, and of the base model: tables of benchmarks/results/short-training.md.

    python -m benchmarks.quality MODEL --train TEXT --test NAME=TEXT [--test NAME=TEXT] --output quality.json

Every row is converted, calibrated on the training text, taught the parent's attention, and trained end to end: all rows on
the same tokens in the same order, with as many optimiser steps. After each stage the perplexity of the test texts is
measured as `hf-rfa evaluate` does. The softmax parent is fine-tuned beside them on the same tokens.

Results are kept in ``--work`` and not computed again: an interrupted run, or one with more rows, continues from them.
"""

from __future__ import annotations

import json
import math
import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any, cast

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from hf_rfa.convert import convert
from hf_rfa.evaluation import perplexity
from hf_rfa.finetune.data import joined_blocks
from hf_rfa.finetune.distill import distill
from hf_rfa.finetune.recipe import Recipe
from hf_rfa.finetune.run_folder import training_folder
from hf_rfa.finetune.trainers import train_stage
from hf_rfa.inference import load_model, use_attention_component
from hf_rfa.io.atomic_io import new_file, new_folder
from hf_rfa.io.text_io import read_documents, tokenize
from hf_rfa.models.attention import AttentionComponent

SOFTMAX = "softmax"
STAGES = ("start", "transfer", "end to end")
#: Options of the conversion, by row of the table.
ROWS: dict[str, dict[str, Any]] = {
    "gaussian (paper)": {"feature_map": "gaussian", "config": {"unit_norm": True, "trainable_projection": True}},
    "arccos": {"feature_map": "arccos", "config": {"unit_norm": True, "trainable_projection": True}},
    "elu": {"feature_map": "elu"},
    "t2r": {"feature_map": "t2r"},
    "hedgehog": {"feature_map": "hedgehog"},
    "positive": {"feature_map": "positive", "config": {"trainable_projection": True}},
    "exponential": {"feature_map": "exponential"},
    "exponential, F = 32": {"feature_map": "exponential", "num_features": 32},
    "exponential, F = 64": {"feature_map": "exponential", "num_features": 64},
    "exponential, F = 256": {"feature_map": "exponential", "num_features": 256},
    "exponential, gate": {"feature_map": "exponential", "gate": True},
    "exponential, W = 16": {"feature_map": "exponential", "window_size": 16},
    "exponential, W = 64": {"feature_map": "exponential", "window_size": 64},
}
#: Rows with a window are measured three times: whole, and each component alone.
COMPONENTS: tuple[AttentionComponent, ...] = ("both", "linear", "window")


def measure(settings: Namespace, checkpoint: Path, component: AttentionComponent) -> dict[str, float]:
    """Return the perplexities of a checkpoint by text and context; each is measured once."""
    stored = settings.work / f"{checkpoint.name}, {component}, {settings.max_tokens or 'all'} tokens.json"
    found = json.loads(stored.read_text()) if stored.is_file() else {}
    keys = {f"{text}, context {context}": (text, context) for text, context in product(settings.test, settings.context)}
    model: Any = None
    for key, (text, context) in keys.items():
        if key in found:
            continue
        if model is None:
            model, tokenizer = load_model(str(checkpoint), dtype="float32")
            use_attention_component(model, component)
        ids = tokenize(tokenizer, read_documents(settings.test[text]), most=settings.max_tokens)
        found[key] = perplexity(model, ids, context_length=context).perplexity
        with new_file(stored) as file:
            json.dump(found, file, indent=2)
    return {key: found[key] for key in keys}


def make_stages(settings: Namespace, row: str, seed: int) -> Iterator[tuple[str, Path]]:
    """Make a row's checkpoints, and yield (stage, folder). A checkpoint that exists is not made again."""
    base = settings.work / f"{row}, seed {seed}"
    recipe = replace(settings.recipe, seed=seed)
    if row == SOFTMAX:
        yield "start", Path(settings.model)
        if "end to end" in settings.stage:
            folder = Path(f"{base}, end to end")
            if not folder.exists():
                finetune_parent(settings, folder, recipe)
            yield "end to end", folder
        return
    if not base.exists():
        convert(settings.model, base, preset="rfa", calibrate_on=settings.train, seed=seed, force=True, **ROWS[row])
    yield "start", base
    folder = base
    for stage, other in (("transfer", "end_to_end_steps"), ("end to end", "transfer_steps")):
        if stage not in settings.stage or (row == "elu" and stage == "transfer"):  # elu has nothing to learn in it
            continue
        last, folder = folder, Path(f"{base}, {stage}")
        if not folder.exists():
            options: dict[str, Any] = {other: 0, "resume": training_folder(folder).exists()}
            distill(last, folder, teacher=settings.model, data=settings.train, recipe=recipe, **options)
        yield stage, folder


def finetune_parent(settings: Namespace, folder: Path, recipe: Recipe) -> None:
    """Train the softmax parent on the tokens of the end-to-end stage."""
    model, tokenizer = load_model(settings.model, dtype="float32")
    stage = recipe.resolve(model.config, model.config.max_position_embeddings).end_to_end
    data = joined_blocks(tokenizer, read_documents(settings.train), cast(int, stage.block_length))
    work = training_folder(folder)
    alone = replace(stage, kl_weight=0.0, lora_rank=0)
    train_stage("end_to_end", model, None, data, alone, work, seed=recipe.seed, resume=True)
    with new_folder(folder) as place:
        model.save_pretrained(place)
        tokenizer.save_pretrained(place)
    shutil.rmtree(work)


def means(results: list[dict[str, Any]], key: str) -> dict[str, dict[str, tuple[float, float]]]:
    """Return the mean perplexity over seeds and half its range, by row and stage."""
    found: dict[str, dict[str, Any]] = {}
    for each in results:
        found.setdefault(each["row"], {}).setdefault(each["stage"], []).append(each["perplexities"][key])
    return {
        row: {stage: (sum(seeds) / len(seeds), (max(seeds) - min(seeds)) / 2) for stage, seeds in stages.items()}
        for row, stages in found.items()
    }


def table_of(results: list[dict[str, Any]], key: str) -> Table:
    """Return the table of one text and context: perplexity, and its ratio to the softmax model at the same stage."""
    table, found = Table("row", *STAGES, title=key), means(results, key)
    start = found[SOFTMAX].get("start", (math.nan, 0.0))
    for row, stages in found.items():
        cells = []
        for stage in STAGES:
            mean, spread = stages.get(stage, (math.nan, 0.0))
            base, _ = found[SOFTMAX].get(stage, start)
            shown = f"{mean:.2f}" + (f" ± {spread:.2f}" if spread else "")
            cells.append(f"{shown} ({mean / base:.3f})" if stage in stages else "")
        table.add_row(row, *cells)
    return table


def plot(results: list[dict[str, Any]], key: str, path: Path) -> None:
    """Draw every row's ratio to the softmax parent by stage."""
    found = means(results, key)
    softmax = found.pop(SOFTMAX)
    base = softmax["start"][0]
    figure = Figure(figsize=(7, 4.2), layout="tight")
    axes = figure.subplots()
    for row, stages in found.items():
        points = [(place, stages[stage][0] / base) for place, stage in enumerate(STAGES) if stage in stages]
        axes.plot(*zip(*points, strict=True), marker="o", label=row)
    if "end to end" in softmax:
        axes.axhline(softmax["end to end"][0] / base, color="black", linestyle="--", label="softmax, fine-tuned")
    axes.set_xticks(range(len(STAGES)), ["swap and calibration", "attention transfer", "end to end"])
    axes.set(yscale="log", ylabel="perplexity / softmax parent's", title=key)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run the grid."""
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="softmax checkpoint")
    parser.add_argument("--train", type=Path, required=True, help="text to train on")
    parser.add_argument("--test", action="append", required=True, metavar="NAME=TEXT", help="text to measure on")
    parser.add_argument("--context", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--max-tokens", type=int, help="measure on so many tokens of each text")
    parser.add_argument("--row", action="append", choices=[SOFTMAX, *ROWS], help="default: all")
    parser.add_argument("--stage", action="append", choices=STAGES, help="default: all")
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--recipe", default="default")
    parser.add_argument("--work", type=Path, default=Path("quality-work"), help="folder for checkpoints")
    parser.add_argument("--output", type=Path, help="JSON to write; the picture goes beside it")
    settings = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()

    settings.work.mkdir(parents=True, exist_ok=True)
    settings.test = {name: Path(path) for name, _, path in (each.partition("=") for each in settings.test)}
    settings.recipe, settings.stage = Recipe.load(settings.recipe), settings.stage or STAGES
    console, results = Console(), []
    for row, seed in product(dict.fromkeys([SOFTMAX, *(settings.row or ROWS)]), settings.seed):
        for stage, folder in make_stages(settings, row, seed):
            for component in COMPONENTS if ROWS.get(row, {}).get("window_size") else COMPONENTS[:1]:
                if stage in settings.stage:
                    name = row if component == "both" else f"{row}: {component} alone"
                    found = measure(settings, folder, component)
                    results.append({"row": name, "seed": seed, "stage": stage, "perplexities": found})
                    console.print(f"{name}, seed {seed}, {stage}: {found}")
    keys = list(results[0]["perplexities"])
    for key in keys:
        console.print(table_of(results, key))
    if settings.output is not None:
        with new_file(settings.output) as file:
            described = {"recipe": asdict(settings.recipe), "max_tokens": settings.max_tokens, "results": results}
            json.dump(described, file, indent=2)
        plot(results, keys[0], settings.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
