"""The figures of an export: how a graph compares with its model, and what it takes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

#: Tokens that the model and its graph are compared on, and those of a prompt that is timed.
COMPARED, PROMPT = 96, 256


class Running(Protocol):
    """What runs in another runtime, and the states of its text.

    Attributes:
        reads_prompts: whether many tokens are read at once.
    """

    reads_prompts: bool

    def begin(self) -> None:
        """Begin a new text."""

    def read(self, ids: Tensor) -> Tensor:
        """Return the logits [1, vocabulary] of the last of some more tokens [1, T]."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """How a graph compares with its model in torch, on a text that the model wrote.

    Attributes:
        difference: largest difference of two logits, over the largest logit.
        same_top: share of tokens whose most likely successor is the same.
        perplexity: the graph's perplexity over torch's.
        split_difference: the same as ``difference``, of a text read at once and read token by token; None for what reads one
            token at a time.
        step_ms: milliseconds of a step, the median.
        prompt_ms: milliseconds a token of a prompt of `PROMPT` tokens, or None.
    """

    difference: float
    same_top: float
    perplexity: float
    split_difference: float | None
    step_ms: float
    prompt_ms: float | None


@dataclass(frozen=True, kw_only=True)
class ExportReport(Measured):
    """The figures of an export.

    Attributes:
        source: the checkpoint.
        destination: the folder.
        int8: whether the weights are of 8 bits.
        num_bytes: bytes of the graph and its weights.
        state_bytes: bytes of the states of one text, of any length.
    """

    source: str
    destination: str
    int8: bool
    num_bytes: int
    state_bytes: int

    def rows(self) -> list[tuple[str, str]]:
        """Return the figures for people."""
        prompt = "" if self.prompt_ms is None else f"; {self.prompt_ms:.1f} ms in a prompt"
        rows = [
            ("graph and weights", f"{self.num_bytes / 1e6:.1f} MB, {'8 bits' if self.int8 else 'float32'}"),
            ("states of one text, of any length", f"{self.state_bytes / 1e6:.2f} MB"),
            ("a token", f"{self.step_ms:.1f} ms{prompt}"),
            ("largest difference of logits from torch's", f"{self.difference:.1e} of the largest"),
            ("same most likely token", f"{self.same_top:.1%}"),
            ("perplexity over torch's", f"{self.perplexity:.4f}"),
        ]
        if self.split_difference is not None:
            rows.append(
                ("difference between a text at once and by token", f"{self.split_difference:.1e} of the largest")
            )
        return rows


@torch.no_grad()
def measure(model: Any, running: Running) -> Measured:
    """Compare a model with what runs in its place, on a text that the model writes, and time that."""
    first = next((token for token in (model.config.bos_token_id, model.config.eos_token_id) if type(token) is int), 0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        ids = model.generate(
            torch.tensor([[first]]), do_sample=True, min_new_tokens=COMPARED, max_new_tokens=COMPARED, top_k=0
        )
    expected = model(ids).logits[0]
    steps, times = [], []
    for token in ids.split(1, dim=1):
        start = time.perf_counter()
        steps.append(running.read(token))
        times.append(time.perf_counter() - start)
    found = torch.cat(steps)
    largest, split_difference, prompt_ms = expected.abs().max(), None, None
    if running.reads_prompts:
        running.begin()
        split_difference = float((running.read(ids)[0] - found[-1]).abs().max() / largest)
        prompt = ids.repeat(1, -(-PROMPT // ids.shape[1]))[:, :PROMPT]
        running.begin()
        start = time.perf_counter()
        running.read(prompt)
        prompt_ms = 1e3 * (time.perf_counter() - start) / PROMPT
    loss, loss_expected = (F.cross_entropy(logits[:-1], ids[0, 1:]) for logits in (found, expected))
    return Measured(
        difference=float((found - expected).abs().max() / largest),
        same_top=float((found.argmax(-1) == expected.argmax(-1)).float().mean()),
        perplexity=float((loss - loss_expected).exp()),
        split_difference=split_difference,
        step_ms=1e3 * median(times),
        prompt_ms=prompt_ms,
    )
