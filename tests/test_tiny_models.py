"""Every causal language model of the installed transformers has a tiny shape that runs, or a reason why not."""

from __future__ import annotations

import pytest
import torch

from tests.tiny_models import UNBUILDABLE, VOCAB, model_types, tiny_config, tiny_model

ROWS, LENGTH = 2, 12


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # transformers' own, as of torch.jit.script
@pytest.mark.parametrize("model_type", [name for name in model_types() if name not in UNBUILDABLE])
def test_runs(model_type: str) -> None:
    model = tiny_model(model_type)
    ids = torch.randint(5, 50, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    assert logits.shape == (ROWS, LENGTH, VOCAB)
    assert logits.isfinite().all()


@pytest.mark.parametrize(
    ("model_type", "kinds"),
    [
        ("gemma3_text", {"sliding_attention", "full_attention"}),
        ("minimax", {"linear_attention", "full_attention"}),
        ("qwen3_next", {"linear_attention", "full_attention"}),
        ("deepseek_v4", {"compressed_sparse_attention", "heavily_compressed_attention"}),
    ],
)
def test_every_kind_of_layer_is_kept(model_type: str, kinds: set[str]) -> None:
    config = tiny_config(model_type)
    assert set(config.layer_types) == kinds
    assert len(config.layer_types) == config.num_hidden_layers == 3
