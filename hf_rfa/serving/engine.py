"""Requests that arrive over time, answered together: each joins a batch of rows at its next step, and leaves when it is done.

One thread does all that the model does. In turns it reads a piece of one prompt, and lets every row write a token. So no
prompt, however long, makes the others wait for more than a piece of it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from ..errors import InputError
from .rows import Rows, read
from .sessions import Sessions
from .writing import Writing

#: Tokens of a prompt that are read between two steps.
PIECE_LENGTH = 256

logger = logging.getLogger(__name__)


class BusyError(RuntimeError):
    """There are as many requests as the server takes, or it is closing."""


class Token(NamedTuple):
    """A token of an answer, its log-probability as the model says it, and those of the likeliest tokens."""

    token: int
    log_prob: float
    likeliest: list[tuple[int, float]]


class Piece(NamedTuple):
    """What comes next of an answer: its text, tokens if they were asked for, and "stop", "length" or "error" at the end."""

    text: str = ""
    tokens: tuple[Token, ...] = ()
    finish: str | None = None


@dataclass(eq=False)
class Request:
    """A prompt to go on with. What is None is left to the checkpoint's generation_config.json."""

    tokens: list[int]  # those of the prompt, and behind them those that were written
    max_tokens: int  # most to write
    send: Callable[[Request, Piece], object]  # called with every piece, in a thread of the engine or of its sessions
    temperature: float | None = None  # 0 takes the likeliest token
    top_p: float | None = None
    top_k: int | None = None  # 0 samples from all tokens, and so does None without a word of the checkpoint
    seed: int = 0  # of the request's own random numbers
    stops: tuple[str, ...] = ()  # texts before which the answer ends
    likeliest: int | None = None  # how many tokens to report at each place, or None for no report
    owner: str = ""  # whose sessions it may go on from
    cached: int = 0  # tokens that were not read, since a session held them
    new: int = 0  # tokens written
    cancelled: bool = False  # it ends at the next step, and nothing more is sent
    _cache: Cache | None = None  # of the prompt while it is read
    _unsent: list[Token] = field(default_factory=list)

    def prepare(self, model: PreTrainedModel, tokenizer: Any) -> None:
        """Take from `generate` how it would choose the tokens."""

        def take(_: Any, ids: Tensor, *, logits_processor: Any, generation_config: Any, **__: Any) -> Tensor:
            self._processors, self._samples = logits_processor, generation_config.do_sample
            ends = generation_config.eos_token_id
            self._ends = ends if isinstance(ends, list) else [ends]
            return ids

        options: dict[str, Any] = {"do_sample": self.temperature != 0, "max_new_tokens": self.max_tokens}
        if self.temperature != 0:  # generate's own top_k is 50
            top_k = model.generation_config.top_k or 0 if self.top_k is None else self.top_k
            named = {"temperature": self.temperature, "top_p": self.top_p, "top_k": top_k}
            options |= {name: value for name, value in named.items() if value is not None}
        ids = torch.tensor([self.tokens], device=model.device)
        options |= {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "disable_compile": True}
        generate: Any = model.generate
        generate(ids, custom_generate=take, **options)
        self._ids = torch.cat([ids, ids.new_zeros(1, self.max_tokens)], dim=1)
        self._random = torch.Generator(device=model.device).manual_seed(self.seed)
        self._writing = Writing(tokenizer, self.stops)

    def write(self, logits: Tensor) -> Piece:
        """Choose the next token from logits, [1, vocabulary], and return what it adds to the answer."""
        scores = self._processors(self._ids[:, : len(self.tokens)], logits.clone())
        if self._samples:
            token = int(torch.multinomial(scores.softmax(-1), 1, generator=self._random))
        else:
            token = int(scores.argmax(-1))
        self._ids[:, len(self.tokens)] = token
        self.tokens.append(token)
        self.new += 1
        if self.likeliest is not None:
            log_probs = logits[0].log_softmax(-1)
            values, indices = log_probs.topk(self.likeliest)
            likeliest = list(zip(indices.tolist(), values.tolist(), strict=True))
            self._unsent.append(Token(token, float(log_probs[token]), likeliest))
        ends = token in self._ends
        text = "" if ends else self._writing.put(token)
        finish = "stop" if ends or self._writing.stopped else "length" if self.new == self.max_tokens else None
        if finish is not None:
            text += self._writing.rest()
        elif not text:
            return Piece()
        tokens, self._unsent = tuple(self._unsent), []
        return Piece(text, tokens, finish)


