"""The options of `hf-rfa finetune` besides transformers' training arguments, and the checks that come before any work."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from hf_rfa.errors import InputError

from .param_groups import PARAMETER_KINDS, ParameterKind
from .recipe import read_overrides

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


@dataclass
class FinetuneArguments:
    """The model that is trained and its data; the other options are transformers' training arguments."""

    task: str = field(metadata={"help": "clm, seq2seq or classify."})
    train: str = field(
        metadata={"help": "Training data: .txt, .jsonl, .csv or .parquet (plain or .gz), or a data set on the hub."}
    )
    model: str | None = field(
        default=None, metadata={"help": "Folder of a checkpoint, RFA or softmax, or its name on the hub."}
    )
    model_type: str | None = field(
        default=None, metadata={"help": "Instead of --model: train a new model of this type, such as rfa_gpt2 or gpt2."}
    )
    config_overrides: str | None = field(
        default=None,
        metadata={
            "help": "Fields of the new model's configuration, as a JSON object; feature_seed: --seed if not given."
        },
    )
    tokenizer: str | None = field(default=None, metadata={"help": "Folder or name of a tokenizer, if not the model's."})
    evaluate: str | None = field(default=None, metadata={"help": "Data to evaluate on, in the same forms."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a data set on the hub."})
    train_split: str = field(default="train", metadata={"help": "Split of a data set on the hub to train on."})
    evaluate_split: str = field(default="validation", metadata={"help": "Split of it to evaluate on."})
    text_column: str = field(default="text", metadata={"help": "Column with the text (clm, classify)."})
    prompt_column: str | None = field(
        default=None, metadata={"help": "Column with prompts, which precede the texts and are not learned (clm)."}
    )
    label_column: str = field(default="label", metadata={"help": "Column with the label (classify)."})
    source_column: str = field(
        default="source", metadata={"help": "Column with the source (seq2seq); a.b for the field b of a column a."}
    )
    target_column: str = field(
        default="target", metadata={"help": "Column with the target (seq2seq), in the same form."}
    )
    train_references: str | None = field(
        default=None, metadata={"help": "Targets, one a line, for training data of one source a line (seq2seq)."}
    )
    evaluate_references: str | None = field(
        default=None, metadata={"help": "Targets, one a line, for the data to evaluate on (seq2seq)."}
    )
    block_length: int | None = field(
        default=None,
        metadata={"help": "Tokens per block (clm), or most tokens of a text. Default: the positions, at most 1024."},
    )
    unpacked: bool = field(
        default=False, metadata={"help": "A document a row, cut and padded, instead of full blocks (clm)."}
    )
    streaming: bool = field(default=False, metadata={"help": "Read the data during training; needs --max-steps."})
    byte_tokenizer: bool = field(default=False, metadata={"help": "Take every byte as a token (ByT5's ids)."})
    from_scratch: bool = field(default=False, metadata={"help": "Take only the model's config.json, and new weights."})
    feature_map_rate: float | None = field(default=None, metadata={"help": "Learning rate of feature maps; 0 freezes."})
    sigma_rate: float | None = field(default=None, metadata={"help": "Learning rate of σ; 0 freezes."})
    gate_rate: float | None = field(default=None, metadata={"help": "Learning rate of gates; 0 freezes."})
    projection_rate: float | None = field(
        default=None, metadata={"help": "Learning rate of the projections of attention; 0 freezes."}
    )
    rest_rate: float | None = field(default=None, metadata={"help": "Learning rate of all else; 0 freezes."})
    resume: bool = field(default=False, metadata={"help": "Continue an interrupted run."})
    overwrite: bool = field(default=False, metadata={"help": "Replace a checkpoint at the output."})

    def source(self) -> str | None:
        """Return the checkpoint whose weights are trained; None for a new model."""
        return None if self.from_scratch else self.model

    def rates(self) -> dict[ParameterKind, float]:
        """Return the learning rates that were given, by kind."""
        given = (self.feature_map_rate, self.sigma_rate, self.gate_rate, self.projection_rate, self.rest_rate)
        return {kind: rate for kind, rate in zip(PARAMETER_KINDS, given, strict=True) if rate is not None}

    def overrides(self) -> dict[str, Any]:
        """Return the fields of the new model's configuration; raise an `InputError` if they are not a JSON object."""
        return read_overrides(self.config_overrides or "{}")

    def check(self, *, max_steps: int) -> None:
        """Raise an `InputError` for what can be seen to be wrong before anything is read, given the training's steps."""
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
        self.overrides()
        for name, task in OPTIONS_OF_A_TASK.items():
            if getattr(self, name) and task != self.task:
                raise InputError(f"--{name.replace('_', '-')} is an option of the task {task}, not of {self.task}.")
        if self.evaluate_references is not None and self.evaluate is None:
            raise InputError("--evaluate-references needs --evaluate, the sources.")
        for kind, rate in self.rates().items():
            if not 0 <= rate < math.inf:
                raise InputError(f"the learning rate of {kind} must be a number of at least 0, got {rate}.")
        if self.streaming and self.task == "classify":
            raise InputError("--streaming does not fit --task classify: the labels have to be known before training.")
        if self.streaming and self.train_references is not None:
            raise InputError("--streaming does not fit --train-references: files of lines are read at once.")
        if self.streaming and max_steps <= 0:
            raise InputError("--streaming needs --max-steps: the length of streamed data is not known.")
