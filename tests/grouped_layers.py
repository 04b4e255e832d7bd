"""An attention layer of grouped queries without projections, for tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor

from hf_rfa.models.attention_seq2seq import RFASeq2SeqAttentionMixin

WIDTH, HIDDEN = 4, 5
SCALING = 0.6


class Layer(RFASeq2SeqAttentionMixin):
    """Attention without projections of its own."""

    scaling = SCALING

    def __init__(self, heads: int, groups: int, kind: str = "causal", **fields: Any) -> None:
        super().__init__()
        defaults = {
            "feature_map": "positive", "window_size": 0, "num_sinks": 0, "num_slots": 0, "gate": False, "unit_norm": False,
            "trainable_projection": False, "feature_seed": 1, "chunk_size": 4, "hidden_size": HIDDEN,
            "max_position_embeddings": 8, "retrieval_window": 0, "retrieval_slots": 0, "retrieval_heads": [],
            "importance": "learned",
        }  # fmt: skip
        config = SimpleNamespace(**{**defaults, **fields})
        config.num_heads_for = lambda kind: heads
        config.head_dim_for = lambda kind: WIDTH
        config.retrieval_heads_of = lambda layer: config.retrieval_heads
        config.motion_of = lambda kind: (0, 0)
        name = config.feature_map
        config.num_features_for = lambda kind: 0 if name == "none" else None if name == "elu" else 6
        self.init_rfa(config, kind=kind, scaling=SCALING, layer_idx=0, groups=groups)
        self.source: Any = None

    def project_query(self, hidden_states: Tensor) -> Tensor:
        return self.source[0]

    def project_source(self, source: Tensor) -> tuple[Tensor, Tensor]:
        return self.source[1:]
