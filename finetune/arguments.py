"""The options of `hf-rfa finetune` besides transformers' training arguments, and the checks that come before any work."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from transformers import TrainingArguments

from hf_rfa.errors import InputError

from .param_groups import PARAMETER_KINDS, ParameterKind

TrainingTask = Literal["clm", "seq2seq", "classify"]

#: Options that one task alone has.
OPTIONS_OF_A_TASK: dict[str, TrainingTask] = {
    "prompt_column": "clm",
    "unpacked": "clm",
    "train_references": "seq2seq",
    "evaluate_references": "seq2seq",
}


def processes_started() -> int:
    """Return how many processes torchrun, accelerate launch or the like started."""
    return int(os.environ.get("WORLD_SIZE", 1))


def check_minutes(minutes: float | None) -> None:
    """Raise an `InputError` for a time that no training takes."""
    if minutes is not None and not 0 < minutes < math.inf:
        raise InputError(f"max_minutes must be a number above 0, got {minutes}.")


def _option(help: str, default: Any = MISSING) -> Any:
    """Return a field with a help text; one without a default has to be given."""
    return field(default=default, metadata={"help": help})


def read_overrides(overrides: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return fields of a configuration, which may be given as a JSON object; raise an `InputError` if a text is none."""
    try:
        fields = json.loads(overrides) if isinstance(overrides, str) else overrides or {}
    except json.JSONDecodeError as error:
        raise InputError(f"config_overrides must be a JSON object, got {overrides!r}: {error}") from error
    if not isinstance(fields, Mapping):
        raise InputError(f'config_overrides must be a JSON object such as {{"n_layer": 4}}, got {fields!r}.')
    return dict(fields)


