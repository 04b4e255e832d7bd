"""``hf-rfa distill``, ``hf-rfa finetune`` and ``hf-rfa make-data``."""

from __future__ import annotations

import json
import re
from argparse import SUPPRESS, ArgumentParser
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from .console import console, report_of, starting
from .options import Overwrite, References, Resume, Seed, UsageError, number, text_file

#: The option for the folder to write; finetune also takes transformers' name of it.
OUTPUT = "--output"


def distill_command(
    checkpoint: Annotated[str, typer.Argument(help="Folder of a converted checkpoint, or its name on the hub.")],
    teacher: Annotated[
        str, typer.Option(help="The softmax model that it was made from: a folder, or a name on the hub.")
    ],
    data: Annotated[
        Path,
        typer.Option(
            callback=text_file,
            help="Text to learn from (.txt or .jsonl, plain or .gz); with an encoder sources, one a line, or a .jsonl file "
            "with source and target.",
        ),
    ],
    output: Annotated[Path | None, typer.Option(help="Folder to write. Default: CHECKPOINT-distilled.")] = None,
    references: References = None,
    recipe: Annotated[str, typer.Option(help="A recipe that comes with hf-rfa, or a YAML file.")] = "default",
    transfer_steps: Annotated[int | None, number("Steps of attention transfer, instead of the recipe's.", 0)] = None,
    end_to_end_steps: Annotated[int | None, number("Steps of training end to end, instead of the recipe's.", 0)] = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
) -> None:
    """Let a converted checkpoint learn from the softmax model that it was made from: attention, then the whole model."""
    starting(f"distilling {checkpoint} from {teacher}")
    from hf_rfa.finetune.distill import distill

    destination = Path(f"{checkpoint.rstrip('/')}-distilled") if output is None else output
    report_of(
        distill,
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
    console.print(f"written to {destination}")


def finetune_parser() -> Any:
    """Return the parser of `finetune_command`'s options, which raises a `UsageError` for those it cannot read."""
    import torch
    from transformers import HfArgumentParser, Seq2SeqTrainingArguments

    from hf_rfa.finetune.arguments import FinetuneArguments

    parser: Any = HfArgumentParser(
        [FinetuneArguments, Seq2SeqTrainingArguments],  # type: ignore[list-item]
        prog="hf-rfa finetune",
        usage="hf-rfa finetune --model MODEL --task TASK --train DATA [--recipe NAME [--small]] [options]",
        description="Options may also come from a recipe, --recipe NAME or a YAML file, in its --small variant if that is "
        "passed too; those on the command line win. --import MODULE, a name or a .py file, imports a feature map first.",
    )
    parser.add_argument(
        OUTPUT, dest="output_dir", default=SUPPRESS, help="Folder to write, as --output-dir. Default: MODEL-finetuned."
    )
    for action in parser._actions:  # help shows the names with dashes alone; those with underscores are read too
        action.option_strings = [name for name in action.option_strings if "_" not in name]
    parser.error = _refuse
    # transformers joins several processes on CPUs, or takes bf16 there, only with --use-cpu.
    parser.set_defaults(use_cpu=not torch.accelerator.is_available())
    shown = parser.format_help
    # A flag may have a value, which recipes give it.
    parser.format_help = lambda: re.sub(
        r"(--[\w-]+)(\s\[[A-Z0-9_]+\])(?=( )?)", lambda found: found[1] + " " * len(found[2]) * bool(found[3]), shown()
    )
    return parser


def _refuse(message: str) -> NoReturn:
    raise UsageError(f"{message.rstrip('.')}. See hf-rfa finetune --help.")


def finetune_words(words: list[str]) -> list[str]:
    """Return the words of a command line as `finetune_parser` takes them: with its recipe's options, and an output."""
    from hf_rfa.finetune.recipe import with_recipe

    words = with_recipe(words)
    names: Any = ArgumentParser(add_help=False, allow_abbrev=False)
    names.error = _refuse
    names.add_argument("--model")
    names.add_argument(OUTPUT, "--output_dir", "--output-dir")
    given, _ = names.parse_known_args(words)
    if given.output is None and given.model is not None:
        words = [*words, OUTPUT, given.model.rstrip("/") + "-finetuned"]
    elif given.output is None and not {"-h", "--help"} & set(words):
        _refuse("--output is missing")
    return words


def finetune_command(context: typer.Context) -> None:
    """Fine-tune a checkpoint, RFA or softmax, with transformers' Trainer (--help lists all of its options)."""
    starting("listing the options" if {"-h", "--help"} & {*context.args} else "preparing the fine-tuning")
    from hf_rfa.evaluation.perplexity import shown
    from hf_rfa.finetune.finetune import finetune

    words = finetune_words(context.args)
    try:
        options, arguments, unknown = finetune_parser().parse_args_into_dataclasses(
            words, look_for_args_file=False, return_remaining_strings=True
        )
    except ValueError as error:  # training arguments check each other as they are made
        _refuse(str(error))
    if unknown:
        _refuse(f"there is no option {unknown[0]}")
    destination = arguments.output_dir
    metrics = finetune(options, arguments)
    if arguments.process_index == 0:
        for name, value in metrics.items():
            console.print(f"{name} {shown(value, 4)}" if isinstance(value, float) else f"{name} {value}")
        console.print(f"written to {destination}")


def make_data_command(
    name: Annotated[Literal["listops", "copy"], typer.Argument(help="The data set.")],
    output: Annotated[Path, typer.Argument(help="File to write, .jsonl.")],
    rows: Annotated[int, number("Rows to write.", 1)] = 10_000,
    min_length: Annotated[int | None, number("Least symbols. Default: 500 for listops, 1 for copy.", 1)] = None,
    max_length: Annotated[int | None, number("Most symbols. Default: 2000 for listops, 63 for copy.", 1)] = None,
    seed: Seed = 0,
) -> None:
    """Write a data set that a program makes: ListOps expressions with their values, or sequences to be copied."""
    starting(f"writing {rows} rows to {output}")
    from hf_rfa.finetune.synthetic import DATA_SETS
    from hf_rfa.io.atomic_io import check_file, new_file

    make, least, most = DATA_SETS[name]
    drawn = make(rows, min_length=min_length or least, max_length=max_length or most, seed=seed)
    check_file(output, replace=False)
    with new_file(output) as file:
        file.writelines(json.dumps(row) + "\n" for row in drawn)
    console.print(f"{rows} rows written to {output}")
