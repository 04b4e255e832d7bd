"""The divergence of logits, of which little is held for the backward pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

#: Logits whose probabilities are held at once, in float32.
CHUNK_LOGITS = 2**21


def logit_divergence(logits: Tensor, expected: Tensor) -> Tensor:
    """Return the mean KL(softmax(expected) ‖ softmax(logits)) of rows, in nats, float32.

    A vocabulary's probabilities are never held for all rows, which would take several times the memory of the logits: the
    backward pass computes them again, a few rows at a time.

    Args:
        logits: the student's, [N, vocabulary], in any floating dtype. Their gradient has it too.
        expected: the teacher's, [N, vocabulary]; they get no gradient.
    """
    rows = max(1, CHUNK_LOGITS // logits.shape[-1])
    chunks = zip(logits.split(rows), expected.split(rows), strict=True)
    sums = [checkpoint(_summed_divergence, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return torch.stack(sums).sum() / len(logits)


def _summed_divergence(logits: Tensor, expected: Tensor) -> Tensor:
    """Return the sum of the rows' divergences."""
    log_probs, expected_log_probs = (rows.float().log_softmax(-1) for rows in (logits, expected))
    return F.kl_div(log_probs, expected_log_probs, reduction="sum", log_target=True)
