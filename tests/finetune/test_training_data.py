"""The data of a training: pairs, blocks of documents, and rows that miss something."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from hf_rfa import InputError
from hf_rfa.finetune.data import (
    PairCollator,
    labelled_texts,
    load_data,
    packed_blocks,
    rows_to_learn,
    select_columns,
    single_documents,
    text_blocks,
    token_pairs,
)
from hf_rfa.inference import load_model
from hf_rfa.io.text_io import tokenize
from tests.conftest import save_tiny_tokenizer


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
    blocks = text_blocks(tokenize(AutoTokenizer.from_pretrained(tmp_path), ["w5 w6", "w7"]), 2)
    assert [block["input_ids"].tolist() for block in blocks] == [[5, 6], [2, 7]]


def selected(path: Path, streaming: bool = False, **columns: str):
    return select_columns(load_data(str(path), streaming=streaming), str(path), columns)


@pytest.mark.parametrize(
    ("name", "content", "columns", "match"),
    [
        ("a.jsonl", '{"t": "x"}\n\n{"t": null}', {}, "a.jsonl, row 2: column 't' is null, not text"),
        ("a.jsonl", '{"t": "x"}\n{"u": "y"}', {}, "a.jsonl, row 2: column 't' is null"),
        ("a.jsonl", '{"t": 5}', {}, "a.jsonl, row 1: column 't' is of type int, not text"),
        ("a.jsonl", '{"t": ["x"]}', {}, "a.jsonl, row 1: column 't' is of type list, not text"),
        ("a.jsonl.gz", '{"t": "x"}\n{"t": null}', {}, "a.jsonl.gz, row 2: column 't' is null"),
        ("a.json", '[{"t": "x"},\n\n{"t": null}]', {}, "a.json, row 2: column 't' is null"),
        ("a.csv", 't,l\n"x\ny",a\n\n,b\n', {"label": "l"}, "a.csv, row 2: column 't' is null"),
        ("a.csv", "t\n1\n2\n", {}, "a.csv, row 1: column 't' is of type int, not text"),
        (
            "a.jsonl",
            '{"t": "x", "l": 0}\n{"t": "y", "l": null}',
            {"label": "l"},
            "row 2: column 'l' is null, not a label",
        ),
        ("a.jsonl", '{"t": "x", "l": "a"}\n{"t": "y"}', {"label": "l"}, "row 2: column 'l' is null, not a label"),
        ("a.jsonl", '{"t": "x", "l": [1]}', {"label": "l"}, "row 1: column 'l' is of type list, not a label"),
        ("a.csv", "t,l\nx,1\ny,\nz,2\n", {"label": "l"}, "a.csv, row 2: column 'l' is null, not a label"),
        ("a.jsonl", '{"t": {"u": "x"}}\n{"t": {"u": null}}', {"text": "t.u"}, "row 2: column 't.u' is null"),
        ("a.jsonl", '{"t": null}\n{"t": {"u": "x"}}', {"text": "t.u"}, "row 1: column 't.u' is null"),
        ("a.jsonl", '{"t": "user"}', {"text": "t.u"}, "has no column 't.u'. It has: t"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_rows_that_miss_something_are_named(name, content, columns, match, streaming, tmp_path):
    path = tmp_path / name
    path.write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    with pytest.raises(InputError, match=match):
        list(selected(path, streaming, **{"text": "t", **columns}))


def test_a_label_that_is_no_number_is_missing(tmp_path):
    path = tmp_path / "rows.parquet"
    Dataset.from_dict({"t": ["x", "y"], "l": [1.0, math.nan]}).to_parquet(path)
    with pytest.raises(InputError, match=r"rows.parquet, row 2: column 'l' is null, not a label"):
        selected(path, text="t", label="l")


def test_words_for_nothing_in_a_csv_file_are_texts_and_labels(tmp_path):
    (tmp_path / "rows.csv").write_text("t,l\nNA,None\nnull,NA\n")
    data = selected(tmp_path / "rows.csv", text="t", label="l")
    assert data.to_dict() == {"text": ["NA", "null"], "label": ["None", "NA"]}


class Words:
    """A tokenizer that gives a word a token, and an empty text none."""

    eos_token_id = 2

    def __call__(self, text=None, text_target=None, **options):
        text = text if text_target is None else text_target
        ids = [[len(word) + 2 for word in each.split()] for each in ([text] if isinstance(text, str) else text)]
        return {"input_ids": ids[0] if isinstance(text, str) else ids}


@pytest.mark.parametrize(
    ("encode", "options", "rows"),
    [
        (token_pairs, {}, {"source": ["a", "a", ""], "target": ["b", "", "b"]}),
        (labelled_texts, {"labels": ["0"]}, {"text": ["a", " "], "label": [0, 0]}),
        (single_documents, {}, {"text": ["a", "a", "a", ""], "prompt": ["b", "b b b b", "b b b b b", "b"]}),
    ],
)
def test_rows_without_a_label_are_left_out_and_counted(encode, options, rows, caplog):
    """All but the first."""
    data = encode(Dataset.from_dict(rows), Words(), length=4, **options)
    ahead = encode is single_documents
    assert len(rows_to_learn(data, "rows.jsonl", ahead=ahead)) == 1
    assert all("rows.jsonl: " in message for message in caplog.messages)
    assert f"rows.jsonl: {len(data) - 1} of {len(data)} rows are left out" in caplog.text
    with pytest.raises(InputError, match=r"rows.jsonl has nothing to learn in any row"):
        rows_to_learn(data.select(range(1, len(data))), "rows.jsonl", ahead=ahead)


def test_blocks_of_prompts_alone_are_left_out():
    data = Dataset.from_dict({"text": ["a", "a"], "prompt": ["b b b b b b b", ""]})
    blocks = packed_blocks(data, Words(), length=3)
    assert blocks["labels"][:] == [[-100, -100, -100], [-100, -100, -100], [-100, 3, 2]]
    assert rows_to_learn(blocks, "rows.jsonl", ahead=True)["labels"][:] == [[-100, 3, 2]]


def test_streamed_rows_without_a_label_are_left_out_as_they_come(caplog):
    rows = Dataset.from_dict({"text": ["a", "a"], "prompt": ["b b b b", ""]}).to_iterable_dataset()
    learned = rows_to_learn(single_documents(rows, Words(), length=3), "streamed.jsonl", ahead=True)
    assert [row["labels"] for row in learned] == [[3, 2]]
    assert caplog.text.count("streamed.jsonl: rows are left out") == 1
    with pytest.raises(InputError, match=r"streamed.jsonl has nothing to learn in any row"):
        rows_to_learn(single_documents(rows.take(1), Words(), length=3), "streamed.jsonl", ahead=True)


def test_documents_in_pieces_lose_nothing():
    data = Dataset.from_dict({"text": ["a bb ccc dddd eeeee", "a"], "prompt": ["b b", ""]})
    rows = single_documents(data, Words(), length=3, in_pieces=True)
    assert rows["input_ids"][:] == [[3, 3, 3], [4, 5, 6], [7, 2], [3, 2]]
    assert rows["labels"][:] == [[-100, -100, 3], [4, 5, 6], [7, 2], [3, 2]]
