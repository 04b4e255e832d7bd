"""The data of a training: pairs, blocks of documents, repeating ones too, and rows that miss something."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_rfa import InputError
from hf_rfa.evaluation.perplexity import Perplexity
from hf_rfa.finetune import trainers
from hf_rfa.finetune.data import (
    PASSAGE_TOKENS,
    PairCollator,
    add_repeats,
    labelled_texts,
    load_data,
    packed_blocks,
    rows_to_learn,
    select_columns,
    single_documents,
    token_pairs,
)
from hf_rfa.finetune.distill import HELD_OUT, distill
from hf_rfa.finetune.recipe import Recipe, Stage
from hf_rfa.inference import load_model


def test_pairs_are_padded_and_shifted(checkpoints):
    model, tokenizer = load_model(str(checkpoints["bart"]))
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


def selected(path: Path, streaming: bool = False, **columns: str):
    return select_columns(load_data(str(path), streaming=streaming), str(path), columns)


@pytest.mark.parametrize(
    ("name", "content", "columns", "match"),
    [
        ("a.jsonl", '{"t": "x"}\n\n{"t": null}', {}, "a.jsonl, row 2: column 't' is null, not text"),
        ("a.jsonl", '{"t": 5}', {}, "a.jsonl, row 1: column 't' is of type int, not text"),
        ("a.jsonl.gz", '{"t": "x"}\n{"t": null}', {}, "a.jsonl.gz, row 2: column 't' is null"),
        ("a.json", '[{"t": "x"},\n\n{"t": null}]', {}, "a.json, row 2: column 't' is null"),
        ("a.csv", 't,l\n"x\ny",a\n\n,b\n', {"label": "l"}, "a.csv, row 2: column 't' is null"),
        ("a.jsonl", '{"t": "x", "l": 0}\n{"t": "y", "l": null}', {"label": "l"}, "row 2: column 'l' is null, not"),
        ("a.jsonl", '{"t": "x", "l": [1]}', {"label": "l"}, "row 1: column 'l' is of type list, not a label"),
        ("a.jsonl", '{"t": {"u": "x"}}\n{"t": {"u": null}}', {"text": "t.u"}, "row 2: column 't.u' is null"),
        ("a.jsonl", '{"t": "user"}', {"text": "t.u"}, "has no column 't.u'. It has: t"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_rows_that_miss_something_are_named(name, content, columns, match, streaming, tmp_path):
    path = tmp_path / name
    path.write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    with pytest.raises(InputError, match=match):
        list(selected(path, streaming, **{"text": "t", **columns}))


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


# Blocks of text that repeat themselves: what is copied from where, and what a training sees


def made(rows: int, length: int, share: float, seed: int = 0):
    """Return blocks of which every token is another one, and the same with repeats."""
    blocks = np.arange(rows * length).reshape(rows, length)
    found = blocks.copy()
    add_repeats(found, share, seed=seed)
    return blocks, found


@settings(max_examples=40, deadline=None)
@given(length=st.integers(2, 700), seed=st.integers(0, 2**16))
def test_a_block_copies_passages_from_before_them(length, seed):
    blocks, found = made(3, length, 1.0, seed)
    for block, copy in zip(blocks, found, strict=True):
        back = np.arange(length) - (copy - block[0])  # where a token stood first
        assert back.min() >= 0, "a copy is of this block, and of what is before it"
        ends = [0, *(np.flatnonzero(np.diff(back)) + 1), length]
        starts = [start for start in ends[:-1] if back[start]]
        assert (length <= PASSAGE_TOKENS[0]) == (not starts), "nothing is before the first passage"
        assert set(copy[: PASSAGE_TOKENS[0]]) == set(block[: PASSAGE_TOKENS[0]])


def test_half_of_such_a_block_is_copied_from_near_and_from_far():
    blocks, found = made(400, 1024, 1.0)
    distance = (blocks - found).ravel()
    copied = distance[distance > 0]
    assert 0.4 < len(copied) / found.size < 0.6
    shares = [float(np.mean((low <= copied) & (copied < 2 * low))) for low in (32, 64, 128, 256, 512)]
    assert min(shares) > 0.05, "no distance is rare"


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.25, 70, 130), (1.0, 400, 400)])
def test_the_share_of_blocks_that_repeat(share, least, most):
    blocks, found = made(400, 300, share)
    assert least <= (blocks != found).any(1).sum() <= most


def test_a_training_sees_them_and_is_not_measured_on_them(material, tmp_path, monkeypatch):
    drawn = np.random.default_rng(0).integers(4, 61, 1600)
    (tmp_path / "text.txt").write_text(" ".join(f"w{number}" for number in drawn))
    rows: list[list[int]] = []
    scored: list[list[int]] = []
    compute_loss = trainers.LogitDistillationTrainer.compute_loss

    def watched(self, model, inputs, *args, **options):
        rows.extend(inputs["input_ids"].tolist())
        assert (inputs["labels"] == inputs["input_ids"]).all()
        return compute_loss(self, model, inputs, *args, **options)

    def score(model, batches):
        scored.extend(row["input_ids"][0].tolist() for row in batches)
        return Perplexity(1.0, 1)

    monkeypatch.setattr(trainers.LogitDistillationTrainer, "compute_loss", watched)
    monkeypatch.setattr("hf_rfa.finetune.distill.score_labels", score)
    stage = Stage(steps=2, batch_size=8, block_length=64, kl_weight=1.0, repeating_share=1.0)
    texts = {"teacher": material / "gpt2", "data": tmp_path / "text.txt"}
    distill(material / "gpt2-rfa", tmp_path / "out", **texts, recipe=Recipe(end_to_end=stage))
    plain = drawn[: 64 * 25].reshape(25, 64).tolist()
    assert len(rows) == 2 * 8
    assert not [row for row in rows if row in plain]
    assert scored == 3 * plain[-HELD_OUT:]