@dataclass
class FinetuneArguments:
    """The model that is trained and its data; the other options are transformers' training arguments."""

    task: str = _option("clm, seq2seq or classify.")
    train: str = _option("Training data: .txt, .jsonl, .csv or .parquet (plain or .gz), or a data set on the hub.")
    model: str | None = _option("Folder of a checkpoint, RFA or softmax, or its name on the hub.", None)
    model_type: str | None = _option(
        "Instead of --model: train a new model of this type, such as rfa_gpt2 or gpt2.", None
    )
    config_overrides: dict[str, Any] | str | None = _option(  # noqa: RUF009  # a field
        "Fields of the new model's configuration, as a JSON object; feature_seed: --seed if not given.", None
    )
    tokenizer: str | None = _option("Folder or name of a tokenizer, if not the model's.", None)
    evaluate: str | None = _option("Data to evaluate on, in the same forms.", None)
    dataset_config: str | None = _option("Configuration of a data set on the hub.", None)
    train_split: str = _option("Split of a data set on the hub to train on.", "train")
    evaluate_split: str = _option("Split of it to evaluate on.", "validation")
    text_column: str = _option("Column with the text (clm, classify).", "text")
    prompt_column: str | None = _option("Column with prompts, which precede the texts and are not learned (clm).", None)
    label_column: str = _option("Column with the label (classify).", "label")
    source_column: str = _option("Column with the source (seq2seq); a.b for the field b of a column a.", "source")
    target_column: str = _option("Column with the target (seq2seq), in the same form.", "target")
    train_references: str | None = _option("Targets for training sources, both one per line (seq2seq).", None)
    evaluate_references: str | None = _option("Targets for evaluation sources, one per line (seq2seq).", None)
    block_length: int | None = _option(
        "Tokens per block (clm), or most tokens of a text. Default: the positions, at most 1024.", None
    )
    unpacked: bool = _option("A document a row, cut and padded, instead of full blocks (clm).", False)
    streaming: bool = _option("Read the data during training; needs --max-steps.", False)
    byte_tokenizer: bool = _option("Take every byte as a token (ByT5's ids).", False)
    feature_map_rate: float | None = _option("Learning rate of feature maps; 0 freezes.", None)
    sigma_rate: float | None = _option("Learning rate of σ; 0 freezes.", None)
    gate_rate: float | None = _option("Learning rate of gates; 0 freezes.", None)
    projection_rate: float | None = _option("Learning rate of the projections of attention; 0 freezes.", None)
    rest_rate: float | None = _option("Learning rate of all else; 0 freezes.", None)
    max_minutes: float | None = _option(
        "End the training after so many minutes, if its steps are not over before; the learning rate falls by the time.",
        None,
    )
    resume: bool = _option("Continue an interrupted run.", False)
    overwrite: bool = _option("Replace a checkpoint at the output.", False)

    def rates(self) -> dict[ParameterKind, float]:
        """Return the learning rates that are set, by kind."""
        rates = (self.feature_map_rate, self.sigma_rate, self.gate_rate, self.projection_rate, self.rest_rate)
        return {kind: rate for kind, rate in zip(PARAMETER_KINDS, rates, strict=True) if rate is not None}

    def columns(self) -> dict[str, str]:
        """Return the columns that the task reads, by what they hold."""
        names = {"clm": ("text", "prompt"), "seq2seq": ("source", "target"), "classify": ("text", "label")}[self.task]
        columns = {name: getattr(self, f"{name}_column") for name in names}
        return {name: column for name, column in columns.items() if column}

    def without_effect(self) -> list[str]:
        """Return the options that say what to take of data sets on the hub, where all data are files."""
        if not all(Path(source).expanduser().exists() for source in (self.train, self.evaluate) if source):
            return []
        defaults = {"dataset_config": None, "train_split": "train", "evaluate_split": "validation"}
        return [f"--{name.replace('_', '-')}" for name, default in defaults.items() if getattr(self, name) != default]

    def check(self, arguments: TrainingArguments) -> None:
        """Raise an `InputError` for what is wrong with these options and training arguments, before anything is read."""
        tasks = get_args(TrainingTask)
        if self.task not in tasks:
            raise InputError(f"task must be one of {', '.join(tasks)}, got {self.task!r}.")
        if (self.model is None) == (self.model_type is None):
            raise InputError("pass either --model, a checkpoint, or --model-type, for a new model of that type.")
        if self.config_overrides is not None and self.model_type is None:
            raise InputError("--config-overrides goes with --model-type: a checkpoint has its own configuration.")
        if self.model_type is not None and self.tokenizer is None and not self.byte_tokenizer:
            raise InputError("--model-type needs a tokenizer: pass --tokenizer, or --byte-tokenizer.")
        if self.tokenizer is not None and self.byte_tokenizer:
            raise InputError("pass either --tokenizer or --byte-tokenizer.")
        read_overrides(self.config_overrides)
        for name, task in OPTIONS_OF_A_TASK.items():
            if getattr(self, name) and task != self.task:
                raise InputError(f"--{name.replace('_', '-')} is an option of the task {task}, not of {self.task}.")
        if self.evaluate_references is not None and self.evaluate is None:
            raise InputError("--evaluate-references needs --evaluate, the sources.")
        check_minutes(self.max_minutes)
        if self.max_minutes is not None and max(processes_started(), arguments.world_size) > 1:
            raise InputError(
                "--max-minutes is for one process: several would look at clocks of their own, and wait for those that ended "
                "before. Pass --max-steps."
            )
        for kind, rate in self.rates().items():
            if not 0 <= rate < math.inf:
                raise InputError(f"the learning rate of {kind} must be a number of at least 0, got {rate}.")
        if self.streaming and self.task == "classify":
            raise InputError("--streaming does not fit --task classify: the labels have to be known before training.")
        if self.streaming and self.train_references is not None:
            raise InputError("--streaming does not fit --train-references: files of lines are read at once.")
        if arguments.max_steps == 0 or (arguments.max_steps < 0 and arguments.num_train_epochs <= 0):
            raise InputError(
                f"--max-steps {arguments.max_steps} and --num-train-epochs {arguments.num_train_epochs:g} train nothing. Ask "
                "for at least one step."
            )
        if self.streaming and arguments.max_steps <= 0:
            raise InputError("--streaming needs --max-steps: the length of streamed data is not known.")
        if arguments.eval_strategy != "no" and self.evaluate is None:
            raise InputError("--eval-strategy needs --evaluate, the data to evaluate on.")
        if processes_started() > arguments.world_size:
            raise InputError(
                f"{processes_started()} processes were started, but the training arguments know of {arguments.world_size}: "
                "they would train apart and write the same output. Pass --use-cpu to train on CPUs, or start one per "
                "accelerator."
            )
        if arguments.fp16 and arguments.device.type == "cpu":
            raise InputError("--fp16 needs an accelerator. Pass --bf16, which CPUs can do, or neither.")
