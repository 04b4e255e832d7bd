"""Blocks of text that repeat themselves: what is copied from where, which blocks they are, and what a training sees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_rfa.evaluation.perplexity import Perplexity
from hf_rfa.finetune import trainers
from hf_rfa.finetune.data import PASSAGE_TOKENS, add_repeats
from hf_rfa.finetune.distill import HELD_OUT, distill
from hf_rfa.finetune.recipe import Recipe, Stage


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


def test_a_passage_as_long_as_all_before_it_is_that():
    _, found = made(20, 2 * PASSAGE_TOKENS[0], 1.0)
    first, second = np.split(found, 2, axis=1)
    assert (first == second).all()


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


def test_the_seed_says_which_and_where():
    assert (made(9, 300, 0.5, 1)[1] == made(9, 300, 0.5, 1)[1]).all()
    assert (made(9, 300, 0.5, 1)[1] != made(9, 300, 0.5, 2)[1]).any()


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
