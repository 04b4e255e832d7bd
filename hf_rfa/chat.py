"""A conversation with a model, turn by turn, whose cache is kept between the turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from .inference.generation import Generation, chat_messages, chat_text, check_chat, generate_rows
from .models.cache_names import cache_argument, returned_cache


class Conversation:
    """A conversation by the tokenizer's chat template.

    A turn reads only the tokens that are new since the turn before: those of the message, and what the template writes
    around it. An RFA model's cache has one size however long the conversation is. The whole conversation is read again where
    a template writes the earlier turns in another way than before, and after beams.

    Attributes:
        messages: the messages so far, with a ``role`` and a ``content`` each.
        cache: the cache after them, or None.
        tokens: the tokens that were read and written so far.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, system: str | None = None) -> None:
        """Begin a conversation, with a system message if there is one.

        Raises:
            InputError: if the tokenizer has no chat template, or the model an encoder.
        """
        check_chat(model)
        *first, message = chat_messages("Hello", system)
        chat_text(tokenizer, [*first, message])  # before anybody writes anything
        self.model, self.tokenizer = model, tokenizer
        self.messages = first
        self.cache: Cache | None = None
        self.tokens: list[int] = []
        self._text = ""  # what the tokens stand for

    def reply(self, message: str, **options: Any) -> Generation:
        """Return the answer to a message; its ``prompt_tokens`` are those that this turn read.

        Args:
            message: the user's message.
            **options: as `hf_rfa.inference.generate_text` takes them.

        Raises:
            InputError: if the conversation is longer than the model's positions.
        """
        messages = [*self.messages, {"role": "user", "content": message}]
        text = chat_text(self.tokenizer, messages)
        cache, tokens, known = self.cache, self.tokens, self._text
        if cache is None or not text.startswith(known):
            cache, tokens, known = None, [], ""
        rest = self.tokenizer(text[len(known) :], verbose=False, add_special_tokens=False)["input_ids"]
        tokens = [*tokens, *rest]
        unread = len(tokens) - (0 if cache is None else cache.get_seq_length())
        row = torch.tensor(tokens, dtype=torch.long)
        answer, output = generate_rows(self.model, self.tokenizer, [row], **cache_argument(cache), **options)

        self.tokens = output.sequences[0].tolist()
        ends: Any = self.model.generation_config.eos_token_id
        if self.tokens[-1] in (ends if isinstance(ends, list) else [ends]):
            del self.tokens[-1]  # the template writes the end of a turn, and the cache has not seen the last token
        self.cache = returned_cache(output) if options.get("num_beams", 1) == 1 else None
        written = self.tokenizer.decode(self.tokens[len(row) :], skip_special_tokens=True)
        self.messages = [*messages, {"role": "assistant", "content": written}]
        self._text = text + written
        return replace(answer, prompt_tokens=unread)
