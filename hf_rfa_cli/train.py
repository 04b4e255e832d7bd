"""``hf-rfa distill`` and ``hf-rfa finetune``."""

from __future__ import annotations

from argparse import SUPPRESS
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer import Argument, Option

from .console import console, report_of, starting
from .options import Overwrite, References, Resume, UsageError, data_path


def distill_command(
    checkpoint: Annotated[str, Argument(help="Folder of a converted checkpoint, or its name on the hub.")],
    teacher: Annotated[str, Option(help="The softmax model that it was made from: a folder, or a name on the hub.")],
    data: Annotated[
        Path,
        Option(
            callback=data_path,
            help="Text to learn from (.txt or .jsonl, plain or .gz); with an encoder sources, one a line, or a .jsonl file "
            "with source and target; for speech a folder, or a .jsonl file with path and maybe text.",
        ),
    ],
    output: Annotated[Path | None, Option(help="Folder to write. Default: CHECKPOINT-distilled.")] = None,
    references: References = None,
    recipe: Annotated[str, Option(help="A recipe that comes with hf-rfa, or a YAML file.")] = "default",
    transfer_steps: Annotated[int | None, Option(min=0, help="Attention transfer; else the recipe's steps.")] = None,
    end_to_end_steps: Annotated[int | None, Option(min=0, help="The same, end to end.")] = None,
    max_minutes: Annotated[float | None, Option(help="End after so many minutes; rates fall by the time.")] = None,
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


def finetune_parser() -> Any:
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
    )
    parser.add_argument("--recipe", help="Recipe with options: a name, or a YAML file.")
    parser.add_argument("--small", action="store_true", help="Take the recipe's small variant.")
    help = "Folder to write, as --output-dir. Default: MODEL-finetuned."
    parser.add_argument("--output", dest="output_dir", default=SUPPRESS, help=help)
    for action in parser._actions:
        # Help shows the names with dashes alone; those with underscores are read too.
        action.option_strings = [name for name in action.option_strings if "_" not in name]
        action.metavar = "true|false" if action.nargs == "?" else action.metavar
        action.required = False  # a recipe may have it
    parser.error = _refuse
    # transformers joins several processes on CPUs, or takes bf16 there, only with --use-cpu.
    parser.set_defaults(use_cpu=not torch.accelerator.is_available())
    return parser


def _refuse(message: str) -> NoReturn:
    raise UsageError(message if message.endswith((".", "?")) else f"{message}.")


def finetune_values(words: list[str]) -> dict[str, Any]:
    """Return the values of all options by name: a command line's, or those of the recipe that it names, or the defaults."""
    from hf_rfa.finetune.recipe import load_settings, merge

    parser = finetune_parser()
    given, unknown = parser.parse_known_args(words)
    if unknown:
        names = [name for name in parser._option_string_actions if "_" not in name]
        (nearest,) = get_close_matches(unknown[0], names, n=1, cutoff=0.0)
        _refuse(f"there is no option {unknown[0]}. Did you mean {nearest}?")
    if given.small and given.recipe is None:
        _refuse("--small is a variant of a recipe: pass --recipe with it")
    settings = {} if given.recipe is None else load_settings(given.recipe, small=given.small)
    parser.set_defaults(**settings)
    values = merge(settings, vars(parser.parse_args(words)))
    if values["output_dir"] is None and values["model"] is not None:
        values["output_dir"] = values["model"].rstrip("/") + "-finetuned"
    if missing := [name for name in ("task", "train", "output_dir") if values[name] is None]:
        _refuse(f"--{missing[0].removesuffix('_dir')} is missing")
    return values


def finetune_command(context: typer.Context) -> None:
    """Fine-tune a checkpoint, RFA or softmax, with transformers' Trainer (--help lists all of its options)."""
    starting("listing the options" if {"-h", "--help"} & {*context.args} else "preparing the fine-tuning")
    from hf_rfa.evaluation.perplexity import shown
    from hf_rfa.finetune.tasks import finetune

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
