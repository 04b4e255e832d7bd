"""``search``: the ways to spend a memory cost no more, and the best by perplexity is taken."""

from __future__ import annotations

import json
import re

import pytest
import torch

from hf_rfa.convert import ConversionOptions, convert
from hf_rfa.convert.checkpoint import open_checkpoint
from hf_rfa.convert.memory_search import retrieval_counts, ways_to_spend
from hf_rfa.evaluation.memory import cache_memory
from tests.conftest import leftovers, words
from tests.convert.conftest import fields, load


@pytest.mark.parametrize(
    ("family", "memory", "dtype"), [("gpt2", 8, "auto"), ("llama", 13, "bfloat16"), ("llama", 40, "auto")]
)
def test_every_way_takes_what_it_says_and_no_more(family, memory, dtype, checkpoints, tmp_path, monkeypatch):
    """Among the ways are those with one retrieval head, and with two where there is room, the first ones."""
    monkeypatch.setattr("hf_rfa.convert.memory_search.RETRIEVAL_SHARES", {0.1: 1 / 3, 0.3: 2 / 3})
    folder, heads = checkpoints[family], [[1, 0], [0, 1], [0, 0]]
    wanted = ConversionOptions(memory=memory, dtype=dtype)
    assert not any(options.retrieval_heads for *_, options in ways_to_spend(open_checkpoint(folder), wanted))
    ways = ways_to_spend(open_checkpoint(folder), wanted, heads)
    assert len({name for name, *_ in ways}) == len(ways) >= 5 + 2 * (memory == 40)
    chosen = [options.retrieval_heads or [] for *_, options in ways]
    assert {len(pairs) for pairs in chosen} == ({0, 1, 2} if memory == 40 else {0, 1})
    assert all(pairs == heads[: len(pairs)] for pairs in chosen)
    softmax = load(folder, dtype="auto" if dtype == "auto" else torch.bfloat16)
    for index, (_, tokens, options) in enumerate(ways):
        convert(folder, tmp_path / str(index), options)
        taken = cache_memory(load(tmp_path / str(index), dtype="auto"))
        assert taken.per_token == 0
        assert taken.worth(cache_memory(softmax), 0) == pytest.approx(tokens, rel=1e-3)
        assert tokens <= memory
        assert tokens > memory - (2 if options.feature_map == "none" else 8 * 9 * 4 / 128 + 2)


def test_how_many_retrieval_heads_are_tried():
    assert retrieval_counts(90) == {4: 1 / 3, 8: 1 / 3, 16: 2 / 3}
    assert retrieval_counts(6) == {1: 1 / 3}


def test_the_best_way_is_converted_and_all_are_reported(checkpoints, text, tmp_path):
    report = convert(checkpoints["llama"], tmp_path / "out", search=True, memory=12, calibrate_on=text)
    best = min(report.trials, key=lambda trial: trial.repeating)
    wanted = ConversionOptions(memory=12)
    heads = fields(tmp_path / "out")["retrieval_heads"]
    ways = {name: options for name, _, options in ways_to_spend(open_checkpoint(checkpoints["llama"]), wanted, heads)}
    convert(checkpoints["llama"], tmp_path / "best", ways[best.name], calibrate_on=text)
    assert fields(tmp_path / "best") == fields(tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "--memory 12 --search" in card
    assert "--window-size" not in card
    assert best.name in card
    assert (tmp_path / "out" / "memory.png").stat().st_size > 5000
    written = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert [trial["perplexity"] for trial in written["trials"]] == [trial.perplexity for trial in report.trials]


def test_the_command_line(checkpoints, tmp_path, run_cli, capsys):
    """A search alone, and one that the training of the whole model follows: both choose the same sizes."""
    parent, data = checkpoints["gpt2"], tmp_path.parent / f"{tmp_path.name}.txt"
    data.write_text(words(4000))
    search = ("convert", parent, tmp_path / "alone", "--search", "--memory", 12, "--calibrate", data)
    assert run_cli(*search) == 0
    assert "perplexity of ways" in capsys.readouterr().out
    options = ("--search", "--memory", 12, "--data", data, "--end-to-end-steps", 2)
    assert run_cli("convert", parent, tmp_path / "trained", *options) == 0
    configs = [fields(tmp_path / name) for name in ("alone", "trained")]
    sizes = ("feature_map", "window_size", "num_sinks", "num_slots", "gate", "num_features")
    assert [configs[0].get(name) for name in sizes] == [configs[1].get(name) for name in sizes]
    distillation = json.loads((tmp_path / "trained" / "distillation.json").read_text())
    assert [stage["name"] for stage in distillation["stages"]] == ["end to end"]
    assert distillation["recipe"]["end_to_end"]["kl_weight"] == 1.0
    card = (tmp_path / "trained" / "README.md").read_text()
    assert f"--search --memory 12 --data {data} --end-to-end-steps 2" in card
    pictures = re.findall(r"!\[[^]]*\]\(([^)]*)\)", card)
    assert "memory.png" in pictures
    assert all((tmp_path / "trained" / name).is_file() for name in pictures)
    assert leftovers(tmp_path) == ["alone", "trained"]
