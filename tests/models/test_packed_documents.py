"""Rows that hold several documents: no layer of any kind sees past the start of its document, or the row is refused."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from hf_rfa import FAMILIES
from hf_rfa.finetune.data import keeps_documents_apart
from hf_rfa.models import modeling_rfa_seq2seq
from tests.conftest import save_tiny_tokenizer, tiny_seq2seq_config, words
from tests.decoders import LENGTH, NAMES, WINDOWED, case, converted, pair, rfa_indices
from tests.families import logits, relative_error, tokens
from tests.training import run, write_rows

#: Families whose other layers are convolutions or recurrences, which read a row as one text.
READ_ON = (
    *("bamba", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text"),
    *("qwen3_5_text", "qwen3_next"),
)
#: Families whose softmax attention is handed a mask made without positions.
WITHOUT_POSITIONS = ("biogpt", "opt")
LENGTHS = (9, 3, 17)
#: The second is a piece from the middle of a document: one starts wherever positions do not continue.
POSITIONS = torch.cat([torch.arange(9), torch.arange(3) + 4, torch.arange(17)])[None]

every_decoder = pytest.mark.parametrize(
    "name", [name if name in (*READ_ON, *WITHOUT_POSITIONS) else case(name) for name in NAMES]
)


def error_of_packing(model: Any) -> float:
    """Return how far the logits of packed documents are from those of the documents in rows of their own."""
    ids = tokens(1, LENGTH)
    documents = zip(ids.split(LENGTHS, dim=1), POSITIONS.split(LENGTHS, dim=1), strict=True)
    alone = [logits(model, document, position_ids=positions) for document, positions in documents]
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


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "opt", "gpt_oss", "lfm2"])
def test_training_packs_where_documents_stay_apart(name):
    """Softmax models are tried: those of OPT and GPT-OSS read the documents of a row as one text."""
    softmax, model = pair(name)
    assert keeps_documents_apart(softmax) == (error_of_packing(softmax) < 1e-4) == (name in ("llama", "gemma3_text"))
    assert keeps_documents_apart(model) == (name not in READ_ON)


@torch.no_grad()
def test_documents_that_are_not_packed_are_learned_in_rows_of_their_own(tmp_path, caplog):
    """Whole, in pieces of a block: the loss is the mean over the labels of pieces that each stand alone."""
    _, model = pair("qwen3_5_text")
    model.save_pretrained(tmp_path / "rfa")
    save_tiny_tokenizer(tmp_path / "rfa")
    texts = [words(5 + 7 * n, n) for n in range(4)]
    write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in texts])
    options = {"evaluate": "rows.jsonl", "learning_rate": 1e-9, "per_device_eval_batch_size": 1}
    with torch.enable_grad():
        metrics = run(tmp_path, tmp_path, "rfa", steps=1, **options)
    assert caplog.text.count("documents are not packed: rfa_qwen3_5_text models") == 1
    tokenizer, losses = AutoTokenizer.from_pretrained(tmp_path / "rfa"), []
    for text in texts:
        for piece in torch.tensor(tokenizer(text)["input_ids"]).split(16):
            if len(piece) > 1:
                found = logits(model, piece[None])[0, :-1]
                losses += torch.nn.functional.cross_entropy(found, piece[1:], reduction="none").tolist()
    assert metrics["eval_loss"] == pytest.approx(fmean(losses), rel=1e-4)
