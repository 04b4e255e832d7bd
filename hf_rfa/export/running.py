"""Running an exported graph in onnxruntime, and what it is measured by."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnxruntime
import torch
import torch.nn.functional as F
from onnxruntime import OrtValue
from torch import Tensor

from .figures import Measured

#: Tokens that the model and its graph are compared on, and those of a prompt that is timed.
COMPARED, PROMPT = 96, 256


class Running:
    """An exported graph and the states of a batch of texts.

    Args:
        path: the graph's file.
        batch: number of texts.
        threads: of onnxruntime; None for as many as torch has.
    """

    def __init__(self, path: Path, batch: int = 1, threads: int | None = None) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or torch.get_num_threads()
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.names = [value.name for value in self.session.get_inputs()]
        self.begin(batch)

    def begin(self, batch: int = 1) -> None:
        """Begin new texts."""
        shapes = [[batch, *value.shape[1:]] for value in self.session.get_inputs()[2:]]
        self.states = [
            OrtValue.ortvalue_from_numpy(np.zeros([size if isinstance(size, int) else 0 for size in shape], np.float32))
            for shape in shapes
        ]

    def read(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the logits [B, vocabulary] of the last of some more tokens [B, T]; ``mask`` is 0 for padding."""
        mask = torch.ones_like(ids) if mask is None else mask
        given = [*(OrtValue.ortvalue_from_numpy(tensor.contiguous().numpy()) for tensor in (ids, mask)), *self.states]
        found = self.session.run_with_ort_values(None, dict(zip(self.names, given, strict=True)))
        logits, *self.states = found
        return torch.from_numpy(logits.numpy()[:, -1])


@torch.no_grad()
def measure(model: Any, path: Path) -> Measured:
    """Compare a model with its graph in a file, and time the graph."""
    first = next((token for token in (model.config.bos_token_id, model.config.eos_token_id) if type(token) is int), 0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        ids = model.generate(
            torch.tensor([[first]]), do_sample=True, min_new_tokens=COMPARED, max_new_tokens=COMPARED, top_k=0
        )
    expected = model(ids).logits[0]
    running, steps, times = Running(path), [], []
    for token in ids.split(1, dim=1):
        start = time.perf_counter()
        steps.append(running.read(token))
        times.append(time.perf_counter() - start)
    found = torch.cat(steps)
    running.begin()
    at_once = running.read(ids)[0]
    prompt = ids.repeat(1, -(-PROMPT // ids.shape[1]))[:, :PROMPT]
    running.begin()
    start = time.perf_counter()
    running.read(prompt)
    prompt_ms = 1e3 * (time.perf_counter() - start) / PROMPT
    largest = expected.abs().max()
    loss, loss_expected = (F.cross_entropy(logits[:-1], ids[0, 1:]) for logits in (found, expected))
    return Measured(
        difference=float((found - expected).abs().max() / largest),
        same_top=float((found.argmax(-1) == expected.argmax(-1)).float().mean()),
        perplexity=float((loss - loss_expected).exp()),
        split_difference=float((at_once - found[-1]).abs().max() / largest),
        step_ms=1e3 * median(times),
        prompt_ms=prompt_ms,
    )
