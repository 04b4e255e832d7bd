"""A tiny converted decoder with a chat template, and an engine that runs it."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import set_seed

from hf_rfa.inference import load_model
from hf_rfa.serving.engine import Engine, Request
from hf_rfa.serving.sessions import Sessions
from tests.conftest import save_tiny_tokenizer
from tests.families import RETRIEVAL, WITHOUT_END, make

#: A turn is a word for the role, the words of the message, and the end token.
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' %}w4{% elif message.role == 'user' %}w5{% else %}w6"
    "{% endif %} {{ message.content }} </s> {% endfor %}{% if add_generation_prompt %}w6 {% endif %}"
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A checkpoint that reads texts without end: a summary, slots, retrieval heads, and old tokens that move along."""
    folder = tmp_path_factory.mktemp("served") / "llama"
    fields = {**WITHOUT_END, **RETRIEVAL, "feature_map": "summary", "num_features": 3}
    model = make("llama", fields, eos_token_id=2, pad_token_id=1)
    model.generation_config.update(eos_token_id=2, pad_token_id=1, suppress_tokens=[0, 1, 3])
    model.save_pretrained(folder)
    save_tiny_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def loaded(folder) -> tuple[Any, Any]:
    """The model and its tokenizer."""
    return load_model(str(folder))


class Client:
    """Asks an engine, and says what `generate` would have answered."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.model = engine, engine.model

    def ask(self, tokens: list[int], most: int = 12, **options: Any) -> tuple[Request, queue.Queue]:
        pieces: queue.Queue = queue.Queue()
        request = Request(list(tokens), most, lambda _, piece: pieces.put(piece), **{"temperature": 0, **options})
        self.engine.submit(request)
        return request, pieces

    @staticmethod
    def answer(asked: tuple[Request, queue.Queue]) -> list[int]:
        request, pieces = asked
        while (piece := pieces.get(timeout=60)).finish is None:
            pass
        assert piece.finish in ("stop", "length")
        return request.tokens[-request.new :]

    def alone(self, tokens: list[int], most: int = 12, seed: int = 0, **options: Any) -> list[int]:
        ids = torch.tensor([tokens])
        set_seed(seed)
        wanted = {"max_new_tokens": most, "do_sample": False, "pad_token_id": 1, **options}
        return self.model.generate(ids, attention_mask=torch.ones_like(ids), **wanted)[0, len(tokens) :].tolist()


@pytest.fixture
def client_of(loaded) -> Iterator[Callable[..., Client]]:
    """A function that starts an engine: it takes the model if it is another one, and what `Sessions` and `Engine` take."""
    engines = []

    def start(
        model: Any = None, *, rows: int = 3, piece_length: int = 16, most_requests: int = 64, **kept: Any
    ) -> Client:
        model = loaded[0] if model is None else model
        sessions = Sessions(model, **{"memory": 2**30, "disk": 2**30, **kept})
        sizes = {"rows": rows, "piece_length": piece_length, "most_requests": most_requests}
        engines.append(Engine(model, loaded[1], sessions, **sizes))
        return Client(engines[-1])

    yield start
    for engine in engines:
        engine.close()
