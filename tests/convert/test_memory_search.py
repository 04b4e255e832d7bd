"""``search``: the ways to spend a memory cost no more, the best by perplexity is taken, and what does not fit is refused."""

from __future__ import annotations

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_rfa.convert import ConversionOptions, convert
from hf_rfa.convert.checkpoint import open_checkpoint
from hf_rfa.convert.memory_search import number_of_heads, retrieval_counts, ways_to_spend
from hf_rfa.evaluation.recall.memory import cache_memory
from tests.conftest import leftovers, words
from tests.convert.conftest import fields


@pytest.mark.parametrize(("memory", "dtype"), [(8, "auto"), (13, "bfloat16"), (40, "auto")])
def test_every_way_takes_what_it_says_and_no_more(decoder, memory, dtype, tmp_path):
    wanted = ConversionOptions(memory=memory, dtype=dtype)
    assert not any(options.retrieval_heads for *_, options in ways_to_spend(open_checkpoint(decoder), wanted))
    ways = ways_to_spend(open_checkpoint(decoder), wanted, [[1, 0]])
    assert len({name for name, *_ in ways}) == len(ways) >= 5 + 2 * (memory == 40)
    assert sum(options.retrieval_heads == [[1, 0]] for *_, options in ways) == 2
    softmax = AutoModelForCausalLM.from_pretrained(decoder, dtype="auto" if dtype == "auto" else torch.bfloat16)
    for index, (_, tokens, options) in enumerate(ways):
        convert(decoder, tmp_path / str(index), options)
        found = cache_memory(AutoModelForCausalLM.from_pretrained(tmp_path / str(index), dtype="auto"))
        assert found.per_token == 0
        assert found.worth(cache_memory(softmax), 0) == pytest.approx(tokens, rel=1e-3)
        assert tokens <= memory
        assert tokens > memory - (2 if options.feature_map == "none" else 8 * 9 * 4 / 128 + 2)


@pytest.mark.parametrize("memory", [40, 60])  # in the second their windows are as long as the model's positions
def test_several_numbers_of_retrieval_heads_are_tried(decoder, memory, monkeypatch):
    assert retrieval_counts(90) == {4: 1 / 3, 8: 1 / 3, 16: 2 / 3}
    assert retrieval_counts(6) == {1: 1 / 3}
    heads = [[1, 0], [0, 1], [2, 1]]
    monkeypatch.setattr("hf_rfa.convert.memory_search.RETRIEVAL_SHARES", {0.1: 1 / 3, 0.25: 2 / 3})
    checkpoint = open_checkpoint(decoder)
    ways = ways_to_spend(checkpoint, ConversionOptions(memory=memory), heads)
    found = [options.retrieval_heads or [] for *_, options in ways]
    assert sorted({len(each) for each in found}) == [0, 1, 2]
    assert all(each == heads[: len(each)] for each in found)
    assert len({name for name, *_ in ways}) == len(ways)
    config = checkpoint.family.rfa_config.from_base(checkpoint.config)
    token, all_heads = 4 * 2 * config.head_dim_for("causal"), number_of_heads(checkpoint, ways[0][2])
    for count, share in ((1, 1 / 3), (2, 2 / 3)):
        windows = {each.retrieval_window for *_, each in ways if len(each.retrieval_heads or []) == count}
        # Beside key and value a token has a score and an arrival.
        most = all_heads * memory * token * share
        assert windows == {min(96, int(most / (token + 8) / count)) - 4}


def test_the_best_way_is_converted_and_all_are_reported(decoder, text, tmp_path):
    report = convert(decoder, tmp_path / "out", search=True, memory=12, calibrate_on=text)
    best = min(report.trials, key=lambda each: each.repeating)
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "out").config
    name = f"window {config.window_size}, sinks {config.num_sinks}"
    name += f", slots {config.num_slots}" if config.num_slots else ""
    name += f", {config.num_features} features" if config.feature_map != "none" else ""
    heads = len(config.retrieval_heads)
    name += f", {heads} retrieval head{'s' * (heads > 1)} of {config.retrieval_window}" if heads else ""
    assert name == best.name
    card = (tmp_path / "out" / "README.md").read_text()
    assert "--memory 12 --search" in card
    assert "--window-size" not in card
    assert best.name in card
    assert (tmp_path / "out" / "memory.png").stat().st_size > 5000
    written = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert [each["perplexity"] for each in written["trials"]] == [each.perplexity for each in report.trials]
    again = convert(decoder, tmp_path / "again", search=True, memory=12, calibrate_on=text)
    assert again.trials == report.trials


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
