"""Perplexity by memory of the cache: converted checkpoints, their softmax model, and a window with sinks of the same bytes.

    python -m benchmarks.memory MODEL TEXT --train TRAIN --rows 64 31+4+28 60+4 64+4+152r4x1020 --output FOLDER
    python -m benchmarks.memory MODEL TEXT --checkpoints rfa-64 … --output FOLDER

The first form makes the checkpoints: what ``hf-rfa convert --memory`` makes of 64 tokens, a window of 31 with 4 sinks
and 28 slots, a window of 60 with 4 sinks, and slots beside 4 retrieval heads that see 1,020 tokens, each as converted and
as trained end to end on the same tokens. Every row is one model on the first tokens of the text in blocks; the control is
the softmax model through a window with 4 sinks that take as many bytes as the checkpoint's cache. Rows are written one by
one to ``memory.json``, and a run goes on where it was stopped. The picture has perplexity relative to softmax, by memory
and by position in the longest blocks.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_rfa  # noqa: F401  # registers the RFA models
from hf_rfa.evaluation.cards import markdown_table
from hf_rfa.evaluation.memory import cache_memory
from hf_rfa.evaluation.recall import window_and_sinks
from hf_rfa.evaluation.recall.scoring import Rows, score_tokens
from hf_rfa.inference.devices import find_device
from hf_rfa.io.text_io import read_documents, tokenize

from .figures import RowFile, print_as_is
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
    softmax_memory = cache_memory(parent)
    yield SOFTMAX, SOFTMAX, math.inf, parent, nullcontext
    for path in checkpoints:
        model: Any = AutoModelForCausalLM.from_pretrained(path).eval().to(parent.device)
        worth = cache_memory(model).worth(softmax_memory, longest)
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
    parser.add_argument("--calibration-tokens", type=int, help="of that text; default: the conversion's")
    parser.add_argument("--recipe", default=str(Path(__file__).parent / "recipes" / "memory.yaml"))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=0, help="of conversion and training; one folder a seed")
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.rows and arguments.train is None:
        parser.error("--rows are calibrated and trained: pass --train, a text.")

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    ids = tokenize(tokenizer, read_documents(arguments.text), most=arguments.tokens)
    parent = AutoModelForCausalLM.from_pretrained(arguments.model).eval().to(find_device("auto"))
    file = RowFile(arguments.output / "memory.json")
    console = Console()
    names = ("train", "recipe", "steps", "seed", "calibration_tokens")
    settings = {name: getattr(arguments, name) for name in names}
    made = make_checkpoints(arguments.model, arguments.rows, folder=arguments.output / "checkpoints", **settings)
    checkpoints = [*arguments.checkpoints, *made]
    with Progress(console=console) as progress:
        task = progress.add_task("", total=(1 + 2 * len(checkpoints)) * len(arguments.contexts))
        whole = {
            "kind": CONTROL,
            "context": max(arguments.contexts),
            "tokens": len(ids),
        }  # the last of a control's rows
        controls = {int(row["worth"]) for row in file.rows if whole.items() <= row.items()}
        for kind, name, worth, model, context in models(parent, checkpoints, max(arguments.contexts), controls):
            for length in arguments.contexts:
                progress.update(task, description=f"{name}, context {length:,}")
                key = {"kind": kind, "name": name, "context": length, "tokens": len(ids)}
                if not file.has(key):
                    with context():
                        figures = score(model, ids[: len(ids) // length * length].view(-1, length))
                    file.add(key | {"worth": None if math.isinf(worth) else worth} | figures)
                progress.advance(task)
    draw(file.rows, arguments.output / "memory.png")
    print_as_is(table(file.rows), console)


def score(model: PreTrainedModel, blocks: Tensor) -> dict[str, Any]:
    """Return the perplexity of blocks of text [N, T], by position too, and the seconds that it took."""
    scored = torch.ones_like(blocks, dtype=torch.bool)
    scored[:, 0] = False
    start = time.perf_counter()
    scores = score_tokens(model, Rows(blocks, scored))
    seconds = time.perf_counter() - start
    buckets = zip(scores.nats.sum(0).split(BUCKET), scored.sum(0).split(BUCKET), strict=True)
    by_position = [math.exp(nats.sum() / counted.sum()) for nats, counted in buckets]
    return {"perplexity": math.exp(scores.mean_nats), "by_position": by_position, "seconds": seconds}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table: perplexity, and its ratio to softmax, by context."""
    contexts = sorted({row["context"] for row in rows})
    base = {row["context"]: row["perplexity"] for row in rows if row["kind"] == SOFTMAX}
    lines = []
    for name in dict.fromkeys(row["name"] for row in rows):
        perplexities = {row["context"]: row["perplexity"] for row in rows if row["name"] == name}
        worth = next(row["worth"] for row in rows if row["name"] == name)
        cells = [
            f"{perplexities[context]:.2f} ({perplexities[context] / base[context]:.3f})"
            if context in perplexities
            else ""
            for context in contexts
        ]
        lines.append([name, "all" if worth is None else f"{worth:.1f}", *cells])
    return markdown_table(["", "memory", *(f"{context:,}" for context in contexts)], lines)


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
                axes.plot(middles, [perplexity / base for perplexity, base in pairs], marker=".", color=COLORS[kind])
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
