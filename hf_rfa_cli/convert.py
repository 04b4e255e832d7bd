"""``hf-rfa convert``."""

from __future__ import annotations

import inspect
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from .console import console, report_of, starting
from .options import Overwrite, References, Resume, UsageError, data_path

#: What convert/options.py defines, read by its path: importing it as a module of `hf_rfa` would load torch.
_PACKAGE: Any = find_spec("hf_rfa")
OPTIONS = SimpleNamespace(**runpy.run_path(f"{_PACKAGE.submodule_search_locations[0]}/convert/options.py"))


def _layers(text: str) -> Any:
    """Read the layers that an option names: "0,2,4-7", "all" or "none"."""
    if text == "all":
        return text
    indices: list[int] = []
    for part in [] if text == "none" else text.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise typer.BadParameter(f"it takes all, none, or indices and ranges such as 0,2,4-7, got {text!r}.")
        indices += range(int(first), int(last or first) + 1)
    return indices


def _heads(text: str) -> Any:
    """Read the heads that an option names: their number, or "18.2,7.2"."""
    if text.isdigit():
        return int(text)
    pairs = [part.strip().partition(".") for part in text.split(",")]
    if not all(layer.isdigit() and head.isdigit() for layer, _, head in pairs):
        raise typer.BadParameter(f"it takes a number of heads, or layer.head of each such as 18.2,7.2, got {text!r}.")
    return [[int(layer), int(head)] for layer, _, head in pairs]


def _config_field(text: str) -> tuple[str, Any]:
    """Read a field of the configuration, "unit_norm=true", with a value as YAML reads it."""
    import yaml

    name, _, value = text.partition("=")
    if not name or not value:
        raise typer.BadParameter(f"it takes a field and its value such as unit_norm=true, got {text!r}.")
    return name, yaml.safe_load(value)


#: How options are read that are no numbers, names or switches, with what stands for their values in the help.
PARSERS: dict[str, tuple[Callable[[str], Any], str]] = {
    **dict.fromkeys(("layers", "cross_layers", "encoder_layers"), (_layers, "LAYERS")),
    "retrieval_heads": (_heads, "HEADS"),
    "config": (_config_field, "FIELD=VALUE"),
    "calibrate_on": (lambda text: data_path(Path(text)), "PATH"),
}


def _conversion_options() -> Iterator[inspect.Parameter]:
    """Yield the fields of `hf_rfa.convert.ConversionOptions` as parameters of a typer command."""
    texts, panel = OPTIONS.help_texts(), None
    for field in fields(OPTIONS.ConversionOptions):
        name, panel = field.name, field.metadata.get("panel", panel)
        parser, metavar = PARSERS.get(name, (None, None))
        option = typer.Option(
            OPTIONS.flag_of(field),
            parser=parser,
            metavar=metavar,
            min=field.metadata.get("minimum"),
            help=texts[name][0].upper() + texts[name][1:],
            rich_help_panel=panel,
        )
        kind: Any = field.type if parser is None else list[Any] | None if name == "config" else Any
        default = field.default if parser is None or field.default is None else str(field.default)
        yield inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
        )


def _with_conversion_options(command: Any) -> Any:
    """Give a command the options of a conversion in place of its last parameter, ``**options``."""
    checkpoint, destination, *others, _ = inspect.signature(command, eval_str=True).parameters.values()
    command.__signature__ = inspect.Signature([checkpoint, destination, *_conversion_options(), *others])
    return command


@_with_conversion_options
def convert_command(
    checkpoint: Annotated[str, typer.Argument(help="Folder of a softmax checkpoint, or its name on the hub.")],
    destination: Annotated[Path, typer.Argument(help="Folder to write.")],
    *,
    overwrite: Overwrite = False,
    transfer_steps: Annotated[
        int | None, typer.Option(min=1, help="Then learn the base model's attention from --data for this many steps.")
    ] = None,
    end_to_end_steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="Then train the whole model on the base model's predictions of --data for this many steps."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            callback=data_path,
            help="Text or speech to learn from (see distill); without --calibrate also what to calibrate on.",
        ),
    ] = None,
    references: References = None,
    resume: Resume = False,
    **options: Any,
) -> None:
    """Convert a softmax checkpoint into an RFA checkpoint."""
    trains = transfer_steps is not None or end_to_end_steps is not None
    if trains != (data is not None):
        raise UsageError(
            "--data is the text of a training, which --transfer-steps or --end-to-end-steps asks for: pass one of these and "
            "--data, or neither."
        )
    for flag, given in (("--references", references is not None), ("--resume", resume)):
        if given and data is None:
            raise UsageError(f"{flag} has no effect without --data. Leave it out.")
    options["config"] = dict(options["config"] or ()) or None
    options["calibrate_on"] = options["calibrate_on"] or data
    starting(f"converting {checkpoint} to {destination}")
    if not trains:
        _convert(checkpoint, destination, overwrite=overwrite, **options)
        return

    from hf_rfa.convert.checkpoint.source import locate
    from hf_rfa.finetune.distill import check_one_process, distill
    from hf_rfa.finetune.run_folder import check_run
    from hf_rfa.io.atomic_io import folder_beside

    check_one_process()
    check_run(destination, sources=(Path(checkpoint),), resume=resume, overwrite=overwrite)
    with folder_beside(destination) as folder:
        converted = folder / destination.name
        command = shlex.join(["hf-rfa", *(word for word in sys.argv[1:] if word != "--resume")])
        trained = "model" if transfer_steps is None else "features"
        _convert(checkpoint, converted, command=command, trained=trained, **options)
        revision = options["revision"]
        teacher = checkpoint if revision is None else locate(checkpoint, revision=revision, allow_pickle=False)
        report_of(
            distill,
            converted,
            destination,
            teacher=teacher,
            data=data,
            references=references,
            recipe="pretrained" if transfer_steps is None else "default",
            transfer_steps=transfer_steps or 0,
            end_to_end_steps=end_to_end_steps or 0,
            resume=resume,
            overwrite=overwrite,
            command=command,
        )


def _convert(checkpoint: str, destination: Path, **options: Any) -> None:
    """Convert with a progress bar, and print the report."""
    from hf_rfa.convert import convert

    for note in report_of(convert, checkpoint, destination, **options).notes:
        console.print(note)
