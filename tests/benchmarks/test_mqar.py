"""Multi-query associative recall: its rows against the definition, its score, and the study from end to end."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import mqar
from benchmarks.mqar_rows import POWER, accuracy, mqar_rows
from hf_rfa.evaluation.perplexity import IGNORED_LABEL


class Reader:
    """Stands for a model: its hidden states are logits, made from token ids by a function."""

    def __init__(self, guess):
        self.guess, self.lm_head = guess, torch.nn.Identity()

    def transformer(self, ids, use_cache):
        return SimpleNamespace(last_hidden_state=self.guess(ids))


def look_up(pairs, vocab):
    """Return logits that are right: the token after the first place where a key stands."""

    def guess(ids):
        keys, values = ids[:, 0 : 2 * pairs : 2], ids[:, 1 : 2 * pairs : 2]
        pair = (ids[:, :, None] == keys[:, None]).long().argmax(-1)
        return torch.nn.functional.one_hot(values.gather(1, pair), vocab).float()

    return guess


@pytest.mark.parametrize(("length", "pairs", "vocab"), [(16, 4, 32), (64, 4, 2048), (64, 16, 64), (128, 8, 512)])
def test_rows_are_those_of_the_definition(length, pairs, vocab):
    ids, labels = mqar_rows(40, length, pairs, vocab=vocab, seed=3)
    assert ids.shape == labels.shape == (40, length)
    assert 0 <= ids.min() <= ids.max() < vocab
    for row, row_labels in zip(ids.tolist(), labels.tolist(), strict=True):
        keys, values = row[0 : 2 * pairs : 2], row[1 : 2 * pairs : 2]
        assert len(set(keys)) == len(set(values)) == pairs
        assert all(1 <= key < vocab // 2 for key in keys)
        assert all(vocab // 2 <= value < vocab for value in values)
        labeled = {index: label for index, label in enumerate(row_labels) if label != IGNORED_LABEL}
        assert all(index >= 2 * pairs and index % 2 == 0 for index in labeled)
        assert sorted(row[index] for index in labeled) == sorted(keys)
        value_of = dict(zip(keys, values, strict=True))
        assert all(label == value_of[row[index]] for index, label in labeled.items())


def test_keys_return_in_the_near_slots_most_often():
    _, labels = mqar_rows(20_000, 24, 1, vocab=64, seed=0)
    counts = (labels != IGNORED_LABEL).sum(0)[2::2].double()
    expected = torch.arange(1, 12).double() ** (POWER - 1)
    torch.testing.assert_close(counts / counts.sum(), expected / expected.sum(), atol=0.01, rtol=0.0)


def test_other_tokens_are_random_ones_of_the_whole_vocabulary():
    ids, labels = mqar_rows(2_000, 64, 4, vocab=32, seed=0)
    others = ids[:, 8:][labels[:, 8:] == IGNORED_LABEL]
    shares = others.bincount(minlength=32).double() / len(others)
    torch.testing.assert_close(shares, torch.full((32,), 1 / 32, dtype=torch.double), atol=0.005, rtol=0.0)


def test_a_seed_gives_its_rows_and_a_curriculum_takes_few_keys():
    first, same, other = (mqar_rows(5, 32, 4, vocab=64, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(one, another) for one, another in zip(first, same, strict=True))
    assert not torch.equal(first[0], other[0])
    ids, _ = mqar_rows(50, 32, 8, vocab=2048, seed=0, keys=10)
    assert ids[:, 0:16:2].max() <= 10
    assert ids[:, 1:16:2].max() < 1024 + 10


@pytest.mark.parametrize(
    ("length", "pairs", "keys"), [(12, 4, None), (17, 4, None), (64, 0, None), (64, 16, 8), (64, 4, 32)]
)
def test_rows_that_cannot_be_are_refused(length, pairs, keys):
    with pytest.raises(ValueError, match=f"{pairs} pairs need an even length of at least {4 * pairs}"):
        mqar_rows(2, length, pairs, vocab=64, seed=0, keys=keys)


def test_looking_up_scores_all_and_guessing_scores_chance():
    rows = mqar_rows(1_000, 64, 8, vocab=64, seed=0)
    assert accuracy(Reader(look_up(8, 64)), rows) == 1.0
    torch.manual_seed(0)
    assert accuracy(Reader(lambda ids: torch.rand(*ids.shape, 64)), rows) == pytest.approx(1 / 64, abs=0.005)
    first_value = accuracy(Reader(lambda ids: torch.nn.functional.one_hot(ids[:, 1:2].expand_as(ids), 64)), rows)
    assert first_value == pytest.approx(1 / 8, abs=0.001)


def test_the_window_has_as_many_bytes_as_the_features():
    plan = mqar.QUICK
    for size in (16, 32, 64, 128):
        memories = []
        for kind in ("exponential", "none"):
            model = mqar.new_model(mqar.Setting("converted", kind, size), plan, 0).eval()
            memories.append(mqar.cache_memory(model).fixed)
        assert 0.9 < memories[1] / memories[0] <= 1.0


def test_the_study_runs_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    plan = mqar.Plan(vocab=64, tests=((32, 2), (32, 4)), test_rows=20, converted=(16,), scratch=16)
    plan = replace(plan, curriculum=((16, 2, 8, 4),), train=((32, 4, 128),), transfer=(32, 4, 2))
    monkeypatch.setattr(mqar, "QUICK", plan)
    monkeypatch.setattr(mqar, "QUICK_SCRATCH", replace(plan, rate=6e-3))
    kinds = [f"--kind={kind}" for kind in ("exponential", "elu", "none")]
    monkeypatch.setattr(sys, "argv", ["mqar", "--quick", "--output", str(tmp_path), *kinds])
    mqar.main()
    results = json.loads((tmp_path / "mqar.json").read_text())["results"]
    converted = {"converted elu", "converted exponential D16", "converted none D16"}
    scratch = {f"scratch {name}" for name in ("elu", "elu gate", "exponential D16", "exponential D16 gate", "none D16")}
    assert set(results) == {"softmax"} | converted | scratch
    assert list(results["converted exponential D16"]["stages"]) == ["before transfer", "after transfer"]
    assert list(results["converted none D16"]["stages"]) == ["before transfer"]
    assert results["softmax"]["memory"]["per_token"] == 2 * 2 * mqar.WIDTH * 4
    assert results["converted exponential D16"]["memory"]["state"] == 2 * 16 * (mqar.WIDTH + 1) * 4
    table = (tmp_path / "mqar.md").read_text().splitlines()
    assert len(table) == 2 + sum(len(each["stages"]) for each in results.values())
    assert (tmp_path / "mqar.png").is_file()

    monkeypatch.setattr(mqar, "run", pytest.fail)
    mqar.main()
    assert json.loads((tmp_path / "mqar.json").read_text())["results"] == results
