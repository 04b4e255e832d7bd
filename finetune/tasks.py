"""Fine-tuning for a task: a checkpoint, RFA or softmax, and data in; a trained checkpoint with its figures out."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    ByT5Tokenizer,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    Seq2SeqTrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.loss.loss_utils import fixed_cross_entropy
from transformers.utils import logging

from hf_rfa.errors import InputError
from hf_rfa.evaluation.cards import markdown_table
from hf_rfa.evaluation.generation_scores import answer_length, bleu
from hf_rfa.evaluation.perplexity import IGNORED_LABEL, perplexity_of, shown
from hf_rfa.inference.loading import (
    CONFIG_ERRORS,
    WEIGHT_ERRORS,
    check_length,
    check_tokens,
    check_vocabulary,
    load_tokenizer,
    name_loss,
    read_config,
    tokens_without_embedding,
)
from hf_rfa.io.text_io import BLOCK_LENGTH
from hf_rfa.models.configuration_rfa import RFAConfigMixin

from .arguments import FinetuneArguments, read_overrides
from .card import data_name, trained_card, trained_folder
from .data import (
    Data,
    keeps_documents_apart,
    labelled_texts,
    load_data,
    load_pairs,
    packed_blocks,
    padding_right,
    rows_to_learn,
    select_columns,
    single_documents,
    token_pairs,
)
from .param_groups import freeze, parameter_kinds
from .run_folder import check_run, check_settings, last_checkpoint, training_folder
from .trainers import GroupedSeq2SeqTrainer, GroupedTrainer, Watch, label_nats

logger = logging.get_logger(__name__)

#: Training arguments that a run has to be resumed with; others, such as how often to log, may change.
SETTINGS_OF_A_RUN = (
    "learning_rate",
    "max_steps",
    "num_train_epochs",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "weight_decay",
    "seed",
)
#: The tasks in words, for model cards, and the Auto classes of their models.
TASKS: dict[str, tuple[str, Any]] = {
    "clm": ("language modeling", AutoModelForCausalLM),
    "seq2seq": ("sequence to sequence", AutoModelForSeq2SeqLM),
    "classify": ("classification", AutoModelForSequenceClassification),
}
#: Ids of special tokens that a new model takes from its tokenizer.
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def finetune(options: FinetuneArguments, arguments: Seq2SeqTrainingArguments) -> dict[str, float]:
    """Train a checkpoint, and write the result to ``arguments.output_dir``.

    The Trainer's own checkpoints are in ``.NAME.training`` beside it until training is finished.

    Args:
        options: the model and the data.
        arguments: transformers' training arguments.

    Returns:
        The metrics of the last evaluation, and the training loss.

    Raises:
        InputError: if an option cannot be used; no training has started then.
        FloatingPointError: if the loss is not finite.
    """
    options.check(arguments)
    destination = Path(cast(str, arguments.output_dir))
    work = training_folder(destination)
    first = arguments.process_index == 0
    if first:
        sources = () if options.model is None else (Path(options.model),)
        check_run(destination, sources=sources, resume=options.resume, overwrite=options.overwrite)

    config, tokenizer = load_config_and_tokenizer(options, seed=arguments.seed)
    positions = config.max_position_embeddings
    length = min(BLOCK_LENGTH, positions) if options.block_length is None else options.block_length
    never_ends = isinstance(config, RFAConfigMixin) and config.streams()
    if length < 2 or (length > positions and not never_ends):
        raise InputError(f"block_length must be from 2 to the model's {positions} positions, got {length}.")
    data = _load(options)
    if options.task == "classify":
        _name_labels(options, data, config, tokenizer)
    set_seed(arguments.seed)
    model = load_model_to_train(options, config)
    if length > positions:
        check_length(model, length, what="the tokens of a block are")
    packed = options.task == "clm" and not options.unpacked and keeps_documents_apart(model)
    if options.task == "clm" and not (packed or options.unpacked) and first:
        logger.warning(
            f"documents are not packed: {config.model_type} models would read those of a row as one text. Each has rows of "
            f"its own, in pieces of at most {length} tokens."
        )
    with arguments.main_process_first(desc="preparing the data"):  # the others find it in the cache
        prepared = _prepare(options, data, tokenizer, config, length, packed=packed)
    if arguments.predict_with_generate:
        check_length(model, arguments.generation_max_length or 0, what="--generation-max-length is")
    freeze(model, options.rates())
    _check_trained(model, options)

    settings = {
        name: value for name, value in vars(options).items() if name not in ("resume", "overwrite", "max_minutes")
    }
    settings |= {name: getattr(arguments, name) for name in SETTINGS_OF_A_RUN}
    if first:
        check_settings(work, settings, resume=options.resume)
    if str(arguments.metric_for_best_model).endswith("perplexity"):
        arguments.greater_is_better = False  # which transformers knows of losses alone
    arguments.output_dir = str(work)
    arguments.logging_nan_inf_filter = False
    arguments.dataloader_pin_memory &= torch.accelerator.is_available()  # torch warns of it where there is none
    use_cache = model.config.use_cache  # which a Trainer sets to its own argument as soon as it is made
    trainer = _trainer(options, model, arguments, prepared, tokenizer, packed=packed)
    if arguments.predict_with_generate and arguments.generation_max_length is None:
        arguments.generation_max_length = answer_length(model, length + 1)
    model.config.use_cache = False  # softmax models keep packed documents apart only without a cache
    result = trainer.train(resume_from_checkpoint=last_checkpoint(work) if options.resume else None)
    if not math.isfinite(result.training_loss):
        raise FloatingPointError(
            f"the loss is {result.training_loss}. Lower the learning rate, or take another feature map."
        )
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    # Of the whole run: the Trainer's own is that of the steps since it was resumed.
    metrics = {"train_loss": fmean(losses) if losses else result.training_loss}
    metrics |= {name: result.metrics[name] for name in ("train_runtime", "train_steps_per_second")}
    if "evaluate" in prepared:
        metrics |= trainer.evaluate()
    model.config.use_cache = use_cache
    trainer.save_model(str(work / "final"))  # gathers what several processes hold
    if first:
        _write(destination, work, options, trainer, metrics)
    return metrics


def _check_trained(model: Any, options: FinetuneArguments) -> None:
    """Warn of options that have no effect, and raise an `InputError` if no parameter is trained."""
    if unused := options.without_effect():
        logger.warning(f"{', '.join(unused)} has no effect on files.")
    kinds = {*parameter_kinds(model).values()}
    if missing := [kind.replace("_", " ") for kind, rate in options.rates().items() if rate and kind not in kinds]:
        logger.warning(f"the learning rate of {', '.join(missing)} has no effect: the model has none.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError("the learning rates leave nothing to train: all kinds of parameters are frozen.")


def _write(
    destination: Path, work: Path, options: FinetuneArguments, trainer: GroupedTrainer, metrics: dict[str, float]
) -> None:
    """Write the trained checkpoint, its figures and its card, whole or not at all."""
    arguments: Any = trainer.args
    steps, data, task = trainer.state.global_step, data_name(options.train), TASKS[options.task][0]
    rates = [f"{arguments.learning_rate:g}"]
    rates += [f"{kind.replace('_', ' ')} {f'{rate:g}' if rate else 'frozen'}" for kind, rate in options.rates().items()]
    batch = arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
    rows = [
        ("task", task),
        ("trained on", data),
        *([("evaluated on", data_name(options.evaluate))] if options.evaluate is not None else []),
        ("steps", f"{steps:,}"),
        ("rows per step", f"{batch:,}"),
        ("learning rate", ", ".join(rates)),
        *((name, shown(value, 4)) for name, value in metrics.items() if isinstance(value, float)),
    ]
    summary = f"{'fine-tuned' if options.model else 'trained from scratch'} on {data} ({task}, {steps:,} steps)."
    section = "## How it was fine-tuned\n\n" + markdown_table(("", ""), rows) + "\n"
    card = trained_card(trainer.model, destination, options.model, summary=summary, section=section)
    figures = {"settings": vars(options), "metrics": metrics, "log": trainer.state.log_history}
    with trained_folder(destination, options.model, card, {"finetuning.json": figures}) as folder:
        shutil.copytree(work / "final", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.bin"))
        if (work / "runs").is_dir():  # TensorBoard's
            shutil.copytree(work / "runs", folder / "runs")


def load_config_and_tokenizer(options: FinetuneArguments, *, seed: int = 0) -> tuple[Any, Any]:
    """Return the configuration of the model to train, and its tokenizer; raise an `InputError` if there are none that fit.

    The random vectors of a new type's model are drawn with the seed, unless ``config_overrides`` has a ``feature_seed``.
    """
    config: Any = None if options.model is None else read_config(options.model)
    if options.byte_tokenizer:
        tokenizer: Any = ByT5Tokenizer(extra_ids=0)
    else:
        name = str(options.tokenizer or options.model)
        path = Path(name).expanduser()
        tokenizer, problem = load_tokenizer(path if path.exists() else name)
        if tokenizer is None:
            raise InputError(f"{name}: {problem}. Pass --tokenizer, or --byte-tokenizer.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if config is None:
        config = _new_config(str(options.model_type), read_overrides(options.config_overrides), tokenizer, seed)
    check_vocabulary(tokenizer, config, options.model or f"config_overrides for {options.model_type}")
    check_tokens([tokenizer.pad_token_id or 0], config)
    return config, tokenizer


def _new_config(model_type: str, overrides: dict[str, Any], tokenizer: Any, seed: int) -> Any:
    """Return a configuration of a type, for a tokenizer."""
    values = {"vocab_size": len(tokenizer)}
    values |= {name: getattr(tokenizer, name) for name in SPECIAL_TOKENS}
    try:
        defaults = AutoConfig.for_model(model_type)
        unknown = [name for name in overrides if not hasattr(defaults, name)]
        if hasattr(defaults, "feature_seed"):
            values["feature_seed"] = seed
        values |= {name: value for name, value in overrides.items() if name not in unknown}
        if "decoder_start_token_id" in vars(defaults):
            values.setdefault("decoder_start_token_id", values["eos_token_id"])
        config = AutoConfig.for_model(model_type, **values)
    except CONFIG_ERRORS as error:
        raise InputError(f"cannot make a configuration of type {model_type}: {error}") from error
    if unknown:
        raise InputError(f"config_overrides: the configuration of {model_type} has no field {', '.join(unknown)}.")
    return config


def load_model_to_train(options: FinetuneArguments, config: Any) -> Any:
    """Return the model, with the checkpoint's weights or new ones; raise an `InputError` if there is none for the task."""
    _, auto_class = TASKS[options.task]
    try:
        if options.model is None:
            model = auto_class.from_config(config)
        else:
            model = auto_class.from_pretrained(options.model, config=config, dtype="float32", use_safetensors=True)
    except WEIGHT_ERRORS as error:
        name = options.model or options.model_type
        raise InputError(f"cannot load a model for {options.task} from {name}: {error}") from error
    if options.task == "clm":
        name_loss(model)
    return model


