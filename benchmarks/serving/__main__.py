"""Time to the first token by turn, and tokens per second by requests at once: `hf-rfa serve` beside `transformers serve`.

    python -m benchmarks.serving CHECKPOINT --output FILE.json

Both serve the same converted checkpoint, one after the other, and are asked by the openai client in one process: one
conversation whose turns have so many tokens each, then requests at once with answers of one length. transformers' server
reads a conversation from its beginning at every turn; of its turns only some are asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai

from ..figures import RowFile, print_as_is

SERVERS = {
    "hf-rfa serve": "-m hf_rfa_cli serve {checkpoint} --rows 32 --port {port} --session-folder {output}.sessions",
    "transformers serve": "examples/serve.py {checkpoint} --device cpu --port {port}",
}
WORDS = ["river", "stone", "light", "under", "garden", "window", "seven", "yellow"]


@contextmanager
def running(server: str, checkpoint: str, output: Path) -> Iterator[Any]:
    """Run a server; yield a client of it that answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [word.format(checkpoint=checkpoint, port=port, output=output) for word in SERVERS[server].split()]
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=3600, max_retries=0)
        yield client
    finally:
        process.terminate()
        process.wait()


async def wait_for(client: Any, checkpoint: str) -> None:
    """Wait until a server answers, and has answered once."""
    while True:
        try:
            await client.completions.create(model=checkpoint, prompt="a", max_tokens=1)
            return
        except openai.APIConnectionError:
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


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--turns", type=int, default=100, help="turns of the conversation")
    parser.add_argument("--words", type=int, default=180, help="words of a message")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32], help="requests at once")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of their answers")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    file = RowFile(options.output)

    async def measure(server: str, client: Any) -> None:
        await wait_for(client, options.checkpoint)
        for requests in options.requests:
            if not file.has({"server": server, "requests": requests}):
                speed = await at_once(client, options.checkpoint, requests, options.tokens)
                file.add({"server": server, "requests": requests, "tokens per second": speed})
        asked = list(range(1, options.turns + 1)) if server == "hf-rfa serve" else [2, options.turns]
        known = {row["turn"]: row["answer"] for row in file.rows if row["server"] == server and "turn" in row}
        async for row in turns(client, options.checkpoint, asked, options.words, known):
            file.add({"server": server, **row})

    for server in options.servers:
        with running(server, options.checkpoint, options.output) as client:
            asyncio.run(measure(server, client))
    for row in file.rows:
        print_as_is(", ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
