"""Softmax cross attention to fewer positions than a source has: runs of similar neighbours are merged into one position.

Audio has many positions, most of which are like the one before. A run keeps the mean of its keys, the mean of its values and
the logarithm of its length n, which is added to its logits: it weighs as n positions with these means do. Nothing of it is
learned. Pairs are merged by rounds, as tokens are in Bolya et al. 2023 (arXiv 2210.09461), but of neighbours alone.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import EncoderDecoderCache

from .cache_names import take_cache
from .cache_rfa_seq2seq import cross_layer_of
from .rfa_classes import base_class, make_class

#: A round merges one of so many positions at most: more rounds take better pairs.
POSITIONS_PER_MERGER = 8


@torch.no_grad()
def runs_of_neighbours(rows: Tensor, count: int) -> Tensor:
    """Return the run that every position belongs to, from 0 to ``count`` − 1 in order, as [B, H, S].

    Each round merges the pairs of neighbouring runs that add least to the squared distance of rows from the means of their
    runs (Ward 1963): first those that both of their runs are nearest to, so that no more than two runs become one.

    Args:
        rows: what neighbours are compared by, [B, H, S, n].
        count: number of runs, at most S.
    """
    runs = torch.arange(rows.shape[2], device=rows.device).expand(rows.shape[:3])
    means, lengths = rows, torch.ones_like(rows[..., :1])
    while (left := means.shape[2]) > count:
        weights = 1 / (1 / lengths[:, :, 1:, 0] + 1 / lengths[:, :, :-1, 0])
        distances = weights * means.diff(dim=2).square().sum(-1)
        # The least distance of a pair and of those that share a run with it.
        least = -F.max_pool1d(-distances, kernel_size=3, stride=1, padding=1)
        distances = torch.where(distances > least, distances + distances.amax(-1, keepdim=True), distances)
        mergers = min(left - count, max(1, left // POSITIONS_PER_MERGER))
        second = 1 + distances.topk(mergers, largest=False).indices
        new = torch.ones_like(lengths[..., 0], dtype=torch.long).scatter_(2, second, 0).cumsum(-1) - 1
        runs = new.gather(2, runs)
        means, lengths = _means(means, lengths, new, left - mergers)
    return runs


def _means(rows: Tensor, weights: Tensor, runs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the weighted means of the rows of every run, [B, H, count, n], and the sums of their weights."""
    shape = (*rows.shape[:2], count)
    total = weights.new_zeros(*shape, 1).scatter_add(2, runs[..., None], weights)
    index = runs[..., None].expand_as(rows)
    return rows.new_zeros(*shape, rows.shape[-1]).scatter_add(2, index, rows * weights) / total, total


def merge_neighbours(key: Tensor, value: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the positions of keys and values [B, H, S, d] to ``count`` runs, or to S if that is less.

    Returns:
        Keys with log n as another column, [B, H, count, d + 1], values [B, H, count, d], and the runs of the positions.
    """
    count = min(count, key.shape[2])
    rows = torch.cat([key, value], dim=-1).float()
    runs = runs_of_neighbours(rows, count)
    means, lengths = _means(rows, torch.ones_like(rows[..., :1]), runs, count)
    mean_key, mean_value = means.to(key.dtype).split(key.shape[-1], dim=-1)
    return torch.cat([mean_key, lengths.log().to(key.dtype)], dim=-1), mean_value, runs


class MergedCrossAttention:
    """Softmax cross attention to runs of positions, for a class with ``q_proj``, ``k_proj``, ``v_proj`` and ``out_proj``."""

    config: Any
    num_heads: int
    head_dim: int
    dropout: float
    scaling: float
    training: bool
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    out_proj: nn.Linear
    layer_idx: int

    def forward(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        *,
        output_rfa_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; arguments as for the family's own attention, and ``output_rfa_attentions``.

        Returns:
            The output [B, T, width], and the weights [B, H, T, S], a run's divided among its positions, or None.
        """
        cache, runs = take_cache(kwargs), None
        layer: Any = None
        if isinstance(cache, EncoderDecoderCache):
            layer = cross_layer_of(cache.cross_attention_cache, self.layer_idx, softmax=True)
        query = self._split_heads(self.q_proj(hidden_states))
        if layer is not None and cache.is_updated.get(self.layer_idx) and not output_rfa_attentions:
            key, value = layer.keys, layer.values
        else:
            key, value = (self._split_heads(project(key_value_states)) for project in (self.k_proj, self.v_proj))
            key, value, runs = merge_neighbours(key, value, self.config.merged_source_length)
            if layer is not None and not cache.is_updated.get(self.layer_idx):
                layer.update(key, value)
                cache.is_updated[self.layer_idx] = True
        key, log_length = key[..., :-1], key[..., None, :, -1]
        dropout = self.dropout if self.training else 0.0
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=log_length, dropout_p=dropout, scale=self.scaling
        )
        output = self.out_proj(output.transpose(1, 2).reshape(*hidden_states.shape[:2], -1))
        if not output_rfa_attentions:
            return output, None
        weights = (query @ key.mT * self.scaling + log_length).softmax(-1) / log_length.exp()
        return output, weights.gather(-1, cast(Tensor, runs)[:, :, None].expand(-1, -1, query.shape[2], -1))

    def _split_heads(self, states: Tensor) -> Tensor:
        return states.view(*states.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)


def merged_attention_class(base: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a family's attention class that merges neighbours."""
    return make_class(globals(), base, (MergedCrossAttention,), f"{base.__name__} to runs of merged positions.")


def __getattr__(name: str) -> Any:
    """Return a class by its name, ``RFAWhisperAttention`` say; an AttributeError if transformers has no base class."""
    return merged_attention_class(base_class(__name__, name, nn.Module))
