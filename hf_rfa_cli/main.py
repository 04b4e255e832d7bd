"""The commands, put together."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from .bench import bench_command
from .chat import chat_command
from .console import Warnings, errors
from .convert import convert_command
from .evaluate import evaluate_command
from .export import export_command
from .generate import generate_command
from .imports import importing
from .options import UsageError
from .recall import recall_command
from .serve import serve_command
from .train import distill_command, finetune_command


class _Flags:
    """Shows a flag without a type in the help, which typer would add though a flag takes no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            param.metavar = "" if getattr(param, "is_flag", False) else param.metavar
        return params


class _Command(_Flags, TyperCommand): ...


class _Group(_Flags, TyperGroup): ...


app = typer.Typer(cls=_Group, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]})
# transformers' own parser reads the options of finetune.
RAW = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
COMMANDS: dict[str, Callable[..., None]] = {
    "convert": convert_command,
    "distill": distill_command,
    "finetune": finetune_command,
    "generate": generate_command,
    "chat": chat_command,
    "evaluate": evaluate_command,
    "recall": recall_command,
    "bench": bench_command,
    "export": export_command,
    "serve": serve_command,
}
WARNINGS = Warnings()
for _name, _command in COMMANDS.items():
    app.command(_name, cls=_Command, context_settings=RAW if _name == "finetune" else None)(importing(_command))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hf-rfa {version('hf-rfa')}")
        raise typer.Exit


@app.callback()
def _shared(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Give a trained transformer a cache that never grows."""


def main() -> None:
    """Run the command line.

    Input that cannot be used, and a full accelerator, end it with a message and status 1, an interrupt with 130 (typer).
    """
    logging.getLogger("hf_rfa").addHandler(WARNINGS)
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], prog_name="hf-rfa", standalone_mode=False) or 0)
    except UsageError as error:
        message = error.format_message() + (f" See {error.ctx.command_path} --help." if error.ctx else "")
    except (ValueError, FloatingPointError) as error:  # the latter for a training whose loss is not finite
        from hf_rfa.errors import InputError

        if not isinstance(error, InputError | FloatingPointError):
            raise
        message = str(error)
    except RuntimeError as error:
        from torch import OutOfMemoryError

        if not isinstance(error, OutOfMemoryError):
            raise
        short = ". ".join(str(error).split(". ")[:2])  # torch goes on about its allocator
        message = f"{short}. Take smaller batches or shorter rows, or compute on the CPU."
    errors.print(f"error: {message}", style="red", soft_wrap=True)
    sys.exit(1)
