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

    def step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        input_scale: Tensor | None,
        state: Tensor,
        exact: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Take one token into a state, in place, and attend: what `reading` and the recurrence come to, in few operations.

        Args:
            query: without rotation, [B, H, G, d].
            key: of what leaves the memory, without rotation, [B, H, 1, d].
            value: [B, H, 1, d].
            input_scale: of these, [B, H or 1, 1], or None for ones.
            state: [B, H, F, d + 1].
            exact: outputs of what is seen exactly, [B, H, G, d], and logarithms of their normalizers, [B, H, G, 1].

        Returns:
            The outputs [B, H, G, d], and the features of the key, [B, H, 1, F].
        """
        batch, heads, groups, width = query.shape
        rank, rows = self.num_features - 1, state.view(-1, *state.shape[2:])

        def of_batch(weights: Tensor) -> Tensor:
            return weights if batch == 1 else weights.repeat(batch, 1, 1)

        # The key joins the state.
        bias, weights = self.key_bias.unsqueeze(1), self.key_projection
        x = torch.baddbmm(of_batch(bias), key.reshape(-1, 1, width), of_batch(weights).mT)
        features = F.pad(x, (1, 0), value=1.0)
        joining = features if input_scale is None else features * input_scale.reshape(-1, 1, 1)
        values = F.pad(value.reshape(-1, 1, width).to(x.dtype), (0, 1), value=1.0)
        rows.baddbmm_(joining.mT, values, beta=math.exp(-1.0 / self.horizon))
        # Of the state: n, [1, x̄], n v̄ and n C(x, v).
        of_values, moments = rows.split([width, 1], dim=2)
        values, products = of_values.split([1, rank], dim=1)
        count = moments.narrow(1, 0, 1).clamp_min(torch.finfo(x.dtype).tiny)  # [B H, 1, 1]
        mean, log_count = (moments / count).narrow(1, 1, rank), count.log()
        covariance = torch.baddbmm(products, mean, values, alpha=-1)
        # Of the queries: the logarithm of the mass, a, and T q.
        bias, weights = self.query_bias.unsqueeze(1), self.query_projection
        linear = torch.baddbmm(of_batch(bias), query.reshape(-1, 1, width), of_batch(weights).mT)
        linear = linear.view(batch * heads, groups, -1)
        by_count = of_batch(self.count_weight.view(heads, groups, -1))
        log_mass, tilt, slope = torch.addcmul(linear, by_count, log_count.clamp_min(0.0)).split([1, rank, rank], dim=2)
        log_mass = torch.baddbmm(log_mass, slope, mean) + (log_count - of_batch(self.window_shift.view(-1, 1, 1)))
        past = torch.baddbmm(values, tilt, covariance) / count
        output, log_exact = exact
        share = torch.sigmoid(log_mass.view(log_exact.shape) - log_exact)
        return torch.lerp(output, past.view(query.shape), share), features.view(batch, heads, 1, -1)

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
