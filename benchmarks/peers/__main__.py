"""Eviction methods of kvpress, and H2O, under a fixed budget of tokens, on the text and in the blocks of `benchmarks.memory`.

    python -m benchmarks.peers SmolLM2-135M-Instruct enwiki/valid.jsonl.gz --environment ENVIRONMENT --output FOLDER

ENVIRONMENT is a folder that gets an environment with kvpress (`benchmarks.peers.environment`). The softmax model is fed
token by token and no method sees a text whole (`benchmarks.peers.feed`). A budget is the most tokens that a query sees, its
own included, and so the most that the cache ever holds. The control comes first: a window with sinks whose tokens keep their
positions has to have the perplexity that `benchmarks.memory` measured for it, else nothing is measured. (StreamingLLM numbers
keys by their place in the cache: `benchmarks.streams` measures it.) Rows are written one by one to
``peers.json``, and a run goes on where it was stopped. ``--models`` adds rows of models that hf-rfa has converted, or of the
softmax model, each asked the same. They read a row at once, so that their tokens a second are not comparable, and left out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_rfa  # noqa: F401  # registers the RFA models
from hf_rfa.errors import InputError
from hf_rfa.evaluation.memory import cache_memory
from hf_rfa.evaluation.recall.probes import DEPTHS, Rows, TokenScores, blocks, needle, repeated, score_tokens
from hf_rfa.io.text_io import read_documents, tokenize

from ..figures import RowFile
from .environment import python_with_kvpress

ROOT = Path(__file__).parent.parent.parent
SINKS = 4
#: In the order in which they are run; the first is the control.
METHODS = ("window with sinks, absolute positions", "TOVA", "H2O", "SnapKV", "LagKV", "KeyDiff", "Knorm")
#: What the noise around a needle consists of.
NOISE = (
    "The river is wide. ",
    "The road is long. ",
    "The wind is cold. ",
    "The field is green. ",
    "The night is quiet. ",
)
#: How far the control's perplexity may be from that of a window with sinks, relative to it.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Task:
    """What a model reads and is asked.

    Attributes:
        name: of the column.
        rows: the tokens.
        is_answer: whether the scored tokens of a row count together; None for a text, of which there is perplexity.
    """

    name: str
    rows: Rows
    is_answer: bool | None = None

    def figure(self, scores: TokenScores) -> float:
        """Return perplexity, or the percentage of tokens or answers predicted."""
        if self.is_answer is None:
            return math.exp(scores.mean_nats)
        return 100 * (scores.answers() if self.is_answer else scores).accuracy


def make_tasks(tokenizer: Any, ids: Tensor, contexts: list[int], *, recall: bool) -> Iterator[Task]:
    """Yield the text in blocks of every length and, for recall, rows like those of the recall suite."""
    for length in contexts:
        yield Task(f"perplexity {length:,}", blocks(ids, length, len(ids) // length))
    if not recall:
        return
    words = sorted(set(range(tokenizer.vocab_size)) - set(tokenizer.all_special_ids))
    random = Random("random 128")
    copied = torch.tensor([random.choices(words, k=128) for _ in range(16)])
    yield Task("copying 128", repeated(copied), is_answer=False)
    random = Random("noise")
    hay: list[int] = []
    while len(hay) < 512:
        hay += tokenizer("".join(random.choices(NOISE, k=64)), add_special_tokens=False)["input_ids"]
    needles = [needle(tokenizer, hay, 512, depth, 4, Random(f"noise 512 {depth}")) for depth in DEPTHS]
    rows = Rows(torch.cat([each.ids for each in needles]), torch.cat([each.scored for each in needles]))
    yield Task("needle 512", rows, is_answer=True)


def measure(
    python: Path, model: Path, task: Task, *, method: str, budget: int, advance: Callable[[], object]
) -> dict[str, Any]:
    """Return the figures of a task, measured in the environment of ``python``; call ``advance`` for every token."""
    with TemporaryDirectory() as folder:
        rows, scores = Path(folder) / "rows.pt", Path(folder) / "scores.pt"
        torch.save({"ids": task.rows.ids, "scored": task.rows.scored}, rows)
        command = [str(python), "-m", "benchmarks.peers.feed", str(model.absolute()), str(rows), str(scores)]
        command += ["--method", method, "--budget", str(budget)]
        environment = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in process.stdout:
                advance()
        if process.returncode:
            raise InputError(f"{' '.join(command)} failed with status {process.returncode}. It says above why.")
        found = torch.load(scores)
    figure = task.figure(TokenScores(found["nats"], found["correct"], task.rows.scored))
    return {
        "figure": figure,
        "bytes": found["cache_bytes"] + found["other_bytes"],
        "seconds": found["seconds"],
        "tokens_per_second": task.rows.ids.numel() / found["seconds"],
    }


def measure_model(model: PreTrainedModel, task: Task) -> dict[str, Any]:
    """Return the figures of a task that a model of this environment reads at once."""
    return {
        "figure": task.figure(score_tokens(model, task.rows)),
        "bytes": cache_memory(model).after(task.rows.ids.shape[1]),
    }


def check_control(row: dict[str, Any], windows: dict[tuple[int, str], float]) -> None:
    """Raise an InputError if the control's perplexity is not what hf-rfa's own window with sinks of its size has."""
    expected = windows.get((row["budget"], row["task"]))
    if expected is not None and abs(row["figure"] / expected - 1) > TOLERANCE:
        raise InputError(
            f"The control has a perplexity of {row['figure']:.3f} with {row['budget']} tokens, and a window of "
            f"{row['budget'] - SINKS} with {SINKS} sinks {expected:.3f} ({row['task']}). The methods are not fed as hf-rfa's "
            "models are: mend benchmarks/peers/feed.py before anything is compared."
        )


def table(rows: list[dict[str, Any]]) -> Table:
    """Return the rows as a table: a line for every method and budget, a column for every task; first those without one."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    made = Table("budget", "method", *tasks, "bytes", "tokens/s")
    keys = dict.fromkeys((row["budget"], row["method"]) for row in rows)
    for budget, method in sorted(keys, key=lambda key: key[0] or 0):
        of_method = {row["task"]: row for row in rows if (row["budget"], row["method"]) == (budget, method)}
        cells = [f"{of_method[task]['figure']:.2f}" if task in of_method else "" for task in tasks]
        speed = max(row.get("tokens_per_second", 0) for row in of_method.values())
        most = max(row["bytes"] for row in of_method.values())
        made.add_row(str(budget or "all"), method, *cells, f"{most:,}", f"{speed:.0f}" if speed else "")
    return made


