"""Settings of the end-to-end training compared: one converted checkpoint, the same tokens, one row a setting.

    python -m benchmarks.training CHECKPOINT TEXT --teacher MODEL --train TRAIN --output FOLDER \
        --try "" "learning_rate=3e-5" "lora_rank=16 learning_rate=1e-3"

Every try is the recipe with some settings of its end-to-end stage changed; the empty one is the recipe as it is. A row has
the perplexity of a text that was not trained on, by context, and what the model predicts of passages that it has read before:
each block of the first context ends with passages from its beginning. The softmax model and the checkpoint untrained are
rows too. Trained models are not kept. Rows are written one by one to ``training.json``, and a run goes on where it was
stopped.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import yaml
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_rfa  # noqa: F401  # registers the RFA models
from hf_rfa.convert.retrieval_heads import repeated_passages
from hf_rfa.errors import InputError
from hf_rfa.evaluation.recall.scoring import Rows, score_tokens
from hf_rfa.finetune.distill import distill
from hf_rfa.finetune.recipe import ALLOWED, Recipe
from hf_rfa.finetune.run_folder import training_folder
from hf_rfa.io.atomic_io import new_file
from hf_rfa.io.text_io import read_documents, tokenize
from hf_rfa_cli.console import report_of

from .memory import score

SOFTMAX, UNTRAINED, AS_IT_IS = "softmax", "untrained", "the recipe as it is"


def recipe_of(recipe: Recipe, words: str, seed: int) -> Recipe:
    """Return a recipe of the end-to-end stage alone, with settings changed by words such as ``lora_rank=16 bf16=false``.

    Raises:
        InputError: if they name no settings of a stage, or values that these cannot have.
    """
    changes: dict[str, Any] = {}
    for word in words.split():
        name, _, value = word.partition("=")
        if name not in ALLOWED or not value:
            raise InputError(
                f"--try takes settings such as learning_rate=3e-5, got {word!r}. There are: {', '.join(ALLOWED)}."
            )
        read = yaml.safe_load(value)
        changes[name] = float(read) if name.endswith("rate") else read  # YAML takes 3e-5 for a text
    stage = replace(recipe.end_to_end, **changes)
    stage.check("end_to_end")
    return Recipe(end_to_end=stage, seed=seed)


def measure(model: PreTrainedModel, ids: Tensor, contexts: list[int]) -> dict[str, Any]:
    """Return the perplexity of a text [N] by context, and how much of passages said again a model predicts."""
    found = {str(each): score(model, ids[: len(ids) // each * each].view(-1, each))["perplexity"] for each in contexts}
    blocks, told = repeated_passages(ids[: len(ids) // contexts[0] * contexts[0]].view(-1, contexts[0]), seed=0)
    scores = score_tokens(model, Rows(blocks, told))
    return {"perplexity": found, "repeated_right": scores.accuracy, "repeated_nats": scores.mean_nats}


def main() -> None:
    """Train and measure what is missing, and print all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--recipe", default="pretrained", help="of hf-rfa distill, by name or file")
    parser.add_argument("--try", dest="tries", nargs="+", default=[""], help="changed settings, one text a row")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    recipe = Recipe.load(given.recipe)
    recipes = {(each, seed): recipe_of(recipe, each, seed) for each in given.tries for seed in given.seeds}

    given.output.mkdir(parents=True, exist_ok=True)
    path = given.output / "training.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else []
    ids = tokenize(AutoTokenizer.from_pretrained(given.teacher), read_documents(given.text), most=given.tokens)

    def add(key: dict[str, Any], folder: Path, **others: Any) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        if torch.accelerator.is_available():
            model.to(torch.accelerator.current_accelerator())
        rows.append(key | measure(model, ids, given.contexts) | others)
        with new_file(path) as file:
            file.write(json.dumps(rows, indent=1) + "\n")

    def known(key: dict[str, Any]) -> bool:
        return any(key.items() <= row.items() for row in rows)

    start = {"checkpoint": given.checkpoint.name, "tokens": len(ids)}
    for name, folder in ((SOFTMAX, given.teacher), (UNTRAINED, given.checkpoint)):
        if not known(start | {"name": name}):
            add(start | {"name": name}, folder)
    for (words, seed), settings in recipes.items():
        key = start | {"name": words or AS_IT_IS, "seed": seed}
        if known(key):
            continue
        trained = given.output / "training-now"
        shutil.rmtree(trained, ignore_errors=True)
        shutil.rmtree(training_folder(trained), ignore_errors=True)
        began = time.perf_counter()
        options = {"teacher": given.teacher, "data": given.train, "recipe": settings}
        report = report_of(distill, given.checkpoint, trained, **options)
        add(key, trained, seconds=time.perf_counter() - began, recipe=report.recipe.to_dict()["end_to_end"])
        shutil.rmtree(trained)
    Console().print(table(rows, given.contexts), markup=False, highlight=False, soft_wrap=True)


def table(rows: list[dict[str, Any]], contexts: list[int]) -> str:
    """Return the rows as a Markdown table, the mean over seeds with the least and the most."""
    lines = ["| checkpoint | settings | " + " | ".join(f"{each:,}" for each in contexts) + " | said again | minutes |"]
    lines.append("|---|---|" + "---|" * (len(contexts) + 2))
    for checkpoint, name in dict.fromkeys((row["checkpoint"], row["name"]) for row in rows):
        found = [row for row in rows if (row["checkpoint"], row["name"]) == (checkpoint, name)]
        cells = [spread([row["perplexity"][str(each)] for row in found]) for each in contexts]
        right, nats = (fmean(row[each] for row in found) for each in ("repeated_right", "repeated_nats"))
        minutes = [row["seconds"] / 60 for row in found if "seconds" in row]
        cells += [f"{100 * right:.1f} ({nats:.2f})", f"{fmean(minutes):.1f}" if minutes else ""]
        lines.append(f"| {checkpoint} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    """Return the mean of values, with the least and the most where there are several."""
    return f"{fmean(values):.2f}" + (f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else "")


if __name__ == "__main__":
    main()
