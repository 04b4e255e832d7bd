"""What is forgotten, by its mean and its covariance: a map of features that is fitted in closed form.

A head's state is that of linear attention with φ(k) = [1, x], x = Pk + b, k without its rotation, and a decay of 1/τ nats a
token. So it has the number n of forgotten tokens, which is never above τ however long the text, and the means of x and v and
their covariance C(x, v). A query q without its rotation reads from it

    log mass = log n + u·q + u_n log n + (Tq)·x̄ + u_0          output = v̄ + C(x, v)ᵀ a,    a = Aq + a_n log n + a_0

which is linear attention with φ(q) = [1 − a·x̄, a], whose normalizer is n. Nothing in it can cancel, as x̄ and n are those of
the query's own past. To centre on running means is what makes so few features enough; a mean that is fixed does not. Without
rotations it reads the same at any distance. Beside a window only (`hf_rfa.models.memory`), whose normalizer the mass joins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .feature_maps import FeatureMap, Features, register_feature_map


@register_feature_map("summary")
class SummaryMap(FeatureMap):
    """φ(k) = [1, Pk + b], φ(q) by running means, F = D; fitted to a text by ridge regression.

    Attributes:
        key_projection: P, [H, D − 1, d].
        key_bias: b, [H, D − 1].
        query_projection: u, A and T, [H G, 2 D − 1, d].
        query_bias: u_0 and a_0, and 0 for T, [H G, 2 D − 1].
        count_weight: u_n and a_n, and 0 for T, [H G, 2 D − 1].
    """

    needs_text = learns_from_raw = needs_window = unrotated = reads_means = True
    uses_scaling = False
    default_num_features = 8
    horizon = 1024.0
    key_projection: Tensor
    key_bias: Tensor
    query_projection: Tensor
    query_bias: Tensor
    count_weight: Tensor

    def build(self) -> None:
        """Add all matrices and biases, of zeros: a mean of values, each of which has the mass of exp(0)."""
        super().build()
        rank, width, queries = self.num_features - 1, self.head_dim, self.num_heads * self.groups
        self.add("key_projection", self.num_heads, rank, width, trainable=True)
        self.add("key_bias", self.num_heads, rank, trainable=True)
        self.add("query_projection", queries, 2 * rank + 1, width, trainable=True)
        self.add("query_bias", queries, 2 * rank + 1, trainable=True)
        self.add("count_weight", queries, 2 * rank + 1, trainable=True)

    def key(self, key: Tensor) -> Tensor:
        """Return [1, Pk + b] of keys without rotation."""
        key = self.key_input(key)
        projected = key @ self.key_projection.mT.to(key.dtype) + self.key_bias[:, None].to(key.dtype)
        return F.pad(projected, (1, 0), value=1.0)

    def query(self, query: Tensor) -> Tensor:
        """Raise a TypeError: features of queries depend on what is forgotten (`reading`)."""
        raise TypeError("features of queries depend on the state that they read: call reading(query, key, sums).")

    def read(self, query: Tensor, forgotten: Forgotten) -> tuple[Tensor, Tensor]:
        """Return the logarithms of the mass of what is forgotten, [B, H, G, 1], and its outputs, [B, H, G, d], at a step.

        Args:
            query: without rotation, [B, H, G, d].
            forgotten: of this map's heads.
        """
        batch, heads, groups, width = query.shape
        by_head = query.reshape(batch, heads * groups, width).transpose(0, 1)
        linear = torch.baddbmm(forgotten.bias, by_head, self.query_projection.mT)
        linear = linear.transpose(0, 1).reshape(batch * heads, groups, -1)
        output = torch.baddbmm(forgotten.mean.flatten(0, 1), linear, forgotten.slopes.flatten(0, 1))
        log_mass, output = output.view(batch, heads, groups, -1).split([1, width], dim=-1)
        return log_mass, output

    def reading(self, query: Tensor, key: Tensor, sums: Tensor) -> Features:
        """Return the features of queries beside those of keys, with their offset.

        Args:
            query: without rotation, [B, H, T G, d].
            key: features of the keys, [B, H, T, F].
            sums: of the features that each query's state holds, [B, H, T, F]: n and n x̄.
        """
        batch, heads, rows, width = query.shape
        groups, rank = self.groups, self.num_features - 1
        length = rows // groups
        by_head = query.view(batch, heads, length, groups, width).permute(1, 3, 0, 2, 4)  # [H, G, B, T, d]
        by_head = by_head.reshape(heads * groups, batch * length, width)
        count = sums[..., :1]
        mean = (sums[..., 1:] / count.clamp_min(torch.finfo(count.dtype).tiny))[:, :, :, None]  # [B, H, T, 1, D − 1]
        log_count = count.clamp_min(1.0).log()[:, :, :, None]
        dtype = query.dtype
        linear = torch.baddbmm(self.query_bias[:, None].to(dtype), by_head, self.query_projection.mT.to(dtype))
        linear = linear.view(heads, groups, batch, length, -1).permute(2, 0, 3, 1, 4)  # [B, H, T, G, 2 D − 1]
        linear = linear + log_count * self.count_weight.view(heads, 1, groups, -1).to(dtype)
        log_mass, tilt, slope = linear.split([1, rank, rank], dim=-1)
        log_mass = log_mass + (slope * mean).sum(-1, keepdim=True)
        features = torch.cat([1.0 - (tilt * mean).sum(-1, keepdim=True), tilt], dim=-1)
        offset = self.window_shift.view(-1, 1, 1, 1).to(dtype) - log_mass
        return Features(features.flatten(2, 3), key, offset.flatten(2, 3), None)


class Forgotten(NamedTuple):
    """What summaries say to the queries of a step, whatever these are, and their states then.

    Attributes:
        state: [B, H, F, d + 1].
        bias: [u_0 + u_n log n, a_0 + a_n log n, 0], [H G, B, 2 D − 1].
        mean: [log n, v̄], [B, H, 1, 1 + d].
        slopes: what [u·q, a, Tq] are multiplied by to be added to these, [B, H, 2 D − 1, 1 + d].
    """

    state: Tensor
    bias: Tensor
    mean: Tensor
    slopes: Tensor


def forgotten_after(
    maps: Sequence[SummaryMap], states: Sequence[Tensor], key: Tensor, value: Tensor, leaves: Tensor | None
) -> list[Forgotten]:
    """Return what summaries say once another token has left, those of many layers at once: it costs as much for one.

    Args:
        maps: that differ in their heads alone.
        states: of them, [B, H, F, d + 1].
        key: of what leaves all heads' memory, without rotation, [B, all heads, d].
        value: [B, all heads, d].
        leaves: whether it does, [B, all heads], or None where it does.
    """
    first, heads = maps[0], [state.shape[1] for state in states]
    rank, width = first.num_features - 1, first.head_dim

    def of_all(name: str, *shape: int) -> Tensor:
        return torch.cat([getattr(each, name) for each in maps]).to(key.dtype).view(-1, *shape)

    x = (of_all("key_projection", rank, width) * key.unsqueeze(2)).sum(-1) + of_all("key_bias", rank)
    features = F.pad(x, (1, 0), value=1.0)
    features = features if leaves is None else features * leaves.unsqueeze(-1)
    decayed = torch.cat(list(states), dim=1) * math.exp(-1.0 / first.horizon)
    state = torch.addcmul(decayed, features.unsqueeze(-1), F.pad(value, (0, 1), value=1.0).unsqueeze(2))
    count = state[:, :, :1, -1:].clamp_min(torch.finfo(key.dtype).tiny)  # [B, all heads, 1, 1]
    log_count, means = count.log(), state / count
    mean_value, mean_x = means[:, :, :1, :-1], means[:, :, 1:, -1:]
    covariance = torch.addcmul(means[:, :, 1:, :-1], mean_x, mean_value, value=-1)
    ones = F.pad(torch.ones_like(count), (0, width))
    slopes = torch.cat([ones, F.pad(covariance, (1, 0)), F.pad(mean_x, (0, width))], dim=2)
    mean = torch.cat([log_count - of_all("window_shift", 1, 1), mean_value], dim=-1)
    by_count = of_all("count_weight", first.groups, 2 * rank + 1)
    bias = torch.addcmul(of_all("query_bias", first.groups, 2 * rank + 1), by_count, log_count.clamp_min(0.0))
    of_maps = zip(*(tensor.split(heads, dim=1) for tensor in (state, bias, mean, slopes)), strict=True)
    return [Forgotten(state, bias.flatten(1, 2).transpose(0, 1), mean, slopes) for state, bias, mean, slopes in of_maps]
