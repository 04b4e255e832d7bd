"""Loading a checkpoint to use it, and generating text with figures on speed and memory."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TextStreamer, set_seed

from .cache import cache_num_bytes
from .errors import InputError

DTYPES = ("auto", "float32", "bfloat16", "float16")


def load_causal_lm(name: str, *, dtype: str = "auto", need_tokenizer: bool = True) -> tuple[PreTrainedModel, Any]:
    """Load a causal language model, RFA or softmax, and its tokenizer.

    Args:
        name: folder of the checkpoint, or its name on the hub.
        dtype: "auto" for the checkpoint's own, or one of `DTYPES`.
        need_tokenizer: whether a missing tokenizer is an error; otherwise it is returned as None.

    Raises:
        InputError: if the checkpoint or its tokenizer cannot be loaded.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    path = Path(name).expanduser()
    if path.exists() and not (path / "config.json").is_file():
        raise InputError(f"{name} has no config.json: it is not a transformers checkpoint.")
    try:
        config = AutoConfig.from_pretrained(path if path.exists() else name)
        model = AutoModelForCausalLM.from_pretrained(
            path if path.exists() else name,
            config=config,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            use_safetensors=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"cannot load a causal language model from {name}: {error}") from error
    tokenizer, problem = load_tokenizer(path if path.exists() else name)
    if tokenizer is None and need_tokenizer:
        raise InputError(f"{name}: {problem}. Put the tokenizer's files beside the weights.")
    return model.eval(), tokenizer


def load_tokenizer(source: str | Path) -> tuple[Any, str | None]:
    """Return (the tokenizer of a folder or hub name, None), or (None, why there is none)."""
    # For a folder without any tokenizer file transformers would return an empty tokenizer.
    if isinstance(source, Path) and not any((source / name).is_file() for name in ("tokenizer.json", "merges.txt")):
        return None, "there is no tokenizer in it"
    try:
        return AutoTokenizer.from_pretrained(source), None
    except (OSError, ValueError, TypeError, KeyError) as error:
        return None, f"its tokenizer cannot be loaded ({error})"


@dataclass(frozen=True)
class Generation:
    """What one call of `generate_text` did.

    Attributes:
        text: the new text.
        prompt_tokens: tokens of the prompt.
        new_tokens: tokens generated.
        seconds: time for them, the prompt included.
        cache_bytes: bytes of the cache at the end.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    seconds: float
    cache_bytes: int


def check_length(model: PreTrainedModel, tokens: int) -> None:
    """Raise an `InputError` if a model has fewer learned positions than ``tokens``."""
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and tokens > positions:
        raise InputError(
            f"prompt and new tokens together are {tokens}, but this model has {positions} learned positions. Ask for fewer "
            f"new tokens, or convert its softmax parent with --max-positions {tokens} or more."
        )


def generate_text(
    model: PreTrainedModel,
    tokenizer: Any,
    prompt: str,
    *,
    max_new_tokens: int,
    streamer: TextStreamer | None = None,
    seed: int = 0,
    ignore_eos: bool = False,
    **options: Any,
) -> Generation:
    """Generate text with ``model.generate``.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        prompt: text to continue.
        max_new_tokens: most tokens to generate.
        streamer: receives the text as it comes, or None.
        seed: seed of the sampling.
        ignore_eos: go on to ``max_new_tokens`` whatever the model says.
        **options: further arguments of ``model.generate`` (``do_sample``, ``temperature``, ``top_k``, …).

    Raises:
        InputError: for an empty prompt, or a length past the model's positions.
    """
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(model.device)
    if ids.shape[1] == 0:
        raise InputError("the prompt is empty: there is nothing to continue.")
    check_length(model, ids.shape[1] + max_new_tokens)
    if ignore_eos:
        options["min_new_tokens"] = max_new_tokens
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    set_seed(seed)
    start = time.perf_counter()
    output: Any = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        pad_token_id=pad,
        streamer=streamer,
        return_dict_in_generate=True,
        **options,
    )
    seconds = time.perf_counter() - start
    new = output.sequences[0, ids.shape[1] :]
    return Generation(
        text=tokenizer.decode(new, skip_special_tokens=True),
        prompt_tokens=ids.shape[1],
        new_tokens=len(new),
        seconds=seconds,
        cache_bytes=cache_num_bytes(output.past_key_values),
    )
