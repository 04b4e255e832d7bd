"""``hf-rfa distill`` and ``hf-rfa finetune``."""

from __future__ import annotations

import json
from argparse import SUPPRESS, ArgumentParser
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from .console import console, report_of, starting
from .options import Overwrite, References, Resume, UsageError, data_path


def distill_command(
    checkpoint: Annotated[str, typer.Argument(help="Folder of a converted checkpoint, or its name on the hub.")],
    teacher: Annotated[
        str, typer.Option(help="The softmax model that it was made from: a folder, or a name on the hub.")
    ],
    data: Annotated[
        Path,
        typer.Option(
            callback=data_path,
            help="Text to learn from (.txt or .jsonl, plain or .gz); with an encoder sources, one a line, or a .jsonl file "
            "with source and target; for speech a folder, or a .jsonl file with path and maybe text.",
        ),
    ],
    output: Annotated[Path | None, typer.Option(help="Folder to write. Default: CHECKPOINT-distilled.")] = None,
    references: References = None,
    recipe: Annotated[str, typer.Option(help="A recipe that comes with hf-rfa, or a YAML file.")] = "default",
    transfer_steps: Annotated[
        int | None, typer.Option(min=0, help="Steps of attention transfer, instead of the recipe's.")
    ] = None,
    end_to_end_steps: Annotated[
        int | None, typer.Option(min=0, help="Steps of training end to end, instead of the recipe's.")
    ] = None,
    max_minutes: Annotated[
        float | None,
        typer.Option(
            help="End after so many minutes, if the steps are not over before; learning rates fall by the time."
        ),
    ] = None,
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
        max_minutes=max_minutes,
        resume=resume,
        overwrite=overwrite,
    )
    console.print(f"written to {destination}")


def finetune_parser(*parents: ArgumentParser) -> Any:
    """Return the parser of `finetune_command`'s options, which raises a `UsageError` for those it cannot read."""
    import torch
    from transformers import HfArgumentParser, Seq2SeqTrainingArguments

    from hf_rfa.finetune.arguments import FinetuneArguments

    parser: Any = HfArgumentParser(
        [FinetuneArguments, Seq2SeqTrainingArguments],  # type: ignore[list-item]
        prog="hf-rfa finetune",
        usage="hf-rfa finetune --model MODEL --task TASK --train DATA [--recipe NAME [--small]] [options]",
        description="Options on the command line win over those of a recipe. --import MODULE, a name or a .py file, imports "
        "a feature map first.",
        parents=parents,
    )
    help = "Folder to write, as --output-dir. Default: MODEL-finetuned."
    parser.add_argument("--output", dest="output_dir", default=SUPPRESS, help=help)
    for action in parser._actions:
        # Help shows the names with dashes alone; those with underscores are read too.
        action.option_strings = [name for name in action.option_strings if "_" not in name]
        action.metavar = "true|false" if action.nargs == "?" else action.metavar
    parser.error = _refuse
    # transformers joins several processes on CPUs, or takes bf16 there, only with --use-cpu.
    parser.set_defaults(use_cpu=not torch.accelerator.is_available())
    return parser


def _refuse(message: str) -> NoReturn:
    raise UsageError(f"{message.rstrip('.')}. See hf-rfa finetune --help.")


def finetune_values(words: list[str]) -> dict[str, Any]:
    """Return the values of a command line's options by name, and of the recipe that it names where it has none."""
    from hf_rfa.finetune.recipe import load_settings, merge, read_overrides, to_words

    recipe_parser: Any = ArgumentParser(add_help=False, allow_abbrev=False)
    recipe_parser.error = _refuse
    recipe_parser.add_argument("--recipe", help="Recipe with options: a name, or a YAML file.")
    recipe_parser.add_argument("--small", action="store_true", help="Take the recipe's small variant.")
    chosen, words = recipe_parser.parse_known_args(words)
    if chosen.small and chosen.recipe is None:
        _refuse("--small is a variant of a recipe: pass --recipe with it")
    settings = {} if chosen.recipe is None else load_settings(chosen.recipe, small=chosen.small)
    values = vars(finetune_parser(recipe_parser).parse_args([*to_words(settings), *words]))
    if values["config_overrides"] is not None:
        overrides = {"config_overrides": read_overrides(values["config_overrides"])}
        values["config_overrides"] = json.dumps(merge(settings, overrides)["config_overrides"])
    if values["output_dir"] is None:
        if values["model"] is None:
            _refuse("--output is missing")
        values["output_dir"] = values["model"].rstrip("/") + "-finetuned"
    return values


def finetune_command(context: typer.Context) -> None:
    """Fine-tune a checkpoint, RFA or softmax, with transformers' Trainer (--help lists all of its options)."""
    starting("listing the options" if {"-h", "--help"} & {*context.args} else "preparing the fine-tuning")
    from hf_rfa.evaluation.perplexity import shown
    from hf_rfa.finetune.finetune import finetune

    values = finetune_values(context.args)
    try:
        options, arguments = finetune_parser().parse_dict(values, allow_extra_keys=True)
    except ValueError as error:  # training arguments check each other as they are made
        _refuse(str(error))
    metrics = finetune(options, arguments)
    if arguments.process_index == 0:
        for name, value in metrics.items():
            console.print(f"{name} {shown(value, 4)}" if isinstance(value, float) else f"{name} {value}")
        console.print(f"written to {values['output_dir']}")
