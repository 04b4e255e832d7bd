"""Texts without end: read piece by piece in memory of one size, gone on from, and kept in a file for another day."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, TextStreamer, set_seed
from transformers.cache_utils import Cache, DynamicCache

from ..errors import InputError
from ..io.text_io import start_tokens
from ..models.cache_names import cache_argument, returned_cache
from .cache_files import cache_num_bytes, load_cache, read_notes, save_cache
from .generation import Generation
from .loading import check_tokens, position_limit

#: Tokens that a model reads at once.
PIECE_LENGTH = 512
#: Characters of a text that are waited for before some are tokenized.
CUT_CHARACTERS = 2**14
#: What is tokenized then, the first that there is: up to a space between two words, up to the end of a line, or all.
BETWEEN_WORDS = re.compile(r".*[^\W_](?= [^\W_])", re.DOTALL)
CUTS = (BETWEEN_WORDS, re.compile(r".*\S\n(?=\S)", re.DOTALL), re.compile(r".*", re.DOTALL))


@dataclass
class Reading:
    """What a model has read and written of a text, and what comes next in it.

    Attributes:
        cache: what the model keeps; None before the first piece.
        pending: tokens that come next, and that the cache does not hold yet. Between calls it is the last token so far, from
            which the next one is predicted.
        unread: text that comes after them. It is not tokenized yet, since more of it may come.
        source: a name of where the text comes from, for the one who goes on; empty once it has ended.
        characters: those that were taken from there.
        recent: for a model whose positions end, its last tokens, a quarter of its positions. Where the positions end, it
            forgets all others and reads these again from position 0.
        forgotten: tokens before the first that the cache has seen.
    """

    cache: Cache | None = None
    pending: list[int] = field(default_factory=list)
    unread: str = ""
    source: str = ""
    characters: int = 0
    recent: list[int] = field(default_factory=list)
    forgotten: int = 0

    @classmethod
    def load(cls, path: str | Path, model: Any) -> Reading:
        """Read from a file what `save` wrote, or a cache of `hf_rfa.inference.save_cache`, which has no pending token.

        Raises:
            InputError: as `hf_rfa.inference.load_cache`.
        """
        return cls(load_cache(path, model), **(read_notes(path) or {}).get("reading", {}))

    def save(self, path: str | Path, model: Any, notes: dict[str, Any] | None = None) -> None:
        """Write all of it to a file, and notes, as `hf_rfa.inference.save_cache` does and with its errors."""
        cache = DynamicCache(config=model.config) if self.cache is None else self.cache
        reading = {name: value for name, value in vars(self).items() if name != "cache"}
        save_cache(cache, path, notes={"reading": reading, **(notes or {})})

    @property
    def tokens_read(self) -> int:
        """The number of tokens that the model has read."""
        return self.forgotten + (0 if self.cache is None else int(self.cache.get_seq_length()))

    @property
    def tokens(self) -> int:
        """The number of tokens so far, those that are pending included."""
        return self.tokens_read + len(self.pending)

    def feed(self, model: Any, count: int) -> Tensor:
        """Let a model read the first of the pending tokens; return the logits of the last of them, [1, vocabulary].

        Args:
            model: the model.
            count: number of the tokens, at most half of the model's positions if these end.
        """
        tokens, limit, read = self.pending[:count], position_limit(model), self.tokens_read
        with torch.no_grad(), uninterrupted():
            if limit is not None and read - self.forgotten + count > limit:
                self.cache, self.forgotten = None, read - len(self.recent)
                tokens = self.recent + tokens
            ids = torch.tensor([tokens], device=model.device)
            output = model(input_ids=ids, **cache_argument(self.cache), use_cache=True, logits_to_keep=1)
            self.cache, self.pending = returned_cache(output), self.pending[count:]
            if limit is not None:
                self.recent = (self.recent + tokens[-count:])[-(limit // 4) :]
        return output.logits[:, -1].float()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait for the end of a block, so that no token is read by some layers alone."""
    if threading.current_thread() is not threading.main_thread():  # which others do not interrupt
        yield
        return
    received: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *args: received.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if received:
        signal.raise_signal(signal.SIGINT)


def read_stream(
    model: PreTrainedModel,
    tokenizer: Any,
    texts: Iterable[str],
    reading: Reading | None = None,
    *,
    piece_length: int = PIECE_LENGTH,
    on_tokens: Callable[[int], object] = lambda tokens: None,
) -> Reading:
    """Let a model read a text of any length, in memory of one size.

    A model whose positions end (`position_limit`) reads its last tokens again wherever they do, and has forgotten all others:
    the text goes on, and what is kept of it is of the last positions alone.

    A text is tokenized in parts of about `CUT_CHARACTERS`. They end between two words where they can, and tokens are those of
    the whole text. Else they end at the end of a line, or anywhere: one token there may become two or three.

    Args:
        model: a causal language model, RFA or softmax.
        tokenizer: its tokenizer.
        texts: the text in pieces of any length, which are joined.
        reading: what came before, changed in place, so that nothing is lost if this is interrupted; None for a new text.
        piece_length: tokens that the model reads at once, at most half of its positions if these end.
        on_tokens: called after each piece with the number of all tokens read so far.

    Returns:
        ``reading``, whose last token is pending: `continue_stream` goes on from there.

    Raises:
        InputError: if there is a token that the model has no embedding for.
    """
    reading = Reading() if reading is None else reading
    drops_space, piece_length = _drops_space(tokenizer), min(piece_length, most_at_once(model))

    def take(text: str) -> None:
        reading.pending += tokens_of(model, tokenizer, text, starts=reading.tokens == 0)

    def read(least: int) -> None:
        while len(reading.pending) >= least:
            reading.feed(model, min(piece_length, len(reading.pending) - 1))
            on_tokens(reading.tokens_read)

    for text in texts:
        with uninterrupted():
            reading.unread += text
            reading.characters += len(text)
            while len(reading.unread) >= CUT_CHARACTERS:
                found = next(filter(None, (cut.match(reading.unread) for cut in CUTS)))
                take(found[0])
                reading.unread = reading.unread[found.end() + (drops_space and found.re is BETWEEN_WORDS) :]
        read(piece_length + 1)
    with uninterrupted():
        take(reading.unread)
        reading.unread, reading.source, reading.characters = "", "", 0
    read(2)
    return reading


