"""How well a causal language model predicts chosen tokens of rows that it reads once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_rfa.errors import InputError
from hf_rfa.evaluation.perplexity import nats_of_labels

#: Tokens that a model reads at once, unless a row alone is longer.
BATCH_TOKENS = 4096
#: Logits that are held at once, unless those of a row alone are more.
BATCH_LOGITS = 2**26


@dataclass(frozen=True)
class Rows:
    """Sequences of tokens, and which of them a model has to predict from those before.

    Attributes:
        ids: token ids, [N, T], padded at the end with any id.
        scored: [N, T], True for the tokens to be predicted; never the first of a row.
    """

    ids: Tensor
    scored: Tensor


@dataclass(frozen=True)
class TokenScores:
    """Predictions of tokens, [N, T] each; what was not to be scored is 0.

    Attributes:
        nats: negative log-likelihood, float64.
        correct: whether the token is the most likely one.
        scored: which tokens were to be predicted.
    """

    nats: Tensor
    correct: Tensor
    scored: Tensor

    @property
    def accuracy(self) -> float:
        """Share of the tokens predicted correctly."""
        return float(self.correct.sum() / self.scored.sum())

    @property
    def mean_nats(self) -> float:
        """Mean negative log-likelihood per token."""
        return float(self.nats.sum() / self.scored.sum())

    def answers(self) -> TokenScores:
        """Return the scores of rows as wholes, [N, 1]: correct are those that greedy decoding would complete."""
        parts = self.nats.sum(1), (self.correct | ~self.scored).all(1), self.scored.any(1)
        return TokenScores(*(part[:, None] for part in parts))


@torch.no_grad()
def score_tokens(model: PreTrainedModel, rows: Rows) -> TokenScores:
    """Return how well a causal model, in evaluation mode, predicts the scored tokens of some rows.

    Logits are computed where a token is to be predicted, and nowhere else.

    Raises:
        InputError: if a likelihood is not finite.
    """
    embeddings: Any = model.get_input_embeddings()
    columns = rows.scored.any(0).nonzero()[:, 0]  # [C]
    size = max(1, min(BATCH_TOKENS // rows.ids.shape[1], BATCH_LOGITS // (embeddings.num_embeddings * len(columns))))
    nats, correct = torch.zeros(rows.ids.shape, dtype=torch.float64), torch.zeros_like(rows.scored)
    for first in range(0, len(rows.ids), size):
        ids = rows.ids[first : first + size].to(model.device)
        before = (columns - 1).to(model.device)
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=before).logits  # [N, C, V]
        targets = ids[:, before + 1]
        losses = torch.stack([nats_of_labels(*row) for row in zip(logits, targets, strict=True)])
        nats[first : first + size, columns] = losses.double().cpu()
        correct[first : first + size, columns] = (logits.argmax(-1) == targets).cpu()
    nats = nats.where(rows.scored, 0.0)
    if not bool(nats.isfinite().all()):
        raise InputError("the model's likelihoods are not finite: its weights or its dtype are at fault.")
    return TokenScores(nats, correct & rows.scored, rows.scored)
