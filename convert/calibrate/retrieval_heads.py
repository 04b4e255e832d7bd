"""Choose retrieval heads: those of which exact attention to all tokens tells the model most of what stood far back.

Copying, and finding a fact again, is the work of few heads (Wu et al. 2024, arXiv 2404.15574; Xiao et al. 2025, DuoAttention,
arXiv 2410.10819). They are found on texts that repeat themselves: the end of a block is made of passages from its beginning.
Head h of the converted model is given a share α_h of exact attention,

    y_h = (1 − α_h) y_h^converted + α_h y_h^softmax,

and ∂/∂α_h of KL(softmax model ‖ converted model) on the repeated passages says what the head would gain. The head of the
steepest descent becomes a retrieval head, α_h = 1, and the next is chosen with it in place: heads that copy do so one after
the other, and what a head is worth depends on those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from hf_rfa.errors import InputError
from hf_rfa.models.attention import RFAAttentionMixin
from hf_rfa.models.exact_attention import read_tokens
from hf_rfa.models.masking import group_queries, ungroup
from hf_rfa.process_memory import give_back_memory

from ..checkpoint.base_model import rfa_layers
from ..inputs import Inputs

#: Passages at the end of a block, and their length as a share of it.
PASSAGES, PASSAGE_SHARE = 3, 3 / 32
#: Share of a passage that says which one it is, and is not scored.
PROMPT_SHARE = 1 / 6


@dataclass(frozen=True)
class RetrievalHeads:
    """Retrieval heads, and what they change.

    Attributes:
        heads: (layer, key-value head) of each, in the order of choice.
        before: KL(softmax ‖ converted) on the repeated passages of a block, in nats per token, without any of them.
        after: the same with all of them, on the same block.
    """

    heads: tuple[tuple[int, int], ...]
    before: float
    after: float

    def __str__(self) -> str:
        """Say it in words."""
        names = ", ".join(f"{layer}.{head}" for layer, head in self.heads)
        gained = f"{self.before:.3f} nats without them, {self.after:.3f} with them"
        return f"{names}; KL to softmax on repeated passages {gained}"


def repeated_passages(ids: Tensor, *, seed: int) -> tuple[Tensor, Tensor]:
    """Return blocks [N, T] of a text that end with passages from their beginning, and which tokens these tell, [N, T].

    Raises:
        InputError: if the blocks are too short for that.
    """
    length = ids.shape[1]
    size = int(length * PASSAGE_SHARE)
    start = length - PASSAGES * size
    if size < 2:
        raise InputError(
            f"retrieval heads are found on blocks of at least {2 / PASSAGE_SHARE:.0f} tokens, got {length}."
        )
    generator = torch.Generator().manual_seed(seed)
    ids, scored = ids.clone(), torch.zeros_like(ids, dtype=torch.bool)
    for row in range(ids.shape[0]):
        for passage in range(start, length, size):
            first = int(torch.randint(max(1, start - PASSAGES * size), (), generator=generator))
            ids[row, passage : passage + size] = ids[row, first : first + size]
            scored[row, passage + max(1, int(size * PROMPT_SHARE)) : passage + size] = True
    return ids, scored


@contextmanager
def exact_shares(layers: list[RFAAttentionMixin], device: torch.device) -> Iterator[Tensor]:
    """Give every head of some layers a share of exact attention, [layers, H], 0 to begin with, while the context lasts.

    They are on ``device``, which the layers compute on: that of their weights says nothing where these stay on disk.
    """
    shares = torch.zeros(len(layers), layers[0].feature_map.num_heads, device=device)
    shares.requires_grad_()
    try:
        for row, layer in enumerate(layers):
            layer.attend = partial(_attend_in_part, layer, shares, row)  # type: ignore[method-assign]
        yield shares
    finally:
        for layer in layers:
            vars(layer).pop("attend", None)


def _attend_in_part(
    layer: RFAAttentionMixin, shares: Tensor, row: int, query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Attend as `RFAAttentionMixin.attend` without padding, with the shares [H] in a row of ``shares`` of exact attention."""
    output, weights = type(layer).attend(layer, query, key, value, **options)
    sink_logits = options.get("sink_logits")
    if sink_logits is None:
        grouped = query.shape[1] != key.shape[1]
        exact = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=layer.scaling, enable_gqa=grouped
        )
    else:
        length = query.shape[2]
        visible = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()[None, None]
        rows, keys_values = group_queries(query, key.shape[1]), torch.cat([key, value.to(key.dtype)], dim=-1)
        exact, _ = read_tokens(rows, keys_values, visible, layer.scaling, sink_logits=sink_logits)
        exact = ungroup(exact, query.shape[1])
    exact = exact.to(value.dtype)
    share = shares[row].repeat_interleave(query.shape[1] // key.shape[1])[:, None, None].to(value.dtype)
    return output + share * (exact - output), weights


def choose_retrieval_heads(
    model: PreTrainedModel,
    base_model: PreTrainedModel,
    inputs: Inputs,
    count: int,
    *,
    seed: int,
    on_head: Callable[[], None],
) -> RetrievalHeads:
    """Return at most ``count`` retrieval heads of a converted decoder; fewer where no further one would gain anything.

    Each is chosen on the next block of the inputs, for the gradient of one block orders the heads as that of two does, and
    a head that follows from the one before matters more.

    Args:
        model: the converted and calibrated model, whose heads are not chosen yet; its parameters need no gradients then.
        base_model: its softmax model.
        inputs: blocks of text, without padding.
        count: number of heads. One of every layer is left as it is.
        seed: what passages are drawn with.
        on_head: called after each.
    """
    layers = [layer for layer in rfa_layers(model).values() if layer.rfa_kind == "causal"]
    ids, scored = repeated_passages(inputs["input_ids"], seed=seed)
    blocks = {"input_ids": ids}
    blocks |= {name: inputs[name] for name in ("position_ids",) if name in inputs}
    model.requires_grad_(False)
    heads: list[tuple[int, int]] = []
    before = 0.0

    def predictions(predictor: PreTrainedModel, index: int) -> Tensor:
        """Return the logarithms of what a model predicts in a block's repeated passages, [tokens, V]."""
        block = {name: tensor[index : index + 1].to(predictor.device) for name, tensor in blocks.items()}
        told = scored[index, 1:].to(predictor.device)
        first = int(told.int().argmax())
        logits = predictor(**block, use_cache=False, logits_to_keep=len(told) - first + 1).logits[0]
        return logits[first - len(told) - 1 : -1][told[first:]].float().log_softmax(-1)

    def divergence(index: int) -> Tensor:
        """Return KL(softmax ‖ converted) per token of a block's repeated passages."""
        with torch.no_grad():
            expected = predictions(base_model, index)
        return F.kl_div(predictions(model, index), expected, log_target=True, reduction="batchmean")

    with exact_shares(layers, model.device) as shares:
        while len(heads) < count:
            with torch.enable_grad():
                without = divergence(len(heads) % len(ids))
                (gradient,) = torch.autograd.grad(without, shares)
            before = before if heads else float(without.detach())
            chosen = shares.detach() > 0
            is_last = chosen.sum(1, keepdim=True) == shares.shape[1] - 1  # one head of a layer is left as it is
            gradient = gradient.masked_fill(chosen | is_last, 0.0)
            row, head = divmod(int(gradient.argmin()), shares.shape[1])
            if not float(gradient[row, head]) < 0:
                break
            with torch.no_grad():
                shares[row, head] = 1.0
            heads.append((layers[row].rfa_layer_idx, head))
            give_back_memory()
            on_head()
        with torch.no_grad():
            after = float(divergence(0))
    return RetrievalHeads(tuple(heads), before, after)
