"""Loading a checkpoint to use it, and generating text with figures on speed and memory."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, cast

import jinja2
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    CompileConfig,
    PreTrainedConfig,
    PreTrainedModel,
    TextStreamer,
    set_seed,
)

from .cache_files import cache_num_bytes
from .devices import find_device
from .errors import InputError
from .families import reads_audio
from .models.attention import AttentionComponent, RFAAttentionMixin
from .models.cache_names import returned_cache
from .models.feature_maps import NoFeatures
from .packed_weights import pack_weights, why_not_packed

DTYPES = ("auto", "float32", "bfloat16", "float16")

ModelKind = Literal["causal", "seq2seq"]
KINDS: dict[ModelKind, str] = {"causal": "a decoder that stands alone", "seq2seq": "an encoder and a decoder"}

VOCABULARY_ADVICE = (
    "Put the model's own tokenizer into the checkpoint's folder, or give the model an embedding for every entry "
    "(model.resize_token_embeddings(len(tokenizer)))."
)
#: Files of which a folder with a tokenizer has at least one.
TOKENIZER_VOCABULARIES = (
    *("tokenizer.json", "merges.txt", "vocab.txt"),
    *("source.spm", "sentencepiece.bpe.model", "spiece.model"),
)
#: Errors of transformers for a configuration, or for weights, that it cannot take.
CONFIG_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError)
WEIGHT_ERRORS = (*CONFIG_ERRORS, RuntimeError, SafetensorError)
#: Fields that say what a call returns, with the value that our programs and `save_pretrained` need: a model is saved with
#: output_attentions only if its attention is eager, and what returns no dictionary fails inside transformers.
OUTPUT_FIELDS = {"output_attentions": False, "return_dict": True}

logger = logging.getLogger(__name__)


@cache
def warn_once(message: str) -> None:
    """Log a warning, the first time that it is given: a command may read a configuration several times."""
    logger.warning(message)


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
            warn_once(
                f"{source}: its configuration has {name}={getattr(config, name)}, and is read with {name}={needed}. Pass "
                f"{name} to the model's call where you need it."
            )
            setattr(config, name, needed)
    attention = config._attn_implementation
    if attention not in (None, "eager", "sdpa") and not _can_attend(config, device):
        warn_once(
            f"{source}: its configuration asks for the attention {attention}, which cannot be computed here. transformers' "
            "own choice is taken, whose results are the same up to rounding."
        )
        config._attn_implementation = None
    return config


def check_is_checkpoint(path: Path, name: str) -> None:
    """Raise an `InputError` if a path exists and has no configuration in it; it says what to do with what is there."""
    if not path.exists() or (path / "config.json").is_file():
        return
    advice = ""
    if (path / "adapter_config.json").is_file():
        advice = (
            " It holds an adapter of PEFT: merge it into its base model first, PeftModel.from_pretrained(base_model, "
            f"{name!r}).merge_and_unload().save_pretrained(FOLDER), save the tokenizer there too, and pass that folder."
        )
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
    packed: bool = False,
) -> tuple[PreTrainedModel, Any]:
    """Load a model that generates text, RFA or softmax, and its tokenizer.

    Args:
        name: folder of the checkpoint, or its name on the hub.
        kind: "causal" for a decoder that stands alone, "seq2seq" for an encoder and a decoder, None for either.
        dtype: "auto" for the checkpoint's own, or one of `DTYPES`. States are in float32 in any case.
        device: what it computes on: cpu, cuda, …, or "auto" for an accelerator where there is one.
        need_tokenizer: whether a missing tokenizer is an error; otherwise it is returned as None.
        packed: pack weights of float32 for inference on this CPU, where it is one for which `pack_weights` can.

    Returns:
        The model, in evaluation mode, and its tokenizer.

    Raises:
        InputError: if the checkpoint or its tokenizer cannot be loaded, is of the other kind, or do not belong together; if
            there is no such device.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    place = find_device(device)
    path = Path(name).expanduser()
    source = path if path.exists() else name
    config = read_config(source, place)
    if reads_audio(config):
        raise InputError(
            f"{name} reads audio: load it with transformers.AutoModelForSpeechSeq2Seq after import hf_rfa."
        )
    found = kind_of(config)
    if kind not in (None, found):
        raise InputError(
            f"{name} is a {config.model_type} model, {KINDS[found]}, but this needs {KINDS[cast(ModelKind, kind)]}. Pass "
            "such a checkpoint, or choose another task."
        )
    auto_class: Any = AutoModelForSeq2SeqLM if found == "seq2seq" else AutoModelForCausalLM
    try:
        model = auto_class.from_pretrained(source, config=config, dtype=dtype, use_safetensors=True)
    except WEIGHT_ERRORS as error:
        raise InputError(f"cannot load a model that generates text from {name}: {error}") from error
    if found == "causal":
        name_loss(model)
    tokenizer, problem = load_tokenizer(source)
    if tokenizer is None and need_tokenizer:
        raise InputError(f"{name}: {problem}. Put the tokenizer's files into the checkpoint's folder.")
    if tokenizer is not None:
        check_vocabulary(tokenizer, config, name)
    if model.device != place:
        model.to(place)
    if packed and why_not_packed(model) is None:
        pack_weights(model)
    return model.eval(), tokenizer


