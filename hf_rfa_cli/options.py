"""Options that several commands share, and the values that options may have."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

#: What typer raises for a command line that it cannot read, and commands for options that do not go together.
UsageError: Any = typer.BadParameter.__base__
#: Of the seeds that numpy and torch both take.
LARGEST_SEED = 2**32 - 1


def given(context: typer.Context, *panels: str) -> list[str]:
    """Return the flags of some panels of the help whose values are not the defaults."""
    params = [param for param in context.command.params if getattr(param, "rich_help_panel", None) in panels]
    return [param.opts[0] for param in params if context.params[param.name] not in (param.default, None, ())]


def refuse(context: typer.Context, why: str, *panels: str) -> None:
    """Raise a `UsageError` if the command line has an option of some panels of the help; the flag comes before ``why``."""
    for flag in given(context, *panels):
        raise UsageError(f"{flag} {why}")


def positive(value: float) -> float:
    """Check that an option is a finite number above 0, which `typer.Option` cannot say."""
    if not 0 < value < math.inf:
        raise typer.BadParameter(f"it must be a number above 0, got {value}.")
    return value


def text_file(path: Path | None) -> Path | None:
    """Check that an option names a file."""
    if path is not None and not path.is_file():
        raise typer.BadParameter(f"there is no text file {path}. Pass a .txt or .jsonl file, plain or .gz.")
    return path


def existing_file(path: Path | None) -> Path | None:
    """Check that an option names a file of any kind."""
    if path is not None and not path.is_file():
        raise typer.BadParameter(f"there is no file {path}.")
    return path


def data_path(path: Path | None) -> Path | None:
    """Check that an option names a file, or a folder."""
    return path if path is not None and path.is_dir() else text_file(path)


def in_a_folder(path: Path | None) -> Path | None:
    """Check that an option names something in a folder that can be written to."""
    if path is not None and not (path.resolve().parent.is_dir() and os.access(path.resolve().parent, os.W_OK)):
        raise typer.BadParameter(f"cannot write to {path.parent}, where {path} is to be. Choose a folder.")
    return path


Model = Annotated[str, Argument(help="Folder of a checkpoint, or its name on the hub.")]
ModelDtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    Option(help="Precision; auto for the checkpoint's own."),
]
Device = Annotated[str, Option(help="Device: cpu, cuda, cuda:1, …; auto for an accelerator if there is one.")]
Seed = Annotated[int, Option(min=0, max=LARGEST_SEED, help="Random seed.")]
BatchSize = Annotated[int, Option(min=1, help="Texts, or windows of one, at a time.")]
References = Annotated[
    Path | None, Option(callback=text_file, help="Outputs for the sources of an encoder, one per line.")
]
Record = Annotated[
    bool, Option("--record", help="Add the result to the folder of the checkpoint, and to its model card.")
]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace a checkpoint at the output.")]
Resume = Annotated[bool, Option("--resume", help="Continue an interrupted training.")]