def most_at_once(model: PreTrainedModel) -> int:
    """Return how many tokens of a stream a model reads at once: those of a piece, or half of its positions if they end."""
    limit = position_limit(model)
    return PIECE_LENGTH if limit is None else min(PIECE_LENGTH, limit // 2)


def tokens_of(model: PreTrainedModel, tokenizer: Any, text: str, *, starts: bool) -> list[int]:
    """Return the tokens of a part of a text, the first of which begins with what the tokenizer begins texts with.

    Raises:
        InputError: if there is a token that the model has no embedding for.
    """
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    ids = [*start_tokens(tokenizer), *ids] if starts else ids
    check_tokens(ids, model.config)
    return ids


def _drops_space(tokenizer: Any) -> bool:
    """Return whether a tokenizer puts a space before every text itself, so that one at a cut has to go."""
    both, one, other, with_space = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("a b", "a", "b", " b")
    )
    return one + with_space != both and one + other == both


def continue_stream(
    model: PreTrainedModel,
    tokenizer: Any,
    reading: Reading,
    *,
    prompt: str = "",
    max_new_tokens: int,
    streamer: TextStreamer | None = None,
    seed: int = 0,
    ignore_eos: bool = False,
    **options: Any,
) -> Generation:
    """Go on with a text that was read, in memory of one size.

    The last token, an end of text too, stays pending. What comes next, read or written, follows it.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        reading: of `read_stream`, of an earlier call, or loaded; changed in place, so that nothing is lost if this is
            interrupted.
        prompt: what follows the text before the model goes on.
        max_new_tokens: most tokens to generate; 0 for the prompt alone.
        streamer: receives the prompt, or else the last token, and the new text as it comes; or None.
        seed: seed of the sampling.
        ignore_eos: go on to ``max_new_tokens`` whatever the model says.
        **options: further arguments of ``model.generate`` (``do_sample``, ``temperature``, …); no beams.

    Returns:
        The new text and its figures.

    Raises:
        InputError: if nothing was read and there is no prompt.
    """
    said = tokens_of(model, tokenizer, prompt, starts=reading.tokens == 0) if prompt else []
    piece_length = most_at_once(model)
    reading.pending += said
    if not reading.pending:
        raise InputError("there is nothing to start from: no token was read. Pass a text or a prompt.")
    start, count = time.perf_counter(), reading.tokens
    new: list[int] = []
    while 0 < len(said) < len(reading.pending):
        reading.feed(model, min(piece_length, len(reading.pending) - len(said)))

    def decode(
        model: Any,
        input_ids: Tensor,
        *,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **_: Any,
    ) -> Tensor:
        """Generate as transformers' own method, which would also hold a mask and positions of all tokens since the first."""
        ended = False
        while not ended:
            while len(reading.pending) > piece_length:
                reading.feed(model, piece_length)
            with uninterrupted():
                scores = logits_processor(input_ids, reading.feed(model, len(reading.pending)))
                drawn = generation_config.do_sample
                token = torch.multinomial(scores.softmax(-1), 1) if drawn else scores.argmax(-1, keepdim=True)
                reading.pending = token[0].tolist()
                new.extend(reading.pending)
            input_ids = torch.cat([input_ids, token], dim=1)
            if streamer is not None:
                streamer.put(token[0].cpu())
            ended = bool(stopping_criteria(input_ids, None).all())
        return input_ids

    if max_new_tokens:
        set_seed(seed)
        ids = torch.tensor([reading.pending], device=model.device)
        options |= {"min_new_tokens": max_new_tokens} if ignore_eos else {}
        options |= {"max_new_tokens": max_new_tokens, "num_beams": 1, "disable_compile": True, "pad_token_id": 0}
        generate: Any = model.generate
        try:
            generate(ids, attention_mask=torch.ones_like(ids), custom_generate=decode, streamer=streamer, **options)
        finally:
            if streamer is not None:
                streamer.end()
    text = tokenizer.decode(new, skip_special_tokens=True)
    return Generation(
        texts=(text,),
        whole_texts=(tokenizer.decode(said + new, skip_special_tokens=True),),
        prompt_tokens=count,
        new_tokens=len(new),
        seconds=time.perf_counter() - start,
        cache_bytes=cache_num_bytes(reading.cache),
    )
