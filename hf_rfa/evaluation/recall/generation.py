"""What a model writes, judged by the softmax model that it was made from.

A converted model can be near its teacher by likelihood and far from it when it generates (arXiv 2603.26556).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, set_seed

from .scoring import Rows, score_tokens


def continuations(
    model: PreTrainedModel, prompts: Tensor, new_tokens: int, *, seed: int | None = None, **options: Any
) -> Tensor:
    """Return ``new_tokens`` new tokens of every prompt [N, T], [N, new_tokens], whatever the model says of an end.

    They are the most likely ones, or with a seed drawn from the model's own distribution; options are those of `generate`.
    """
    if seed is not None:
        set_seed(seed)
        options |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    pad = model.generation_config.pad_token_id
    output = model.generate(  # type: ignore[operator]
        prompts.to(model.device),
        attention_mask=torch.ones_like(prompts, device=model.device),
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        pad_token_id=0 if pad is None else pad,
        do_sample=seed is not None,
        num_beams=1,
        repetition_penalty=1.0,
        **options,
    )
    return output[:, prompts.shape[1] :].cpu()


def agreement(one: Tensor, other: Tensor) -> float:
    """Return the mean number of tokens that two tensors [N, T] have in common from the start of their rows."""
    return float((one == other).long().cumprod(1).sum(1).double().mean())


def repeated_ngrams(ids: Tensor, n: int = 4) -> float:
    """Return the share of the n-grams of some rows [N, T] that occurred before in their row."""
    again = total = 0
    for row in ids.tolist():
        grams = [tuple(row[place : place + n]) for place in range(len(row) - n + 1)]
        again += len(grams) - len(set(grams))
        total += len(grams)
    return again / total


def nats_of(teacher: PreTrainedModel, prompts: Tensor, new: Tensor) -> float:
    """Return the mean negative log-likelihood per token that a model gives to continuations [N, T] of prompts."""
    ids = torch.cat([prompts, new], dim=1)
    return score_tokens(teacher, Rows(ids, (torch.arange(ids.shape[1]) >= prompts.shape[1]).expand_as(ids))).mean_nats
