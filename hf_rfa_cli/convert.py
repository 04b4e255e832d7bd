"""``hf-rfa convert``."""

from __future__ import annotations

import inspect
import runpy
import shlex
import sys
from copy import copy
from dataclasses import Field, fields
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, get_args

import typer

from .console import console, report_of, starting
from .options import Overwrite, References, Resume, UsageError, number, text_file

#: What convert/options.py defines, read by its path: importing it as a module of `hf_rfa` would load torch.
_PACKAGE: Any = find_spec("hf_rfa")
OPTIONS = SimpleNamespace(**runpy.run_path(f"{_PACKAGE.submodule_search_locations[0]}/convert/options.py"))
LAYERS = ("layers", "cross_layers", "encoder_layers")
HEADS = "retrieval_heads"


def _layers(option: str, text: str | None) -> Any:
    """Read the layers that an option names: "0,2,4-7", "all", "none", or None if it was not given."""
    if text is None or text == "all":
        return text
    indices: list[int] = []
    for part in [] if text == "none" else text.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise UsageError(f"{option} takes all, none, or indices and ranges such as 0,2,4-7, got {text!r}.")
        indices += range(int(first), int(last or first) + 1)
    return indices


def _heads(option: str, text: str) -> Any:
    """Read the heads that an option names: their number, or "18.2,7.2"."""
    if text.isdigit():
        return int(text)
    pairs = [part.strip().partition(".") for part in text.split(",")]
    if not all(layer.isdigit() and head.isdigit() for layer, _, head in pairs):
        raise UsageError(f"{option} takes a number of heads, or layer.head of each such as 18.2,7.2, got {text!r}.")
    return [[int(layer), int(head)] for layer, _, head in pairs]


def _config(option: str, words: list[str] | None) -> dict[str, Any] | None:
    """Read fields of the configuration, "unit_norm=true", with values as YAML reads them; None if none was given."""
    import yaml

    values: dict[str, Any] = {}
    for word in words or []:
        name, equals, value = word.partition("=")
        if not name or not equals or not value:
            raise UsageError(f"{option} takes a field and its value such as unit_norm=true, got {word!r}.")
        values[name] = yaml.safe_load(value)
    return values or None


def _parameter(field: Field, panel: str, text: str) -> inspect.Parameter:
    """Return the parameter of a typer command for a field of `hf_rfa.convert.ConversionOptions`."""
    name, default, flag = field.name, field.default, OPTIONS.flag_of(field.name)
    read_as_text = {"config": list[str] | None, "calibrate_on": Path | None, HEADS: str}
    kind: Any = {**read_as_text, **dict.fromkeys(LAYERS, str | None)}.get(name, field.type)
    default = str(default) if name == HEADS else default
    text = text[0].upper() + text[1:]
    if name in OPTIONS.MINIMUM and name != HEADS:
        option = number(text, OPTIONS.MINIMUM[name], names=(flag,))
    else:
        option = typer.Option(flag, help=text, callback=text_file if name == "calibrate_on" else None)
    option.rich_help_panel = panel
    annotation = Annotated[kind, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _with_conversion_options(command: Any) -> Any:
    """Give a command whose last parameter is ``**options`` the options of a conversion, and its own a group of the help."""
    arguments, own = [], []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            arguments.append(parameter)
        elif parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            kind, option = get_args(parameter.annotation)
            option = copy(option)
            option.rich_help_panel = "Output" if parameter.name == "overwrite" else "Distillation"
            own.append(parameter.replace(annotation=Annotated[kind, option]))
    texts, panel, added = OPTIONS.help_texts(), "", []
    for field in fields(OPTIONS.ConversionOptions):
        panel = OPTIONS.PANELS.get(field.name, panel)
        added.append(_parameter(field, panel, texts[field.name]))
    command.__signature__ = inspect.Signature([*arguments, *added, *own])
    return command


@_with_conversion_options
def convert_command(
    checkpoint: Annotated[str, typer.Argument(help="Folder of a softmax checkpoint, or its name on the hub.")],
    destination: Annotated[Path, typer.Argument(help="Folder to write.")],
    *,
    overwrite: Overwrite = False,
    transfer_steps: Annotated[
        int | None, number("Then learn the base model's attention from --data for this many steps.", 1)
    ] = None,
    end_to_end_steps: Annotated[
        int | None,
        number("Then train the whole model on the base model's predictions of --data for this many steps.", 1),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            callback=text_file,
            help="Text to learn from (see distill); without --calibrate also the text to calibrate on.",
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
    options |= {name: _layers(OPTIONS.flag_of(name), options[name]) for name in LAYERS}
    options[HEADS] = _heads(OPTIONS.flag_of(HEADS), options[HEADS])
    options["config"] = _config(OPTIONS.flag_of("config"), options["config"])
    options["calibrate_on"] = options["calibrate_on"] or data
    starting(f"converting {checkpoint} to {destination}")
    if not trains:
        _convert(checkpoint, destination, overwrite=overwrite, **options)
        return

    from hf_rfa.convert.checkpoint import locate
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
