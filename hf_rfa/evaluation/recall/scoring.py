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
    """Return how well a model predicts the scored tokens of some rows.

    Args:
        model: a causal language model, softmax or RFA, in evaluation mode.
        rows: the tokens. Their logits are computed where a token is to be predicted, and nowhere else.

    Raises:
        InputError: if a likelihood is not finite.
    """
    embeddings: Any = model.get_input_embeddings()
    columns = int(rows.scored.any(0).sum())
    size = max(1, min(BATCH_TOKENS // rows.ids.shape[1], BATCH_LOGITS // (embeddings.num_embeddings * columns)))
    batches = zip(rows.ids.split(size), rows.scored.split(size), strict=True)
    scores = [_score_batch(model, ids, scored) for ids, scored in batches]
    nats, correct = (torch.cat(parts) for parts in zip(*scores, strict=True))
    if not bool(nats.isfinite().all()):
        raise InputError("the model's likelihoods are not finite: its weights or its dtype are at fault.")
    return TokenScores(nats, correct, rows.scored)


def _score_batch(model: PreTrainedModel, ids: Tensor, scored: Tensor) -> tuple[Tensor, Tensor]:
    """Return (nats, correct) of a batch, [N, T] each."""
    columns = scored.any(0).nonzero()[:, 0]  # [C]
    before = (columns - 1).to(model.device)
    logits = model(input_ids=ids.to(model.device), use_cache=False, logits_to_keep=before).logits  # [N, C, V]
    targets = ids[:, columns].to(logits.device)
    losses = torch.stack([nats_of_labels(*row) for row in zip(logits, targets, strict=True)])
    nats = torch.zeros(ids.shape, dtype=torch.float64)
    correct = torch.zeros(ids.shape, dtype=torch.bool)
    nats[:, columns], correct[:, columns] = losses.double().cpu(), (logits.argmax(-1) == targets).cpu()
    return nats.where(scored, 0.0), correct & scored
