"""``hf-rfa convert``."""

from __future__ import annotations

import importlib.util
import inspect
import shlex
import sys
from dataclasses import Field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from .console import console, report_of, starting
from .options import Overwrite, References, Resume, UsageError, data_path


def _load_options() -> Any:
    """Return the module convert/options.py, loaded by its path: as a module of `hf_rfa` it would load torch."""
    package: Any = importlib.util.find_spec("hf_rfa")
    path = Path(package.submodule_search_locations[0], "convert", "options.py")
    spec: Any = importlib.util.spec_from_file_location("conversion_options", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OPTIONS = _load_options()
FIELDS: dict[str, Field] = {field.name: field for field in fields(OPTIONS.ConversionOptions)}
#: What stands in the help for values that are no numbers and no names.
METAVARS = {"layers": "LAYERS", "retrieval_heads": "HEADS", "config": "FIELD=VALUE", "calibrate_on": "PATH"}


def _read(name: str, text: str) -> Any:
    """Read the value of an option."""
    if name == "calibrate_on":
        return data_path(Path(text))
    try:
        return OPTIONS.read(FIELDS[name], text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _fields_of(texts: list[str] | None) -> dict[str, Any]:
    """Return the options that ``--config FIELD=VALUE`` sets; those that are none of a conversion are of its ``config``.

    Values of these are read as YAML; whether there are such fields is checked before the conversion begins.
    """
    import yaml

    options: dict[str, Any] = {"config": None}
    for name, found, text in (text.partition("=") for text in texts or ()):
        if not found or not name:
            raise UsageError(f"--config takes a field and its value such as num_sinks=2, got {name!r}.")
        if name not in FIELDS:
            options["config"] = (options["config"] or {}) | {name: yaml.safe_load(text)}
        elif flag := FIELDS[name].metadata["flag"]:
            raise UsageError(f"--config {name}: use its own option, {flag}.")
        else:
            try:
                options[name] = OPTIONS.read(FIELDS[name], text)
            except ValueError as error:
                raise UsageError(f"--config {name}: {error}") from error
    return options


def _with_conversion_options(command: Any) -> Any:
    """Give a command the fields of `hf_rfa.convert.ConversionOptions` with a flag in place of its last parameter."""
    checkpoint, destination, *others, _ = inspect.signature(command, eval_str=True).parameters.values()
    options = []
    for name, field in FIELDS.items():
        help, flag, least = (field.metadata[key] for key in ("help", "flag", "least"))
        if flag is not None:
            kind: Any = list[str] | None if name == "config" else Any if name in METAVARS else field.type
            parser = partial(_read, name) if kind is Any else None
            option = Option(flag, parser=parser, metavar=METAVARS.get(name), min=least, help=help)
            options.append(others[0].replace(name=name, default=field.default, annotation=Annotated[kind, option]))
    command.__signature__ = inspect.Signature([checkpoint, destination, *options, *others])
    return command


@_with_conversion_options
def convert_command(
    checkpoint: Annotated[str, Argument(help="Folder of a softmax checkpoint, or its name on the hub.")],
    destination: Annotated[Path, Argument(help="Folder to write.")],
    *,
    overwrite: Overwrite = False,
    transfer_steps: Annotated[int | None, Option(min=1, help="Then attention transfer: its steps on --data.")] = None,
    end_to_end_steps: Annotated[int | None, Option(min=1, help="Then training of the whole model: steps.")] = None,
    data: Annotated[
        Path | None,
        Option(
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
    options["calibrate_on"] = options["calibrate_on"] or data
    options |= _fields_of(options["config"])
    try:
        OPTIONS.ConversionOptions(**options)
    except ValueError as error:
        raise UsageError(str(error)) from error
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
        revision = options.get("revision")
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