def kind_of(config: PreTrainedConfig) -> ModelKind:
    """Return whether a configuration is of a decoder alone or of an encoder and a decoder."""
    return "seq2seq" if config.is_encoder_decoder else "causal"


def check_vocabulary(tokenizer: Any, config: Any, name: str) -> None:
    """Warn if a tokenizer can give tokens that a model has no embedding for; `check_tokens` refuses texts that have some."""
    without = tokens_without_embedding(tokenizer, config)
    if without:
        warn_once(
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


def load_tokenizer(source: str | Path) -> tuple[Any, str | None]:
    """Return (the tokenizer of a folder or hub name, None), or (None, why there is none)."""
    # For a folder without any tokenizer file transformers would return an empty tokenizer.
    if isinstance(source, Path) and not any((source / name).is_file() for name in TOKENIZER_VOCABULARIES):
        return None, "there is no tokenizer in it"
    try:
        return AutoTokenizer.from_pretrained(source), None
    except (OSError, ValueError, TypeError, KeyError) as error:
        return None, f"its tokenizer cannot be loaded ({error})"


@dataclass(frozen=True)
class Generation:
    """Texts and figures of one call of `generate_text`.

    Attributes:
        texts: the new text for each prompt.
        whole_texts: each prompt with its new text; with an encoder, the new text alone.
        prompt_tokens: tokens of the prompts, or of the sources for a model with an encoder.
        new_tokens: tokens generated.
        seconds: time for them, the prompts included.
        cache_bytes: bytes of the cache at the end.
    """

    texts: tuple[str, ...]
    whole_texts: tuple[str, ...]
    prompt_tokens: int
    new_tokens: int
    seconds: float
    cache_bytes: int

    @property
    def text(self) -> str:
        """The new text for the first prompt."""
        return self.texts[0]


def check_length(model: PreTrainedModel, tokens: int, *, what: str = "prompt and new tokens together are") -> None:
    """Raise an `InputError` if a model has fewer positions than ``tokens``."""
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and tokens > positions:
        raise InputError(
            f"{what} {tokens}, but this model has {positions} positions. Ask for fewer tokens, or convert its softmax parent "
            f"with --max-positions {tokens} or more."
        )


def chat_text(tokenizer: Any, prompt: str, system: str | None = None) -> str:
    """Return a message as the tokenizer's chat template writes it, up to where the answer begins.

    Args:
        tokenizer: the model's tokenizer.
        prompt: the user's message.
        system: a system message before it.

    Raises:
        InputError: if the tokenizer has no chat template, or the template refuses the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            "the tokenizer has no chat template, so the model was made to continue texts. Leave --chat out, or put its "
            "template into the checkpoint as chat_template.jinja."
        )
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": prompt})
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (jinja2.TemplateError, ValueError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise InputError(f"the tokenizer's chat template refuses these messages ({roles}): {error}") from error


def generate_text(
    model: PreTrainedModel,
    tokenizer: Any,
    prompt: str | Sequence[str],
    *,
    max_new_tokens: int,
    streamer: TextStreamer | None = None,
    seed: int = 0,
    ignore_eos: bool = False,
    chat: bool = False,
    system: str | None = None,
    compiled: bool = False,
    **options: Any,
) -> Generation:
    """Generate text with ``model.generate``.

    Args:
        model: a causal language model, or one with an encoder.
        tokenizer: its tokenizer.
        prompt: text to continue, or the source to translate or summarise; several are generated as one batch.
        max_new_tokens: most tokens to generate.
        streamer: receives the text of a single prompt as it comes, or None.
        seed: seed of the sampling.
        ignore_eos: go on to ``max_new_tokens`` whatever the model says.
        chat: take each prompt as a user's message, and write it as the tokenizer's chat template does.
        system: with ``chat``, a system message before it.
        compiled: run decoding steps under ``torch.compile``, on any device; not with beams, which transformers
            does not compile. The first steps then take up to minutes.
        **options: further arguments of ``model.generate`` (``do_sample``, ``num_beams``, ``temperature``, …).

    Returns:
        The new texts and their figures.

    Raises:
        InputError: for an empty prompt, or a length past the model's positions; with ``chat`` also if the tokenizer has no
            chat template, or the model an encoder.
    """
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    seq2seq, texts = kind_of(model.config) == "seq2seq", prompts
    if chat and seq2seq:
        raise InputError(
            f"a {model.config.model_type} model has an encoder, and answers one source at a time. Leave --chat out."
        )
    if chat:
        texts = [chat_text(tokenizer, each, system) for each in prompts]
    tokens = tokenizer(texts, verbose=False, add_special_tokens=not chat)["input_ids"]  # a template writes them itself
    check_tokens((index for row in tokens for index in row), model.config)
    rows = [torch.tensor(row, dtype=torch.long) for row in tokens]
    for number, (each, row) in enumerate(zip(prompts, rows, strict=True), start=1):
        if len(row) == 0 or ((seq2seq or chat) and not each.strip()):
            which = ("source" if seq2seq else "prompt") + (f" {number} of {len(rows)}" if len(rows) > 1 else "")
            raise InputError(f"the {which} is empty: there is nothing to start from.")
    pad = tokenizer.pad_token_id
    given = pad is not None and pad < model.config.vocab_size
    pad = pad if given else tokenizer.eos_token_id
    # New tokens follow the last one of a prompt; an encoder's positions start with the first one of a source.
    pads = partial(pad_sequence, batch_first=True, padding_side="right" if seq2seq else "left")
    ids = pads(rows, padding_value=pad or 0).to(model.device)
    mask = pads([torch.ones_like(row) for row in rows]).to(model.device)
    if seq2seq:
        check_length(model, ids.shape[1], what="the source's tokens are")
        check_length(model, max_new_tokens + 1, what="the start token and the new tokens are")
    else:
        check_length(model, ids.shape[1] + max_new_tokens)
    options |= {"min_new_tokens": max_new_tokens} if ignore_eos else {}
    options |= {} if given else {"pad_token_id": pad}
    options |= compiled_steps() if compiled else {}
    options |= {"max_new_tokens": max_new_tokens, "streamer": streamer, "return_dict_in_generate": True}
    set_seed(seed)
    start = time.perf_counter()
    output: Any = model.generate(ids, attention_mask=mask, **options)  # type: ignore[operator]
    seconds = time.perf_counter() - start
    new = output.sequences[:, 1 if seq2seq else ids.shape[1] :]
    end: Any = model.generation_config.eos_token_id
    ends = torch.tensor([] if end is None else end, dtype=torch.long, device=new.device)
    ended = torch.isin(new, ends).cumsum(-1)[:, :-1]  # tokens after the first end are padding
    texts, whole = (tuple(tokenizer.batch_decode(each, skip_special_tokens=True)) for each in (new, output.sequences))
    return Generation(
        texts=texts,
        whole_texts=whole,
        prompt_tokens=int(mask.sum()),
        new_tokens=len(new) + int((ended == 0).sum()),
        seconds=seconds,
        cache_bytes=cache_num_bytes(returned_cache(output)),
    )


def compiled_steps() -> dict[str, Any]:
    """Return the arguments of ``model.generate`` by which decoding steps are compiled on any device.

    A GPU does without the configuration: a static cache is enough there.
    """
    config = CompileConfig(mode="default")
    config._compile_all_devices = True  # type: ignore[assignment]
    return {"cache_implementation": "static", "compile_config": config}


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
    if component == "linear" and any(isinstance(layer.feature_map, NoFeatures) for layer in layers):
        raise InputError("attention_component=linear needs features, and this model has none (feature_map='none').")
    for layer in layers:
        layer.attention_component = component
