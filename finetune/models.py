"""The model that is fine-tuned, from a checkpoint or new, with its configuration and tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    ByT5Tokenizer,
)

from hf_rfa.convert.calibration_data import BLOCK_LENGTH
from hf_rfa.errors import InputError
from hf_rfa.inference import CONFIG_ERRORS, WEIGHT_ERRORS, check_vocabulary, load_tokenizer, name_loss, read_config

from .arguments import FinetuneArguments

TASK_CLASSES: dict[str, Any] = {
    "clm": AutoModelForCausalLM,
    "seq2seq": AutoModelForSeq2SeqLM,
    "classify": AutoModelForSequenceClassification,
}
#: Ids of special tokens that a new model takes from its tokenizer.
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load_config_and_tokenizer(options: FinetuneArguments) -> tuple[Any, Any]:
    """Return the configuration of the model to train, and its tokenizer.

    Raises:
        InputError: if one of them cannot be read, or they do not belong together.
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
        config = _new_config(str(options.model_type), options.overrides(), tokenizer)
    check_vocabulary(tokenizer, config, options.model or f"config_overrides for {options.model_type}")
    return config, tokenizer


def _new_config(model_type: str, overrides: dict[str, Any], tokenizer: Any) -> Any:
    """Return a configuration of a type, for a tokenizer."""
    values = {"vocab_size": len(tokenizer)}
    values |= {name: getattr(tokenizer, name) for name in SPECIAL_TOKENS}
    try:
        known = AutoConfig.for_model(model_type)
        unknown = [name for name in overrides if not hasattr(known, name)]
        values |= {name: value for name, value in overrides.items() if name not in unknown}
        if "decoder_start_token_id" in vars(known):
            values.setdefault("decoder_start_token_id", values["eos_token_id"])
        config = AutoConfig.for_model(model_type, **values)
    except CONFIG_ERRORS as error:
        raise InputError(f"cannot make a configuration of type {model_type}: {error}") from error
    if unknown:
        raise InputError(f"config_overrides: the configuration of {model_type} has no field {', '.join(unknown)}.")
    return config


def resolve_block_length(options: FinetuneArguments, config: Any) -> int:
    """Return the tokens per block; raise an `InputError` if the model has fewer positions."""
    positions = config.max_position_embeddings
    length = min(BLOCK_LENGTH, positions) if options.block_length is None else options.block_length
    if not 2 <= length <= positions:
        raise InputError(f"block_length must be from 2 to the model's {positions} positions, got {length}.")
    return length


def load_model_to_train(options: FinetuneArguments, config: Any) -> Any:
    """Return the model, with the checkpoint's weights or new ones; raise an `InputError` if there is none for the task."""
    auto_class = TASK_CLASSES[options.task]
    try:
        if options.source() is None:
            model = auto_class.from_config(config)
        else:
            model = auto_class.from_pretrained(options.model, config=config, dtype="float32", use_safetensors=True)
    except WEIGHT_ERRORS as error:
        name = options.model or options.model_type
        raise InputError(f"cannot load a model for {options.task} from {name}: {error}") from error
    if options.task == "clm":
        name_loss(model)
    return model
