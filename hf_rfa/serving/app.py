"""OpenAI's interface to an engine: models, completions and chat completions, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ..errors import InputError
from ..inference.generation import messages_text
from ..inference.loading import check_length, check_tokens, position_limit
from ..io.text_io import text_ids
from .engine import BusyError, Engine, Piece, Token
from .engine import Request as Job

#: Tokens of a completion where a request names no number, as OpenAI has it.
COMPLETION_TOKENS = 16
#: Parts of conversations whose tokens are remembered, and most characters of each.
REMEMBERED_PARTS, REMEMBERED_LENGTH = 4096, 4096


class ApiError(Exception):
    """What becomes OpenAI's error object."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        kind = "server_error" if status in (429, 500) else "invalid_request_error"
        self.status, self.body = status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


class _Asked(BaseModel):
    """What both kinds of requests may ask for. Fields that would change an answer, and are not supported, take no value."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    seed: int | None = None
    stop: Annotated[str, Field(min_length=1)] | Annotated[list[str], Field(max_length=4)] | None = None
    n: int = Field(1, ge=1, le=16)
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    logit_bias: None = None


class _CompletionAsked(_Asked):
    prompt: str | list[int] | list[str] | list[list[int]] = Field(min_length=1)
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: None = None


class _TextPart(BaseModel):
    type: Literal["text"]
    text: str


class _Message(BaseModel):
    role: str
    content: str | list[_TextPart]

    def plain(self) -> dict[str, str]:
        """Return the message as chat templates take it."""
        whole = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": whole}


class _ChatAsked(_Asked):
    messages: list[_Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: None = None
    tools: None = None


class PartsTokenizer:
    """Tokenizes conversations, and remembers the tokens of their parts: of a later turn only the new parts are tokenized.

    A part begins with a special token, at which every tokenizer divides a text first.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        plain = [token for token in tokenizer.added_tokens_decoder.values() if token.special and not token.normalized]
        marks = [re.escape(token.content) for token in plain if not (token.lstrip or token.single_word)]
        self._begin = re.compile(f"(?={'|'.join(marks)})" if marks else "(?!)")
        self._remembered = lru_cache(REMEMBERED_PARTS)(self._tokens)

    def _tokens(self, part: str) -> list[int]:
        return self._tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text, without any that the tokenizer adds by itself."""
        tokens: list[int] = []
        for part in filter(None, self._begin.split(text)):
            tokens += self._remembered(part) if len(part) <= REMEMBERED_LENGTH else self._tokens(part)
        return tokens


class App:
    """The application, which a server runs as ``asgi``.

    Args:
        engine: what answers.
        name: of the model, which requests have to name.
        keys: of the interface, one of which a request has to bring; none for any request.
        most_prompt: most tokens of a prompt.
        most_answer: most tokens of an answer, and as many as it may have if a request to chat names no number.
        most_bytes: of a request.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        *,
        keys: Sequence[str] = (),
        most_prompt: int = 1_000_000,
        most_answer: int = 4096,
        most_bytes: int = 2**24,
    ) -> None:
        self.engine, self.name, self._keys, self._tokenize = engine, name, keys, PartsTokenizer(engine.tokenizer)
        self._most_prompt, self._most_answer, self._most_bytes = most_prompt, most_answer, most_bytes
        routes = [
            Route("/load_model", self._load_model, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._models),
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat_completions, methods=["POST"]),
        ]
        handlers: Any = dict.fromkeys((ApiError, InputError, ClientDisconnect, 404, 405), _refuse)
        self.asgi = Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(self.engine.close)

    async def _load_model(self, request: Request) -> Response:
        """Say that the model is loaded, which `transformers chat` asks for first."""
        return Response(_event({"status": "ready", "cached": True}), media_type="text/event-stream")

    async def _models(self, request: Request) -> Response:
        self._owner(request)
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": "hf-rfa"}
        if name := request.path_params.get("name"):
            self._check_name(name)
            return JSONResponse(model)
        return JSONResponse({"object": "list", "data": [model]})

    async def _completions(self, request: Request) -> _Answer:
        owner, asked = self._owner(request), await self._read(request, _CompletionAsked)
        prompts = [asked.prompt] if isinstance(asked.prompt, str) or isinstance(asked.prompt[0], int) else asked.prompt
        texts = [each for each in prompts if isinstance(each, str)]
        tokens = await asyncio.to_thread(lambda: list(text_ids(self.engine.tokenizer, texts))) if texts else prompts
        most = asked.max_tokens or COMPLETION_TOKENS
        return _Answer(self, asked, owner, tokens, most)

    async def _chat_completions(self, request: Request) -> _Answer:
        owner, asked = self._owner(request), await self._read(request, _ChatAsked)
        tokens = await asyncio.to_thread(self._chat_tokens, [message.plain() for message in asked.messages])
        room = (position_limit(self.engine.model) or self._most_prompt + self._most_answer) - len(tokens)
        most = asked.max_completion_tokens or asked.max_tokens or max(1, min(self._most_answer, room))
        return _Answer(self, asked, owner, [tokens], most)

    def _chat_tokens(self, messages: list[dict[str, str]]) -> list[int]:
        return self._tokenize(messages_text(self.engine.tokenizer, messages))

    def _owner(self, request: Request) -> str:
        """Return the key that a request brings; all keys are compared, in the same time whatever they have in common."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        matches = [secrets.compare_digest(given.encode(), key.encode()) for key in self._keys]
        if self._keys and not any(matches):
            raise ApiError(401, "this server asks for an API key, and this is none of its keys.", "invalid_api_key")
        return given if self._keys else ""

    def _check_name(self, name: str) -> None:
        if name != self.name:
            raise ApiError(404, f"there is no model {name!r}, only {self.name!r}.", "model_not_found", "model")

    async def _read(self, request: Request, kind: type[BaseModel]) -> Any:
        """Read and check the body of a request."""
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._most_bytes:
                raise ApiError(413, f"the request has more than {self._most_bytes:,} bytes.", "request_too_large")
        try:
            asked: Any = kind.model_validate_json(bytes(body))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise ApiError(400, f"{place or 'the body'}: {first['msg']}", param=place or None) from error
        self._check_name(asked.model)
        return asked

    def check_prompt(self, prompt: list[int], most: int) -> None:
        """Raise an `ApiError` for a prompt, or a number of tokens to answer it with, that is not taken."""
        if not prompt or min(prompt) < 0:
            raise ApiError(400, "the prompt is empty, or has tokens below 0.", param="prompt")
        if most > self._most_answer:
            message = f"an answer has {self._most_answer:,} tokens at most here, and {most:,} were asked for."
            raise ApiError(400, message, param="max_tokens")
        try:
            check_tokens(prompt, self.engine.model.config)
            check_length(self.engine.model, len(prompt) + most)
            if len(prompt) > self._most_prompt:
                raise InputError(f"the prompt has {len(prompt):,} tokens, and this server reads {self._most_prompt:,}.")
        except InputError as error:
            raise ApiError(400, str(error), "context_length_exceeded", "prompt") from error


class _Answer:
    """Answers to one request in OpenAI's form, as a response of Starlette's: they end with the client."""

    def __init__(self, app: App, asked: Any, owner: str, prompts: list[list[int]], most: int) -> None:
        self._app, self._asked, self._chat = app, asked, isinstance(asked, _ChatAsked)
        chat, self._likeliest = self._chat, asked.logprobs
        if chat:
            self._likeliest = asked.top_logprobs or 0 if asked.logprobs else None
        kind = "chat.completion" + ".chunk" * asked.stream if chat else "text_completion"
        head = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}", "object": kind}
        self._head: dict[str, Any] = {**head, "created": int(time.time()), "model": app.name}
        self._pieces: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def send(job: Job, piece: Piece) -> None:  # in another thread
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._pieces.put_nowait, (self._jobs.index(job), piece))

        stops = (asked.stop,) if isinstance(asked.stop, str) else tuple(filter(None, asked.stop or ()))
        seed = secrets.randbelow(2**63) if asked.seed is None else asked.seed
        self._jobs: list[Job] = []
        for prompt in prompts:
            app.check_prompt(prompt, most)
            for number in range(asked.n):
                sampling = (asked.temperature, asked.top_p, asked.top_k, (seed + number) % 2**63)
                self._jobs.append(Job(list(prompt), most, send, *sampling, stops, self._likeliest, owner))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have all prompts answered, and send the answers."""
        try:
            for job in self._jobs:
                self._app.engine.submit(job)
            if self._asked.stream:
                await StreamingResponse(self._events(), media_type="text/event-stream")(scope, receive, send)
            else:
                await JSONResponse(await self._whole(receive))(scope, receive, send)
        except BusyError as error:
            raise ApiError(429, str(error), "rate_limit_exceeded") from error
        finally:
            for job in self._jobs:
                self._app.engine.cancel(job)

    async def _parts(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yield the pieces of all answers as they come, with the answers' numbers."""
        unfinished = len(self._jobs)
        while unfinished:
            index, piece = await self._pieces.get()
            if piece.finish == "gone":
                raise ClientDisconnect
            if piece.finish == "error":
                raise ApiError(500, "the answer could not be computed; the server's log says why.")
            unfinished -= piece.finish is not None
            yield index, piece

    async def _whole(self, receive: Receive) -> dict[str, Any]:
        """Return all answers, unless the client goes away."""

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self._pieces.put_nowait((0, Piece(finish="gone")))

        watching, whole = asyncio.create_task(watch()), [Piece() for _ in self._jobs]
        try:
            async for index, piece in self._parts():
                text, tokens, _ = whole[index]
                whole[index] = Piece(text + piece.text, tokens + piece.tokens, piece.finish)
        finally:
            watching.cancel()
        choices = [self._choice(index, piece, "message") for index, piece in enumerate(whole)]
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def _events(self) -> AsyncIterator[str]:
        """Yield the answers as server-sent events."""
        try:
            async for index, piece in self._parts():
                yield _event({**self._head, "choices": [self._choice(index, piece, "delta")]})
        except ApiError as error:
            yield _event(error.body)
            return
        if (self._asked.stream_options or {}).get("include_usage"):
            yield _event({**self._head, "choices": [], "usage": self._usage()})
        yield "data: [DONE]\n\n"

    def _choice(self, index: int, piece: Piece, name: str) -> dict[str, Any]:
        content: dict[str, Any] = {"text": piece.text}
        if self._chat:
            content = {name: {"role": "assistant", "content": piece.text}}
        logprobs = None if self._likeliest is None else self._logprobs(piece.tokens)
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": piece.finish}

    def _usage(self) -> dict[str, Any]:
        new, prompts = sum(job.new for job in self._jobs), self._jobs[:: self._asked.n]
        read, cached = sum(len(job.tokens) - job.new for job in prompts), sum(job.cached for job in prompts)
        usage = {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}
        return {**usage, "prompt_tokens_details": {"cached_tokens": cached}}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        def entry(token: int, log_prob: float) -> dict[str, Any]:
            text = self._app.engine.tokenizer.decode([token])
            return {"token": text, "logprob": log_prob, "bytes": list(text.encode())}

        entries = [entry(each.token, each.log_prob) for each in tokens]
        likeliest = [[entry(*pair) for pair in each.likeliest] for each in tokens]
        if self._chat:
            return {"content": [{**one, "top_logprobs": some} for one, some in zip(entries, likeliest, strict=True)]}
        return {
            "tokens": [one["token"] for one in entries],
            "token_logprobs": [one["logprob"] for one in entries],
            "top_logprobs": [{one["token"]: one["logprob"] for one in some} for some in likeliest],
        }


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


async def _refuse(request: Request, error: Any) -> Response:
    """Return an error as OpenAI's object; a client that has gone reads none."""
    if isinstance(error, InputError):
        error = ApiError(400, str(error))
    elif isinstance(error, ClientDisconnect):
        error = ApiError(499, "the client has gone.")
    elif not isinstance(error, ApiError):
        error = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    return JSONResponse(error.body, status_code=error.status)
