"""A decoder as a function of some tokens and of states that begin as zeros: what exporters trace.

Every group of heads that keeps tokens in one way (`hf_rfa.models.memory`) has two states, of float32:

    rows     [B, H, P, 2d]     key and value of the token in every place
    places   [B, 2H, P]        first its score, then its arrival, for every head

Zeros are an empty memory. Scores of sinks are `SINK_SCORE`. The arrival of a token is `FIRST_ARRIVAL` plus its number since
the origin of its epoch (`hf_rfa.models.positions`), and 0 marks an empty place. Where the next epoch begins B is taken off
all arrivals, so that no number grows with the text, and no position is an input.

Heads with a summary (`hf_rfa.models.summary_feature_map`) have rows [B, H, P + F, 2d + F]: behind key and value a token's
features φ = [1, Pk + b], made as it arrives, of its key without rotation. The last F rows are the state, the sum of φᵀ times
the rows of what left, decayed: in its first row the columns of features are n and n x̄.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_rfa.errors import InputError
from hf_rfa.models.attention import RFAAttentionMixin
from hf_rfa.models.cache_rfa import RFA_LAYER_TYPE
from hf_rfa.models.configuration_rfa import RFAConfigMixin
from hf_rfa.models.masking import join_heads, split_heads
from hf_rfa.models.memory import MemoryLayout
from hf_rfa.models.positions import Rotation
from hf_rfa.models.streaming import can_move

#: Score of a sink; finite, as whole rows are multiplied by zeros.
SINK_SCORE = 3e38
#: Arrival of a text's first token. From here on float32 tells every token of an epoch, and 8 million before it.
FIRST_ARRIVAL = float(2**23)
#: Logit of a place that is not seen.
UNSEEN = -1e30
#: Domain of the functions in `hf_rfa.export.operators`.
DOMAIN = "hf_rfa"


@dataclass(frozen=True)
class Group:
    """Heads of a layer that keep tokens in one way: those but the retrieval heads, or these."""

    layer: RFAAttentionMixin
    layout: MemoryLayout
    is_retrieval: bool

    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of the states, rows and places, without the batch."""
        heads, count, features = self.layout.heads, self.layout.places, self.layout.state_rows
        return (heads, count + features, 2 * self.layout.head_dim + features), (2 * heads, count)


def check_exportable(model: Any) -> None:
    """Raise an `InputError` for a model that has no such function."""
    config, problem = model.config, None
    if not isinstance(config, RFAConfigMixin):
        problem = "is a softmax model, whose cache grows: convert it first (hf-rfa convert)"
    elif model.config.is_encoder_decoder:
        problem = "has an encoder, and only decoders are exported"
    elif set(config.cache_layer_types()) != {RFA_LAYER_TYPE}:
        kinds = ", ".join(sorted({*config.cache_layer_types()} - {RFA_LAYER_TYPE}))
        problem = f"has layers that are not converted ({kinds}). Only decoders all of whose layers are can be exported"
    elif config.feature_map not in ("none", "summary"):
        problem = (
            f"has features (feature_map={config.feature_map!r}), of which only a summary is exported: convert it with "
            "--feature-map summary, or with none"
        )
    elif config.gate:
        problem = "has gates, which are not exported"
    elif any(isinstance(getattr(module, "sinks", None), nn.Parameter) for module in model.modules()):
        problem = "has learned sinks in its attention (gpt-oss), which are not exported"
    elif "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        problem = "takes no position_ids, without which its positions cannot be exported"
    if problem is not None:
        raise InputError(f"this {config.model_type} model {problem}.")


