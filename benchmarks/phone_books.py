"""Many phone books of one size, where the recall suite's few cannot tell a difference from chance.

    python -m benchmarks.phone_books SmolLM2-135M-Instruct CHECKPOINT … --window 60+4 --entries 5 --books 512

The first model is the softmax parent, which is also asked under a window with sinks. Every model answers the same questions.
Counted are those that it alone gets right, and those that the parent alone gets right.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from random import Random

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_rfa  # noqa: F401  # registers the RFA models
from hf_rfa.evaluation.cards import markdown_table
from hf_rfa.evaluation.recall.probes import Texts, phone_book
from hf_rfa.evaluation.recall.scoring import Rows, TokenScores, score_tokens
from hf_rfa.evaluation.recall.window_control import window_and_sinks

from .figures import print_as_is


def compare(parent: str, checkpoints: list[str], window: tuple[int, int], rows: Rows) -> Iterator[list[str]]:
    """Yield a row for the parent, for the parent under a window with sinks, and for each checkpoint."""
    softmax = AutoModelForCausalLM.from_pretrained(parent).eval()
    expected = score_tokens(softmax, rows).answers()

    def line(name: str, scores: TokenScores) -> list[str]:
        won, lost = int((scores.correct & ~expected.correct).sum()), int((expected.correct & ~scores.correct).sum())
        counts = [""] * 2 if scores is expected else [str(won), str(lost)]
        return [name, f"{100 * scores.accuracy:.1f}", f"{scores.mean_nats:.2f}", *counts]

    yield line("softmax", expected)
    with window_and_sinks(softmax, *window):
        yield line(f"window {window[0]} + {window[1]} sinks", score_tokens(softmax, rows).answers())
    del softmax
    for checkpoint in checkpoints:
        model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
        yield line(checkpoint, score_tokens(model, rows).answers())


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
    arguments = parser.parse_args()
    texts = Texts(AutoTokenizer.from_pretrained(arguments.parent))
    rows = phone_book(texts, arguments.entries, arguments.books, Random(f"questions {arguments.entries}"))
    lines = list(compare(arguments.parent, arguments.checkpoints, arguments.window, rows))
    print_as_is(
        markdown_table(["", "% right", "nats", "right where softmax is wrong", "wrong where softmax is right"], lines)
    )


if __name__ == "__main__":
    main()
