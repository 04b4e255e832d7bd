"""Time to the first token by turn, and tokens per second by requests at once: `hf-rfa serve` beside two other servers.

    python -m benchmarks.serving CHECKPOINT --output FILE.json [--gguf MODEL.gguf] [--asleep 1000]

With --asleep, what `hf-rfa serve` takes for so many conversations that nobody goes on with, and the time to go on with one.
transformers' server has the same converted checkpoint, and llama.cpp (`llama_cpp.py`) the base model in a GGUF file. They are
asked one after the other by the openai client in one process: requests at once with answers of one length, then one
conversation whose turns have so many tokens each. transformers' server reads a conversation from its beginning at every
turn, so that only some of its turns are asked for. llama.cpp reads on, as far as the model has positions.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import psutil

from ..figures import RowFile, print_as_is

SERVERS = {
    "hf-rfa serve": (
        "-m hf_rfa_cli serve {checkpoint} --rows 32 --port {port} --session-folder {output}.sessions --session-disk 20000"
    ),
    "transformers serve": "examples/serve.py {checkpoint} --device cpu --port {port}",
    "llama.cpp": "-m benchmarks.serving.llama_cpp {gguf} --port {port}",
}
WORDS = ["river", "stone", "light", "under", "garden", "window", "seven", "yellow"]


@contextmanager
def running(server: str, checkpoint: str, output: Path, gguf: Path | None) -> Iterator[tuple[Any, int]]:
    """Run a server; yield a client of it, and its process's number."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fields = {"checkpoint": checkpoint, "port": port, "output": output, "gguf": gguf}
    words = [word.format(**fields) for word in SERVERS[server].split()]
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=3600, max_retries=0)
        yield client, process.pid
    finally:
        process.terminate()
        process.wait()


async def wait_for(client: Any, checkpoint: str) -> None:
    """Wait until a server answers, and has answered once."""
    while True:
        try:
            await client.completions.create(model=checkpoint, prompt="a", max_tokens=1)
            return
        except (openai.APIConnectionError, openai.InternalServerError):  # llama.cpp listens while it loads
            await asyncio.sleep(0.5)


def message(turn: int, words: int) -> str:
    """Return what a user says in a turn."""
    return " ".join(WORDS[(turn * 7 + n * n + n // 3) % len(WORDS)] for n in range(words))


async def turns(
    client: Any, checkpoint: str, asked: list[int], words: int, known: dict[int, str]
) -> AsyncIterator[dict[str, Any]]:
    """Yield the seconds to the first token of some turns of one conversation, and the answers.

    What is ``known`` is not asked again; turns that are not asked for have an answer of one word.
    """
    messages: list[dict[str, str]] = []
    for turn in range(1, max(asked) + 1):
        messages.append({"role": "user", "content": message(turn, words)})
        text = known.get(turn, "Yes.")
        if turn in asked and turn not in known:
            start, first, text = time.perf_counter(), 0.0, ""
            options: dict[str, Any] = {"model": checkpoint, "messages": messages, "max_tokens": 2, "temperature": 0}
            async for part in await client.chat.completions.create(**options, stream=True):
                if part.choices and part.choices[0].delta.content:
                    first = first or time.perf_counter() - start
                    text += part.choices[0].delta.content
            seconds = first or time.perf_counter() - start  # an answer may end at once
            yield {"turn": turn, "seconds": seconds, "answer": text}
        messages.append({"role": "assistant", "content": text})


async def at_once(client: Any, checkpoint: str, requests: int, tokens: int) -> float:
    """Return the tokens per second of so many requests at once."""
    options: dict[str, Any] = {"model": checkpoint, "max_tokens": tokens, "temperature": 0}
    start = time.perf_counter()
    answers = await asyncio.gather(
        *(client.completions.create(prompt=message(n, 12), **options) for n in range(requests))
    )
    return sum(answer.usage.completion_tokens for answer in answers) / (time.perf_counter() - start)


async def asleep(client: Any, checkpoint: str, conversations: int, folder: Path, pid: int) -> dict[str, Any]:
    """Return the bytes of so many conversations, and the seconds to the first token of some that go on, or are new.

    Their length does not matter: each is one token. Going on reads 20 more; what is read from the disk is in no page cache.
    """
    options: dict[str, Any] = {"model": checkpoint, "temperature": 0}

    def resident() -> int:
        return psutil.Process(pid).memory_info().rss

    async def seconds(number: int, cached: int) -> float:
        start = time.perf_counter()
        said = {"prompt": [number, *range(100, 120)], "max_tokens": 2, "stream_options": {"include_usage": True}}
        parts = await client.completions.create(**said, **options, stream=True)
        await anext(parts)
        first = time.perf_counter() - start
        last = [part async for part in parts][-1]
        assert last.usage.prompt_tokens_details.cached_tokens == cached
        return first

    before, numbers = resident(), range(1000, 1000 + conversations)
    for start in range(0, conversations, 8):
        eight = numbers[start : start + 8]
        await asyncio.gather(*(client.completions.create(prompt=[each], max_tokens=1, **options) for each in eight))
    paths = list(folder.glob("*.memory"))
    row: dict[str, Any] = {"asleep": conversations, "resident before": before, "resident": resident()}
    row |= {"files": len(paths), "bytes of files": sum(path.stat().st_size for path in paths)}
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    for name, some, cached in (
        ("from memory", numbers[-20:], 1),
        ("from disk", numbers[:20], 1),
        ("new", range(200, 220), 0),
    ):
        row[name] = round(statistics.median([await seconds(number, cached) for number in some]), 3)
    return row


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--turns", type=int, default=100, help="turns of the conversation")
    parser.add_argument("--words", type=int, default=180, help="words of a message")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32], help="requests at once")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of their answers")
    parser.add_argument("--asleep", type=int, help="conversations that sleep, instead of all else")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS)[:2])
    parser.add_argument("--gguf", type=Path, help="the base model, for llama.cpp")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    file = RowFile(options.output)

    async def measure(server: str, client: Any) -> None:
        await wait_for(client, options.checkpoint)
        for requests in options.requests:
            if not file.has({"server": server, "requests": requests}):
                speed = await at_once(client, options.checkpoint, requests, options.tokens)
                file.add({"server": server, "requests": requests, "tokens per second": speed})
        asked = [2, options.turns] if server == "transformers serve" else list(range(1, options.turns + 1))
        known = {row["turn"]: row["answer"] for row in file.rows if row["server"] == server and "turn" in row}
        async for row in turns(client, options.checkpoint, asked, options.words, known):
            file.add({"server": server, **row})

    async def sleep(client: Any, pid: int) -> None:
        await wait_for(client, options.checkpoint)
        folder = options.output.with_name(f"{options.output.name}.sessions")
        file.add({"server": "hf-rfa serve", **await asleep(client, options.checkpoint, options.asleep, folder, pid)})

    for server in options.servers if options.asleep is None else ["hf-rfa serve"]:
        with running(server, options.checkpoint, options.output, options.gguf) as (client, pid):
            asyncio.run(measure(server, client) if options.asleep is None else sleep(client, pid))
    for row in file.rows:
        print_as_is(", ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
