"""Options that several commands share, and the values that options may have."""

from __future__ import annotations

import math
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

#: What typer raises for a command line that it cannot read, and commands for options that do not go together.
UsageError: Any = typer.BadParameter.__base__

#: Earlier names of options, which still work, by command.
RENAMED = {
    "bench": {"--window": "--window-size"},
    "convert": {"--window": "--window-size", "--distill-steps": "--transfer-steps"},
    "evaluate": {"--context": "--context-length", "--branch": "--attention-component"},
}


def current_names(command: str, words: list[str]) -> list[str]:
    """Return the words of a command line with the current names of options; each earlier one is named on stderr."""
    found = []
    for word in words:
        name, equals, value = word.partition("=")
        new = RENAMED.get(command, {}).get(name)
        if new is not None:
            typer.echo(f"{name} is called {new} now.", err=True)
        found.append(word if new is None else new + equals + value)
    return found


def number(
    text: str,
    least: float | None = None,
    most: float | None = None,
    *,
    above: float = -math.inf,
    name: str | None = None,
) -> Any:
    """Return the declaration of an option whose value is a number from ``least`` to ``most``, or larger than ``above``.

    Args:
        text: its help.
        least: the least that it may be.
        most: the most that it may be.
        above: what it has to be larger than.
        name: the option, where it is not named as its parameter.
    """
    limits = (("above", None if above == -math.inf else above), ("at least", least), ("at most", most))
    bounds = " and ".join(f"{words} {limit}" for words, limit in limits if limit is not None)

    def check(value: float | None) -> float | None:
        """Return the value."""
        low, high = (-math.inf if least is None else least), (math.inf if most is None else most)
        if value is not None and not (low <= value <= high and above < value < math.inf):
            raise typer.BadParameter(f"it must be {bounds}, got {value}.")
        return value

    return typer.Option(*([name] if name else []), callback=check, help=text)


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


#: The precision of a model that is made.
Dtype = Literal["float32", "bfloat16", "float16"]


class LoadedDtype(StrEnum):
    """The precision of a model that is loaded."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


Model = Annotated[str, typer.Argument(help="Folder of a checkpoint, or its name on the hub.")]
ModelDtype = Annotated[LoadedDtype, typer.Option("--dtype", help="Precision; auto for the checkpoint's own.")]
#: numpy and torch both take these.
Seed = Annotated[int, number("Seed of what is drawn at random.", 0, 2**32 - 1)]
Beams = Annotated[int, number("Beams of generation; 1 for none.", 1)]
BatchSize = Annotated[int, number("Texts, or windows of one, at a time.", 1)]
References = Annotated[
    Path | None, typer.Option(callback=text_file, help="Outputs that belong to the sources of an encoder, one a line.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint that is at the output.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where an interrupted training stopped.")]
