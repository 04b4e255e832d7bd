"""Correct the output projections of layers for what their attention loses, in closed form.

What a layer does not see changes the outputs p of its heads, and part of the change is a linear function of p. The weight W
of the projection after them takes that part up,

    W ← W + argmin_Δ Σ ‖W o − (W + Δ) p‖² + ridge · tr(Σ p pᵀ) / width · ‖Δ‖²

with the heads' outputs o in the softmax model, and sums over the tokens of a text. Both have the layer's inputs in that
model. A bias is corrected too. The ridge is the one of a grid with the least error on the text's last rows; a layer
that none of them helps there stays as it is. The same least squares correct what is left of a pruned layer (Frantar and
Alistarh 2022, arXiv 2208.11580).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_rfa.models.attention import RFAAttentionMixin

from .activations import LayerInputs, LinearOutput, layer_output
from .calibration_data import SCORED_TOKENS
from .offload import keep_in_memory

#: Ridge penalties that are tried, relative to the mean square of an input.
RIDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
#: Share of the rows that is held out.
HELD_OUT = 1 / 8


@dataclass(frozen=True)
class OutputCorrection:
    """What is added to the output projection of a layer.

    Attributes:
        projection: name of the projection in the model.
        weight: [outputs, inputs], in float32.
        bias: [outputs], or None where the projection has none.
        error_ratio: squared error of its outputs on held-out rows with it, relative to that without it.
    """

    projection: str
    weight: Tensor
    bias: Tensor | None
    error_ratio: float


class _Regression:
    """Sums over the rows of a regression, in float64: all that its solution and its error depend on."""

    def __init__(self, inputs: int, outputs: int, device: torch.device) -> None:
        self.squares = torch.zeros(inputs, inputs, dtype=torch.float64, device=device)
        self.products = torch.zeros(inputs, outputs, dtype=torch.float64, device=device)
        self.total = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, inputs: Tensor, targets: Tensor) -> None:
        """Add inputs [n, I] and targets [n, O]."""
        self.squares += (inputs.T @ inputs).double()
        self.products += (inputs.T @ targets).double()
        self.total += targets.square().sum().double()

    def solve(self, penalty: Tensor) -> Tensor:
        """Return the solution [I, O] with a ridge penalty per input, [I]."""
        return torch.linalg.solve(self.squares + penalty.diag(), self.products)

    def error(self, solution: Tensor) -> float:
        """Return the sum of the squares that a solution leaves."""
        return float(self.total - 2 * (solution * self.products).sum() + (solution * (self.squares @ solution)).sum())


@torch.no_grad()
def correct_output(
    name: str, layer: RFAAttentionMixin, inputs: LayerInputs, masks: dict[str, Tensor | None], expected: LinearOutput
) -> OutputCorrection | None:
    """Return the correction of a layer's output projection, or None if no ridge lowers the error on the held-out rows.

    Args:
        name: of the layer in the model.
        layer: the RFA layer, calibrated.
        inputs: its inputs in the softmax model.
        masks: those of that model's inputs (`hf_rfa.convert.activations.padding_masks`).
        expected: what the softmax layer's projection makes of them, [N, T, width].
    """
    count, length, width = expected.output.shape
    fitted = count - math.ceil(count * HELD_OUT)
    linear = layer.get_submodule(expected.module)
    if not fitted or not isinstance(linear, nn.Linear | Conv1D):
        return None
    mask = masks["encoder" if layer.rfa_kind == "encoder" else "causal"]
    has_bias = linear.bias is not None
    size = (linear.nx if isinstance(linear, Conv1D) else linear.in_features) + has_bias
    parts = [_Regression(size, width, expected.output.device) for _ in range(2)]  # to fit, and held out
    passed: list[Tensor] = []
    step = max(1, SCORED_TOKENS // length)
    starts = [*range(0, fitted, step), *range(fitted, count, step), count]
    with linear.register_forward_hook(lambda module, args, output: passed.extend((args[0], output))):
        for start, end in pairwise(starts):
            rows = slice(start, end)
            layer_output(layer, inputs.rows(rows), {kind: None if x is None else x[rows] for kind, x in masks.items()})
            heads, output = (tensor.float() for tensor in passed)
            passed.clear()
            is_token = slice(None) if mask is None else mask[rows]
            errors = (expected.output[rows].float() - output)[is_token].reshape(-1, width)
            heads = F.pad(heads, (0, 1), value=1.0) if has_bias else heads
            parts[start >= fitted].add(heads[is_token].reshape(-1, size), errors)
    to_fit, held_out = parts
    penalty = to_fit.squares.diagonal().clone()
    penalty[size - has_bias :] = 0.0  # the bias has none
    penalty[: size - has_bias] = penalty.sum() / (size - has_bias)
    if not float(penalty.sum()) or not float(held_out.total):
        return None
    errors_left = {ridge: held_out.error(to_fit.solve(ridge * penalty)) for ridge in RIDGES}
    best = min(RIDGES, key=errors_left.__getitem__)
    ratio = errors_left[best] / float(held_out.total)
    if not ratio < 1.0:
        return None
    solution = to_fit.solve(best * penalty).float()
    weight, bias = (solution[:-1], solution[-1]) if has_bias else (solution, None)
    return OutputCorrection(f"{name}.{expected.module}", weight.T, bias, ratio)


@torch.no_grad()
def apply_corrections(model: PreTrainedModel, corrections: Iterable[OutputCorrection]) -> set[str]:
    """Correct the output projections of a model's layers, and return the names of the tensors that changed.

    The tensors are new ones: models that share the old ones keep them.
    """
    changed = set()
    for correction in corrections:
        linear = model.get_submodule(correction.projection)
        keep_in_memory(linear)
        additions = {"weight": correction.weight.T if isinstance(linear, Conv1D) else correction.weight}
        additions |= {} if correction.bias is None else {"bias": correction.bias}
        for field, addition in additions.items():
            before = getattr(linear, field)
            after = (before.float() + addition.to(before.device)).to(before.dtype)
            setattr(linear, field, nn.Parameter(after, requires_grad=before.requires_grad))
            changed.add(f"{correction.projection}.{field}")
    return changed
