"""Errors of a layer's outputs at places past its memory, with gradients: what conversion fits by gradient descent.

A query t sees its sinks and its window, and of the tokens behind it those that the slots hold:

    o_t = Σ_j p_tj a_tj v_j / Σ_j p_tj a_tj

with the softmax weights a, and p = 1 for what is seen. Errors are weighed as the output projection weighs them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_rfa.models.attention import RFAAttentionMixin
from hf_rfa.models.importance import Importance
from hf_rfa.models.masking import split_heads
from hf_rfa.models.memory import MemoryLayout

from ..checkpoint.offload import tensor_of
from .activations import LayerActivations, lifetimes_of

#: Queries that are looked at at once: more of them leave a processor's caches.
QUERIES_AT_ONCE = 64
#: Queries of a step of gradient descent, and rows that they are of.
STEP_QUERIES, STEP_ROWS = 480, 6
#: Share of the rows that is held out, which are the first ones.
HELD_OUT = 1 / 8
#: Tokens of a text from which on there is gradient descent. With 16,384 tokens it is worth 1.2 to 2 % of SmolLM2-135M's
#: perplexity at a memory of 64 tokens, with 8,192 it was 0.3 %.
FITTED_FROM = 16_384
#: Logit or score of what is not seen.
UNSEEN = -1e30
#: Added to the squares of an output projection, relative to their mean, so that they have a root.
LEAST_SQUARE = 1e-4


@dataclass(frozen=True, eq=False)
class FarQueries:
    """Some queries of n rows of a text, and what they see of its first T tokens.

    Attributes:
        query: [n, H, Q G, d].
        key: [n, H, T, d].
        value: [n, H, T, d].
        logits: of the softmax layer, [n, H, Q, G, T]; `UNSEEN` for tokens that a query does not see.
        weights: softmax weights, [n, H, Q, G, T], 0 where a query sees nothing, which padding may.
        near: sinks and the tokens of the window, [n, Q, T].
        far: those behind the window, [n, Q, T].
        is_token: False where the query is padding, [n, Q].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    logits: Tensor
    weights: Tensor
    near: Tensor
    far: Tensor
    is_token: Tensor

    @cached_property
    def outputs(self) -> Tensor:
        """The softmax layer's outputs, [n, H, Q G, d]."""
        return self.weights.flatten(2, 3) @ self.value

    @cached_property
    def log_mass(self) -> Tensor:
        """Logarithm of the sum of the exponentials of the logits, [n, H, Q G, 1]; 0 where a query sees nothing."""
        largest = self.logits.amax(-1, keepdim=True)
        log_mass = largest - self.weights.amax(-1, keepdim=True).log()  # faster than `logsumexp` on a processor
        return log_mass.masked_fill(largest < UNSEEN / 2, 0.0).flatten(2, 3)

    def shares(self, score: Tensor, slots: int, softness: float = 0.0) -> Tensor:
        """Return p, by which tokens are seen exactly, [n, H, Q, T].

        Args:
            score: of all tokens, [n, H, T].
            slots: K.
            softness: that of the choice, in nats (`hf_rfa.convert.calibrate.importance`); 0 chooses as the memory does.
        """
        scores = score[:, :, None].masked_fill(~self.far[:, None], UNSEEN)  # [n, H, Q, T]
        best = scores.topk(slots + 1, dim=-1).values[..., -2:]
        above = scores - best.mean(-1, keepdim=True)
        share = torch.sigmoid(above / softness) if softness else (above > 0).to(scores.dtype)
        return torch.where(self.far[:, None], share, self.near[:, None].to(scores.dtype))

    def errors(self, share: Tensor, root: Tensor | None = None) -> Tensor:
        """Return the mean squared error of every head's outputs, [H].

        Args:
            share: p, [n, H, Q, T].
            root: what the errors are multiplied by (`output_root`), or None.
        """
        values = F.pad(self.value, (0, 1), value=1.0)  # whose last column sums the weights
        sums = (self.weights * share[:, :, :, None]).flatten(2, 3) @ values  # [n, H, Q G, d + 1]
        mass = sums[..., -1:].clamp_min(torch.finfo(sums.dtype).tiny)
        differences = (sums[..., :-1] / mass - self.outputs).unflatten(2, (self.near.shape[1], -1))
        if root is not None:
            differences = torch.einsum("nhqgd,hgde->nhqge", differences, root)
        squares = differences.square().sum((-2, -1)) * self.is_token[:, None]  # [n, H, Q]
        return squares.sum((0, 2)) / self.is_token.sum().clamp_min(1)


def far_queries(
    layer: RFAAttentionMixin, activations: LayerActivations, places: Tensor, stop: int | None = None, *, group: int = 0
) -> FarQueries:
    """Return the queries at some places, [Q], of all rows of activations, which see no token from ``stop`` on.

    The activations are those of all heads but the retrieval heads, or of these as ``group`` 1.
    """
    length, is_token = activations.key.shape[2], activations.is_token
    query, key, value = (x.float() for x in (activations.query, activations.key, activations.value))
    key, value = key[:, :, :stop], value[:, :, :stop]
    layout = replace(layer.memory_layouts(key.dtype)[group], slots=0)
    tokens, ordinal = lifetimes_of(layer, layout, key[:, :1], is_token[:, :stop])
    seen = (places[:, None] >= torch.arange(key.shape[2], device=places.device)) & is_token[:, None, :stop]
    near = seen & tokens.visible(ordinal[:, places])[:, 0]
    query = query.unflatten(2, (length, -1))[:, :, places]  # [n, H, Q, G, d]
    logits = (layer.scaling * query.flatten(2, 3) @ key.mT).unflatten(2, query.shape[2:4])
    first = int((~seen).any(1).any(0).to(torch.uint8).argmax())  # all queries see the tokens before it
    logits[..., first:].masked_fill_(~seen[:, None, :, None, first:], UNSEEN)
    weights, blind = logits.softmax(-1), ~seen.any(-1)  # padding that sees nothing
    if bool(blind.any()):
        weights = weights.masked_fill(blind[:, None, :, None, None], 0.0)
    return FarQueries(
        query=query.flatten(2, 3),
        key=key,
        value=value,
        logits=logits,
        weights=weights,
        near=near,
        far=seen & ~near,
        is_token=is_token[:, places],
    )


