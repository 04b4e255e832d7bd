"""The data of a training: pairs of a source and its target, and blocks of documents."""

from __future__ import annotations

import torch
from datasets import Dataset
from transformers import AutoTokenizer

from hf_rfa.finetune.data import PairCollator, joined_blocks, token_pairs
from hf_rfa.inference import load_model

from .conftest import save_tiny_tokenizer


def test_pairs_are_padded_and_shifted(tiny_seq2seq_parents):
    model, tokenizer = load_model(str(tiny_seq2seq_parents["bart"]))
    data = Dataset.from_dict({"source": ["w5 w6", "w7"], "target": ["w8", "w9 w10 w11"]})
    pairs = list(token_pairs(data, tokenizer, length=3))
    collate = PairCollator(tokenizer, model=model)
    batch = collate(pairs)
    assert batch["input_ids"].tolist() == [[5, 6, 2], [7, 2, 1]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["labels"].tolist() == [[8, 2, -100], [9, 10, 2]]
    assert batch["decoder_input_ids"].tolist() == [[2, 8, 2], [2, 9, 10]]
    assert batch["decoder_attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    with torch.no_grad():
        loss = model(**batch).loss
        alone = [model(**collate([pair])).loss for pair in pairs]
    torch.testing.assert_close(loss, (2 * alone[0] + 3 * alone[1]) / 5)


def test_targets_are_read_as_targets():
    """As tokenizers with a vocabulary per language need it."""

    def sides(text=None, text_target=None, **options):
        return {"input_ids": [[4] if text_target is None else [5] for _ in text or text_target]}

    data = Dataset.from_dict({"source": ["a"], "target": ["b"]})
    assert list(token_pairs(data, sides, length=3)) == [{"input_ids": [4], "labels": [5]}]


def test_blocks_join_documents(tmp_path):
    save_tiny_tokenizer(tmp_path)
    blocks = joined_blocks(AutoTokenizer.from_pretrained(tmp_path), ["w5 w6", "w7"], length=2)
    assert [block["input_ids"].tolist() for block in blocks] == [[5, 6], [2, 2], [7, 2]]
