"""Generating text, with figures on speed and memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jinja2
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import CompileConfig, PreTrainedModel, TextStreamer, set_seed

from ..errors import InputError
from ..io.text_io import text_ids
from ..models.cache_names import returned_cache
from .cache_files import cache_num_bytes
from .loading import check_length, check_tokens, kind_of


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


def messages_text(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """Return a conversation as the tokenizer's chat template writes it, up to where the next answer begins.

    Args:
        tokenizer: the model's tokenizer.
        messages: each with a ``role`` and a ``content``.

    Raises:
        InputError: if the tokenizer has no chat template, or the template refuses the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            "the tokenizer has no chat template, so the model was made to continue texts. Leave chat out, or put its "
            "template into the checkpoint as chat_template.jinja."
        )
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
    compiled: bool | None = None,
    **options: Any,
) -> Generation:
    """Generate text with ``model.generate``.

    Args:
        model: a causal language model, or one with an encoder.
        tokenizer: its tokenizer.
        prompt: text to continue, or the source to translate or summarize; several are generated as one batch.
        max_new_tokens: most tokens to generate.
        streamer: receives the text of a single prompt as it comes, or None.
        seed: seed of the sampling.
        ignore_eos: go on to ``max_new_tokens`` whatever the model says.
        chat: take each prompt as a user's message, and write it as the tokenizer's chat template does.
        system: with ``chat``, a system message before it.
        compiled: True runs decoding steps under ``torch.compile`` on any device; not with beams, which transformers does not
            compile. False never does. The default leaves it to ``model.generate``: a decoder does on a GPU. The first steps
            then take up to minutes.
        **options: further arguments of ``model.generate`` (``do_sample``, ``num_beams``, ``temperature``, …).

    Returns:
        The new texts and their figures.

    Raises:
        InputError: for an empty prompt, or a length past the model's positions; with ``chat`` also if the tokenizer has no
            chat template, or the model an encoder.
    """
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    seq2seq = kind_of(model.config) == "seq2seq"
    if chat and seq2seq:
        raise InputError(
            f"a {model.config.model_type} model has an encoder, and answers one source at a time. Leave --chat out."
        )
    inputs = prompts
    if chat:
        before = [] if system is None else [{"role": "system", "content": system}]
        inputs = [messages_text(tokenizer, [*before, {"role": "user", "content": text}]) for text in prompts]
    if chat or seq2seq:  # a template writes special tokens itself
        tokens = tokenizer(inputs, verbose=False, add_special_tokens=not chat)["input_ids"]
    else:
        tokens = list(text_ids(tokenizer, inputs))
    check_tokens((index for row in tokens for index in row), model.config)
    rows = [torch.tensor(row, dtype=torch.long) for row in tokens]
    for number, (text, row) in enumerate(zip(prompts, rows, strict=True), start=1):
        if len(row) == 0 or ((seq2seq or chat) and not text.strip()):
            which = ("source" if seq2seq else "prompt") + (f" {number} of {len(rows)}" if len(rows) > 1 else "")
            raise InputError(f"the {which} is empty: there is nothing to start from.")
    pad = tokenizer.pad_token_id
    if pad is None or pad >= model.config.vocab_size:
        pad = tokenizer.eos_token_id
        options["pad_token_id"] = pad
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
    options |= compiled_steps() if compiled else {"disable_compile": True} if compiled is False else {}
    options |= {"max_new_tokens": max_new_tokens, "streamer": streamer, "return_dict_in_generate": True}
    set_seed(seed)
    start = time.perf_counter()
    output: Any = model.generate(ids, attention_mask=mask, **options)  # type: ignore[operator]
    seconds = time.perf_counter() - start
    new = output.sequences[:, 1 if seq2seq else ids.shape[1] :]
    return Generation(
        texts=tuple(tokenizer.batch_decode(new, skip_special_tokens=True)),
        whole_texts=tuple(tokenizer.batch_decode(output.sequences, skip_special_tokens=True)),
        prompt_tokens=int(mask.sum()),
        new_tokens=int(written(new, model).sum()),
        seconds=seconds,
        cache_bytes=cache_num_bytes(returned_cache(output)),
    )


def written(new: Tensor, model: PreTrainedModel) -> Tensor:
    """Return how many of each row's new tokens [N, T] a model wrote, its first end included: what follows is padding."""
    end: Any = model.generation_config.eos_token_id
    ends = torch.tensor([] if end is None else end, dtype=torch.long, device=new.device)
    return 1 + (torch.isin(new, ends).cumsum(-1)[:, :-1] == 0).sum(-1)


def compiled_steps() -> dict[str, Any]:
    """Return the arguments of ``model.generate`` by which decoding steps are compiled on any device.

    A GPU does without the configuration: a static cache is enough there.
    """
    config = CompileConfig(mode="default")
    config._compile_all_devices = True  # type: ignore[assignment]
    return {"cache_implementation": "static", "compile_config": config}
