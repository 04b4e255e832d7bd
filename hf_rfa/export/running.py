"""Running an exported graph in onnxruntime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import torch
from onnxruntime import OrtValue
from torch import Tensor


class RunningGraph:
    """An exported graph and the states of a batch of texts.

    Args:
        path: the graph's file.
        batch: number of texts.
        threads: of onnxruntime; None for as many as torch has.
    """

    reads_prompts = True

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
