"""Loading a checkpoint to use it, and what a model can be asked for."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from ..errors import InputError
from ..families import has_rotary_positions, reads_audio
from ..models.attention import AttentionComponent, RFAAttentionMixin
from ..models.configuration_rfa import RFAConfigMixin
from ..models.streaming import can_move

DTYPES = ("auto", "float32", "bfloat16", "float16")

ModelKind = Literal["causal", "seq2seq", "speech"]
KINDS: dict[ModelKind, str] = {
    "causal": "a decoder that stands alone",
    "seq2seq": "an encoder and a decoder",
    "speech": "an encoder of audio and a decoder",
}
#: The Auto class that loads each.
AUTO_CLASSES: dict[ModelKind, Any] = {
    "causal": AutoModelForCausalLM,
    "seq2seq": AutoModelForSeq2SeqLM,
    "speech": AutoModelForSpeechSeq2Seq,
}

VOCABULARY_ADVICE = (
    "Put the model's own tokenizer into the checkpoint's folder, or give the model an embedding for every entry "
    "(model.resize_token_embeddings(len(tokenizer)))."
)
#: Files of which a folder with a tokenizer has at least one.
TOKENIZER_VOCABULARIES = (
    *("tokenizer.json", "merges.txt", "vocab.txt"),
    *("source.spm", "sentencepiece.bpe.model", "spiece.model", "tokenizer.model", "spm.model"),
)
#: Errors of transformers for a configuration, or for weights, that it cannot take.
CONFIG_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError)
WEIGHT_ERRORS = (*CONFIG_ERRORS, RuntimeError, SafetensorError)
#: Fields that say what a call returns, with the value that our programs and `save_pretrained` need: a model is saved with
#: output_attentions only if its attention is eager, and what returns no dictionary fails inside transformers.
OUTPUT_FIELDS = {"output_attentions": False, "return_dict": True}

logger = logging.get_logger(__name__)


def find_device(name: str) -> torch.device:
    """Return the device of a name such as cpu, cuda or cuda:1.

    "auto" is the accelerator that torch finds, or else the CPU. Apple's is left out, for it lacks float64, which conversion
    computes in.

    Raises:
        InputError: if there is no such device.
    """
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        name = "cpu" if accelerator is None or accelerator.type == "mps" else str(accelerator)
    try:
        device = torch.empty(0, device=name).device  # cuda is cuda:0 then
    except (RuntimeError, AssertionError) as error:  # the latter by a torch without CUDA
        reason = str(error).splitlines()[0]
        raise InputError(f"cannot compute on the device {name!r}: {reason}. Pass cpu, cuda, or auto.") from error
    if device.type == "meta":
        raise InputError("a model on the device 'meta' has no numbers. Pass cpu, cuda, or auto.")
    return device


def read_config(source: str | Path, device: torch.device | None = None) -> PreTrainedConfig:
    """Return the configuration of a checkpoint, a folder or a name on the hub.

    A warning says where it is read otherwise than it is written: attention that cannot be computed on this machine is left
    to transformers to choose, and so are `OUTPUT_FIELDS`.

    Args:
        source: the folder, or the name.
        device: what the model will compute on; None for any that this machine has.

    Raises:
        InputError: if there is none, or none that can be used.
    """
    check_is_checkpoint(Path(source).expanduser(), str(source))
    try:
        config: Any = AutoConfig.from_pretrained(source)
    except CONFIG_ERRORS as error:
        reason = error.__cause__ if isinstance(error, StrictDataclassError) else error
        raise InputError(f"cannot read the configuration of {source}: {reason}") from error
    for name, needed in OUTPUT_FIELDS.items():
        if getattr(config, name) != needed:
            logger.warning_once(
                f"{source}: its configuration has {name}={getattr(config, name)}, and is read with {name}={needed}. Pass "
                f"{name} to the model's call where you need it."
            )
            setattr(config, name, needed)
    attention = config._attn_implementation
    if attention not in (None, "eager", "sdpa") and not _can_attend(config, device):
        logger.warning_once(
            f"{source}: its configuration asks for the attention {attention}, which cannot be computed here. transformers' "
            "own choice is taken, whose results are the same up to rounding."
        )
        config._attn_implementation = None
    return config


def check_is_checkpoint(path: Path, name: str) -> None:
    """Raise an `InputError` if a path exists and holds no configuration, or an adapter too; it says what to do with it."""
    has_config, has_adapter = ((path / name).is_file() for name in ("config.json", "adapter_config.json"))
    if has_config and has_adapter:
        raise InputError(
            f"{name} holds a model and an adapter of PEFT (adapter_config.json), and transformers would put the adapter on "
            "the model. If it was merged into these weights, remove the adapter's files; if not, pass a folder of each."
        )
    if not path.exists() or has_config:
        return
    advice = ""
    if has_adapter:
        advice = (
            " It holds an adapter of PEFT: merge it into its base model first, PeftModel.from_pretrained(base_model, "
            f"{name!r}).merge_and_unload().save_pretrained(FOLDER), save the tokenizer there too, and pass that folder."
        )
    elif models := sorted(file.parent.name for file in path.glob("*/config.json")):
        advice = f" It holds folders of models: pass one of them ({', '.join(models)})."
    raise InputError(f"{name} has no config.json: it is not a transformers checkpoint.{advice}")


def _can_attend(config: Any, device: torch.device | None) -> bool:
    """Return whether the attention that a configuration asks for can be computed on a device, or on any here for None."""
    if device is not None and device.type == "cpu" and "flash" in config._attn_implementation:
        return False
    try:
        with torch.device("meta"):
            AutoModel.from_config(copy.deepcopy(config))
    except (ImportError, ValueError):  # transformers' own check
        return False
    return True


def name_loss(model: Any) -> None:
    """Set the loss of a causal model to the next token's, where transformers does not know it by the class's name (GPT-2)."""
    if model.loss_type is None:
        model.loss_type = "ForCausalLM"


def load_model(
    name: str,
    *,
    kind: ModelKind | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    need_tokenizer: bool = True,
) -> tuple[PreTrainedModel, Any]:
    """Load a model that generates text, RFA or softmax, and its tokenizer.

    Args:
        name: folder of the checkpoint, or its name on the hub.
        kind: "causal" for a decoder that stands alone, "seq2seq" for an encoder and a decoder, None for either of these;
            "speech" for an encoder of audio and a decoder.
        dtype: "auto" for the checkpoint's own, or one of `DTYPES`. States are in float32 in any case.
        device: what it computes on: cpu, cuda, …, or "auto" for an accelerator where there is one.
        need_tokenizer: whether a missing tokenizer is an error; otherwise it is returned as None.

    Returns:
        The model, in evaluation mode, and its tokenizer.

    Raises:
        InputError: if the checkpoint or its tokenizer cannot be loaded, is of the other kind, or do not belong together; if
            there is no such device.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    torch_device = find_device(device)
    path = Path(name).expanduser()
    source = path if path.exists() else name
    config = read_config(source, torch_device)
    model_kind = kind_of(config)
    if model_kind == "speech" and kind is None:
        raise InputError(
            f"{name} reads audio, and this needs a model that reads text. Speech is for hf-rfa generate --audio, hf-rfa "
            "evaluate --task transcription, hf-rfa distill, and transformers.AutoModelForSpeechSeq2Seq after import hf_rfa."
        )
    if kind is not None and kind != model_kind:
        raise InputError(
            f"{name} is a {config.model_type} model, {KINDS[model_kind]}, but this needs {KINDS[kind]}. Pass such a "
            "checkpoint, or choose another task."
        )
    try:
        model = AUTO_CLASSES[model_kind].from_pretrained(source, config=config, dtype=dtype, use_safetensors=True)
    except WEIGHT_ERRORS as error:
        raise InputError(f"cannot load a model that generates text from {name}: {error}") from error
    if model_kind == "causal":
        name_loss(model)
    tokenizer, problem = load_tokenizer(source)
    if tokenizer is None and need_tokenizer:
        raise InputError(f"{name}: {problem}. Put the tokenizer's files into the checkpoint's folder.")
    if tokenizer is not None:
        check_vocabulary(tokenizer, config, name)
    if model.device != torch_device:
        model.to(torch_device)
    return model.eval(), tokenizer


