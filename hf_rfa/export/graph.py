"""A decoder as a function of some tokens and of states that begin as zeros, and what exporters trace of it.

Every group of heads that keeps tokens in one way (`hf_rfa.models.memory`) has two states, of float32:

    keys, values   [B, H, P, d]        of the token in every place

Groups that differ in their heads alone make a `Stack`, whose H' heads have one or two states together:

    places         [B, 2, H', P]       the score of the token in every place, and its arrival
    summary        [B, H', F, d + 1]   the sum of φᵀ [v, 1] of what left, decayed: its last column is n and n x̄

Zeros are an empty memory. Scores of sinks are `SINK_SCORE`. The arrival of a token is `FIRST_ARRIVAL` plus its number since
the origin of its epoch (`hf_rfa.models.positions`), and 0 marks an empty place. Where the next epoch begins B is taken off
all arrivals, so that no number grows with the text, and no position is an input.

A summary (`hf_rfa.models.summary_feature_map`) has features φ = [1, Pk + b] of a key without rotation, which are made as its
token leaves: its arrival tells how far the key is turned.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_rfa.errors import InputError
from hf_rfa.models.attention import RFAAttentionMixin
from hf_rfa.models.cache_rfa import RFA_LAYER_TYPE
from hf_rfa.models.configuration_rfa import RFAConfigMixin
from hf_rfa.models.importance import Importance, LearnedImportance
from hf_rfa.models.masking import head_orders, split_heads
from hf_rfa.models.memory import MemoryLayout
from hf_rfa.models.streaming import can_move

#: Score of a sink; finite, as whole rows are multiplied by zeros.
SINK_SCORE = 3e38
#: Arrival of a text's first token. From here on float32 tells every token of an epoch, and 8 million before it.
FIRST_ARRIVAL = float(2**23)
#: Logit of a place that is not seen.
UNSEEN = -1e30
#: Domain of the functions in `hf_rfa.export.operators`, and of the marks in what is traced.
DOMAIN = "hf_rfa"


@dataclass(eq=False)
class Group:
    """Heads of a layer that keep tokens in one way: those but the retrieval heads, or these.

    Attributes:
        layer: whose heads they are.
        layout: of what they keep.
        importance: by which their slots rank tokens, or None without slots.
        chosen: the heads, or none where they are all of the layer.
    """

    layer: RFAAttentionMixin
    layout: MemoryLayout
    importance: Importance | None
    chosen: tuple[int, ...]


@dataclass(eq=False)
class Stack:
    """Groups of all layers that differ in their heads alone."""

    groups: list[Group] = field(default_factory=list)

    @property
    def layout(self) -> MemoryLayout:
        """That of the first group, for sizes that are the same of all."""
        return self.groups[0].layout

    @property
    def heads(self) -> list[int]:
        """The number of heads of every group."""
        return [group.layout.heads for group in self.groups]


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


class DecoderGraph(nn.Module):
    """Tokens and their positions to the logits of the last one, with marks where layers begin, end and attend.

    Args:
        model: a decoder with a language-model head that `check_exportable` lets pass.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        attention = {name: module for name, module in self.named_modules() if isinstance(module, RFAAttentionMixin)}
        self.groups: list[Group] = []
        kinds: dict[tuple[Any, ...], Stack] = {}
        for layer in attention.values():
            chosen = tuple(layer.retrieval_heads)
            order, _ = head_orders(layer.rfa_heads, chosen)
            parts = (order[: len(order) - len(chosen)], chosen) if chosen else ((),)
            of_parts = zip(layer.memory_layouts(torch.float32), layer.importances(), parts, strict=True)
            for layout, importance, heads in of_parts:
                self.groups.append(Group(layer, layout, importance, heads))
                kinds.setdefault(layout.kind, Stack()).groups.append(self.groups[-1])
        self.stacks = list(kinds.values())
        first, stack = self.groups[0].layout, model.rfa_stacks[0]
        moves = bool(first.max_distance) and can_move(stack)
        if first.state_rows and stack.reads_unrotated and not can_move(stack):
            raise InputError(
                "a summary reads keys without rotation, and this model's turn in no way that could be found."
            )
        self.distance, self.step = (first.max_distance, first.distance_step) if moves else (0, 0)
        keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.keep: dict[str, Any] = {"logits_to_keep": 1} if keeps_logits else {}
        #: The name of the list of layers.
        self.layers_name = re.sub(r"\.\d+\..*", "", next(iter(attention)))

    @property
    def layers(self) -> Any:
        """The list of layers."""
        return self.get_submodule(self.layers_name)

    def layer_of(self, index: int) -> RFAAttentionMixin:
        """Return the attention of a layer of the list."""
        return next(module for module in self.layers[index].modules() if isinstance(module, RFAAttentionMixin))

    def states(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the names of all states, and their shapes without the batch."""
        found: list[tuple[str, tuple[int, ...]]] = []
        for number, group in enumerate(self.groups):
            shape = (group.layout.heads, group.layout.places, group.layout.head_dim)
            found += [(f"keys.{number}", shape), (f"values.{number}", shape)]
        for number, stack in enumerate(self.stacks):
            heads, layout = sum(stack.heads), stack.layout
            found.append((f"places.{number}", (2, heads, layout.places)))
            if layout.state_rows:
                found.append((f"summary.{number}", (heads, layout.state_rows, layout.head_dim + 1)))
        return found

    def traced_layers(self) -> tuple[int, dict[int, int]]:
        """Return how many layers to trace, and for every other one which of these, but the first, it is like."""
        about = [_about(layer) for layer in self.layers]
        for count in range(2, len(about)):
            if all(each in about[1:count] for each in about[count:]):
                return count, {index: about.index(about[index], 1, count) for index in range(count, len(about))}
        return len(about), {}

    @contextmanager
    def marking(self, count: int) -> Iterator[None]:
        """Let the first layers leave marks, and the model have no others."""
        layers = list(self.layers)
        try:
            for index, layer in enumerate(layers):
                layer.forward = _Marked(layer.forward, index)
                for module in layer.modules():
                    if isinstance(module, RFAAttentionMixin):
                        module.attend = _Attend(module, index)  # type: ignore[method-assign]
            del self.layers[count:]
            yield
        finally:
            self.layers.extend(layers[count:])
            for layer in layers:
                del layer.forward
                for module in layer.modules():
                    vars(module).pop("attend", None)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the logits [B, 1, vocabulary] of the last of some tokens [B, W]."""
        logits = self.model(ids, position_ids=positions, use_cache=False, **self.keep).logits
        return logits if self.keep else logits[:, -1:]


class _Marked:
    """A layer's forward pass between two marks, on its hidden states."""

    def __init__(self, forward: Any, index: int) -> None:
        self.original, self.index = forward, index

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (self._mark("begin", args[0]), *args[1:])
        else:
            kwargs["hidden_states"] = self._mark("begin", kwargs["hidden_states"])
        found = self.original(*args, **kwargs)
        if isinstance(found, tuple):
            return (self._mark("end", found[0]), *found[1:])
        return self._mark("end", found)

    def _mark(self, name: str, hidden: Tensor) -> Tensor:
        return _symbol(name, (hidden,), self.index, hidden)


class _Attend:
    """Takes the place of a layer's `hf_rfa.models.attention.RFAAttentionMixin.attend`.

    The mark's last input is what a learned importance reads, or what another rule makes of the tokens, [B, W, H] of all heads
    with slots, group by group.
    """

    def __init__(self, layer: RFAAttentionMixin, index: int) -> None:
        self.layer, self.index = layer, index

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, hidden_states: Tensor, **unread: Any
    ) -> tuple[Tensor, None]:
        importance = hidden_states
        if not _is_plain(self.layer):
            chosen, none = self.layer.retrieval_heads, torch.zeros_like(hidden_states[..., 0])
            parts = zip(self.layer.importances(), split_heads(key, chosen) if chosen else (key,), strict=True)
            scores = [rule.score(hidden_states, part, none) for rule, part in parts if rule is not None]
            importance = torch.cat(scores, dim=1).transpose(1, 2).float()
        return _symbol("attention", (query, key, value, importance), self.index, query), None


