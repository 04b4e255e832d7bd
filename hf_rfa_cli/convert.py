"""``hf-rfa convert``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from .options import LoadedDtype, ModelDtype, Overwrite, References, Resume, Seed, UsageError, number, text_file


def _layers(option: str, text: str | None) -> Any:
    """Read the layers that an option names: "0,2,4-7", "all", "none", or None if it was not given."""
    if text is None or text == "all":
        return text
    if text == "none":
        return []
    indices: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise UsageError(f"{option} takes all, none, or indices and ranges such as 0,2,4-7, got {text!r}.")
        indices += range(int(first), int(last or first) + 1)
    return indices


def convert_command(
    source: Annotated[str, typer.Argument(help="Folder of a softmax checkpoint, or its name on the hub.")],
    destination: Annotated[Path, typer.Argument(help="Folder to write.")],
    feature_map: Annotated[
        str | None, typer.Option(help="Feature map. Default: positive; exponential with --distill-steps.")
    ] = None,
    num_features: Annotated[int | None, number("D, rows of W per head. Default: the map's own.", 1)] = None,
    num_cross_features: Annotated[int | None, number("D of cross attention.", 1)] = None,
    num_encoder_features: Annotated[int | None, number("D of an encoder's attention.", 1)] = None,
    unit_norm: Annotated[bool, typer.Option("--unit-norm", help="Normalise q and k (the paper's RFA).")] = False,
    iid: Annotated[bool, typer.Option("--iid", help="Draw W independently, not in orthogonal blocks.")] = False,
    trainable_projection: Annotated[
        bool, typer.Option("--trainable-projection", help="Make W a parameter, for training.")
    ] = False,
    redraw_pool: Annotated[int, number("Redraw W from a pool of this size at every step of training.", 0)] = 0,
    gate: Annotated[
        bool | None,
        typer.Option(
            "--gate/--no-gate", help="Add a recency gate per head. Default: with --distill-steps and no window."
        ),
    ] = None,
    window: Annotated[
        int,
        number("Let causal attention see so many last tokens exactly, beside the features.", 0),
    ] = 0,
    seed: Seed = 0,
    layers: Annotated[
        str, typer.Option(help="Layers whose causal attention to convert: all, none, or 0,2,4-7. Others stay softmax.")
    ] = "all",
    cross_layers: Annotated[
        str | None, typer.Option(help="Decoder layers whose cross attention to convert. Default: all.")
    ] = None,
    encoder_layers: Annotated[str | None, typer.Option(help="Encoder layers to convert. Default: none.")] = None,
    keep_softmax: Annotated[
        int,
        number("Leave so many layers softmax after all: those whose conversion does most damage.", 0),
    ] = 0,
    max_positions: Annotated[int | None, number("Extend the positions to this number.", 1)] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            callback=text_file,
            help="Text to calibrate on (.txt, .jsonl, plain or .gz; for an encoder one source a line). Default: random "
            "tokens.",
        ),
    ] = None,
    dtype: ModelDtype = LoadedDtype.auto,
    overwrite: Overwrite = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Load weights that exist only as a pickle. Only if you trust them.")
    ] = False,
    distill_steps: Annotated[
        int | None,
        number("Then learn the parent's attention from --data for so many steps.", 1),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            callback=text_file, help="Text to learn from (see distill); calibration reads it too, but for --calibrate."
        ),
    ] = None,
    references: References = None,
    resume: Resume = False,
) -> None:
    """Convert a softmax checkpoint into an RFA checkpoint."""
    if (distill_steps is None) != (data is None):
        raise UsageError("--distill-steps and --data belong together: pass both, or neither.")
    for option, given in (("--references", references is not None), ("--resume", resume)):
        if given and data is None:
            raise UsageError(f"{option} has no effect without --data. Leave it out.")
    if feature_map is None:
        feature_map = "positive" if distill_steps is None else "exponential"
    causal = _layers("--layers", layers)
    if gate is None:  # only training makes it pay, and no window beside it; only causal attention has one
        gate = distill_steps is not None and window == 0 and causal != []
    options: dict[str, Any] = {
        "feature_map": feature_map,
        "num_features": num_features,
        "num_cross_features": num_cross_features,
        "num_encoder_features": num_encoder_features,
        "unit_norm": unit_norm,
        "orthogonal": not iid,
        "trainable_projection": trainable_projection,
        "redraw_pool": redraw_pool,
        "gate": gate,
        "window": window,
        "seed": seed,
        "layers": causal,
        "cross_layers": _layers("--cross-layers", cross_layers),
        "encoder_layers": _layers("--encoder-layers", encoder_layers),
        "keep_softmax": keep_softmax,
        "max_positions": max_positions,
        "calibrate_on": calibrate or data,
        "dtype": dtype.value,
        "allow_pickle": allow_pickle,
    }
    if distill_steps is None:
        _convert(source, destination, overwrite=overwrite, **options)
        return

    from hf_rfa.convert.atomic_io import check_destination, folder_beside
    from hf_rfa.finetune.distill import check_one_process, distill
    from hf_rfa.finetune.run_folder import check_training_folder, training_folder

    from .console import console, shown_steps

    check_one_process()
    check_destination(destination, overwrite=overwrite, sources=(Path(source),))
    check_training_folder(training_folder(destination), resume=resume)
    with folder_beside(destination) as folder:
        converted = folder / destination.name
        command = shlex.join(["hf-rfa", *(word for word in sys.argv[1:] if word != "--resume")])
        _convert(source, converted, overwrite=False, command=command, **options)
        with shown_steps() as progress:
            report = distill(
                converted,
                destination,
                teacher=source,
                data=cast(Path, data),
                references=references,
                transfer_steps=distill_steps,
                end_to_end_steps=0,
                resume=resume,
                overwrite=overwrite,
                command=command,
                progress=progress,
            )
    console.print(report.table())


def _convert(source: str, destination: Path, **options: Any) -> None:
    """Convert with a progress bar, and print the report."""
    from hf_rfa.convert import convert

    from .console import console, shown_steps

    with shown_steps() as progress:
        report = convert(source, destination, progress=progress, **options)
    console.print(report.table())
    for note in report.notes:
        console.print(note)
