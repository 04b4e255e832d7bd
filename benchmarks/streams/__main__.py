"""One stream of 10⁶ tokens, far past the trained length: a converted model, and a softmax model with as many bytes.

    python -m benchmarks.streams softmax BASE --texts a.txt.gz b.txt … --tokens 1000000 --every 3 --output FOLDER
    python -m benchmarks.streams ours BASE CHECKPOINT --memory 256 --texts … --tokens 1000000 --every 3 --output FOLDER
    python -m benchmarks.streams streaming-llm BASE --memory 256 --texts … --tokens 100000 --every 3 --output FOLDER
    python -m benchmarks.streams recomputed BASE --memory 64 128 256 --texts … --tokens 100000 --every 3 --output FOLDER
    python -m benchmarks.streams show FOLDER

The texts are joined, and read in blocks of 8,192 tokens, some of which are scored. *softmax* is the base model, which reads
each of these anew. *ours* is a converted model, whose cache has to have the bytes of ``--memory`` tokens of the base model's.
*streaming-llm* is the base model by StreamingLLM's rule (`benchmarks.streams.readers`), with a window and 4 sinks that are
``--memory`` tokens together. *recomputed* is the base model that reads the last ``--memory`` tokens as a text of their own,
for windows drawn from the scored blocks (`benchmarks.streams.measure`); it is compared with the streams on the same tokens.
Every measurement has a folder of its own in FOLDER, so that several can run at a time, and goes on where it was stopped.
*show*, and all others when they are done, writes ``streams.json`` and prints tables; `docs.make_pictures` draws them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from hf_rfa.errors import InputError
from hf_rfa.evaluation.memory import cache_memory
from hf_rfa.inference import load_model
from hf_rfa.io.text_io import read_documents

from ..figures import print_as_is
from .measure import BLOCK, Blocks, read_anew, read_stream, read_windows, window_starts
from .readers import CacheReader, Reader, StreamingLLM
from .report import collect, tables

#: How far the bytes of a converted model may be from those of ``--memory`` tokens, relative to them.
TOLERANCE = 0.02


def parse() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    stream = argparse.ArgumentParser(add_help=False)
    stream.add_argument("base", help="the softmax model")
    stream.add_argument("--texts", type=Path, nargs="+", required=True, help="text files, .txt or .txt.gz, in order")
    stream.add_argument("--output", type=Path, required=True)
    scored = argparse.ArgumentParser(add_help=False)
    scored.add_argument("--tokens", type=int, default=1_000_000, help="of the stream (default: %(default)s)")
    scored.add_argument("--every", type=int, default=1, help="score every so many blocks one (default: all)")
    scored.add_argument("--score-from", type=int, help="score all blocks from this token on")
    one = argparse.ArgumentParser(add_help=False)
    one.add_argument("--memory", type=int, required=True, help="tokens of the base model's cache")
    commands.add_parser("softmax", parents=[stream, scored])
    ours = commands.add_parser("ours", parents=[stream, scored, one])
    commands.add_parser("streaming-llm", parents=[stream, scored, one])
    recomputed = commands.add_parser("recomputed", parents=[stream, scored])
    recomputed.add_argument("--memory", type=int, nargs="+", required=True, help="tokens of the base model's cache")
    recomputed.add_argument(
        "--windows", type=int, default=1000, help="windows of 9 scored tokens (default: %(default)s)"
    )
    ours.add_argument("checkpoint", help="the converted model")
    show = commands.add_parser("show")
    show.add_argument("output", type=Path)
    return parser.parse_args()


def read_texts(tokenizer: Any, texts: list[Path], least: int) -> Tensor:
    """Return the tokens of texts, joined, [N].

    Raises:
        InputError: if there are fewer than ``least``.
    """
    text = "".join(document for path in texts for document in read_documents(path))
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    if len(ids) < least:
        raise InputError(
            f"the texts have {len(ids):,} tokens, and {least:,} are asked for. Name more, or pass --tokens."
        )
    return ids


def load_converted(checkpoint: str, base: Any, memory: int) -> Any:
    """Return a converted model.

    Raises:
        InputError: if its cache does not have the bytes of ``memory`` tokens of the base model's.
    """
    model: Any = load_model(checkpoint)[0]
    worth = cache_memory(model).worth(cache_memory(base), 0)
    if not math.isclose(worth, memory, rel_tol=TOLERANCE):
        raise InputError(
            f"the cache of {checkpoint} has the bytes of {worth:.1f} tokens of the base model's, and --memory says {memory}."
        )
    return model


def measure(arguments: argparse.Namespace, progress: Progress) -> None:
    """Measure what a command asks for, as far as it is missing."""
    base, tokenizer = load_model(arguments.base)
    command, output = arguments.command, arguments.output
    ids = read_texts(tokenizer, arguments.texts, arguments.tokens)
    blocks = Blocks(arguments.tokens, arguments.every, arguments.score_from)

    def bar(name: str, total: int) -> Callable[[int], object]:
        return partial(progress.advance, progress.add_task(name, total=total))

    if command == "softmax":
        read_anew(base, ids, blocks, output / command, bar(command, len(blocks.scored()) * BLOCK))
    elif command == "recomputed":
        starts = window_starts(blocks, arguments.windows)
        for size in arguments.memory:
            name = f"recomputed-{size}"
            read_windows(base, ids, starts, size, output / name, bar(name, len(starts)))
    else:
        name = f"{command}-{arguments.memory}"
        if command == "ours":
            reader: Reader = CacheReader(load_converted(arguments.checkpoint, base, arguments.memory))
        else:
            reader = StreamingLLM(base, arguments.memory)
        read_stream(reader, ids, blocks, output / name, bar(name, len(blocks) * BLOCK))


def main() -> None:
    """Measure what is missing, and print all."""
    arguments = parse()
    console = Console()
    if arguments.command != "show":
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
            measure(arguments, progress)
    print_as_is(tables(collect(arguments.output)), console)


if __name__ == "__main__":
    main()
