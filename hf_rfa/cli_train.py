"""``hf-rfa distill`` and ``hf-rfa finetune``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from .errors import InputError
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


def finetune_command(context: typer.Context) -> None:
    """Fine-tune a checkpoint, RFA or softmax, with transformers' Trainer (--help lists all of its options)."""
    from transformers import HfArgumentParser, Seq2SeqTrainingArguments

    from .finetune.finetune import FinetuneArguments, finetune

    parser: Any = HfArgumentParser(
        [FinetuneArguments, Seq2SeqTrainingArguments],  # type: ignore[list-item]
        prog="hf-rfa finetune",
        description="Options may also stand in a YAML file, --settings FILE; those on the command line win.",
    )

    def refuse(message: str) -> NoReturn:
        raise InputError(f"hf-rfa finetune: {message}. --help lists the options.")

    parser.error = refuse
    words = _with_settings(["--output_dir" if word == "--output" else word for word in context.args])
    if "--output_dir" not in words and "--model" in words[:-1]:
        words += ["--output_dir", words[words.index("--model") + 1].rstrip("/") + "-finetuned"]
    options, arguments, unknown = parser.parse_args_into_dataclasses(
        words, look_for_args_file=False, return_remaining_strings=True
    )
    if unknown:
        refuse(f"there is no option {unknown[0]}")
    metrics = finetune(options, arguments)
    if arguments.process_index == 0:
        for name, value in metrics.items():
            console.print(f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}")
        console.print(f"written to {words[words.index('--output_dir') + 1]}")


def _with_settings(words: list[str]) -> list[str]:
    """Return a command line in which ``--settings FILE`` is replaced by the options in that YAML file, before all others."""
    import yaml

    if "--settings" not in words:
        return words
    place = words.index("--settings")
    path = Path(words[place + 1] if place + 1 < len(words) else "")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"cannot read the settings in {path}: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"{path} holds no settings.")
    given = []
    for name, value in values.items():
        given += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return given + words[:place] + words[place + 2 :]
