"""``hf-rfa export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .console import report_of, starting
from .options import Model, Overwrite, UsageError


def export_command(
    checkpoint: Model,
    destination: Annotated[Path, typer.Argument(help="Folder to write.")],
    to: Annotated[Literal["onnx", "executorch"], typer.Option(help="Format of the graph.")] = "onnx",
    runtime: Annotated[
        Literal["genai", "transformers.js"] | None,
        typer.Option("--for", help="Names and files of onnxruntime-genai, or of transformers.js."),
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="Weights of 8 bits, in a quarter of the bytes.")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Export a converted decoder to one graph with a cache of fixed size, for onnxruntime or ExecuTorch."""
    if to == "executorch" and (runtime or int8):
        raise UsageError("--for and --int8 are of --to onnx. Leave them out.")
    starting(f"exporting {checkpoint} to {destination}")
    from hf_rfa.export import export_executorch, export_onnx

    if to == "executorch":
        report_of(export_executorch, checkpoint, destination, overwrite=overwrite)
    else:
        report_of(export_onnx, checkpoint, destination, int8=int8, runtime=runtime, overwrite=overwrite)
