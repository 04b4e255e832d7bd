"""Perplexity by memory of the cache: converted checkpoints, their softmax model, and a window with sinks of the same bytes.

    python -m benchmarks.memory MODEL TEXT --train TRAIN --rows 64 31+4+28 60+4 64+4+152r4x1020 --output FOLDER
    python -m benchmarks.memory MODEL TEXT --checkpoints rfa-64 … --output FOLDER

The first form makes the checkpoints: what ``hf-rfa convert --search`` finds for a memory of 64, a window of 31 with 4 sinks
and 28 slots, a window of 60 with 4 sinks, and slots beside 4 retrieval heads that see 1,020 tokens, each as converted and
as trained end to end on the same tokens. Every row is one model on the first tokens of the text in blocks; the control is
the softmax model through a window with 4 sinks that take as many bytes as the checkpoint's cache. Rows are written one by
one to ``memory.json``, and a run goes on where it was stopped. The picture has perplexity relative to softmax, by memory
and by position in the longest blocks.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_rfa  # noqa: F401  # registers the RFA models
from hf_rfa.evaluation.recall import window_and_sinks
from hf_rfa.evaluation.recall.memory import cache_memory
from hf_rfa.evaluation.recall.scoring import Rows, score_tokens
from hf_rfa.io.atomic_io import new_file
from hf_rfa.io.text_io import read_documents, tokenize

from .memory_checkpoints import make_checkpoints

SINKS = 4
#: Tokens of a block whose mean is one point of the picture by position.
BUCKET = 256
#: Kinds of rows, and their colors. A window with sinks is the control, also where it is a checkpoint that was trained.
SOFTMAX, CONTROL, CONVERTED = "softmax", "window and sinks", "converted"
RETRIEVAL = "with retrieval heads"
TRAINED = {kind: f"{kind}, trained" for kind in (CONTROL, CONVERTED, RETRIEVAL)}
COLORS = {SOFTMAX: "#555555", CONTROL: "#dd9464", CONVERTED: "#7ba7d4", RETRIEVAL: "#8fbf6b"}
COLORS |= {TRAINED[CONTROL]: "#b3440f", TRAINED[CONVERTED]: "#174a80", TRAINED[RETRIEVAL]: "#3f6f1d"}


def models(
    parent: PreTrainedModel, checkpoints: Iterable[Path], longest: int, controls: set[int]
) -> Iterator[tuple[str, str, float, Any, Any]]:
    """Yield (kind, name, tokens of the parent's cache, model, context manager to score it in) for every row.

    The memory is that after the ``longest`` context. A control is left out where there is one of its size, or of a token
    more, among the sizes ``controls``.
    """
    controls = set(controls)
    own = cache_memory(parent)
    yield SOFTMAX, SOFTMAX, math.inf, parent, nullcontext
    for path in checkpoints:
        model: Any = AutoModelForCausalLM.from_pretrained(path).eval().to(parent.device)
        worth = cache_memory(model).worth(own, longest)
        config = model.config
        plain = config.feature_map == "none" and not config.num_slots
        kind = CONTROL if plain else CONVERTED
        if config.retrieval_heads:
            kind = RETRIEVAL
        trained = (path / "distillation.json").is_file()
        size = int(worth + 0.5)
        if kind == CONTROL and not trained:
            controls.add(size)
        yield TRAINED[kind] if trained else kind, path.name, worth, model, nullcontext

        def control(window: int = size - SINKS) -> AbstractContextManager:
            return window_and_sinks(parent, window, SINKS)

        if not trained and kind != CONTROL and controls.isdisjoint((size, size + 1)):
            controls.add(size)
            yield CONTROL, f"{size - SINKS}+{SINKS}", float(size), parent, control


def main() -> None:
    """Measure what is missing, and print and draw all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--checkpoints", type=Path, nargs="+", default=[])
    parser.add_argument("--train", type=Path)
    parser.add_argument("--rows", nargs="+", default=[])
    parser.add_argument("--recipe", default=str(Path(__file__).parent / "recipes" / "memory.yaml"))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=0, help="of conversion and training; one folder a seed")
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    if given.rows and given.train is None:
        parser.error("--rows are calibrated and trained: pass --train, a text.")

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    ids = tokenize(tokenizer, read_documents(given.text), most=given.tokens)
    parent = AutoModelForCausalLM.from_pretrained(given.model).eval()
    if torch.accelerator.is_available():
        parent.to(torch.accelerator.current_accelerator())
    given.output.mkdir(parents=True, exist_ok=True)
    path = given.output / "memory.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else []
    console = Console()
    settings = {"train": given.train, "recipe": given.recipe, "steps": given.steps, "seed": given.seed}
    made = make_checkpoints(given.model, given.rows, folder=given.output / "checkpoints", **settings)
    checkpoints = [*given.checkpoints, *made]
    columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=(1 + 2 * len(checkpoints)) * len(given.contexts))
        whole = {"kind": CONTROL, "context": max(given.contexts), "tokens": len(ids)}  # the last of a control's rows
        controls = {int(row["worth"]) for row in rows if whole.items() <= row.items()}
        for kind, name, worth, model, context in models(parent, checkpoints, max(given.contexts), controls):
            for length in given.contexts:
                progress.update(task, description=f"{name}, context {length:,}")
                key = {"kind": kind, "name": name, "context": length, "tokens": len(ids)}
                if not any(key.items() <= row.items() for row in rows):
                    with context():
                        figures = score(model, ids[: len(ids) // length * length].view(-1, length))
                    rows.append(key | {"worth": None if math.isinf(worth) else worth} | figures)
                    with new_file(path) as file:
                        file.write(json.dumps(rows, indent=1) + "\n")
                progress.advance(task)
    draw(rows, given.output / "memory.png")
    console.print(table(rows), markup=False, highlight=False, soft_wrap=True)


def score(model: PreTrainedModel, blocks: Tensor) -> dict[str, Any]:
    """Return the perplexity of blocks of text [N, T], by position too, and the seconds that it took."""
    scored = torch.ones_like(blocks, dtype=torch.bool)
    scored[:, 0] = False
    start = time.perf_counter()
    scores = score_tokens(model, Rows(blocks, scored))
    seconds = time.perf_counter() - start
    bucket = torch.arange(blocks.shape[1]) // BUCKET
    by_position = [math.exp(scores.among(scored & (bucket == each)).mean_nats) for each in bucket.unique()]
    return {"perplexity": math.exp(scores.mean_nats), "by_position": by_position, "seconds": seconds}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table: perplexity, and its ratio to softmax, by context."""
    contexts = sorted({row["context"] for row in rows})
    base = {row["context"]: row["perplexity"] for row in rows if row["kind"] == SOFTMAX}
    lines = [
        "| | memory | " + " | ".join(f"{each:,}" for each in contexts) + " |",
        "|---|---|" + "---|" * len(contexts),
    ]
    for name in dict.fromkeys(row["name"] for row in rows):
        found = {row["context"]: row for row in rows if row["name"] == name}
        worth = next(iter(found.values()))["worth"]
        cells = [
            f"{found[each]['perplexity']:.2f} ({found[each]['perplexity'] / base[each]:.3f})" if each in found else ""
            for each in contexts
        ]
        lines.append(f"| {name} | {'all' if worth is None else f'{worth:.1f}'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def best_rows(rows: list[dict[str, Any]], context: int) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the row of the lowest perplexity of every kind and size at some context, sizes as powers of two, in order."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["worth"] or 0.0):
        if row["context"] == context and row["worth"] is not None:
            of_kind, size = found.setdefault(row["kind"], {}), 2 ** round(math.log2(row["worth"]))
            if size not in of_kind or row["perplexity"] < of_kind[size]["perplexity"]:
                of_kind[size] = row
    return found


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw perplexity relative to softmax by memory, and by position in the longest blocks, to a PNG file.

    Of several rows of a kind and of nearly one size (`best_rows`) the best is drawn.
    """
    softmax = {row["context"]: row for row in rows if row["kind"] == SOFTMAX}
    best = {context: best_rows(rows, context) for context in sorted(softmax)}
    longest = max(best)
    sizes = sorted({size for of_kind in best[longest].values() for size in of_kind})
    figure = Figure(figsize=(4.6 + 2.9 * max(1, len(sizes)), 3.8))
    left, *places = figure.subplots(
        1, 1 + len(sizes), width_ratios=[1.5] + [1.0] * len(sizes), sharey=True, squeeze=False
    )[0]
    lines = ("solid", "dashed", "dotted")
    for (context, kinds), style in zip(best.items(), lines, strict=False):
        for kind, of_kind in kinds.items():
            points = [(row["worth"], row["perplexity"] / softmax[context]["perplexity"]) for row in of_kind.values()]
            left.plot(*zip(*points, strict=True), linestyle=style, marker="o", markersize=4, color=COLORS[kind])
    left.set_xscale("log", base=2)
    left.set_xticks(sizes, [str(each) for each in sizes])
    left.minorticks_off()
    contexts = ", ".join(f"{style} {context:,}" for context, style in zip(best, lines, strict=False))
    left.set_xlabel(f"memory, tokens of the softmax cache\n(context: {contexts})")
    left.set_ylabel("perplexity / softmax")
    middles = [BUCKET * (index + 0.5) for index in range(len(softmax[longest]["by_position"]))]
    for axes, size in zip(places, sizes, strict=True):
        for kind, of_kind in best[longest].items():
            if size in of_kind:
                pairs = zip(of_kind[size]["by_position"], softmax[longest]["by_position"], strict=True)
                axes.plot(middles, [own / theirs for own, theirs in pairs], marker=".", color=COLORS[kind])
        axes.set_title(f"memory of about {size}", fontsize=9)
        axes.set_xlabel(f"position in blocks of {longest:,}")
    for axes in (left, *places):
        axes.axhline(1.0, color=COLORS[SOFTMAX])
        axes.grid(alpha=0.3)
    if left.get_ylim()[1] > 2:  # shared by all axes
        powers = range(math.ceil(math.log2(left.get_ylim()[1])) + 1)
        left.set_yscale("log", base=2)
        left.set_yticks([2**power for power in powers], [str(2**power) for power in powers])
    drawn = [kind for kind in COLORS if any(kind in found for found in best.values())]
    for kind in (SOFTMAX, *drawn):
        left.plot([], [], color=COLORS[kind], label=kind)
    left.legend(frameon=False, fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