def kind_of(config: PreTrainedConfig) -> ModelKind:
    """Return whether a configuration is of a decoder alone or of an encoder, of text or audio, and a decoder."""
    if reads_audio(config):
        return "speech"
    return "seq2seq" if config.is_encoder_decoder else "causal"


def check_vocabulary(tokenizer: Any, config: Any, name: str) -> None:
    """Warn if a tokenizer can give tokens that a model has no embedding for; `check_tokens` refuses texts that have some."""
    without = tokens_without_embedding(tokenizer, config)
    if without:
        logger.warning_once(
            f"{name}: its tokenizer has {len(tokenizer)} entries, and the model's vocabulary {config.vocab_size}: texts "
            f"with {', '.join(map(repr, without[:3]))}{' …' if len(without) > 3 else ''} cannot be read. {VOCABULARY_ADVICE}"
        )


def tokens_without_embedding(tokenizer: Any, config: Any) -> list[str]:
    """Return the entries of a tokenizer that a model has no embedding for."""
    return sorted(token for token, index in tokenizer.get_vocab().items() if index >= config.vocab_size)


def check_tokens(ids: Iterable[int], config: Any) -> None:
    """Raise an `InputError` if there is a token among some that a model has no embedding for."""
    largest = max(ids, default=-1)
    if largest >= config.vocab_size:
        raise InputError(
            f"the tokenizer gives token {largest}, but the model's vocabulary has {config.vocab_size} entries. "
            f"{VOCABULARY_ADVICE}"
        )