class Engine:
    """Answers requests with a model, some at a time.

    Args:
        model: a converted decoder.
        tokenizer: its tokenizer.
        sessions: what is kept of earlier requests.
        rows: most requests that are answered at a time.
        most_requests: most that are waiting or answered.
        piece_length: tokens of a prompt that are read between two steps.

    Attributes:
        closing: whether it takes no more requests.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        sessions: Sessions,
        *,
        rows: int = 8,
        most_requests: int = 64,
        piece_length: int = PIECE_LENGTH,
    ) -> None:
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise InputError(
                "the server needs a tokenizer of the tokenizers library (tokenizer.json), and this one is slow."
            )
        self.model, self.tokenizer, self.sessions = model, tokenizer, sessions
        self._most_rows, self._most_requests, self._piece_length = rows, most_requests, piece_length
        self._rows = Rows(model)
        self._waiting: list[Request] = []  # the first of them are read in turns
        self._active: list[Request] = []  # in the order of the rows
        self._changed, self.closing = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def requests(self) -> int:
        """The number of requests that wait or are answered."""
        return len(self._waiting) + len(self._active)

    def submit(self, request: Request) -> None:
        """Take a request.

        Raises:
            BusyError: if there are too many, or the engine is closing.
        """
        with self._changed:
            if self.closing or self.requests >= self._most_requests:
                raise BusyError(
                    f"there are {self.requests} requests already, or the server is closing. Try again later."
                )
            self._waiting.append(request)
            self._changed.notify()

    def cancel(self, request: Request) -> None:
        """Have a request end; what has been written of it is kept as a session."""
        request.cancelled = True
        with self._changed:
            if request in self._waiting:
                self._waiting.remove(request)

    def close(self) -> None:
        """End all requests, and write sessions that are in no file."""
        with self._changed:
            self.closing = True
            self._changed.notify()
        self._thread.join()

    @torch.no_grad()
    def _run(self) -> None:
        try:
            while not self.closing:
                self._turn()
            for row in range(len(self._active)):
                self._keep(row, write=True)
        except Exception:
            logger.exception("the engine cannot go on")
            self.closing = True
        for request in (*self._waiting, *self._active):
            request.send(request, Piece(finish="error"))
        self.sessions.close()

    def _turn(self) -> None:
        """Wait for requests, read a piece of one, and let every row write a token."""
        with self._changed:
            self._changed.wait_for(lambda: self.requests or self.closing)
            free = self._most_rows - len(self._active)
            request = self._waiting[0] if self._waiting and free else None
        if request is not None:
            read_all = self._read(request)
            with self._changed:
                if request in self._waiting:
                    self._waiting.remove(request)
                    if not read_all:
                        self._waiting.insert(free - 1, request)
        for row in reversed(range(len(self._active))):
            if self._active[row].cancelled:
                self._end(row)
        if self._active:
            self._step()

    def _read(self, request: Request) -> bool:
        """Read a piece of a prompt; return whether it has become a row, with all but its last token read, or failed."""
        try:
            if request._cache is None:
                found = self.sessions.find(request.owner, request.tokens)
                request._cache = DynamicCache(config=self.model.config) if found is None else found
                request.cached = int(request._cache.get_seq_length())
            done = int(request._cache.get_seq_length())
            piece = request.tokens[done : min(done + self._piece_length, len(request.tokens) - 1)]
            if piece:
                read(self.model, request._cache, [piece], [list(range(done, done + len(piece)))])
            if done + len(piece) < len(request.tokens) - 1:
                return False
            request.prepare(self.model, self.tokenizer)
            self._rows.insert(request._cache)
            self._active.append(request)
            request._cache = None
            if piece:
                self._keep(len(self._active) - 1, write=False)
        except Exception:
            logger.exception("a request failed")
            request.send(request, Piece(finish="error"))
        return True

    def _step(self) -> None:
        """Let every row write a token."""
        try:
            logits = self._rows.step([request.tokens[-1] for request in self._active])
            pieces = [request.write(logits[row : row + 1]) for row, request in enumerate(self._active)]
        except Exception:
            logger.exception("a step failed")
            pieces = [Piece(finish="error") for _ in self._active]
        for row in reversed(range(len(pieces))):
            request, piece, written = self._active[row], pieces[row], None
            if piece.finish is not None:
                written = self._end(row, keep=piece.finish != "error")
            if piece != Piece() and not request.cancelled:
                self._send(request, piece, written)

    def _send(self, request: Request, piece: Piece, written: Future[int] | None) -> None:
        """Send a piece, after a file that is being written: what has ended outlives the process."""
        if written is None:
            request.send(request, piece)
        else:
            written.add_done_callback(lambda _: request.send(request, piece))

    def _end(self, row: int, *, keep: bool = True) -> Future[int] | None:
        """Take a request out; what was read and written is kept, and what is returned ends when it is in a file."""
        written = self._keep(row, write=True) if keep else None
        self._rows.remove(row)
        del self._active[row]
        return written

    def _keep(self, row: int, *, write: bool) -> Future[int] | None:
        """Keep what has been read of a row: all tokens but the last."""
        request = self._active[row]
        return self.sessions.keep(request.owner, request.tokens[:-1], self._rows.copy(row), write=write)
