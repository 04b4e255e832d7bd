"""``hf-rfa export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .console import report_of, starting
from .options import Model, Overwrite


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
    starting(f"exporting {checkpoint} to {destination}")
    from hf_rfa.export import export

    report_of(export, checkpoint, destination, to=to, int8=int8, runtime=runtime, overwrite=overwrite)
