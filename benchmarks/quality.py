"""Perplexity by feature map and stage of training, and of the base model: tables of benchmarks/results/short-training.md.

    python -m benchmarks.quality MODEL --train TEXT --test NAME=TEXT [--test NAME=TEXT] --output quality.json

Every row is converted, calibrated on the training text, taught the parent's attention, and trained end to end: all rows on
the same tokens in the same order, with as many optimiser steps. After each stage the perplexity of the test texts is
measured as `hf-rfa evaluate` does. The softmax parent is fine-tuned beside them on the same tokens.

Results are kept in ``--work`` and not computed again: an interrupted run, or one with more rows, continues from them.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, cast

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from hf_rfa.convert import convert
from hf_rfa.convert.atomic_io import new_file, new_folder
from hf_rfa.convert.calibration_data import tokenize
from hf_rfa.convert.text_io import read_documents
from hf_rfa.finetune.data import joined_blocks
from hf_rfa.finetune.distill import distill
from hf_rfa.finetune.evaluation import perplexity
from hf_rfa.finetune.recipe import Recipe
from hf_rfa.finetune.run_folder import training_folder
from hf_rfa.finetune.trainers import train_stage
from hf_rfa.inference import load_model, use_attention_component
from hf_rfa.models.attention import AttentionComponent

SOFTMAX = "softmax"
STAGES = ("start", "transfer", "end to end")
#: Options of the conversion, by row of the table.
ROWS: dict[str, dict[str, Any]] = {
    "gaussian (paper)": {"feature_map": "gaussian", "unit_norm": True, "trainable_projection": True},
    "arccos": {"feature_map": "arccos", "unit_norm": True, "trainable_projection": True},
    "elu": {"feature_map": "elu"},
    "t2r": {"feature_map": "t2r"},
    "hedgehog": {"feature_map": "hedgehog"},
    "positive": {"feature_map": "positive", "trainable_projection": True},
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


@dataclass(frozen=True)
class Settings:
    """The settings that all rows share."""

    model: str
    train: Path
    tests: dict[str, Path]
    contexts: tuple[int, ...]
    max_tokens: int | None
    recipe: Recipe
    work: Path

    def measure(self, checkpoint: Path, component: AttentionComponent) -> dict[str, float]:
        """Return the perplexities of a checkpoint by text and context; each is measured once."""
        stored = self.work / f"{checkpoint.name}, {component}, {self.max_tokens or 'all'} tokens.json"
        found = json.loads(stored.read_text()) if stored.is_file() else {}
        keys = {f"{text}, context {context}": (text, context) for text, context in product(self.tests, self.contexts)}
        model: Any = None
        for key, (text, context) in keys.items():
            if key in found:
                continue
            if model is None:
                model, tokenizer = load_model(str(checkpoint), dtype="float32")
                use_attention_component(model, component)
            ids = tokenize(tokenizer, read_documents(self.tests[text]), most=self.max_tokens)
            found[key] = perplexity(model, ids, context_length=context).perplexity
            with new_file(stored) as file:
                json.dump(found, file, indent=2)
        return {key: found[key] for key in keys}

    def stages(self, row: str, seed: int, stages: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
        """Make a row's checkpoints, and yield (stage, folder). A checkpoint that exists is not made again."""
        base = self.work / f"{row}, seed {seed}"
        recipe = replace(self.recipe, seed=seed)
        if row == SOFTMAX:
            yield "start", Path(self.model)
            if "end to end" in stages:
                folder = Path(f"{base}, end to end")
                if not folder.exists():
                    self.finetune_parent(folder, recipe)
                yield "end to end", folder
            return
        if not base.exists():
            convert(self.model, base, calibrate_on=self.train, seed=seed, **ROWS[row])
        yield "start", base
        last = base
        others: dict[str, Any] = {"transfer": {"end_to_end_steps": 0}, "end to end": {"transfer_steps": 0}}
        for stage, other in others.items():
            if stage not in stages or (row == "elu" and stage == "transfer"):  # elu has nothing to learn in the first
                continue
            folder = Path(f"{base}, {stage}")
            if not folder.exists():
                other |= {"teacher": self.model, "data": self.train, "recipe": recipe}
                distill(last, folder, **other, resume=training_folder(folder).exists())
            yield stage, folder
            last = folder

    def finetune_parent(self, folder: Path, recipe: Recipe) -> None:
        """Train the softmax parent on the tokens of the end-to-end stage."""
        model, tokenizer = load_model(self.model, dtype="float32")
        stage = recipe.end_to_end.resolve(model.config, model.config.max_position_embeddings)
        data = joined_blocks(tokenizer, read_documents(self.train), cast(int, stage.block_length))
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
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
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()

    arguments.work.mkdir(parents=True, exist_ok=True)
    tests = {name: Path(path) for name, _, path in (each.partition("=") for each in arguments.test)}
    recipe = Recipe.load(arguments.recipe)
    settings = Settings(
        arguments.model, arguments.train, tests, tuple(arguments.context), arguments.max_tokens, recipe, arguments.work
    )
    stages = tuple(arguments.stage or STAGES)
    console, results = Console(), []
    for row, seed in product(dict.fromkeys([SOFTMAX, *(arguments.row or ROWS)]), arguments.seed):
        for stage, folder in settings.stages(row, seed, stages):
            for component in COMPONENTS if ROWS.get(row, {}).get("window_size") else COMPONENTS[:1]:
                if stage in stages:
                    name = row if component == "both" else f"{row}: {component} alone"
                    found = settings.measure(folder, component)
                    results.append({"row": name, "seed": seed, "stage": stage, "perplexities": found})
                    console.print(f"{name}, seed {seed}, {stage}: {found}")
    keys = list(results[0]["perplexities"])
    for key in keys:
        console.print(table_of(results, key))
    if arguments.output is not None:
        with new_file(arguments.output) as file:
            described = {"recipe": recipe.to_dict(), "max_tokens": arguments.max_tokens, "results": results}
            json.dump(described, file, indent=2)
        plot(results, keys[0], arguments.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
