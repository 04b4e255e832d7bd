"""``hf-rfa distill``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .terminal import console


def distill_command(
    checkpoint: Annotated[str, typer.Argument(help="Folder of a converted checkpoint, or its name on the hub.")],
    teacher: Annotated[str, typer.Option(help="Its softmax parent: a folder, or a name on the hub.")],
    data: Annotated[
        Path,
        typer.Option(
            help="Text to learn from (.txt or .jsonl, plain or .gz); with an encoder sources, one a line, or a .jsonl file "
            "with source and target."
        ),
    ],
    output: Annotated[Path | None, typer.Option(help="Folder to write. Default: CHECKPOINT-distilled.")] = None,
    references: Annotated[Path | None, typer.Option(help="Outputs for the sources, one a line.")] = None,
    recipe: Annotated[str, typer.Option(help="A recipe that comes with hf-rfa, or a YAML file.")] = "default",
    transfer_steps: Annotated[
        int | None, typer.Option(min=0, help="Steps of attention transfer, instead of the recipe's.")
    ] = None,
    end_to_end_steps: Annotated[
        int | None, typer.Option(min=0, help="Steps of training end to end, instead of the recipe's.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run stopped.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint at the output.")] = False,
) -> None:
    """Let a converted checkpoint learn from its softmax parent: attention first, then the whole model."""
    from .finetune.distill import distill

    destination = Path(f"{checkpoint.rstrip('/')}-distilled") if output is None else output
    report = distill(
        checkpoint,
        destination,
        teacher=teacher,
        data=data,
        references=references,
        recipe=recipe,
        transfer_steps=transfer_steps,
        end_to_end_steps=end_to_end_steps,
        resume=resume,
        overwrite=overwrite,
    )
    console.print(report.table())
    console.print(f"written to {destination}")
