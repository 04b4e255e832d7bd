"""Choose retrieval heads: those of which exact attention to all tokens tells the model most of what stood far back.

Copying, and finding a fact again, is the work of few heads (Wu et al. 2024, arXiv 2404.15574; Xiao et al. 2025, DuoAttention,
arXiv 2410.10819). They are found on texts that repeat themselves: the end of a block is made of passages from its beginning.
Head h of the converted model is given a share α_h of exact attention,

    y_h = (1 − α_h) y_h^converted + α_h y_h^softmax,

and ∂/∂α_h of KL(softmax model ‖ converted model) on the repeated passages says what the head would gain. The head of the
steepest descent becomes a retrieval head, α_h = 1, and the next is chosen with it in place: heads that copy do so one after
the other, and what a head is worth depends on those before it. Up to the first passage a block is read without gradients.

Heads that are to keep few tokens copy less. Some of them are chosen on the ends of blocks as they are in the text, all at
once by the sum of the derivatives on several blocks: what these gain is less, and adds up.

The converted model has been calibrated: what slots and features stand for already, no head needs to see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from hf_rfa.errors import InputError
from hf_rfa.models.attention import RFAAttentionMixin
from hf_rfa.models.cache_names import cache_argument, returned_cache
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


class ExactShares:
    """Shares of exact attention, of every head of some layers, and the keys and values of a cache that this reads.

    Attributes:
        shares: [layers, H], 0 to begin with. They are on the device that the layers compute on: that of their weights says
            nothing where these stay on disk.
        past: keys and values [B, H, T, d] of the tokens in a cache, by the number of the layer. They are those of the first
            call with a cache, so that a new text needs an empty one.
    """

    def __init__(self, layers: list[RFAAttentionMixin], device: torch.device) -> None:
        self.layers = layers
        self.shares = torch.zeros(len(layers), layers[0].feature_map.num_heads, device=device, requires_grad=True)
        self.past: dict[int, tuple[Tensor, Tensor]] = {}

    def __enter__(self) -> ExactShares:
        """Let the layers attend in these shares."""
        for row, layer in enumerate(self.layers):
            layer.attend = partial(self._attend, layer, row)  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        """Let the layers attend as before."""
        for layer in self.layers:
            vars(layer).pop("attend", None)

    def _attend(
        self, layer: RFAAttentionMixin, row: int, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as `RFAAttentionMixin.attend` without padding, with a row's shares [H] of exact attention."""
        output, weights = type(layer).attend(layer, query, key, value, **options)
        if row in self.past:
            key, value = (torch.cat(pair, dim=2) for pair in zip(self.past[row], (key, value), strict=True))
        elif options.get("cache") is not None:
            self.past[row] = key, value
        if not torch.is_grad_enabled() and not bool(self.shares[row].any()):
            return output, weights  # nothing of it would count
        exact = _exact_attention(layer, query, key, value, options.get("sink_logits")).to(value.dtype)
        share = self.shares[row].repeat_interleave(query.shape[1] // key.shape[1])[:, None, None].to(value.dtype)
        return output + share * (exact - output), weights


def _exact_attention(
    layer: RFAAttentionMixin, query: Tensor, key: Tensor, value: Tensor, sink_logits: Tensor | None
) -> Tensor:
    """Attend causally from the last tokens to all of them: queries [1, H_q, T, d], keys and values [1, H, past + T, d]."""
    length, past = query.shape[2], key.shape[2] - query.shape[2]
    visible = torch.ones(length, past + length, dtype=torch.bool, device=query.device).tril(past)[None, None]
    if sink_logits is None:
        mask = visible if past else None
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=not past, scale=layer.scaling, enable_gqa=grouped
        )
    rows, keys_values = group_queries(query, key.shape[1]), torch.cat([key, value.to(key.dtype)], dim=-1)
    exact, _ = read_tokens(rows, keys_values, visible, layer.scaling, sink_logits=sink_logits)
    return ungroup(exact, query.shape[1])


class _Block(NamedTuple):
    """A block of text in two parts, and what the softmax model predicts of the second, passages or text as it is."""

    beginning: dict[str, Tensor]  # inputs up to where the first passage is, or would be
    rest: dict[str, Tensor]
    scored: Tensor  # [tokens], whether the token after each of the rest is scored
    expected: Tensor  # logarithms of the softmax model's probabilities, [scored tokens, V]


