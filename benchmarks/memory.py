"""Perplexity by memory of the cache: converted checkpoints, their softmax model, and a window with sinks of the same bytes.

    hf-rfa convert MODEL 64 --memory 64 --calibrate TRAIN
    hf-rfa distill 64 --output '64 trained' --teacher MODEL --data TRAIN --recipe pretrained --end-to-end-steps 50
    python -m benchmarks.memory MODEL TEXT --checkpoints 64 '64 trained' --output FOLDER

Every row is one model on the first tokens of the text in blocks, by its folder's name. The control is the softmax model
through a window with 4 sinks that take as many bytes as a checkpoint's cache. Rows are written one by one to ``memory.json``,
and a run goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_rfa  # noqa: F401  # registers the RFA models
from hf_rfa.evaluation import perplexity
from hf_rfa.evaluation.cards import markdown_table
from hf_rfa.evaluation.memory import cache_memory
from hf_rfa.evaluation.recall import window_and_sinks
from hf_rfa.inference.loading import find_device
from hf_rfa.io.text_io import read_documents, tokenize

from .figures import RowFile, print_as_is

SINKS = 4
#: Tokens whose logits are held at once.
TOKENS_AT_ONCE = 4096
#: Kinds of rows.
SOFTMAX, CONTROL, CONVERTED = "softmax", "window and sinks", "converted"


def models(
    parent: PreTrainedModel, checkpoints: list[Path], longest: int, controls: set[int]
) -> Iterator[tuple[str, str, float, Any, Callable[[], AbstractContextManager]]]:
    """Yield (kind, name, tokens of the parent's cache, model, context manager to score it in) for every row.

    The memory is that after the ``longest`` context. A control is left out where there is one of its size, or of a token
    more, among the sizes ``controls``.
    """
    controls = set(controls)
    yield SOFTMAX, SOFTMAX, math.inf, parent, nullcontext
    for path in checkpoints:
        model: Any = AutoModelForCausalLM.from_pretrained(path).eval().to(parent.device)
        worth = cache_memory(model).worth(cache_memory(parent), longest)
        yield CONVERTED, path.name, worth, model, nullcontext
        size = int(worth + 0.5)
        if controls.isdisjoint((size, size + 1)):
            controls.add(size)
            window = partial(window_and_sinks, parent, size - SINKS, SINKS)
            yield CONTROL, f"{size - SINKS}+{SINKS}", float(size), parent, window


def main() -> None:
    """Measure what is missing, and print all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--checkpoints", type=Path, nargs="+", required=True)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    ids = tokenize(tokenizer, read_documents(arguments.text), most=arguments.tokens)
    parent = AutoModelForCausalLM.from_pretrained(arguments.model).eval().to(find_device("auto"))
    file, longest = RowFile(arguments.output / "memory.json"), max(arguments.contexts)
    console = Console()
    last = {"kind": CONTROL, "context": longest, "tokens": len(ids)}  # of a control's rows
    controls = {int(row["worth"]) for row in file.rows if last.items() <= row.items()}
    with Progress(console=console) as progress:
        task = progress.add_task("", total=(1 + 2 * len(arguments.checkpoints)) * len(arguments.contexts))
        for kind, name, worth, model, context in models(parent, arguments.checkpoints, longest, controls):
            for length in arguments.contexts:
                progress.update(task, description=f"{name}, context {length:,}")
                key = {"name": name, "context": length, "tokens": len(ids)}
                if not file.has(key):
                    blocks, batch_size = ids[: len(ids) // length * length], max(1, TOKENS_AT_ONCE // length)
                    with context():
                        found = perplexity(model, blocks, context_length=length, batch_size=batch_size).perplexity
                    memory = None if math.isinf(worth) else worth
                    file.add({"kind": kind, **key, "worth": memory, "perplexity": found})
                progress.advance(task)
    print_as_is(table(file.rows), console)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table: perplexity, and its ratio to softmax, by context."""
    contexts = sorted({row["context"] for row in rows})
    base = {row["context"]: row["perplexity"] for row in rows if row["kind"] == SOFTMAX}
    lines = []
    for name in dict.fromkeys(row["name"] for row in rows):
        of_name = {row["context"]: row for row in rows if row["name"] == name}
        worth = next(iter(of_name.values()))["worth"]
        ratios = {context: row["perplexity"] / base[context] for context, row in of_name.items()}
        cells = [
            f"{of_name[each]['perplexity']:.2f} ({ratios[each]:.3f})" if each in ratios else "" for each in contexts
        ]
        lines.append([name, "all" if worth is None else f"{worth:.1f}", *cells])
    return markdown_table(["", "memory", *(f"{context:,}" for context in contexts)], lines)


if __name__ == "__main__":
    main()