def _load(options: FinetuneArguments) -> dict[str, Data]:
    """Return the data to train and, if there are any, to evaluate on; their rows were checked to have what the task reads."""
    data = {}
    for name in ("train", "evaluate"):
        source, references = getattr(options, name), getattr(options, f"{name}_references")
        if references is not None:
            data[name] = load_pairs(source, references)
        elif source is not None:
            split, streaming = getattr(options, f"{name}_split"), options.streaming and name == "train"
            rows = load_data(source, split=split, config=options.dataset_config, streaming=streaming)
            data[name] = select_columns(rows, source, options.columns())
    return data


def _name_labels(options: FinetuneArguments, data: dict[str, Data], config: Any, tokenizer: Any) -> None:
    """Put a classifier's labels into its configuration."""
    labels, *others = (sorted(map(str, rows.unique("label"))) for rows in data.values())
    if len(labels) < 2:
        raise InputError(f"{options.train} has one label only ({labels[0]}): there is nothing to learn.")
    if new := [label for evaluated in others for label in evaluated if label not in labels]:
        raise InputError(
            f"{options.evaluate}: label {new[0]!r} is not among those of the training data: {', '.join(labels)}."
        )
    config.id2label, config.label2id = dict(enumerate(labels)), {label: n for n, label in enumerate(labels)}
    config.pad_token_id = tokenizer.pad_token_id


