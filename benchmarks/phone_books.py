"""Many phone books of one size, where the recall suite's few cannot tell a difference from chance.

    python -m benchmarks.phone_books SmolLM2-135M-Instruct CHECKPOINT … --window 60+4 --entries 5 --books 512

The first model is the softmax parent, which is also asked under a window with sinks. Every model answers the same questions.
Counted are those that it alone gets right, and those that the parent alone gets right.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from random import Random
from typing import Any

from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_rfa  # noqa: F401  # registers the RFA models
from hf_rfa.evaluation.recall.probes import Texts, phone_book
from hf_rfa.evaluation.recall.scoring import Rows, score_tokens
from hf_rfa.evaluation.recall.window_control import window_and_sinks


def answers(model: Any, rows: Rows) -> tuple[Tensor, float]:
    """Return which rows are answered, [N], and the mean negative log-likelihood of an answer in nats."""
    scores = score_tokens(model, rows)
    return scores.answered, scores.row_nats


def compare(parent: str, checkpoints: list[str], window: tuple[int, int], rows: Rows) -> Iterator[str]:
    """Yield the rows of a Markdown table: the parent, the parent under a window with sinks, and the checkpoints."""
    softmax = AutoModelForCausalLM.from_pretrained(parent).eval()
    expected, nats = answers(softmax, rows)
    yield "| | % right | nats | right where softmax is wrong | wrong where softmax is right |\n|---|---|---|---|---|"
    yield f"| softmax | {100 * expected.double().mean():.1f} | {nats:.2f} | | |"

    def line(name: str, model: Any) -> str:
        found, nats = answers(model, rows)
        won, lost = int((found & ~expected).sum()), int((expected & ~found).sum())
        return f"| {name} | {100 * found.double().mean():.1f} | {nats:.2f} | {won} | {lost} |"

    with window_and_sinks(softmax, *window):
        yield line(f"window {window[0]} + {window[1]} sinks", softmax)
    del softmax
    for checkpoint in checkpoints:
        yield line(checkpoint, AutoModelForCausalLM.from_pretrained(checkpoint).eval())


def _window(word: str) -> tuple[int, int]:
    """Return window and sinks of a word such as 60+4."""
    window, sinks = map(int, word.split("+"))
    return window, sinks


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.phone_books", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("parent", help="softmax checkpoint")
    parser.add_argument("checkpoints", nargs="*", help="converted checkpoints")
    parser.add_argument(
        "--window", type=_window, default="60+4", help="window+sinks of the control (default: %(default)s)"
    )
    parser.add_argument("--entries", type=int, default=5, help="lines of a book (default: %(default)s)")
    parser.add_argument("--books", type=int, default=512, help="number of books (default: %(default)s)")
    given = parser.parse_args()
    console = Console()
    texts = Texts(AutoTokenizer.from_pretrained(given.parent))
    rows = phone_book(texts, given.entries, given.books, Random(f"questions {given.entries}"))
    for line in compare(given.parent, given.checkpoints, given.window, rows):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
