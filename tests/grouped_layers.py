"""An attention layer of grouped queries, and the same layer with a key-value head for every query head, for tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_rfa.models.attention import RFAAttentionMixin

HEADS, GROUPS, BATCH, WIDTH, HIDDEN = 2, 3, 2, 4, 5
SCALING = 0.6
PADDING = torch.ones(BATCH, 13, dtype=torch.long)
PADDING[0, :3], PADDING[1, 5], PADDING[1, 11:] = 0, 0, 0
DOCUMENTS = torch.zeros(BATCH, 13, dtype=torch.bool)
DOCUMENTS[0, 6], DOCUMENTS[1, 0], DOCUMENTS[1, 8] = True, True, True


def repeat(tensor: Tensor | None, groups: int = GROUPS, dim: int = 1) -> Tensor | None:
    """Return what key-value heads have, for each of their query heads."""
    return None if tensor is None else tensor.repeat_interleave(groups, dim=dim)


def double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Layer(RFAAttentionMixin):
    """Attention without projections of its own."""

    scaling = SCALING

    def __init__(self, heads: int, groups: int, kind: str = "causal", **fields: Any) -> None:
        super().__init__()
        defaults = {
            "feature_map": "positive", "window_size": 0, "num_sinks": 0, "num_slots": 0, "gate": False, "unit_norm": False,
            "orthogonal": True, "trainable_projection": False, "redraw_pool": 0, "feature_seed": 1, "chunk_size": 4,
            "hidden_size": HIDDEN, "max_position_embeddings": 8, "state_dtype": "float32", "retrieval_window": 0,
        }  # fmt: skip
        config = SimpleNamespace(**{**defaults, **fields})
        config.num_heads_for = lambda kind: heads
        config.head_dim_for = lambda kind: WIDTH
        config.retrieval_heads_of = lambda layer: []
        name = config.feature_map
        config.num_features_for = lambda kind: 0 if name == "none" else None if name in ("elu", "hedgehog") else 6
        self.init_rfa(config, kind=kind, scaling=SCALING, layer_idx=0, groups=groups)
        self.source: Any = None

    def project_query(self, hidden_states: Tensor) -> Tensor:
        return self.source[0]

    def project_source(self, source: Tensor) -> tuple[Tensor, Tensor]:
        return self.source[1:]


def pair(kind: str = "causal", **fields: Any) -> tuple[Layer, Layer]:
    """Return a layer of grouped queries with any parameters, and the same layer with a key-value head per query head."""
    torch.manual_seed(0)
    grouped, single = Layer(HEADS, GROUPS, kind, **fields).double(), Layer(HEADS * GROUPS, 1, kind, **fields).double()
    with torch.no_grad():
        for tensor in grouped.state_dict().values():
            tensor.add_(0.2 * torch.randn_like(tensor))
        theirs = grouped.state_dict()
        for name, tensor in single.state_dict().items():
            tensor.copy_(theirs[name].repeat_interleave(tensor.shape[0] // theirs[name].shape[0], dim=0))
    return grouped.eval(), single.eval()


def sample(length: int = 13) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys, values and hidden states."""
    torch.manual_seed(1)
    keys = (double(BATCH, HEADS, length, WIDTH) for _ in range(2))
    return double(BATCH, HEADS * GROUPS, length, WIDTH), *keys, double(BATCH, length, HIDDEN)


CASES = {
    "plain": {},
    "exponential": {"feature_map": "exponential"},
    "gaussian": {"feature_map": "gaussian", "gate": True},
    "signed window": {"feature_map": "gaussian", "window_size": 3, "num_sinks": 2},
    "unit norm": {"feature_map": "gaussian", "unit_norm": True, "window_size": 2},
    "elu": {"feature_map": "elu", "gate": True, "window_size": 1},
    "t2r": {"feature_map": "t2r"},
    "hedgehog": {"feature_map": "hedgehog", "window_size": 4},
    "window": {"window_size": 3},
    "sinks": {"feature_map": "exponential", "window_size": 3, "num_sinks": 2, "gate": True},
    "no features": {"feature_map": "none", "window_size": 5, "num_sinks": 1},
    "slots": {"feature_map": "none", "window_size": 2, "num_sinks": 1, "num_slots": 3},
    "slots and features": {"feature_map": "exponential", "window_size": 2, "num_slots": 2},
}
every_case = pytest.mark.parametrize("fields", CASES.values(), ids=CASES.keys())
every_text = pytest.mark.parametrize(
    "text",
    [
        {},
        {"padding_mask": PADDING},
        {"document_starts": DOCUMENTS},
        {"padding_mask": PADDING, "document_starts": DOCUMENTS},
    ],
    ids=["whole", "padded", "packed", "both"],
)


def options_of(layer: Layer) -> dict[str, Any]:
    """Return learned sinks, for a layer with a window."""
    return {"sink_logits": torch.linspace(-1.0, 2.0, HEADS * GROUPS).double()} if layer.window_size else {}
