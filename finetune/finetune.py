"""Fine-tuning: a checkpoint, RFA or softmax, and data in; a trained checkpoint with its curves and figures out."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from hf_rfa.convert.writer import check_destination, new_folder
from huggingface_hub import ModelCard
from matplotlib.figure import Figure
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    ByT5Tokenizer,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    default_data_collator,
    set_seed,
)

from hf_rfa.errors import InputError
from hf_rfa.inference import check_vocabulary, load_tokenizer

from .corpora import check_columns, labelled_texts, load_data, packed_blocks, token_pairs
from .distillation import StopAtNaN
from .folders import check_settings, check_training_folder, training_folder
from .groups import KINDS, GroupedTrainer, ParameterKind, freeze
from .metrics import AccuracyMetric

Task = Literal["clm", "seq2seq", "classify"]
TASKS: dict[str, Any] = {
    "clm": AutoModelForCausalLM,
    "seq2seq": AutoModelForSeq2SeqLM,
    "classify": AutoModelForSequenceClassification,
}


#: Training arguments that a run has to be resumed with; others, such as how often to log, may change.
DECISIVE = (
    "learning_rate",
    "max_steps",
    "num_train_epochs",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "weight_decay",
    "seed",
)


@dataclass
class FinetuneArguments:
    """What is trained, and on what; the rest are transformers' training arguments."""

    model: str = field(metadata={"help": "Folder of a checkpoint, RFA or softmax, or its name on the hub."})
    task: str = field(metadata={"help": "clm, seq2seq or classify."})
    train: str = field(
        metadata={"help": "Training data: .txt, .jsonl, .csv or .parquet (plain or .gz), or a data set on the hub."}
    )
    evaluate: str | None = field(default=None, metadata={"help": "Data to evaluate on, likewise."})
    text_column: str = field(default="text", metadata={"help": "Column with the text (clm, classify)."})
    label_column: str = field(default="label", metadata={"help": "Column with the label (classify)."})
    source_column: str = field(default="source", metadata={"help": "Column with the source (seq2seq)."})
    target_column: str = field(default="target", metadata={"help": "Column with the target (seq2seq)."})
    block_length: int | None = field(
        default=None,
        metadata={"help": "Tokens per block (clm), or most tokens of a text. Default: the positions, at most 1024."},
    )
    streaming: bool = field(default=False, metadata={"help": "Read the data as training goes on; needs --max_steps."})
    byte_tokenizer: bool = field(default=False, metadata={"help": "Take every byte as a token (ByT5's ids)."})
    from_scratch: bool = field(default=False, metadata={"help": "Take only the model's config.json, and new weights."})
    feature_map_rate: float | None = field(default=None, metadata={"help": "Learning rate of feature maps; 0 freezes."})
    sigma_rate: float | None = field(default=None, metadata={"help": "Learning rate of σ; 0 freezes."})
    gate_rate: float | None = field(default=None, metadata={"help": "Learning rate of gates; 0 freezes."})
    projection_rate: float | None = field(
        default=None, metadata={"help": "Learning rate of the projections of attention; 0 freezes."}
    )
    rest_rate: float | None = field(default=None, metadata={"help": "Learning rate of all else; 0 freezes."})
    resume: bool = field(default=False, metadata={"help": "Go on where an interrupted run stopped."})
    overwrite: bool = field(default=False, metadata={"help": "Replace a checkpoint at the output."})

    def rates(self) -> dict[ParameterKind, float]:
        """Return the learning rates that were given, by kind."""
        given = (self.feature_map_rate, self.sigma_rate, self.gate_rate, self.projection_rate, self.rest_rate)
        return {kind: rate for kind, rate in zip(KINDS, given, strict=True) if rate is not None}


class GroupedSeq2SeqTrainer(GroupedTrainer, Seq2SeqTrainer):
    """`Seq2SeqTrainer` with the groups of `GroupedTrainer`."""


