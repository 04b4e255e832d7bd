"""Long free generation: does what a converted model writes, or what it knows, get worse with the number of tokens?

    python -m benchmarks.long_generation MODEL TEXT --checkpoints rfa-256 window-252 … --output FOLDER

Every checkpoint continues the same prompts, beginnings of stretches of the text, by sampling from its own distribution. Of
each stretch of what it wrote there are the nats per token that the softmax model gives it, with as many tokens before it for
context, and the share of its 4-grams that occurred before in the stretch. Then it reads a text, once with the cache that it
has after all that, and once after the prompt alone. Checkpoints are done one by one, in ``generation.json``; a run goes on
where it was stopped. ``generation.png`` has the nats and the 4-grams by position.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import hf_rfa  # noqa: F401  # registers the RFA models
from hf_rfa.evaluation.cards import markdown_table
from hf_rfa.evaluation.memory import cache_memory
from hf_rfa.evaluation.recall.generation import continuations, nats_of, repeated_ngrams
from hf_rfa.io.text_io import read_documents, tokenize
from hf_rfa.models.cache_names import cache_argument, returned_cache

from .figures import RowFile, print_as_is


class Steps(BaseStreamer):
    """Passes every step of `generate` to a progress bar."""

    def __init__(self, progress: Progress, task: Any) -> None:
        self.progress, self.task = progress, task

    def put(self, value: Tensor) -> None:
        """Count a step."""
        self.progress.advance(self.task)

    def end(self) -> None:
        """Nothing is left to do."""


def main() -> None:
    """Generate with the checkpoints that are missing, and print and draw all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--checkpoints", type=Path, nargs="+", required=True)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=10_000)
    parser.add_argument("--stretch", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    each = arguments.prompt_tokens + arguments.stretch
    ids = tokenize(tokenizer, read_documents(arguments.text), most=arguments.rows * each)
    if len(ids) < arguments.rows * each:
        parser.error(
            f"{arguments.rows} prompts and texts of {each} tokens are needed, and {arguments.text} has {len(ids)} tokens."
        )
    prompts, texts = ids.view(arguments.rows, each).split((arguments.prompt_tokens, arguments.stretch), 1)
    parent = AutoModelForCausalLM.from_pretrained(arguments.model).eval()
    file = RowFile(arguments.output / "generation.json")
    console = Console()
    names = ("new_tokens", "rows", "seed", "stretch", "prompt_tokens")
    with Progress(console=console) as progress:
        for checkpoint in arguments.checkpoints:
            key = {"name": checkpoint.name, **{name: getattr(arguments, name) for name in names}}
            if file.has(key):
                continue
            model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
            worth = cache_memory(model).worth(cache_memory(parent), arguments.new_tokens)
            task = progress.add_task(checkpoint.name, total=arguments.new_tokens + 1)  # the prompt is a step too
            figures = measured(model, parent, prompts, texts, arguments, Steps(progress, task))
            file.add(key | {"worth": worth} | figures)
    draw(file.rows, arguments.output / "generation.png")
    print_as_is(table(file.rows), console)


@torch.no_grad()
def measured(
    model: Any,
    parent: PreTrainedModel,
    prompts: Tensor,
    texts: Tensor,
    arguments: argparse.Namespace,
    steps: BaseStreamer,
) -> dict[str, Any]:
    """Return the figures of one model on prompts [N, P] and texts [N, S]."""
    start = time.perf_counter()
    cache = DynamicCache(config=model.config)
    options = {"seed": arguments.seed, "streamer": steps, **cache_argument(cache)}
    written = continuations(model, prompts, arguments.new_tokens, **options)
    seconds = time.perf_counter() - start
    fresh = returned_cache(model(prompts, use_cache=True))
    return {
        "seconds": seconds,
        "nats": parent_nats(parent, torch.cat([prompts, written], 1), prompts.shape[1], arguments.stretch),
        "again": [
            repeated_ngrams(each) for each in written.split(arguments.stretch, 1) if each.shape[1] == arguments.stretch
        ],
        "text_after": read_on(model, cache, written[:, -1:], texts),
        "text_after_prompt": read_on(model, fresh, prompts[:, :0], texts),
    }


def parent_nats(parent: PreTrainedModel, ids: Tensor, begin: int, stretch: int) -> list[float]:
    """Return the nats per token that a model gives to each whole stretch of tokens [N, T] from ``begin`` on.

    It reads each with the tokens of the stretch before it, and no others.
    """
    found = []
    for first in range(begin, ids.shape[1] - stretch + 1, stretch):
        before = ids[:, max(0, first - stretch) : first]
        found.append(nats_of(parent, before, ids[:, first : first + stretch]))
    return found


def read_on(model: Any, cache: Any, last: Tensor, texts: Tensor) -> float:
    """Return the nats per token of texts [N, S], but for their first token, that a model reads with a cache.

    Args:
        model: the model.
        cache: what it has read. It goes on from there.
        last: tokens that are not in it yet, [N, 0 or more].
        texts: the texts.
    """
    logits = model(torch.cat([last, texts], 1), **cache_argument(cache), logits_to_keep=texts.shape[1]).logits[:, :-1]
    nats = -logits.float().log_softmax(-1).gather(-1, texts[:, 1:, None])
    return float(nats.double().mean())


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table: the first and the last tenth of what was written, and the text read after it."""
    head = ["", "memory", "nats of the first tenth", "last", "4-grams again, first", "last"]
    head += ["text after it", "after the prompt"]
    lines = []
    for row in rows:
        size = max(1, len(row["nats"]) // 10)
        ends = [sum(part) / size for name in ("nats", "again") for part in (row[name][:size], row[name][-size:])]
        figures = (*ends, row["text_after"], row["text_after_prompt"])
        lines.append([row["name"], f"{row['worth']:.1f}", *(f"{figure:.3f}" for figure in figures)])
    return markdown_table(head, lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the softmax model's nats of what was written, and its repetitions, by position, to a PNG file."""
    figure = Figure(figsize=(10, 3.6))
    for axes, name, label in zip(
        figure.subplots(1, 2),
        ("nats", "again"),
        ("nats per token by the softmax model", "4-grams that came before, share"),
        strict=True,
    ):
        for row in rows:
            places = [row["stretch"] * (index + 0.5) for index in range(len(row[name]))]
            axes.plot(places, row[name], marker=".", label=f"{row['name']} ({row['worth']:.0f} tokens)")
        axes.set_xlabel("generated tokens")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