def _prepare(
    options: FinetuneArguments, data: dict[str, Data], tokenizer: Any, config: Any, length: int, *, packed: bool
) -> dict[str, Data]:
    """Return the data as the model takes it."""
    encoders: dict[str, Callable[..., Data]] = {
        "clm": packed_blocks if packed else partial(single_documents, in_pieces=not options.unpacked),
        "seq2seq": token_pairs,
        "classify": partial(labelled_texts, labels=[*config.id2label.values()]),
    }
    prepared = {}
    for name, texts in data.items():
        source = getattr(options, name)
        rows = encoders[options.task](texts, tokenizer, length=length)
        if packed and hasattr(rows, "__len__") and len(rows) == 0:
            raise InputError(f"{source} does not fill a single block of {length} tokens.")
        if isinstance(rows, Dataset) and tokens_without_embedding(tokenizer, config):  # a stream is read in training
            for column in ("input_ids", "labels") if options.task == "seq2seq" else ("input_ids",):
                check_tokens((max(row, default=0) for row in rows[column]), config)
        prepared[name] = rows_to_learn(rows, source, ahead=options.task == "clm")
    return prepared


def _evaluated(logits: Any, labels: torch.Tensor, *, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the likeliest classes of logits [..., C] and the nats of labels: an evaluation then keeps no logits."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    expected = F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL) if shift else labels
    return logits.argmax(dim=-1), label_nats(logits, expected)


def _metrics(prediction: Any, *, task: str, tokenizer: Any) -> dict[str, float]:
    """Return the mean nats of all labels as the loss, the perplexity of a language model, and the accuracy or the BLEU.

    The Trainer's own loss is a mean of batches' means, and with label smoothing that of another distribution. This one takes
    its place, whatever the Trainer reads it for. With a ``tokenizer`` sequences were generated.
    """
    (predictions, nats), labels = prediction.predictions, prediction.label_ids
    loss = float(nats[nats != IGNORED_LABEL].mean(dtype=np.float64))
    if task == "seq2seq":
        return {"loss": loss} | ({} if tokenizer is None else {"bleu": _bleu(predictions, labels, tokenizer)})
    if task == "clm":
        predictions, labels = predictions[:, :-1], labels[:, 1:]
    accuracy = float((predictions == labels)[labels != IGNORED_LABEL].mean())
    return {"loss": loss, "accuracy": accuracy} | ({"perplexity": perplexity_of(loss)} if task == "clm" else {})


def _bleu(predictions: np.ndarray, labels: np.ndarray, tokenizer: Any) -> float:
    """Return the BLEU of generated sequences."""
    padded = (np.where(ids == IGNORED_LABEL, tokenizer.pad_token_id, ids) for ids in (predictions, labels))
    return bleu(*(tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in padded))[0]


def _mean_loss(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None, *, shift: int = 0
) -> torch.Tensor:
    """Return the loss as the mean over the labels of a whole step, of which a batch may be one piece of several.

    The Trainer counts those labels, and takes a head's word for it that it divides by their number. Heads with a loss of
    their own take the number and ignore it: GPT-2's and BART's classifiers, and every head of models with an encoder.
    A language model's logits stand ``shift`` = 1 before what they predict.
    """
    logits = outputs["logits"]
    if shift:
        logits, labels = logits[:, :-shift], labels[:, shift:]
    return fixed_cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), num_items_in_batch)


