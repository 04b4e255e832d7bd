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
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_rfa  # noqa: F401  # registers the RFA models
from hf_rfa.convert.calibrate.retrieval_heads import repeated_passages
from hf_rfa.errors import InputError
from hf_rfa.evaluation.cards import markdown_table
from hf_rfa.evaluation.recall.scoring import Rows, score_tokens
from hf_rfa.finetune.distill import distill
from hf_rfa.finetune.recipe import ALLOWED, Recipe
from hf_rfa.finetune.run_folder import training_folder
from hf_rfa.inference.devices import find_device
from hf_rfa.io.text_io import read_documents, tokenize
from hf_rfa_cli.console import report_of

from .figures import RowFile, print_as_is
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
    return Recipe(end_to_end=replace(recipe.end_to_end, **changes), seed=seed)


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
    arguments = parser.parse_args()
    recipe = Recipe.load(arguments.recipe)
    recipes = {(each, seed): recipe_of(recipe, each, seed) for each in arguments.tries for seed in arguments.seeds}

    file = RowFile(arguments.output / "training.json")
    ids = tokenize(
        AutoTokenizer.from_pretrained(arguments.teacher), read_documents(arguments.text), most=arguments.tokens
    )

    def add(key: dict[str, Any], folder: Path, **others: Any) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder).eval().to(find_device("auto"))
        file.add(key | measure(model, ids, arguments.contexts) | others)

    start = {"checkpoint": arguments.checkpoint.name, "tokens": len(ids)}
    for name, folder in ((SOFTMAX, arguments.teacher), (UNTRAINED, arguments.checkpoint)):
        if not file.has(start | {"name": name}):
            add(start | {"name": name}, folder)
    for (words, seed), settings in recipes.items():
        key = start | {"name": words or AS_IT_IS, "seed": seed}
        if file.has(key):
            continue
        trained = arguments.output / "training-now"
        shutil.rmtree(trained, ignore_errors=True)
        shutil.rmtree(training_folder(trained), ignore_errors=True)
        began = time.perf_counter()
        options = {"teacher": arguments.teacher, "data": arguments.train, "recipe": settings}
        report = report_of(distill, arguments.checkpoint, trained, **options)
        add(key, trained, seconds=time.perf_counter() - began, recipe=asdict(report.recipe.end_to_end))
        shutil.rmtree(trained)
    print_as_is(table(file.rows, arguments.contexts))


def table(rows: list[dict[str, Any]], contexts: list[int]) -> str:
    """Return the rows as a Markdown table, the mean over seeds with the least and the most."""
    head = ["checkpoint", "settings", *(f"{context:,}" for context in contexts), "said again", "minutes"]
    lines = []
    for checkpoint, name in dict.fromkeys((row["checkpoint"], row["name"]) for row in rows):
        seeds = [row for row in rows if (row["checkpoint"], row["name"]) == (checkpoint, name)]
        cells = [spread([row["perplexity"][str(context)] for row in seeds]) for context in contexts]
        right, nats = (fmean(row[figure] for row in seeds) for figure in ("repeated_right", "repeated_nats"))
        minutes = [row["seconds"] / 60 for row in seeds if "seconds" in row]
        cells += [f"{100 * right:.1f} ({nats:.2f})", f"{fmean(minutes):.1f}" if minutes else ""]
        lines.append([checkpoint, name, *cells])
    return markdown_table(head, lines)


def spread(values: list[float]) -> str:
    """Return the mean of values, with the least and the most where there are several."""
    return f"{fmean(values):.2f}" + (f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else "")


if __name__ == "__main__":
    main()