def _is_plain(layer: Any) -> bool:
    """Return whether what a layer's mark reads does not depend on its importance and its retrieval heads."""
    return all(isinstance(rule, LearnedImportance | None) for rule in layer.importances())


def _symbol(name: str, inputs: tuple[Tensor, ...], layer: int, like: Tensor) -> Tensor:
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::{name}", inputs, {"layer": layer}, dtype=like.dtype, shape=like.shape, version=1
    )


def _about(layer: nn.Module) -> list[Any]:
    """Return what tells layers apart that are traced differently: modules, their plain attributes, and shapes."""
    found: list[Any] = []
    for name, module in layer.named_modules():
        if re.search(r"(^|\.)((retrieval_)?importance|feature_map)(\.|$)", name):  # for which marks stand
            continue
        plain = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str | list | None) and not key.endswith("layer_idx")
        }
        if isinstance(module, RFAAttentionMixin) and _is_plain(module):
            plain.pop("retrieval_heads", None)
        weights = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        found.append((name, type(module), plain, [(key, tensor.shape) for key, tensor in weights]))
    return found


def summary_weights(layer: RFAAttentionMixin) -> dict[str, Tensor]:
    """Return the matrices of a layer's summary, for queries and keys as their positions n have turned them.

    A row that is turned back and multiplied is one product of [row cos(n angle), row sin(n angle)].
    """
    feature_map, (_, partner) = layer.feature_map, turning(layer)
    groups, found = feature_map.groups, {}
    bias = feature_map.query_bias.detach().clone()
    bias[:, 0] -= feature_map.window_shift.repeat_interleave(groups)
    for name in ("key", "query"):
        projection = getattr(feature_map, f"{name}_projection").detach().mT
        found[f"{name}_weight"] = torch.cat([projection, -partner @ projection], dim=-2)
    found["key_bias"] = feature_map.key_bias.detach()[:, None]
    found["query_bias"] = bias.view(-1, groups, bias.shape[-1])
    found["count_weight"] = feature_map.count_weight.detach().view(-1, groups, bias.shape[-1])
    return found


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
