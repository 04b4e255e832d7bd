"""A server's batch: the new tokens of many sequences in one row, taken apart into rows that attention takes.

A server asks for everything at once: prompts, parts of prompts, and one token each of the sequences that are being
continued. `RFAAttentionMixin` takes a batch of rows of one length, and a cache. The sequences that bring equally many tokens
are such a batch, and their states, taken out of their blocks (`hf_rfa_vllm.states`), such a cache. Nothing here knows of a
particular server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from hf_rfa.models.attention import RFAAttentionMixin
from hf_rfa.models.cache_rfa import RFALayer
from hf_rfa.models.memory import Places
from hf_rfa.models.positions import origins


class TokenGroup(NamedTuple):
    """Sequences of a batch that bring equally many tokens.

    Attributes:
        tokens: the places of their tokens in the batch's row, [B, T].
        blocks: the numbers of their blocks, [B].
        past: the least number of tokens that one of them has brought before; 0 if these are the first tokens of all, so that
            their blocks hold nothing of theirs.
    """

    tokens: Tensor
    blocks: Tensor
    past: int


def group_tokens(starts: list[int], past: Iterable[int], blocks: Tensor) -> list[TokenGroup]:
    """Return the sequences of a batch, grouped by the number of their tokens; new ones apart from the others.

    Args:
        starts: the place of every sequence's first token in the batch's row, and after these the place after the last.
        past: the number of tokens that every sequence has brought before.
        blocks: the numbers of the sequences' blocks, [sequences].
    """
    members: dict[tuple[int, bool], list[tuple[int, int]]] = {}
    for index, before in enumerate(past):
        length = starts[index + 1] - starts[index]
        if length:
            members.setdefault((length, before == 0), []).append((index, before))
    groups = []
    for (length, _), found in members.items():
        indices, pasts = zip(*found, strict=True)
        first = torch.tensor([starts[index] for index in indices])
        tokens = (first[:, None] + torch.arange(length)).to(blocks.device, non_blocking=True)
        chosen = torch.tensor(indices).to(blocks.device, non_blocking=True)
        groups.append(TokenGroup(tokens, blocks[chosen], min(pasts)))
    return groups


def attend_in_groups(
    attend: Callable[..., tuple[Tensor, Tensor | None]],
    groups: list[TokenGroup],
    views: dict[str, Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden_states: Tensor,
    sink_logits: Tensor | None = None,
    move: Callable[[RFALayer], object] = lambda layer: None,
) -> Tensor:
    """Attend causally within every sequence of a batch, whose states are read and written where they are kept.

    Args:
        attend: `RFAAttentionMixin.attend` of a layer whose ``rfa_layer_idx`` is 0, the only one of the caches made here.
        groups: the batch's sequences.
        views: the layer's tensors in all blocks (`StateLayout.views`).
        query: [1, H_q, N, d], for all N tokens of the batch in one row.
        key: [1, H, N, d].
        value: [1, H, N, d].
        hidden_states: the layer's input, [1, N, width].
        sink_logits: see `attend`.
        move: moves what a cache holds to where the next token's epoch has it (`hf_rfa.models.positions`).

    Returns:
        The output, [1, H_q, N, d]; 0 at places that belong to no sequence.
    """
    output = torch.zeros_like(query)
    for tokens, blocks, past in groups:
        layer = RFALayer()
        if past:
            layer.restore({name: view[blocks] for name, view in views.items()}, past)
            move(layer)
        found, _ = attend(
            *(each[0][:, tokens].transpose(0, 1) for each in (query, key, value)),  # [B, ·, T, d]
            hidden_states=hidden_states[0][tokens],
            cache=Cache(layers=[layer]),
            sink_logits=sink_logits,
        )
        output[0][:, tokens] = found.transpose(0, 1)
        for name, tensor in layer.tensors().items():
            views[name][blocks] = tensor
    return output


class BatchStates(Protocol):
    """What a server tells attention layers of the batch that is being computed."""

    def groups(self) -> list[TokenGroup] | None:
        """Return the batch's sequences, or None in a dry run, which measures time and memory."""

    def views(self, index: int) -> dict[str, Tensor]:
        """Return the tensors of an attention layer in all blocks."""


class ServedAttention(RFAAttentionMixin):
    """Attention of an RFA layer to the sequences of a batch, each to its own tokens and its own state."""

    #: The server's states, and the layer's place among them. A tuple, so that they are no submodule of every layer.
    batch_states: tuple[BatchStates, int]
    serves_batches = True

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        hidden_states: Tensor,
        sink_logits: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attend within every sequence; arguments as for `RFAAttentionMixin.attend`, for one row of all tokens.

        The other arguments describe that row as if it were one text. None of them applies.
        """
        states, index = self.batch_states
        groups = states.groups()
        if groups is None:  # as one text, which takes as much memory as any batch of as many tokens
            output, _ = super().attend(query, key, value, hidden_states=hidden_states, sink_logits=sink_logits)
            return output, None
        inputs = (query, key, value, hidden_states, sink_logits, self._move)
        return attend_in_groups(super().attend, groups, states.views(index), *inputs), None

    def _move(self, layer: RFALayer) -> None:
        """Move what a cache layer holds to where the next token's epoch has it."""
        if self.max_distance:
            places = cast(Places, layer.memories[0].places)
            layer.move(origins(places.count, self.memory_layout(places.keys_values.dtype)), self.motions())


@cache
def served_class(base: Any) -> Any:
    """Return the class of a family's RFA attention layers in a server."""
    return type(f"Served{base.__name__}", (ServedAttention, base), {"__doc__": f"{base.__name__} in a server."})


def serve(attention: RFAAttentionMixin, states: BatchStates, index: int) -> None:
    """Let an attention layer read and write a server's states, among which its own are at place ``index``."""
    served: Any = attention
    kind: Any = type(attention)
    served.__class__ = served_class(kind)
    served.batch_states = states, index
    served.rfa_layer_idx = 0  # of caches that hold this layer alone
