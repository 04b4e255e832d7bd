"""Tiny checkpoints to export: every part of a memory, in two layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hf_rfa.models.importance import LearnedImportance
from tests.conftest import save_tiny_tokenizer
from tests.families import make

#: Grouped queries, sinks, window, slots, retrieval heads in one of two layers, and positions that go back every 5 tokens.
OPTIONS = {
    **{"feature_map": "none", "window_size": 3, "num_sinks": 2, "num_slots": 3, "max_distance": 12, "distance_step": 5},
    **{
        "retrieval_heads": [[0, 1]],
        "retrieval_window": 4,
        "retrieval_slots": 3,
        "num_hidden_layers": 2,
        "vocab_size": 64,
    },
}
SUMMARY = {"feature_map": "summary", "num_features": 4}


def saved(folder: Path, family: str = "llama", **options: Any) -> Path:
    """Return a folder with a tiny checkpoint."""
    model = make(family, {**OPTIONS, **options})
    for name, weight in model.named_parameters():
        if ".feature_map." in name:  # which are zeros before a conversion
            torch.nn.init.normal_(weight, std=0.3)
    for module in model.modules():
        if isinstance(module, LearnedImportance):  # zeros before a conversion, too
            torch.nn.init.uniform_(module.weight, 0.0, 0.1)
            torch.nn.init.uniform_(module.recency, 0.0, 0.1)
    model.save_pretrained(folder)
    save_tiny_tokenizer(folder)
    return folder
