"""The logits of a model whose old tokens move along, by a loop: what hf_rfa/models/positions.py has to give."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from hf_rfa.models.attention import RFAAttentionMixin
from tests.memory_by_loop import memory_by_loop


def rotated(x: Tensor, position: Tensor, frequency: Tensor, interleaved: bool = False) -> Tensor:
    """Return [..., d] rotated to positions [...], as complex numbers."""
    width = 2 * len(frequency)
    x, rest = x[..., :width], x[..., width:]
    real, imaginary = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    turned = torch.complex(real, imaginary) * torch.polar(torch.ones(()).double(), position[..., None] * frequency)
    parts = turned.real, turned.imag
    return torch.cat([torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1), rest], -1)


def summary_by_loop(
    module: Any, head: int, query: Tensor, keys: Tensor, values: Tensor, ages: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the logarithm of the mass of some forgotten tokens, and their output, by the definition of a summary.

    Args:
        module: a `SummaryMap` of as many key-value heads.
        head: the query head, of all of them.
        query: without rotation, [d].
        keys: of the forgotten tokens, without rotation, [n, d].
        values: [n, d].
        ages: how many tokens ago each was forgotten, [n].
    """
    own, rank = head // module.groups, module.num_features - 1
    if not len(keys):
        return torch.tensor(-torch.inf, dtype=query.dtype), torch.zeros_like(query)
    shares = torch.exp(-ages.to(query) / module.horizon)
    log_count, shares = shares.sum().log(), shares / shares.sum()
    linear = (
        module.query_projection[head] @ query
        + module.query_bias[head]
        + module.count_weight[head] * log_count.clamp_min(0)
    )
    x = keys @ module.key_projection[own].T + module.key_bias[own]
    mean, output = shares @ x, shares @ values
    covariance = ((x - mean) * shares[:, None]).T @ (values - output)
    log_mass = log_count + linear[0] + linear[1 + rank :] @ mean - module.window_shift[own]
    return log_mass, output + linear[1 : 1 + rank] @ covariance


def stream_by_loop(
    softmax: Any,
    rfa: Any,
    ids: Tensor,
    padding: Tensor | None = None,
    starts: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Return the logits of all tokens, [B, T, vocabulary], of two models with the same weights in float64.

    The softmax model reads all tokens at position 0, where nothing is rotated. Its attention is replaced by a loop over
    queries, each of which sees what `memory_by_loop` says, where its epoch has it.

    Args:
        softmax: the base model.
        rfa: the RFA model: says what is kept, L and B.
        ids: [B, T].
        padding: [B, T], 0 for padding, or None.
        starts: [B, T], True where a document starts, or None.
        interleaved: how the family rotates.
    """
    length, config = ids.shape[1], rfa.config
    layers = {m.layer_idx: m for m in rfa.modules() if isinstance(m, RFAAttentionMixin)}
    number = torch.zeros(ids.shape, dtype=torch.long)  # of each token in its document
    for row in range(len(ids)):
        count = -1
        for t in range(length):
            if padding is None or padding[row, t]:
                count = 0 if starts is not None and starts[row, t] else count + 1
            number[row, t] = max(count, 0)
    document = torch.zeros_like(ids) if starts is None else starts.cumsum(1)

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, scaling: float, **kwargs: Any):
        layer = layers.get(module.layer_idx)  # None for a sliding softmax layer, whose tokens stay in place
        kind = (getattr(softmax.config, "layer_types", None) or {0: ""} | dict.fromkeys(layers, ""))[module.layer_idx]
        table = softmax.base_model.rotary_emb
        frequency = getattr(table, f"{kind}_inv_freq", getattr(table, "inv_freq", None)).double()
        distance, step = (10**6, 1) if layer is None else (config.max_distance, config.distance_step)
        output = torch.zeros_like(query)
        seen = torch.zeros(*key.shape[:2], length, length, dtype=torch.bool)
        chosen = [] if layer is None else layer.retrieval_heads
        others = [head for head in range(key.shape[1]) if head not in chosen]
        marks: dict[str, Any] = {"padding": padding, "starts": starts}
        kept = {"window": config.window_size, "slots": config.num_slots, "sinks": config.num_sinks}
        kept = {"window": softmax.config.sliding_window} if layer is None else kept

        def ranked(heads: list[int], rule: Any) -> tuple[torch.Tensor, list[float]]:
            if rule is None:
                return torch.zeros(len(ids), len(heads), length), [0.0] * len(heads)
            return torch.einsum("btn,hn->bht", module.inputs.to(rule.weight), rule.weight), rule.recency.tolist()

        seen[:, others], forgotten = memory_by_loop(
            *ranked(others, None if layer is None else layer.importance), **kept, **marks
        )
        if chosen:
            kept = {"window": config.retrieval_window, "slots": config.retrieval_slots, "sinks": config.num_sinks}
            seen[:, chosen] = memory_by_loop(*ranked(chosen, layer.retrieval_importance), **kept, **marks)[0]
        groups = query.shape[1] // key.shape[1]
        for row in range(len(ids)):
            for t in range(length):
                at = int(number[row, t])
                origin = 0 if at < distance else ((at - distance) // step + 1) * step
                place = torch.maximum(number[row] - origin, number[row].clamp_max(config.num_sinks))
                q = rotated(query[row, :, t], torch.tensor(at - origin).expand(query.shape[1]), frequency, interleaved)
                k = rotated(key[row], place.expand(key.shape[1], -1), frequency, interleaved)
                logits = torch.einsum("hd,hnd->hn", q, k.repeat_interleave(groups, 0)) * scaling
                visible = seen[row, :, t].repeat_interleave(groups, 0)
                weights = logits.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0)
                output[row, :, t] = torch.einsum("hn,hnd->hd", weights, value[row].repeat_interleave(groups, 0))
                if layer is None or config.feature_map != "summary":
                    continue
                totals = logits.masked_fill(~visible, -torch.inf).logsumexp(-1)
                read = (torch.arange(length) <= t) & (document[row] == document[row, t])
                read = read if padding is None else read & (padding[row] != 0)
                for head in range(query.shape[1]):
                    if (index := head // groups) in others and read[t]:
                        gone = read & ~seen[row, index, t]
                        place = others.index(index) * groups + head % groups
                        leaving = forgotten[row, others.index(index)].tolist()
                        ages = torch.tensor([at - int(number[row, leaving.index(j)]) for j in gone.nonzero()[:, 0]])
                        past = query[row, head, t], key[row, index, gone], value[row, index, gone], ages
                        log_mass, past_output = summary_by_loop(layer.feature_map, place, *past)
                        share = torch.sigmoid(log_mass - totals[head])
                        output[row, head, t] += share * (past_output - output[row, head, t])
        return output.transpose(1, 2), None

    AttentionInterface.register("stream_by_loop", attention)
    softmax.set_attn_implementation("stream_by_loop")
    hooks = []
    for module in softmax.modules():
        if type(module).__name__.endswith("Attention") and hasattr(module, "layer_idx"):
            hooks.append(
                module.register_forward_pre_hook(
                    lambda module, args, kwargs: setattr(module, "inputs", kwargs.get("hidden_states", *args)),
                    with_kwargs=True,
                )
            )
    mask = torch.ones_like(ids)
    logits = softmax(ids, position_ids=torch.zeros_like(ids), use_cache=False, attention_mask=mask).logits
    for hook in hooks:
        hook.remove()
    return logits