def position_limit(model: PreTrainedModel) -> int | None:
    """Return the most tokens of a text that a model reads and writes, or None for any number.

    Decoders whose old tokens move along with the text have no end (`hf_rfa.models.positions`).
    """
    config: Any = model.config
    if isinstance(config, RFAConfigMixin) and config.streams():
        (stack,) = cast(Any, model).rfa_stacks
        if can_move(stack):
            return None
    return getattr(config, "max_position_embeddings", None)


def check_length(model: PreTrainedModel, tokens: int, *, what: str = "prompt and new tokens together are") -> None:
    """Raise an `InputError` if a model has fewer positions than ``tokens``."""
    limit = position_limit(model)
    if limit is not None and tokens > limit:
        raise InputError(f"{what} {tokens}, but this model has {limit} positions. {shorter_or_longer(model, tokens)}")


def shorter_or_longer(model: PreTrainedModel, tokens: int) -> str:
    """Return what to do about a text that has more tokens than a model has positions, in a sentence."""
    ways = [f"with --max-positions {tokens} or more"]
    if has_rotary_positions(model.config) and not model.config.is_encoder_decoder:
        ways.append("with --preset exact, which reads texts of any length where all layers are converted")
    return f"Take fewer tokens, or convert its base model {', or '.join(ways)}."


def load_tokenizer(source: str | Path) -> tuple[Any, str | None]:
    """Return (the tokenizer of a folder or hub name, None), or (None, why there is none)."""
    # For a folder without any tokenizer file transformers would return an empty tokenizer.
    if isinstance(source, Path) and not any((source / name).is_file() for name in TOKENIZER_VOCABULARIES):
        return None, "there is no tokenizer in it"
    try:
        return AutoTokenizer.from_pretrained(source), None
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        return None, f"its tokenizer cannot be loaded ({error})"


def use_attention_component(model: nn.Module, component: AttentionComponent) -> None:
    """Let the attention of a model with a sliding window use one component alone, to see what each does.

    Args:
        model: the RFA model, changed in place; caches made before must not be used again.
        component: "linear" for random features of all tokens, "window" for the window alone, or "both", the default.
            Retrieval heads stay as they are.

    Raises:
        InputError: if the model has no sliding window, for any component but "both"; if it has no features, for "linear".
    """
    layers = [module for module in model.modules() if isinstance(module, RFAAttentionMixin) and module.window_size]
    if not layers and component != "both":
        raise InputError(f"attention_component={component} needs attention with a window, and this model has none.")
    if component == "linear" and (alone := [layer for layer in layers if layer.feature_map.needs_window]):
        name = alone[0].feature_map.name
        raise InputError(
            f"attention_component=linear needs features of all tokens, and feature_map={name!r} has none beside a window."
        )
    for layer in layers:
        layer.attention_component = component