def _trainer(
    options: FinetuneArguments, model: Any, arguments: Any, prepared: dict[str, Any], tokenizer: Any, *, packed: bool
) -> GroupedTrainer:
    """Return the Trainer of a task."""
    seq2seq, shift = options.task == "seq2seq", int(options.task == "clm")
    generates = seq2seq and arguments.predict_with_generate
    collator: Any = DataCollatorForSeq2Seq(padding_right(tokenizer), model=model if seq2seq else None)
    if options.task == "classify":
        collator = DataCollatorWithPadding(padding_right(tokenizer))
    elif packed:
        collator = default_data_collator
    # A decoder of a model with an encoder may be trained alone: its configuration has both.
    own_loss = options.task != "clm" or hasattr(model.config, "encoder_layers")
    own_loss &= not arguments.label_smoothing_factor  # for which the Trainer has one
    return (GroupedSeq2SeqTrainer if seq2seq else GroupedTrainer)(
        model=model,
        args=arguments,
        train_dataset=prepared["train"],
        eval_dataset=prepared.get("evaluate"),
        data_collator=collator,
        processing_class=tokenizer,
        rates=options.rates(),
        watch=Watch(None if options.max_minutes is None else 60 * options.max_minutes),
        compute_metrics=partial(_metrics, task=options.task, tokenizer=tokenizer if generates else None),
        preprocess_logits_for_metrics=None if generates else partial(_evaluated, shift=shift),
        compute_loss_func=partial(_mean_loss, shift=shift) if own_loss else None,
    )