class Summary(nn.Module):
    """The matrices of a layer's summary, for queries and keys as their positions n have turned them.

    A row that is turned back and multiplied is one product of [row cos(n angle), row sin(n angle)].
    """

    key_weight: Tensor
    key_bias: Tensor
    query_weight: Tensor
    query_bias: Tensor
    count_weight: Tensor

    def __init__(self, layer: RFAAttentionMixin) -> None:
        super().__init__()
        feature_map, (_, partner) = layer.feature_map, turning(layer)
        groups = feature_map.groups
        bias = feature_map.query_bias.detach().clone()
        bias[:, 0] -= feature_map.window_shift.repeat_interleave(groups)
        for name in ("key", "query"):
            projection = getattr(feature_map, f"{name}_projection").detach().mT
            self.register_buffer(f"{name}_weight", torch.cat([projection, -partner @ projection], dim=-2))
        self.register_buffer("key_bias", feature_map.key_bias.detach()[:, None])
        self.register_buffer("query_bias", bias[:, None])
        self.register_buffer("count_weight", feature_map.count_weight.detach().view(-1, groups, 1, bias.shape[-1]))

    def forward(self, query: Tensor, key: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features of keys [B, H, W, F], and what queries say of mass, tilt and slope, [B, H, G, W, 2F - 1].

        Args:
            query: [B, H G, W, d].
            key: [B, H, W, d].
            turn: cosines and sines of the angles of every column, [B, 1, W, 2d].
        """
        features = (torch.cat([key, key], -1) * turn) @ self.key_weight + self.key_bias
        linear = (torch.cat([query, query], -1) * turn) @ self.query_weight + self.query_bias
        return F.pad(features, (1, 0), value=1.0), linear.unflatten(1, (key.shape[1], -1))


class DecoderGraph(nn.Module):
    """Some tokens of texts, and the states before them, to the logits of the last one and the states after.

    Args:
        model: a decoder with a language-model head that `check_exportable` lets pass.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        layers = [module for module in model.modules() if isinstance(module, RFAAttentionMixin)]
        self.groups = [
            Group(layer, layout, bool(index))
            for layer in layers
            for index, layout in enumerate(layer.memory_layouts(torch.float32))
        ]
        first = self.groups[0].layout
        stack = model.rfa_stacks[0]
        moves = bool(first.max_distance) and can_move(stack)
        if first.state_rows and stack.reads_unrotated and not can_move(stack):
            raise InputError(
                "a summary reads keys without rotation, and this model's turn in no way that could be found."
            )
        self.distance, self.step = (first.max_distance, first.distance_step) if moves else (0, 0)
        self.sinks = first.sinks
        keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.keep: dict[str, Any] = {"logits_to_keep": 1} if keeps_logits else {}
        self.summaries = nn.ModuleDict()
        self.horizon = layers[0].feature_map.horizon if first.state_rows else None
        for number, group in enumerate(self.groups):
            if group.layout.state_rows:
                self.summaries[str(number)] = Summary(group.layer)
            frequency, partner = turning(group.layer)
            self.register_buffer(f"frequency_{number}", frequency)
            self.register_buffer(f"partner_{number}", partner)
            importance = None if group.is_retrieval else group.layer.importance
            recency = torch.zeros(group.layout.heads) if importance is None else importance.recency.float()
            self.register_buffer(f"recency_{number}", recency[None, :, None])

    def zeros(self, batch: int) -> list[Tensor]:
        """Return the states of ``batch`` texts before their first token."""
        return [torch.zeros(batch, *shape) for group in self.groups for shape in group.shapes()]

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Let the model's attention read and write this graph's states."""
        layers: dict[Any, list[int]] = {group.layer: [] for group in self.groups}
        for number, group in enumerate(self.groups):
            layers[group.layer].append(number)
        try:
            for layer, numbers in layers.items():
                layer.attend = _Attend(self, layer, numbers)
            yield
        finally:
            for layer in layers:
                del layer.attend

    def forward(self, ids: Tensor, is_token: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """Return the logits [B, 1, vocabulary] of the last token, and the states.

        Args:
            ids: [B, W].
            is_token: [B, W], False for padding, which comes before the tokens of a row. All tokens of a row are of one
                epoch.
            *states: rows and places of every group.
        """
        self.rows, self.places = list(states[::2]), list(states[1::2])
        heads = self.groups[0].layout.heads
        last = self.places[0][:, heads:].amax((1, 2))[:, None]  # of each text's last token, [B, 1]
        count = torch.where(last > 0, last + (1.0 - FIRST_ARRIVAL), 0.0)
        sinks = (self.places[0][:, :1] >= SINK_SCORE).sum(-1)
        number = is_token.cumsum(1) - 1
        self.is_token, self.taken_off = is_token, torch.zeros_like(count)
        is_due = torch.zeros_like(count, dtype=torch.bool)
        if self.distance:
            is_due = (count >= self.distance) & is_token[:, -1:]
            self.taken_off = torch.where(is_due, float(self.step), 0.0)
        self.ordinal = count - self.taken_off + number
        self.is_sink = sinks + number < self.sinks
        # Arrival and score by the number of heads, without importance.
        new = self.ordinal + FIRST_ARRIVAL, torch.where(self.is_sink, SINK_SCORE, 0.0)
        counts = {group.layout.heads for group in self.groups}
        self.new_places = {heads: [part[:, None].expand(-1, heads, -1) for part in new] for heads in counts}
        is_one = torch.ones_like(is_token[:1], dtype=torch.int64).sum() == 1
        self.is_step = is_one & is_token.all() & ~is_due.any()
        self.targets = self._targets(last)
        self._prepare_summaries(number + 1)
        positions = self.ordinal.clamp_min(0.0).long()
        logits = self.model(ids, position_ids=positions, use_cache=False, **self.keep).logits[:, -1:]
        states = tuple(state for pair in zip(self.rows, self.places, strict=True) for state in pair)
        del self.rows, self.places, self.is_token, self.taken_off, self.ordinal, self.new_places
        del self.is_sink, self.is_step, self.targets, self.turns, self.decay
        return logits, *states

    def _prepare_summaries(self, count: Tensor) -> None:
        """Prepare what summaries of all layers read.

        They are cosines and sines of the angles of queries and keys, [B, 1, W, 2d] by the layers' rotation, and what is left,
        at every token, of the state and of what left with each token, [B, 1, W, 1 + W].

        Args:
            count: how many tokens of the pass there are up to each, [B, W].
        """
        self.turns: dict[Rotation, Tensor] = {}
        for number in map(int, self.summaries):
            rotation, frequency = self.groups[number].layer.rotation, getattr(self, f"frequency_{number}")
            if rotation not in self.turns:
                angle = self.ordinal[:, None, :, None] * frequency
                self.turns[rotation] = torch.cat([angle.cos(), angle.sin()], dim=-1)
        self.decay = torch.zeros(1)
        if self.horizon is not None:
            age = count[:, :, None] - F.pad(count, (1, 0))[:, None]
            self.decay = torch.where(age >= 0, (age / -self.horizon).exp(), 0.0)[:, None]

    def _targets(self, last: Tensor) -> list[tuple[Tensor, ...]]:
        """Return where the next token of every group goes.

        They are its place [B, H, 1], whether a token leaves it, [B, H, 1, 1] of 1 and 0, and the logits' offset after that,
        [B, H, 1, P].

        It is the law of `hf_rfa.models.lifetimes.targets_of`, for all groups of a kind at once.
        """
        kinds: dict[tuple[Any, ...], list[int]] = {}
        for number, group in enumerate(self.groups):
            kinds.setdefault(group.layout.kind, []).append(number)
        targets: dict[int, tuple[Tensor, ...]] = {}
        for numbers in kinds.values():
            layouts = [self.groups[number].layout for number in numbers]
            counts = [layout.heads for layout in layouts]
            parts = [
                self.places[number].split(layout.heads, 1) for number, layout in zip(numbers, layouts, strict=True)
            ]
            score, arrival = (torch.cat(part, 1) for part in zip(*parts, strict=True))  # [B, all heads, P]
            in_window = arrival > last[..., None] + (1.0 - layouts[0].window)
            rank = torch.where(in_window, torch.inf, torch.where(arrival > 0, score, -torch.inf))
            worst = rank == rank.amin(-1, keepdim=True)
            place = torch.where(worst, arrival, -1.0).argmax(-1, keepdim=True)  # of several, the last to come
            leaves = (arrival.gather(-1, place) > 0)[..., None].float()
            unseen = torch.where(arrival > 0, 0.0, UNSEEN).scatter(-1, place, 0.0)[:, :, None]
            of_groups = [tensor.split(counts, 1) for tensor in (place, leaves, unseen)]
            targets |= zip(numbers, zip(*of_groups, strict=True), strict=True)
        return [targets[number] for number in range(len(self.groups))]


class _Attend:
    """Takes the place of a layer's `hf_rfa.models.attention.RFAAttentionMixin.attend`, with the same results."""

    def __init__(self, graph: DecoderGraph, layer: RFAAttentionMixin, numbers: list[int]) -> None:
        self.graph, self.layer, self.numbers = graph, layer, numbers

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, hidden_states: Tensor, **unread: Any
    ) -> tuple[Tensor, None]:
        layer, heads = self.layer, key.shape[1]
        queries = query.reshape(query.shape[0], heads, -1, query.shape[-1])  # [B, H, G W, d]
        rows = torch.cat([key, value], dim=-1)
        parts: list[tuple[Tensor, ...]] = [(queries, rows)]
        if layer.retrieval_heads:
            split = [split_heads(tensor, layer.retrieval_heads) for tensor in (queries, rows)]
            parts = list(zip(*split, strict=True))
        outputs = [
            self._attend_group(number, part, hidden_states) for number, part in zip(self.numbers, parts, strict=True)
        ]
        return join_heads(outputs, layer.retrieval_heads).reshape(query.shape), None

    def _attend_group(self, number: int, part: tuple[Tensor, ...], hidden_states: Tensor) -> Tensor:
        query, rows = part
        graph, group = self.graph, self.graph.groups[number]
        layout = group.layout
        arrival, score = graph.new_places[layout.heads]
        if layout.slots:
            assert group.layer.importance is not None
            score = group.layer.importance.score(hidden_states, rows[..., : layout.head_dim], graph.ordinal)
            score = torch.where(graph.is_sink[:, None], SINK_SCORE, score.float())
        of_summary = torch.zeros(1), torch.zeros(1), torch.zeros(1)
        if layout.state_rows:
            summary: Any = graph.summaries[str(number)]
            by_head = query.reshape(query.shape[0], -1, rows.shape[2], layout.head_dim)
            turn = graph.turns[group.layer.rotation]
            features, linear = summary(by_head, rows[..., : layout.head_dim], turn)
            rows = torch.cat([rows, features], dim=-1)
            of_summary = graph.decay, linear, summary.count_weight
        states = graph.rows[number], graph.places[number]
        new = query * group.layer.scaling, rows, torch.cat([score, arrival], 1)
        about = graph.is_token, graph.taken_off, graph.is_step, *graph.targets[number]
        constants = (getattr(graph, f"{name}_{number}") for name in ("recency", "frequency", "partner"))
        sizes: Any = {"window": float(layout.window), "sinks": float(layout.sinks), "slots": float(layout.slots)}
        output, graph.rows[number], graph.places[number] = torch.onnx.ops.symbolic_multi_out(
            f"{DOMAIN}::attend",
            (*new, *about, *states, *constants, *of_summary),
            {**sizes, "features": layout.state_rows},
            dtypes=[torch.float32] * 3,
            shapes=[query.shape, *(state.shape for state in states)],
            version=1,
        )
        return output


def turning(layer: RFAAttentionMixin) -> tuple[Tensor, Tensor]:
    """Return the angle of every column of a layer's keys for each position, [d], and a matrix of their partners, [d, d].

    A key k turned by n positions is k cos(n angle) + (k partner) sin(n angle) (`hf_rfa.models.positions.Rotation`).
    """
    rotation, width = layer.rotation, layer.rfa_width
    pairs = rotation.frequency.shape[0]
    index = torch.arange(pairs)
    first, second = (2 * index, 2 * index + 1) if rotation.interleaved else (index, index + pairs)
    frequency, partner = torch.zeros(width), torch.zeros(width, width)
    frequency[first] = frequency[second] = rotation.frequency.float().cpu()
    partner[second, first], partner[first, second] = -1.0, 1.0
    return frequency, partner
