"""Losses of distillation whose gradients are computed at once, so that little of a graph is held."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

#: Logits whose probabilities are held at once, in float32.
CHUNK_LOGITS = 2**23


class _LogitDivergence(torch.autograd.Function):
    """Computes the gradient, softmax(logits) − softmax(expected), along with the loss, a few rows at a time."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, expected: Tensor) -> Tensor:
        rows = max(1, CHUNK_LOGITS // logits.shape[-1])
        total, gradient = torch.zeros((), device=logits.device), torch.empty_like(logits)
        chunks = zip(logits.split(rows), expected.split(rows), gradient.split(rows), strict=True)
        for ours, theirs, place in chunks:
            found, wanted = (each.float().log_softmax(-1) for each in (ours, theirs))
            likely = wanted.exp()
            total += (likely * (wanted - found)).sum()
            place.copy_(found.exp_().sub_(likely).div_(logits.shape[0]))
        ctx.save_for_backward(gradient)
        return total / logits.shape[0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0].to(gradient.dtype), None


def logit_divergence(logits: Tensor, expected: Tensor) -> Tensor:
    """Return the mean KL(softmax(expected) ‖ softmax(logits)) of rows, in nats, float32.

    A vocabulary's probabilities are never held for all rows, which would take several times the memory of the logits.

    Args:
        logits: the student's, [N, vocabulary], in any floating dtype. Their gradient has it too.
        expected: the teacher's, [N, vocabulary]; they get no gradient.
    """
    return _LogitDivergence.apply(logits, expected)


class _EarlyGradient(torch.autograd.Function):
    """Is a loss whose gradients are known."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: Sequence[Tensor | None], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = grad_outputs
        return None, None, *(None if each is None else each * scale.to(each.dtype) for each in ctx.gradients)


def early_gradient(loss: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return a loss with the gradients that it has now, in place of its graph, whose memory is free after this.

    A sum of such losses has the gradients of the sum, and holds the graph of one of them at a time.

    Args:
        loss: a scalar. One without a graph is returned as it is.
        parameters: leaves that may get gradients. All others get none.
    """
    if not loss.requires_grad:
        return loss
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return _EarlyGradient.apply(loss.detach(), gradients, *parameters)
