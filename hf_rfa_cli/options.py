"""Options that several commands share, and the values that options may have."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

#: What typer raises for a command line that it cannot read, and commands for options that do not go together.
UsageError: Any = typer.BadParameter.__base__


def number(
    text: str,
    least: float = -math.inf,
    most: float = math.inf,
    *,
    above: float = -math.inf,
    names: tuple[str, ...] = (),
) -> Any:
    """Return an option with the help ``text`` and a number from ``least`` to ``most``, which is also larger than ``above``.

    ``names`` are the option's, where it is not named as its parameter.
    """
    limits = (("above", above), ("at least", least), ("at most", most))
    bounds = " and ".join(f"{words} {limit}" for words, limit in limits if math.isfinite(limit))

    def check(value: float | None) -> float | None:
        if value is not None and not (least <= value <= most and above < value < math.inf):
            raise typer.BadParameter(f"it must be {bounds}, got {value}.")
        return value

    return typer.Option(*names, callback=check, help=text)


def text_file(path: Path | None) -> Path | None:
    """Check that an option names a file."""
    if path is not None and not path.is_file():
        raise typer.BadParameter(f"there is no text file {path}. Pass a .txt or .jsonl file, plain or .gz.")
    return path


def in_a_folder(path: Path | None) -> Path | None:
    """Check that an option names something in a folder that can be written to."""
    if path is not None and not (path.resolve().parent.is_dir() and os.access(path.resolve().parent, os.W_OK)):
        raise typer.BadParameter(f"cannot write to {path.parent}, where {path} is to be. Choose a folder.")
    return path


Model = Annotated[str, typer.Argument(help="Folder of a checkpoint, or its name on the hub.")]
ModelDtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(help="Precision; auto for the checkpoint's own."),
]
Device = Annotated[
    str, typer.Option(help="What to compute on: cpu, cuda, cuda:1, …; auto for an accelerator where there is one.")
]
#: numpy and torch both take these.
Seed = Annotated[int, number("Seed of what is drawn at random.", 0, 2**32 - 1)]
Beams = Annotated[int, number("Beams of generation; 1 for none.", 1)]
BatchSize = Annotated[int, number("Texts, or windows of one, at a time.", 1)]
References = Annotated[
    Path | None, typer.Option(callback=text_file, help="Outputs that belong to the sources of an encoder, one a line.")
]
Record = Annotated[
    bool, typer.Option("--record", help="Add the result to the folder of the checkpoint, and to its model card.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint that is at the output.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where an interrupted training stopped.")]
