"""A decoder as a function of some tokens and of states that begin as zeros: what exporters trace.

Every group of heads that keeps tokens in one way (`hf_rfa.models.memory`) has two states, of float32:

    rows     [B, H, P, 2d]     key and value of the token in every place
    places   [B, 2H, P]        first its score, then its arrival, for every head

Zeros are an empty memory. Scores of sinks are `SINK_SCORE`. The arrival of a token is `FIRST_ARRIVAL` plus its number since
the origin of its epoch (`hf_rfa.models.positions`), and 0 marks an empty place. Where the next epoch begins B is taken off
all arrivals, so that no number grows with the text, and no position is an input.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_rfa.errors import InputError
from hf_rfa.models.attention import RFAAttentionMixin
from hf_rfa.models.cache_rfa import RFA_LAYER_TYPE
from hf_rfa.models.configuration_rfa import RFAConfigMixin
from hf_rfa.models.masking import join_heads, split_heads
from hf_rfa.models.memory import MemoryLayout
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
        heads, count = self.layout.heads, self.layout.places
        return (heads, count, 2 * self.layout.head_dim), (2 * heads, count)


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
    elif config.feature_map != "none":
        problem = (
            f"has features (feature_map={config.feature_map!r}), which are not exported: convert it with --preset exact"
        )
    elif any(isinstance(getattr(module, "sinks", None), nn.Parameter) for module in model.modules()):
        problem = "has learned sinks in its attention (gpt-oss), which are not exported"
    elif "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        problem = "takes no position_ids, without which its positions cannot be exported"
    if problem is not None:
        raise InputError(f"this {config.model_type} model {problem}.")


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
        moves = bool(first.max_distance) and can_move(model.rfa_stacks[0])
        self.distance, self.step = (first.max_distance, first.distance_step) if moves else (0, 0)
        self.sinks = first.sinks
        keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.keep: dict[str, Any] = {"logits_to_keep": 1} if keeps_logits else {}
        for number, group in enumerate(self.groups):
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
        positions = self.ordinal.clamp_min(0.0).long()
        logits = self.model(ids, position_ids=positions, use_cache=False, **self.keep).logits[:, -1:]
        states = tuple(state for pair in zip(self.rows, self.places, strict=True) for state in pair)
        del self.rows, self.places, self.is_token, self.taken_off, self.ordinal, self.new_places
        del self.is_sink, self.is_step, self.targets
        return logits, *states

    def _targets(self, last: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return where the next token goes in every group [B, H, 1], and the logits' offset after that [B, H, 1, P].

        It is the law of `hf_rfa.models.lifetimes.targets_of`, for all groups of a kind at once.
        """
        kinds: dict[tuple[Any, ...], list[int]] = {}
        for number, group in enumerate(self.groups):
            kinds.setdefault(group.layout.kind, []).append(number)
        targets: dict[int, tuple[Tensor, Tensor]] = {}
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
            unseen = torch.where(arrival > 0, 0.0, UNSEEN).scatter(-1, place, 0.0)[:, :, None]
            targets |= zip(numbers, zip(place.split(counts, 1), unseen.split(counts, 1), strict=True), strict=True)
        return [targets[number] for number in range(len(self.groups))]


class _Attend:
    """Takes the place of a layer's `hf_rfa.models.attention.RFAAttentionMixin.attend`, with the same results."""

    def __init__(self, graph: DecoderGraph, layer: RFAAttentionMixin, numbers: list[int]) -> None:
        self.graph, self.layer, self.numbers = graph, layer, numbers

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, hidden_states: Tensor, **unread: Any
    ) -> tuple[Tensor, None]:
        layer, heads = self.layer, key.shape[1]
        queries = (query * layer.scaling).reshape(query.shape[0], heads, -1, query.shape[-1])  # [B, H, G T, d]
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
        states = graph.rows[number], graph.places[number]
        new = query, rows, torch.cat([score, arrival], 1)
        about = graph.is_token, graph.taken_off, graph.is_step, *graph.targets[number]
        constants = (getattr(graph, f"{name}_{number}") for name in ("recency", "frequency", "partner"))
        sizes: Any = {"window": float(layout.window), "sinks": float(layout.sinks), "slots": float(layout.slots)}
        output, graph.rows[number], graph.places[number] = torch.onnx.ops.symbolic_multi_out(
            f"{DOMAIN}::attend",
            (*new, *about, *states, *constants),
            sizes,
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