@dataclass(frozen=True)
class FarText:
    """A text's queries past the memory of a layer.

    Attributes:
        layer: the layer.
        activations: its activations in the softmax model, [N, H, T, ·].
        hidden_states: its input there, [N, T, width].
        root: what errors are multiplied by (`output_root`), or None.
        group: 1 for the layer's retrieval heads, 0 for all others.
    """

    layer: RFAAttentionMixin
    activations: LayerActivations
    hidden_states: Tensor
    root: Tensor | None
    group: int = 0

    @property
    def layout(self) -> MemoryLayout:
        """The layout of what the heads keep."""
        return self.layer.memory_layouts(torch.float32)[self.group]

    @property
    def importance(self) -> Importance | None:
        """By what their slots rank tokens."""
        return self.layer.importances()[self.group]

    @property
    def first(self) -> int:
        """The first place whose query does not see all tokens."""
        return self.layout.places

    @property
    def held_out(self) -> int:
        """How many rows are held out."""
        return math.ceil(len(self.activations.key) * HELD_OUT)

    @property
    def is_long(self) -> bool:
        """Whether the text is one that gradient descent pays on."""
        rows, _, length, _ = self.activations.key.shape
        return length > self.first and rows > self.held_out and int(self.activations.is_token.sum()) >= FITTED_FROM

    def generator(self) -> torch.Generator:
        """Return what draws queries: the same for a layer and a seed of conversion."""
        seed = self.layer.feature_map.seed * 1_000_003 + self.layer.rfa_layer_idx
        return torch.Generator().manual_seed(seed % 2**32)

    def draw(self, generator: torch.Generator) -> Iterator[tuple[int, FarQueries]]:
        """Yield about `STEP_QUERIES` queries of `STEP_ROWS` rows that are not held out, at random, row by row.

        Each row has a part of all places, and comes with the tokens up to its last one: fewer of them take less time.
        """
        (count, _, length, _), device = self.activations.key.shape, self.activations.key.device
        rows = self.held_out + torch.randperm(count - self.held_out, generator=generator)[:STEP_ROWS]
        step = max(1, (length - self.first) // STEP_QUERIES)
        start = self.first + int(torch.randint(step, (), generator=generator))
        parts = torch.arange(start, length, step, device=device).tensor_split(len(rows))
        for row, places in zip(rows.tolist(), parts, strict=True):
            if len(places):
                yield row, self.queries(row, places, int(places[-1]) + 1)

    def rows_held_out(self) -> Iterator[tuple[int, FarQueries]]:
        """Yield queries of the rows that are held out, one row after the other."""
        for row in range(self.held_out):
            yield row, self._queries_from(row, self.first, self._step(STEP_ROWS))

    def all_rows(self, start: int) -> Iterator[tuple[int, FarQueries]]:
        """Yield all queries from a place on, some of a row at a time; they come with the tokens up to the last of them."""
        length, device = self.activations.key.shape[2], self.activations.key.device
        for row in range(len(self.activations.key)):
            for first in range(start, length, QUERIES_AT_ONCE):
                stop = min(first + QUERIES_AT_ONCE, length)
                yield row, self.queries(row, torch.arange(first, stop, device=device), stop)

    def queries(self, row: int, places: Tensor, stop: int | None = None) -> FarQueries:
        """Return the queries at some places of a row; see `far_queries`."""
        return far_queries(self.layer, self.activations.rows(row + 1, row), places, stop, group=self.group)

    def _step(self, rows: int) -> int:
        return max(1, rows * (self.activations.key.shape[2] - self.first) // STEP_QUERIES)

    def _queries_from(self, row: int, start: int, step: int) -> FarQueries:
        length, device = self.activations.key.shape[2], self.activations.key.device
        return self.queries(row, torch.arange(min(start, length), length, step, device=device))


def output_roots(layer: RFAAttentionMixin, projection: str | None) -> list[Tensor | None]:
    """Return R with ‖R_gᵀ e‖ = ‖W_g e‖ for errors e of every query head's output, [H, G, d, d].

    Args:
        layer: the layer.
        projection: name of its output projection W, whose columns W_g are a head's, or None.

    Returns:
        R of all heads but the retrieval heads, and of these; None where the projection is not of the heads' outputs side by
        side.
    """
    linear = None if projection is None else layer.get_submodule(projection)
    heads, width = layer.rfa_heads, layer.rfa_width
    if not isinstance(linear, nn.Linear | Conv1D):
        return [None, None]
    weight = tensor_of(linear, "weight")
    weight = (weight if isinstance(linear, Conv1D) else weight.mT).float()  # [inputs, outputs]
    groups = layer.feature_map.groups
    if weight.shape[0] != heads * groups * width:
        return [None, None]
    by_head = weight.view(heads, groups, width, -1)
    squares = by_head @ by_head.mT
    squares = squares + LEAST_SQUARE * squares.diagonal(dim1=-2, dim2=-1).mean() * torch.eye(width).to(squares)
    root = torch.linalg.cholesky(squares)
    return [part[0] for part in split_heads(root[None], layer.retrieval_heads)] if layer.retrieval_heads else [root]
