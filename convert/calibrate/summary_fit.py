"""The summary of what is forgotten, fitted to the softmax model's own attention in closed form.

For every head, from queries past the memory in a text (`hf_rfa.models.summary_feature_map` says what is fitted):

1. P: the directions of keys along which values change most, for the queries that there are: the first right singular vectors
   of Rᵀ cov(v, k) E[qqᵀ]^½, where R is a root of the output projection, by which errors count. T has the same directions of
   queries, so that (Tq)·x̄ is the best of its rank to s q·k̄.
2. u: ridge regression of the logarithm of the mass that softmax gives the forgotten, less log n + (Tq)·x̄. A query counts by
   the square of what an error does to the output there.
3. A: ridge regression of the layer's output, given that mass.
4. The share of every head's summary with the least error; and whether its outputs on held-out rows are better for it.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_rfa.models.lifetimes import Lifetimes
from hf_rfa.models.summary_feature_map import SummaryMap

from .activations import lifetimes_of
from .far_outputs import FarText

#: Ridge penalty of mass and of tilt, relative to the mean squares of their inputs.
MASS_RIDGE, TILT_RIDGE = 0.1, 0.3
#: About how many queries of a text are looked at, and of a row, whose queries are much alike.
QUERIES, ROW_QUERIES = 4608, 256
#: Largest weight of a query in the regression of masses, relative to their mean.
LARGEST_WEIGHT = 50.0
#: Taken off log n, so that the inputs of the regressions have about one size.
USUAL_LOG_COUNT = 5.5
#: Logarithms of the factors of a summary's mass that are tried.
LOG_SHARES = torch.arange(-24, 25) / 4


class HeadText(NamedTuple):
    """What one key-value head's queries past its memory see of a row, Q of them with G query heads each.

    Attributes:
        query: without rotation, [G, Q, d].
        key: of all tokens, without rotation, [T, d].
        value: [T, d].
        until: ordinal of the first query that does not see a token exactly any more, [T]; `NEVER` for padding.
        ordinal: of the queries, [Q].
        output: the softmax layer's, [G, Q, d].
        exact: the output of the exact tokens alone, [G, Q, d].
        log_exact: logarithm of their mass, Σ exp(q·k·s), [G, Q].
        far: the output of the forgotten tokens alone, [G, Q, d].
        log_far: logarithm of their mass, [G, Q].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    until: Tensor
    ordinal: Tensor
    output: Tensor
    exact: Tensor
    log_exact: Tensor
    far: Tensor
    log_far: Tensor

    def forgotten_by(self) -> Tensor:
        """Return how many of the row's queries, up to its end, have forgotten each token, [T]."""
        return (self.ordinal[-1] + 1 - self.until).clamp_min(0).float()

    def moments(self, mean: Tensor, projection: Tensor, horizon: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return of what every query has forgotten n, the means of v and of x = P (k − mean), and their covariance.

        They are [Q, 1], [Q, d], [Q, r] and [Q, r, d]; ``projection`` is Pᵀ, [d, r], and ``horizon`` τ.
        """
        x, length = (self.key - mean) @ projection, len(self.key)
        products = (x[:, :, None] * self.value[:, None]).flatten(1)
        columns = torch.cat([torch.ones(length, 1).to(x), self.value, x, products], dim=1).double()
        first = torch.searchsorted(self.ordinal.to(self.until), self.until)  # query that has forgotten the token
        sums = columns.new_zeros(len(self.ordinal) + 1, columns.shape[1])
        until = self.until.clamp_max(int(self.ordinal[-1]) + 1).double()
        sums.index_add_(0, first, columns * torch.exp(until / horizon)[:, None])
        sums = (sums[:-1].cumsum(0) / torch.exp(self.ordinal.double() / horizon)[:, None]).to(x)
        count = sums[:, :1].clamp_min(1.0)
        value, mean_x, product = (sums[:, 1:] / count).split(
            [self.value.shape[1], x.shape[1], products.shape[1]], dim=1
        )
        product = product.view(len(count), x.shape[1], -1)
        return count, value, mean_x, product - mean_x[:, :, None] * value[:, None]


class Reading(NamedTuple):
    """What all texts of a head say together, as `HeadText` names it, and the moments of what is forgotten."""

    query: Tensor
    output: Tensor
    exact: Tensor
    log_exact: Tensor
    far: Tensor
    log_far: Tensor
    counts: Tensor
    value: Tensor
    mean: Tensor
    covariance: Tensor

    @staticmethod
    def of(texts: list[HeadText], mean: Tensor, projection: Tensor, horizon: float) -> Reading:
        """Join texts of one head; the arguments are those of `HeadText.moments`."""
        names = ("query", "output", "exact", "log_exact", "far", "log_far")
        parts = [torch.cat([getattr(text, name) for text in texts], dim=1) for name in names]
        moments = zip(*(text.moments(mean, projection, horizon) for text in texts), strict=True)
        return Reading(*parts, *(torch.cat(part) for part in moments))

    def errors(self, log_mass: Tensor, tilt: Tensor, root: Tensor, log_shares: Tensor) -> Tensor:
        """Return the mean squared error of the outputs for every share, [shares].

        Args:
            log_mass: of the summary, [G, n].
            tilt: a, [G, n, r].
            root: R, [G, d, d].
            log_shares: logarithms of factors of the mass.
        """
        summary = self.value + torch.einsum("gnr,nrd->gnd", tilt, self.covariance)
        error, change = (self.exact - self.output) @ root, (summary - self.exact) @ root
        share = torch.sigmoid(log_mass - self.log_exact + log_shares[:, None, None].to(log_mass))
        squares, products = change.square().sum(-1), (error * change).sum(-1)
        return (error.square().sum(-1) + 2 * share * products + share.square() * squares).mean((1, 2))


@torch.no_grad()
def fit_summary(text: FarText) -> tuple[Tensor, Tensor]:
    """Fit the `SummaryMap` of a layer, whose rotation is known and whose slots are filled by what is calibrated already.

    Returns:
        The mean squared errors of the heads' outputs past the memory in the rows held out, without the summary and with it,
        [H] each.
    """
    layer, activations = text.layer, text.activations
    feature_map = cast(SummaryMap, layer.feature_map)
    key = activations.key.float()
    tokens, ordinal = lifetimes_of(layer, layer.memory_layout(key.dtype), key, activations.key_mask, text.hidden_states)
    raw = layer.rotation.turn(key, -ordinal[:, None])
    rows = [_texts_of(text, raw, tokens, ordinal, row) for row in range(len(key))]
    identity = torch.eye(key.shape[-1]).to(key).expand(feature_map.num_heads, feature_map.groups, -1, -1)
    errors = []
    for head, root in enumerate(identity if text.root is None else text.root):
        by_row = [heads[head] for heads in rows if heads]
        few = min(text.held_out, len(by_row) // 2)
        errors.append(_fit_head(feature_map, head, by_row[few:], by_row[:few], root, layer.scaling))
    before, after = torch.tensor(errors).T
    return before, after


def _texts_of(text: FarText, raw: Tensor, tokens: Lifetimes, ordinal: Tensor, row: int) -> list[HeadText]:
    """Return what the heads see of a row, nothing where none of its queries is past the memory.

    ``raw`` are all rows' keys without rotation, [N, H, T, d], and ``tokens`` and ``ordinal`` those of `lifetimes_of`.
    """
    layer, groups = text.layer, text.layer.feature_map.groups
    places = (text.activations.is_token[row] & (ordinal[row] >= text.first)).nonzero()[:, 0]
    if not len(places):
        return []
    step = max(1, len(places) * len(raw) // QUERIES, len(places) // ROW_QUERIES)
    places = places[row % step :: step]
    seen = text.queries(row, places)
    of_row = Lifetimes(*(part[row : row + 1] for part in tokens))
    near = of_row.visible(ordinal[row : row + 1, places])[0][:, :, None]  # [H, Q, 1, T]
    weights, log_mass = seen.weights[0], seen.log_mass[0].unflatten(1, (-1, groups))[..., 0]  # [H, Q, G, T], [H, Q, G]

    def part(mask: Tensor) -> tuple[Tensor, Tensor]:
        chosen = weights * mask
        mass = chosen.sum(-1).clamp_min(torch.finfo(chosen.dtype).tiny)
        output = chosen.flatten(1, 2) @ seen.value[0]
        return output.unflatten(1, mass.shape[1:]) / mass[..., None], mass.log() + log_mass

    exact, log_exact = part(near)
    far, log_far = part(~near)
    query = layer.rotation.turn(seen.query[0].unflatten(1, (-1, groups)), -ordinal[row, places][:, None])
    output = seen.outputs[0].unflatten(1, (-1, groups))
    until = tokens.until[row].masked_fill(tokens.arrival[row] < 0, 2**30)
    by_query = [x.transpose(1, 2) for x in (query, output, exact, log_exact, far, log_far)]  # [H, G, Q, ·]
    return [
        HeadText(q, raw[row, head], seen.value[0, head], until[head], ordinal[row, places], *rest)
        for head, (q, *rest) in enumerate(zip(*by_query, strict=True))
    ]


def _fit_head(
    feature_map: SummaryMap,
    head: int,
    fitted: list[HeadText],
    held_out: list[HeadText],
    root: Tensor,
    scaling: float,
) -> tuple[float, float]:
    """Fit one key-value head; return the errors of `fit_summary`."""
    rank, groups = feature_map.num_features - 1, feature_map.groups
    mean, projection, directions = _directions(fitted, rank, root, scaling)
    constant = (scaling * mean)[None]  # what (Tq)·x̄ leaves out of s q·k̄
    reading = Reading.of(fitted, mean, projection, feature_map.horizon)
    at = slice(head * groups, (head + 1) * groups)
    for group, query_head in enumerate(range(at.start, at.stop)):
        weights, bias, counts = _fit_query_head(reading, group, constant, directions, root[group])
        feature_map.query_projection[query_head] = torch.cat([weights, directions.T])
        feature_map.query_bias[query_head] = bias
        feature_map.count_weight[query_head] = counts
    feature_map.key_projection[head] = projection.T
    feature_map.key_bias[head] = -(mean @ projection)

    def errors(reading: Reading, log_shares: Tensor) -> Tensor:
        log_count = reading.counts.log()
        linear = reading.query @ feature_map.query_projection[at].mT + feature_map.query_bias[at, None]
        linear = linear + log_count * feature_map.count_weight[at, None]
        mass, tilt, slope = linear.split([1, rank, rank], dim=-1)
        log_mass = (mass + log_count)[..., 0] + (slope * reading.mean).sum(-1)
        return reading.errors(log_mass, tilt, root, log_shares)

    best = LOG_SHARES[errors(reading, LOG_SHARES).argmin()]
    feature_map.window_shift[head] = -best
    after, before = errors(
        Reading.of(held_out, mean, projection, feature_map.horizon), torch.stack([best, torch.tensor(-1e9)])
    ).tolist()
    return before, after


def _directions(texts: list[HeadText], rank: int, root: Tensor, scaling: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean of forgotten keys, [d], Pᵀ and Tᵀ, [d, r]."""
    counts = torch.cat([text.forgotten_by() for text in texts]).double()
    keys, values = (torch.cat([getattr(text, name) for text in texts]).double() for name in ("key", "value"))
    query = torch.cat([text.query for text in texts], dim=1).flatten(0, 1).double()
    share = counts / counts.sum()
    mean, mean_value = share @ keys, share @ values
    centred = (keys - mean) * share[:, None]
    covariance = (values - mean_value).T @ centred  # of values and keys, [d, d]
    moments, vectors = torch.linalg.eigh(query.T @ query / len(query))
    moments = moments.clamp_min(1e-6 * moments.max()).sqrt()
    half, inverse = (vectors * moments) @ vectors.T, (vectors / moments) @ vectors.T
    sensitivity = (root.double().mT @ covariance @ half).flatten(0, 1)  # [G d, d]
    main = torch.linalg.svd(sensitivity, full_matrices=False).Vh[:rank].T
    main = F.pad(main, (0, rank - main.shape[1]))  # keys have no more directions than they are wide
    projection, directions = half @ main, inverse @ main
    deviation = ((keys - mean) @ projection).square().mul(share[:, None]).sum(0).clamp_min(1e-24).sqrt()
    return mean.float(), (projection / deviation).float(), (scaling * directions * deviation).float()


def _fit_query_head(
    reading: Reading, group: int, constant: Tensor, directions: Tensor, root: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what one query head's features are of: u and A [1 + r, d], biases and weights of log n, [1 + 2 r] each."""
    rank = directions.shape[1]
    query, log_count = reading.query[group].double(), reading.counts.double().log()
    mean, deviation = query.mean(0), query.std(0).clamp_min(1e-6)
    ones = torch.ones_like(log_count)
    inputs = torch.cat([(query - mean) / deviation, log_count - USUAL_LOG_COUNT, ones], dim=1)  # [n, d + 2]

    def as_weights(linear: Tensor) -> Tensor:
        """Return linear functions of queries [·, d] as weights of the inputs, [·, d + 2]."""
        linear = linear.double()
        return torch.cat([linear * deviation, linear.new_zeros(len(linear), 1), linear @ mean[:, None]], dim=1)

    slope = ((reading.query[group] @ directions) * reading.mean).sum(-1)
    change = (reading.far - reading.exact)[group] @ root
    share = torch.sigmoid(reading.log_far[group] - reading.log_exact[group])
    weight = ((share * (1 - share)).square() * change.square().sum(-1)).double()
    weight = (weight / weight.mean().clamp_min(1e-300)).clamp_max(LARGEST_WEIGHT)
    target = (reading.log_far[group] - log_count[:, 0] - slope).double()
    penalty = torch.full((inputs.shape[1],), MASS_RIDGE * len(inputs)).to(inputs)
    penalty[-1] *= 1e-5
    weighted = inputs * weight[:, None]
    expected = as_weights(constant)[0]
    mass = expected + torch.linalg.solve(
        weighted.T @ inputs + penalty.diag(), weighted.T @ (target - inputs @ expected)
    )

    log_mass = (inputs @ mass + log_count[:, 0]).float() + slope
    share = torch.sigmoid(log_mass - reading.log_exact[group])
    missing = reading.output[group] - reading.exact[group] - share[:, None] * (reading.value - reading.exact[group])
    missing, effect = missing @ root, (reading.covariance * share[:, None, None]) @ root
    products, targets = effect @ effect.mT, (effect @ missing[:, :, None])[..., 0]  # [n, r, r], [n, r]
    few = inputs.float()
    normal = torch.einsum("nij,na,nb->iajb", products, few, few).reshape(rank * few.shape[1], -1).double()
    right = (targets.T @ few).flatten().double()
    start = 0.5 * as_weights(directions.T).flatten()
    normal_penalty = TILT_RIDGE * normal.diagonal().mean() * torch.eye(len(normal)).to(normal)
    tilt = start + torch.linalg.solve(normal + normal_penalty, right - normal @ start)
    both = torch.cat([mass[None], tilt.view(rank, -1)])  # [1 + r, d + 2]
    weights = both[:, :-2] / deviation
    bias = both[:, -1] - weights @ mean - USUAL_LOG_COUNT * both[:, -2]
    zeros = torch.zeros(rank).to(bias)
    return weights.float(), torch.cat([bias, zeros]).float(), torch.cat([both[:, -2], zeros]).float()