def main() -> None:
    """Measure what is missing, and print all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--environment", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS[:4])
    parser.add_argument("--budgets", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024])
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--models", type=Path, nargs="+", default=[], help="folders of models to be asked the same")
    parser.add_argument("--recall", action="store_true", help="copying and needles too")
    parser.add_argument(
        "--control",
        type=Path,
        default=ROOT / "benchmarks" / "results" / "memory.json",
        help="what benchmarks.memory measured of windows with sinks (default: %(default)s)",
    )
    arguments = parser.parse_args()
    python = python_with_kvpress(arguments.environment)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    ids = tokenize(tokenizer, read_documents(arguments.text), most=arguments.tokens)
    tasks = list(make_tasks(tokenizer, torch.as_tensor(ids), arguments.contexts, recall=arguments.recall))
    windows = {
        (int(row["worth"]), f"perplexity {row['context']:,}"): row["perplexity"]
        for row in json.loads(arguments.control.read_text())
        if row["kind"] == "window and sinks" and row["tokens"] == len(ids)
    }
    file = RowFile(arguments.output / "peers.json")
    wanted = [
        (budget, task, method)
        for budget in arguments.budgets
        for task in tasks
        for method in dict.fromkeys((METHODS[0], *arguments.methods))
    ]
    if (arguments.budgets[0], tasks[0].name) not in windows:
        parser.error(
            f"{arguments.control} has no window of {arguments.budgets[0]} tokens on this text: measure it first."
        )
    console = Console()
    with Progress(console=console) as progress:
        tokens = sum(task.rows.ids.numel() for _, task, _ in wanted)
        tokens += len(arguments.models) * sum(task.rows.ids.numel() for task in tasks)
        done = progress.add_task("", total=tokens)
        for budget, task, method in wanted:
            progress.update(done, description=f"{method}, {budget} tokens, {task.name}")
            key = {"budget": budget, "method": method, "task": task.name, "tokens": len(ids)}
            if file.has(key):
                progress.advance(done, task.rows.ids.numel())
            else:
                step = len(task.rows.ids)
                found = measure(
                    python,
                    arguments.model,
                    task,
                    method=method,
                    budget=budget,
                    advance=partial(progress.advance, done, step),
                )
                file.add(key | found)
            if method == METHODS[0]:
                check_control(next(row for row in file.rows if key.items() <= row.items()), windows)
        if arguments.models:
            parent_memory = cache_memory(AutoModelForCausalLM.from_pretrained(arguments.model))
        for folder in arguments.models:
            model = AutoModelForCausalLM.from_pretrained(folder).eval()
            memory = cache_memory(model)
            budget = None if memory.per_token else round(memory.worth(parent_memory, max(arguments.contexts)))
            for task in tasks:
                progress.update(done, description=f"{folder.name}, {task.name}")
                key = {"budget": budget, "method": folder.name, "task": task.name, "tokens": len(ids)}
                if not file.has(key):
                    file.add(key | measure_model(model, task))
                progress.advance(done, task.rows.ids.numel())
    console.print(table(file.rows))


if __name__ == "__main__":
    main()
