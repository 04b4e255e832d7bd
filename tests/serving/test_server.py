"""OpenAI's interface, asked by the official client over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import openai
import psutil
import pytest
import uvicorn

from hf_rfa.serving.app import App, PartsTokenizer
from tests.conftest import words

KEYS = ["first-key", "second-key"]
MESSAGES: Any = [{"role": "user", "content": "w7 w8 w9"}]


class Server:
    """The application on a port of its own, and clients of it."""

    def __init__(self, engine: Any, **options: Any) -> None:
        self.engine = engine
        app = App(engine, "tiny", **options)
        self._server = uvicorn.Server(uvicorn.Config(app.asgi, port=0, log_level="warning"))
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def client(self, key: str = KEYS[0]) -> Any:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def post(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        headers = {"Authorization": f"Bearer {KEYS[0]}"}
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, body, headers), timeout=60) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture
def serve(client_of) -> Iterator[Callable[..., Server]]:
    servers = []

    def start(*, keys: Sequence[str] = (), limits: dict[str, int] | None = None, **options: Any) -> Server:
        servers.append(Server(client_of(**options).engine, keys=keys, **(limits or {})))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_official_client_is_answered(serve, loaded, client_of):
    server = serve(keys=KEYS)
    client, model = server.client(), client_of()
    tokenizer = loaded[1]
    assert [each.id for each in client.models.list()] == [client.models.retrieve("tiny").id] == ["tiny"]

    def expected(text: str, most: int, **options: Any) -> str:
        return tokenizer.decode(
            model.alone(tokenizer(text)["input_ids"][:-1], most, **options), skip_special_tokens=True
        )

    prompts = ["w7 w8", "w9"]
    whole = client.completions.create(model="tiny", prompt=prompts, max_tokens=9, temperature=0)
    assert [choice.text for choice in whole.choices] == [expected(prompt, 9) for prompt in prompts]
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 18)
    seeded = client.completions.create(model="tiny", prompt="w7", max_tokens=9, seed=5, n=2, top_p=0.9)
    texts = [expected("w7", 9, do_sample=True, top_p=0.9, top_k=0, seed=seed) for seed in (5, 6)]
    assert [choice.text for choice in seeded.choices] == texts

    said: Any = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 11}
    answer = client.chat.completions.create(**said)
    message = answer.choices[0].message.content
    assert message == expected("w5 w7 w8 w9 </s> w6", 11)
    assert answer.choices[0].finish_reason in ("length", "stop")
    parts = list(client.chat.completions.create(**said, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].delta.content for part in parts[:-1]) == message
    assert parts[-1].usage.prompt_tokens_details.cached_tokens == 5
    later = [*MESSAGES, {"role": "assistant", "content": message}, {"role": "user", "content": "w10"}]
    turn = client.chat.completions.create(**{**said, "messages": later})
    assert turn.usage.prompt_tokens_details.cached_tokens == 6 + 11 - 1
    other = server.client(KEYS[1]).chat.completions.create(**{**said, "messages": later})
    assert other.usage.prompt_tokens_details.cached_tokens == 0
    assert other.choices[0].message.content == turn.choices[0].message.content


def test_conversations_are_tokenized_part_by_part(loaded):
    tokenizer = loaded[1]
    tokenize = PartsTokenizer(tokenizer)
    whole = "w5 w7 w8 </s> w6 w9 </s> <s> w5 w10 </s>w6 "
    assert tokenize(whole) == tokenizer(whole, add_special_tokens=False)["input_ids"]
    remembered = tokenize._remembered.cache_info().currsize
    later = whole + "w12 </s> w5 w11"
    assert tokenize(later) == tokenizer(later, add_special_tokens=False)["input_ids"]
    assert tokenize._remembered.cache_info().currsize == remembered + 2


def test_stop_strings_and_log_probabilities(serve):
    client = serve().client()
    said: Any = {"model": "tiny", "prompt": "w7 w8", "max_tokens": 8, "temperature": 0}
    text = client.completions.create(**said).choices[0].text
    stop = text.split()[3]
    stopped = client.completions.create(**said, stop=[stop]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text[: text.find(stop)], "stop")
    found = client.completions.create(**said, logprobs=2).choices[0].logprobs
    assert " ".join(found.tokens) == text
    assert [max(each.values()) for each in found.top_logprobs] == found.token_logprobs
    chat = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=3, logprobs=True, top_logprobs=2)
    assert [len(each.top_logprobs) for each in chat.choices[0].logprobs.content] == [2, 2, 2]


def test_what_cannot_be_answered_gets_an_error_object(serve):
    server = serve(keys=KEYS, limits={"most_prompt": 40, "most_answer": 20, "most_bytes": 2000})
    with pytest.raises(openai.AuthenticationError, match="none of its keys"):
        server.client("first-kez").models.list()
    with pytest.raises(openai.NotFoundError, match="no model 'other', only 'tiny'"):
        server.client().completions.create(model="other", prompt="w7")
    said: Any = {"model": "tiny", "prompt": "w7"}
    for change, message in (
        ({"prompt": [99]}, "token 99, but the model's vocabulary has 61"),
        ({"prompt": [[]]}, "the prompt is empty"),
        ({"prompt": ""}, "at least 1 item"),
        ({"prompt": words(41)}, "the prompt has 41 tokens, and this server reads 40"),
        ({"max_tokens": 21}, "an answer has 20 tokens at most here"),
        ({"temperature": -1}, "temperature: Input should be greater than or equal to 0"),
        ({"suffix": "w8"}, "suffix: Input should be null"),
        ({"frequency_penalty": 0.5}, "frequency_penalty: Input should be 0"),
    ):
        with pytest.raises(openai.BadRequestError, match=message) as error:
            server.client().completions.create(**{**said, **change})
        assert error.value.body["type"] == "invalid_request_error"
    assert server.post("/v1/completions", b"{")[0] == 400
    assert server.post("/v1/completions", b" " * 2001)[0] == 413
    status, body = server.post("/v1/nothing", b"{}")
    assert (status, body["error"]["type"]) == (404, "invalid_request_error")
    assert server.engine.requests == 0


def test_clients_that_go_away_free_their_rows(serve, monkeypatch):
    server = serve(limits={"most_answer": 400_000}, rows=1, most_requests=2)
    monkeypatch.setattr(server.engine.model.generation_config, "suppress_tokens", [0, 1, 2, 3])  # no answer ends
    said: Any = {"model": "tiny", "prompt": "w7", "max_tokens": 400_000, "temperature": 0}
    stream = server.client().completions.create(**said, stream=True)
    next(stream)
    with pytest.raises(openai.APITimeoutError):
        server.client().with_options(timeout=0.3).completions.create(**said)
    wait_for(lambda: server.engine.requests == 1)
    waiting = server.client().completions.create(**said, stream=True)
    wait_for(lambda: server.engine.requests == 2)
    waiting.close()
    wait_for(lambda: server.engine.requests == 1)
    streams = [stream, server.client().completions.create(**said, stream=True)]
    with pytest.raises(openai.RateLimitError, match="there are 2 requests already"):
        server.client().completions.create(**said)
    for each in streams:
        each.close()
    wait_for(lambda: server.engine.requests == 0)


@pytest.mark.slow
def test_two_hundred_clients_of_whom_many_go_away(serve, client_of, tmp_path, record_property):
    """No answer is wrong, no row is lost, and memory stays as it is: for a minute, or for HF_RFA_LOAD_SECONDS."""
    alone, drawn = client_of(), random.Random(0)
    prompts = [[drawn.randrange(4, 61) for _ in range(drawn.choice([1, 5, 20, 60]))] for _ in range(20)]
    expected = [alone.alone(prompt, 12) for prompt in prompts]
    server = serve(rows=8, most_requests=256, memory=2**20, disk=2**22, folder=tmp_path / "sessions")
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600)
    seconds = float(os.environ.get("HF_RFA_LOAD_SECONDS", 75))
    decode, end, counts = alone.engine.tokenizer.decode, time.monotonic() + seconds, Counter[str]()
    memory: list[int] = []

    async def visit(chance: random.Random) -> None:
        while time.monotonic() < end:
            number = chance.randrange(len(prompts))
            said: Any = {"model": "tiny", "prompt": prompts[number], "max_tokens": 12, "temperature": 0}
            if chance.random() < 0.3:
                with suppress(TimeoutError, asyncio.TimeoutError):
                    await asyncio.wait_for(client.completions.create(**said), chance.random())
                counts["gone"] += 1
                continue
            text, leaves = "", chance.random() < 0.3
            stream = await client.completions.create(**said, stream=True)
            async for part in stream:
                text += part.choices[0].text
                if leaves and chance.random() < 0.2:
                    break
            else:
                assert text == decode(expected[number], skip_special_tokens=True)
                counts["answered"] += 1
            await stream.close()

    async def watch() -> None:
        while time.monotonic() < end:
            await asyncio.sleep(5)
            memory.append(psutil.Process().memory_info().rss)

    async def everybody() -> None:
        await asyncio.gather(watch(), *(visit(random.Random(number)) for number in range(200)))

    asyncio.run(everybody())
    record_property("counts", dict(counts))
    record_property("megabytes", [round(each / 2**20) for each in memory])
    wait_for(lambda: server.engine.requests == 0)
    assert len(server.engine._rows) == 0
    assert min(counts["answered"], counts["gone"]) > 50
    assert max(memory[5:]) < 1.05 * max(memory[:5])
