"""Rows that hold several documents: no layer of any kind sees past the start of its document, or the row is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_rfa import FAMILIES
from hf_rfa.models import modeling_rfa_seq2seq

from .conftest import tiny_seq2seq_config
from .decoders import LENGTH, NAMES, case, rfa_indices
from .families import logits, relative_error, tokens
from .test_decoders import WINDOWED, converted, pair

#: Families whose other layers are convolutions or recurrences, which read a row as one text.
READ_ON = (
    *("bamba", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text"),
    *("qwen3_5_text", "qwen3_next"),
)
#: Families whose softmax attention is handed a mask made without positions.
WITHOUT_POSITIONS = ("biogpt", "opt")
LENGTHS = (9, 3, 17)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]

every_decoder = pytest.mark.parametrize(
    "name", [name if name in (*READ_ON, *WITHOUT_POSITIONS) else case(name) for name in NAMES]
)


def error_of_packing(model: Any) -> float:
    """Return how far the logits of packed documents are from those of the documents in rows of their own."""
    ids = tokens(1, LENGTH)
    alone = [logits(model, document) for document in ids.split(LENGTHS, dim=1)]
    return relative_error(model(ids, position_ids=POSITIONS, use_cache=False).logits, torch.cat(alone, dim=1))


@torch.no_grad()
@every_decoder
def test_packed_documents_are_the_documents_in_rows_of_their_own(name):
    """With softmax layers among those of RFA, and with sliding ones."""
    softmax, model = pair(name, dtype=torch.float64)
    hybrid = converted(softmax, **WINDOWED, softmax_layers=rfa_indices(model)[1:])
    for each in (model, hybrid):
        if name not in READ_ON:
            assert error_of_packing(each) < 1e-5
            continue
        kinds = set(model.config.layer_types) - {"full_attention", "moe", "mlp"}
        with pytest.raises(ValueError, match=rf"{kinds.pop()}.*a row of its own"):
            error_of_packing(each)
        assert torch.isfinite(logits(each, tokens(1, LENGTH), position_ids=torch.arange(LENGTH)[None])).all()
    if name in READ_ON:
        assert error_of_packing(softmax) > 0.1, "its base model reads on, so that refusing is right"


@torch.no_grad()
@pytest.mark.parametrize("name", ["bart", "marian"])
def test_decoders_without_position_ids_refuse_packed_documents(name):
    """The softmax models raise an IndexError."""
    config = FAMILIES[name].rfa_config(**{**tiny_seq2seq_config(name).to_dict(), "model_type": f"rfa_{name}"})
    model = getattr(modeling_rfa_seq2seq, f"RFA{name.title()}ForCausalLM")(config).eval()
    with pytest.raises(ValueError, match=r"read a row as one text.*a row of its own"):
        error_of_packing(model)
    ids = tokens(1, LENGTH)
    assert torch.equal(logits(model, ids, position_ids=torch.arange(LENGTH)[None]), logits(model, ids))