def choose_retrieval_heads(
    model: PreTrainedModel,
    base_model: PreTrainedModel,
    inputs: Inputs,
    count: int,
    *,
    by_recall: int,
    seed: int,
    on_head: Callable[[], None],
) -> RetrievalHeads:
    """Return at most ``count`` retrieval heads of a converted decoder; fewer where no further one would gain anything.

    As many blocks of the inputs are looked at. Eight heads that were chosen on one block cost 1.1 % of SmolLM2-135M's
    perplexity on Wikipedia, at a memory of 128 tokens.

    Args:
        model: the converted and calibrated model, whose heads are not chosen yet; its parameters need no gradients then.
        base_model: the softmax model.
        inputs: blocks of text, without padding.
        count: number of heads. One of every layer is left as it is.
        by_recall: how many of them repeated passages choose, at least 1; text as it is chooses the others.
        seed: what passages are drawn with.
        on_head: called after each.
    """
    layers = [layer for layer in rfa_layers(model).values() if layer.rfa_kind == "causal"]
    plain: Inputs = {name: inputs[name] for name in ("input_ids", "position_ids") if name in inputs}
    plain["scored"] = torch.ones_like(plain["input_ids"], dtype=torch.bool)
    ids, scored = repeated_passages(plain["input_ids"], seed=seed)
    repeating = plain | {"input_ids": ids, "scored": scored}
    model.requires_grad_(False)
    heads: list[tuple[int, int]] = []

    with ExactShares(layers, model.device) as exact:
        shares = exact.shares

        def slopes(blocks: Inputs, number: int) -> tuple[Tensor, float, _Block]:
            """Return ∂KL/∂α on one of the blocks, [layers, H], KL, and the block."""
            index = number % len(ids)
            block = _ask_block(base_model, {name: tensor[index : index + 1] for name, tensor in blocks.items()})
            with torch.enable_grad():
                divergence = _divergence(model, exact, block)
                (gradient,) = torch.autograd.grad(divergence, shares)
            give_back_memory()
            return gradient, float(divergence.detach()), block

        def choose(slope: Tensor) -> bool:
            """Choose the head of the steepest descent, and return whether there is one."""
            chosen = shares.detach() > 0
            is_last = chosen.sum(1, keepdim=True) == shares.shape[1] - 1  # one head of a layer is left as it is
            slope = slope.masked_fill(chosen | is_last, 0.0)
            row, head = divmod(int(slope.argmin()), shares.shape[1])
            if not float(slope[row, head]) < 0:
                return False
            with torch.no_grad():
                shares[row, head] = 1.0
            heads.append((layers[row].rfa_layer_idx, head))
            on_head()
            return True

        slope, before, first = slopes(repeating, 0)
        while choose(slope) and len(heads) < by_recall:
            slope = slopes(repeating, len(heads))[0]
        if count > by_recall == len(heads):
            slope = torch.stack([slopes(plain, number)[0] for number in range(by_recall, count)]).sum(0)
            while len(heads) < count and choose(slope):
                pass
        with torch.no_grad():
            after = float(_divergence(model, exact, first))
    return RetrievalHeads(tuple(heads), before, after)


@torch.no_grad()
def _ask_block(base_model: PreTrainedModel, block: dict[str, Tensor]) -> _Block:
    """Return a block [1, T] in two parts, with what the softmax model predicts."""
    scored = block.pop("scored")[0]
    last = PASSAGES * int(len(scored) * PASSAGE_SHARE)
    inputs = {name: tensor.to(base_model.device) for name, tensor in block.items()}
    beginning, rest = (
        {name: tensor[:, part] for name, tensor in inputs.items()} for part in (slice(-last), slice(-last, None))
    )
    scored = scored[len(scored) - last + 1 :].to(base_model.device)
    logits = base_model(**inputs, use_cache=False, logits_to_keep=last).logits[0]
    return _Block(beginning, rest, scored, logits[:-1][scored].float().log_softmax(-1))


def _predictions(
    model: PreTrainedModel, exact: ExactShares, beginning: dict[str, Tensor], rest: dict[str, Tensor], scored: Tensor
) -> Tensor:
    """Return the logarithms of what the converted model predicts of a block's scored tokens, [tokens, V].

    Gradients flow from there to the first passage, and no further: what stands before is read without.
    """
    exact.past = {}
    with torch.no_grad():
        cache = returned_cache(model(**beginning, use_cache=True, logits_to_keep=1))
    logits = model(**rest, **cache_argument(cache), use_cache=True).logits[0]
    return logits[:-1][scored].float().log_softmax(-1)


def _divergence(model: PreTrainedModel, exact: ExactShares, block: _Block) -> Tensor:
    """Return KL(softmax ‖ converted) per scored token of a block."""
    predicted = _predictions(model, exact, block.beginning, block.rest, block.scored)
    return F.kl_div(predicted, block.expected, log_target=True, reduction="batchmean")
