"""``search``: the ways to spend a memory cost no more, the best by perplexity is taken, and what does not fit is refused."""

from __future__ import annotations

import json
import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_rfa.convert import ConversionOptions, convert
from hf_rfa.convert.checkpoint import open_checkpoint
from hf_rfa.convert.memory_search import number_of_heads, retrieval_counts, ways_to_spend
from hf_rfa.errors import InputError
from hf_rfa.evaluation.memory import cache_memory
from tests.conftest import leftovers
from tests.families import save_softmax_model

TEXT = "the cat sat on the mat and the dog ate the cat . " * 60


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def parent(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save_softmax_model(request.param, folder)
    return folder


@pytest.mark.parametrize(("memory", "dtype"), [(8, "auto"), (13, "bfloat16"), (40, "auto")])
def test_every_way_takes_what_it_says_and_no_more(parent, memory, dtype, tmp_path):
    wanted = ConversionOptions(memory=memory, dtype=dtype)
    assert not any(options.retrieval_heads for *_, options in ways_to_spend(open_checkpoint(parent), wanted))
    ways = ways_to_spend(open_checkpoint(parent), wanted, [[1, 0]])
    assert len({name for name, *_ in ways}) == len(ways) >= 5 + 2 * (memory == 40)
    assert sum(options.retrieval_heads == [[1, 0]] for *_, options in ways) == 2
    softmax = AutoModelForCausalLM.from_pretrained(parent, dtype="auto" if dtype == "auto" else torch.bfloat16)
    for index, (_, tokens, options) in enumerate(ways):
        convert(parent, tmp_path / str(index), options)
        found = cache_memory(AutoModelForCausalLM.from_pretrained(tmp_path / str(index), dtype="auto"))
        assert found.per_token == 0
        assert found.worth(cache_memory(softmax), 0) == pytest.approx(tokens, rel=1e-3)
        assert tokens <= memory
        assert tokens > memory - (2 if options.feature_map == "none" else 8 * 9 * 4 / 128 + 2)


@pytest.mark.parametrize("memory", [40, 60])  # in the second their windows are as long as the model's positions
def test_several_numbers_of_retrieval_heads_are_tried(parent, memory, monkeypatch):
    assert retrieval_counts(90) == {4: 1 / 3, 8: 1 / 3, 16: 2 / 3}
    assert retrieval_counts(6) == {1: 1 / 3}
    heads = [[1, 0], [0, 1], [2, 1]]
    monkeypatch.setattr("hf_rfa.convert.memory_search.RETRIEVAL_SHARES", {0.1: 1 / 3, 0.25: 2 / 3})
    checkpoint = open_checkpoint(parent)
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


def test_the_best_way_is_converted_and_all_are_reported(parent, text, tmp_path):
    report = convert(parent, tmp_path / "out", search=True, memory=12, calibrate_on=text)
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
    again = convert(parent, tmp_path / "again", search=True, memory=12, calibrate_on=text)
    assert again.trials == report.trials


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "search needs a text"),
        ({"window_size": 4}, "search decides on window_size"),
        ({"preset": "mixed", "feature_map": "elu", "gate": True}, "decides on preset, feature_map, gate"),
        ({"calibrate_on": True, "memory": 97}, "more than the positions"),
        ({"calibrate_on": True, "trained": "features"}, "Train the whole model: --end-to-end-steps"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(options, message, parent, text, tmp_path):
    if "calibrate_on" in options:
        options = options | {"calibrate_on": text}
    with pytest.raises(InputError, match=message):
        convert(parent, tmp_path / "out", search=True, **options)
    assert leftovers(tmp_path) == []


def test_models_with_an_encoder_are_refused(text, tmp_path):
    save_softmax_model("bart", tmp_path / "bart")
    with pytest.raises(InputError, match="for decoders alone"):
        convert(tmp_path / "bart", tmp_path / "out", search=True, memory=12, calibrate_on=text)


def test_the_command_line(parent, text, tmp_path, run_cli, capsys):
    assert run_cli("convert", parent, tmp_path / "out", "--search", "--memory", 12, "--calibrate", text) == 0
    assert "perplexity of ways" in capsys.readouterr().out
    data = tmp_path.parent / f"{tmp_path.name}.txt"
    data.write_text(TEXT * 8)
    words = ["--search", "--memory", 12, "--data", data, "--end-to-end-steps", 2]
    assert run_cli("convert", parent, tmp_path / "trained", *words) == 0
    assert convert(parent, tmp_path / "alone", search=True, memory=12, calibrate_on=data).trials
    configs = [AutoConfig.from_pretrained(tmp_path / name).to_dict() for name in ("alone", "trained")]
    sizes = ("feature_map", "window_size", "num_sinks", "num_slots", "gate", "num_features")
    assert [configs[0][name] for name in sizes] == [configs[1][name] for name in sizes]
    distillation = json.loads((tmp_path / "trained" / "distillation.json").read_text())
    assert [stage["name"] for stage in distillation["stages"]] == ["end to end"]
    assert distillation["recipe"]["end_to_end"]["kl_weight"] == 1.0
    assert (
        f"--search --memory 12 --data {data} --end-to-end-steps 2" in (tmp_path / "trained" / "README.md").read_text()
    )
    card = (tmp_path / "trained" / "README.md").read_text()
    pictures = re.findall(r"!\[[^]]*\]\(([^)]*)\)", card)
    assert "memory.png" in pictures
    assert all((tmp_path / "trained" / name).is_file() for name in pictures)
    assert leftovers(tmp_path) == ["alone", "out", "trained"]