def finetune(options: FinetuneArguments, arguments: Seq2SeqTrainingArguments) -> dict[str, float]:
    """Train a checkpoint, and write the result to ``arguments.output_dir``.

    The Trainer's own checkpoints lie in ``.NAME.training`` beside it until training is finished.

    Args:
        options: what is trained, and on what.
        arguments: transformers' training arguments.

    Returns:
        The metrics of the last evaluation, and the training loss.

    Raises:
        InputError: if anything that was passed cannot be used; no training has started then.
        FloatingPointError: if the loss is not finite.
    """
    if options.task not in TASKS:
        raise InputError(f"task must be one of {', '.join(TASKS)}, got {options.task!r}.")
    for kind, rate in options.rates().items():
        if not 0 <= rate < math.inf:
            raise InputError(f"the learning rate of {kind} must be a number of at least 0, got {rate}.")
    if options.streaming and arguments.max_steps <= 0:
        raise InputError("--streaming needs --max_steps: the length of what is streamed is not known.")
    destination = Path(cast(str, arguments.output_dir))
    work = training_folder(destination)
    first = arguments.process_index == 0
    if first:
        check_destination(destination, overwrite=options.overwrite, sources=(Path(options.model),))
        check_training_folder(work, resume=options.resume)

    config = _config(options)
    tokenizer = _tokenizer(options, config)
    length = _block_length(options, config)
    data = {
        name: load_data(source, split=split, streaming=options.streaming and name == "train")
        for name, source, split in (("train", options.train, "train"), ("evaluate", options.evaluate, "validation"))
        if source is not None
    }
    with arguments.main_process_first(desc="preparing the data"):  # the others find it in the cache
        prepared = _prepare(options, data, tokenizer, config, length)
    set_seed(arguments.seed)
    model = _model(options, config, tokenizer)
    freeze(model, options.rates())

    settings = {name: value for name, value in vars(options).items() if name not in ("resume", "overwrite")}
    settings |= {name: getattr(arguments, name) for name in DECISIVE}
    if first:
        check_settings(work, settings, resume=options.resume)
    arguments.output_dir = str(work)
    arguments.logging_nan_inf_filter = False
    going_on = options.resume and any(work.glob("checkpoint-*"))
    trainer = _trainer(options, model, arguments, prepared, tokenizer)
    cache = model.config.use_cache
    model.config.use_cache = False  # softmax models keep packed documents apart only without a cache
    found = trainer.train(resume_from_checkpoint=going_on)
    if not math.isfinite(found.training_loss):
        raise FloatingPointError(
            f"the loss is {found.training_loss}. Lower the learning rate, or take another feature map."
        )
    metrics = {"train_loss": found.training_loss}
    if "evaluate" in prepared:
        metrics |= trainer.evaluate()
        if options.task == "clm":
            metrics["eval_perplexity"] = math.exp(min(700.0, metrics["eval_loss"]))
    model.config.use_cache = cache
    trainer.save_model(str(work / "final"))  # gathers what several processes hold
    if first:
        with new_folder(destination) as folder:
            shutil.copytree(work / "final", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.bin"))
            _write_figures(folder, options, metrics, trainer.state.log_history)
        shutil.rmtree(work, ignore_errors=True)
    return metrics


def _config(options: FinetuneArguments) -> Any:
    try:
        return AutoConfig.from_pretrained(options.model)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the configuration of {options.model}: {error}") from error


def _tokenizer(options: FinetuneArguments, config: Any) -> Any:
    if options.byte_tokenizer:
        tokenizer: Any = ByT5Tokenizer(extra_ids=0)
    else:
        path = Path(options.model).expanduser()
        tokenizer, problem = load_tokenizer(path if path.exists() else options.model)
        if tokenizer is None:
            raise InputError(
                f"{options.model}: {problem}. Put the tokenizer's files beside it, or pass --byte_tokenizer."
            )
    check_vocabulary(tokenizer, config, options.model)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _block_length(options: FinetuneArguments, config: Any) -> int:
    positions = config.max_position_embeddings
    length = min(1024, positions) if options.block_length is None else options.block_length
    if not 2 <= length <= positions:
        raise InputError(f"block_length must be from 2 to the model's {positions} positions, got {length}.")
    return length


def _prepare(
    options: FinetuneArguments, data: dict[str, Any], tokenizer: Any, config: Any, length: int
) -> dict[str, Any]:
    """Return the data as the model takes it."""
    sources = {"train": options.train, "evaluate": cast(str, options.evaluate)}
    needed = {
        "clm": (options.text_column,),
        "seq2seq": (options.source_column, options.target_column),
        "classify": (options.text_column, options.label_column),
    }[options.task]
    for name, each in data.items():
        check_columns(each, sources[name], *needed)
    prepared = {}
    if options.task == "classify":
        if options.streaming:
            raise InputError("--streaming does not fit --task classify: the labels have to be known before training.")
        labels = sorted({str(label) for label in data["train"][options.label_column]})
        if len(labels) < 2:
            raise InputError(f"{options.train} has one label only ({labels[0]}): there is nothing to learn.")
        config.num_labels = len(labels)
        config.id2label, config.label2id = dict(enumerate(labels)), {label: n for n, label in enumerate(labels)}
        config.pad_token_id = tokenizer.pad_token_id
    for name, each in data.items():
        if options.task == "clm":
            prepared[name] = packed_blocks(each, tokenizer, text_column=options.text_column, length=length)
        elif options.task == "seq2seq":
            columns = {"source_column": options.source_column, "target_column": options.target_column}
            prepared[name] = token_pairs(each, tokenizer, length=length, **columns)
        else:
            prepared[name] = labelled_texts(
                each,
                tokenizer,
                text_column=options.text_column,
                label_column=options.label_column,
                labels=labels,
                length=length,
                source=sources[name],
            )
        if hasattr(prepared[name], "__len__") and len(prepared[name]) == 0:
            raise InputError(f"{sources[name]} does not fill a single block of {length} tokens.")
    return prepared


def _model(options: FinetuneArguments, config: Any, tokenizer: Any) -> Any:
    auto_class = TASKS[options.task]
    try:
        if options.from_scratch:
            return auto_class.from_config(config)
        return auto_class.from_pretrained(options.model, config=config, dtype="float32", use_safetensors=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"cannot load a model for {options.task} from {options.model}: {error}") from error


def _accuracy(prediction: Any) -> dict[str, float]:
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    found = AccuracyMetric().compute(predictions=np.argmax(logits, axis=-1), references=prediction.label_ids)
    return cast(dict[str, float], found)


def _trainer(
    options: FinetuneArguments, model: Any, arguments: Any, prepared: dict[str, Any], tokenizer: Any
) -> GroupedTrainer:
    collators: dict[str, Any] = {
        "clm": default_data_collator,
        "seq2seq": DataCollatorForSeq2Seq(tokenizer, model=model),
        "classify": DataCollatorWithPadding(tokenizer),
    }
    cls = GroupedSeq2SeqTrainer if options.task == "seq2seq" else GroupedTrainer
    return cls(
        model=model,
        args=arguments,
        train_dataset=prepared["train"],
        eval_dataset=prepared.get("evaluate"),
        data_collator=collators[options.task],
        processing_class=tokenizer,
        compute_metrics=_accuracy if options.task == "classify" else None,
        callbacks=[StopAtNaN()],
        rates=options.rates(),
    )


def _write_figures(
    folder: Path, options: FinetuneArguments, metrics: dict[str, float], log: Sequence[dict[str, Any]]
) -> None:
    """Write metrics, log, curves and card beside the weights."""
    described = {"settings": vars(options), "metrics": metrics, "log": list(log)}
    (folder / "finetuning.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    figure = Figure(figsize=(5.4, 3.4))
    axes = figure.subplots()
    for name, label in (("loss", "training"), ("eval_loss", "evaluation")):
        points = [(entry["step"], entry[name]) for entry in log if name in entry]
        if points:
            axes.plot(*zip(*points, strict=True), marker="." if name == "eval_loss" else None, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.tight_layout()
    figure.savefig(folder / "finetuning.png", dpi=150)
    old = Path(options.model) / "README.md"
    card = ModelCard.load(old) if old.is_file() else ModelCard("---\nlibrary_name: transformers\n---\n")
    rows = "\n".join(f"| {name} | {value:.4f} |" for name, value in metrics.items() if isinstance(value, float))
    card.text += f"\n## How it was fine-tuned\n\n| | |\n|---|---|\n{rows}\n\n![loss](finetuning.png)\n"
    card.save(folder / "README.md")
