"""The command line's commands, put together."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from .bench import bench_command
from .convert import convert_command
from .evaluate import evaluate_command
from .generate import generate_command
from .imports import importing
from .options import UsageError, current_names
from .train import distill_command, finetune_command, make_data_command


class _Flags:
    """Lets help show a flag as itself: typer would add a type to it that nobody may pass."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)  # type: ignore[misc]
        for each in params:
            if getattr(each, "is_flag", False):
                each.metavar = ""
        return params


class _Command(_Flags, TyperCommand):
    """A command, whose options may have their earlier names."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, current_names(str(self.name), args))


class _Group(_Flags, TyperGroup):
    """All of them."""


HELP = {"help_option_names": ["-h", "--help"]}
# transformers' own parser reads the options of finetune.
RAW = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
app = typer.Typer(cls=_Group, pretty_exceptions_enable=False, context_settings=HELP)
app.command("convert", cls=_Command)(importing(convert_command))
app.command("distill", cls=_Command)(importing(distill_command))
app.command("evaluate", cls=_Command)(importing(evaluate_command))
app.command("bench", cls=_Command)(importing(bench_command))
app.command("finetune", cls=_Command, context_settings=RAW)(importing(finetune_command))
app.command("make-data", cls=_Command)(make_data_command)
app.command("generate", cls=_Command)(importing(generate_command))


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
    """Turn softmax transformers into Random Feature Attention models whose decoding takes constant time and memory."""


def main() -> None:
    """Run the command line: whatever cannot be used ends it with a message and status 1, an interrupt with 130 (typer)."""
    try:
        status = app(sys.argv[1:] or ["--help"], prog_name="hf-rfa", standalone_mode=False)
    except UsageError as error:
        _fail(error.format_message() + (f" See {error.ctx.command_path} --help." if error.ctx else ""))
    except FloatingPointError as error:  # a training whose loss is not finite says what to do
        _fail(str(error))
    except ValueError as error:
        from hf_rfa.errors import InputError

        if not isinstance(error, InputError):
            raise
        _fail(str(error))
    sys.exit(status or 0)


def _fail(message: str) -> None:
    Console(stderr=True).print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(1)


if __name__ == "__main__":
    main()
