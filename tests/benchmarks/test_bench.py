"""The benchmark: its models are one model, its caches are at the position that is timed, its figures are written."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from transformers import BartConfig, Gemma2Config

from hf_rfa import InputError, RFAGPT2Config, bench
from hf_rfa.bench.models import cache_at, step_inputs
from hf_rfa.inference import cache_num_bytes
from hf_rfa.models.cache_names import cache_argument
from tests.conftest import tiny_parent_config
from tests.families import FAMILIES, base_config, every_family


@every_family
def test_the_models_have_the_same_weights_and_caches_at_the_same_position(family):
    softmax, rfa = bench.pair(base_config(family), 40, window_size=3)
    others = dict(rfa.named_parameters())
    assert all(torch.equal(parameter, others[name]) for name, parameter in softmax.named_parameters())
    sizes = {}
    for model in (softmax, rfa):
        inputs = step_inputs(model, 2, 7)
        for position in (5, 30):
            cache = cache_at(model, inputs, position)
            assert cache.get_seq_length() == position
            sizes[model, position] = cache_num_bytes(cache)
            model(**inputs, **cache_argument(cache))
            assert cache.get_seq_length() == position + 1
    assert sizes[softmax, 30] > sizes[softmax, 5]
    assert sizes[rfa, 30] == sizes[rfa, 5]


@pytest.mark.parametrize("family", ["gpt2", "bart", "llama"])
def test_a_converted_checkpoint_is_timed_as_it_is(family):
    """Beside its softmax parent, whose weights it shares; layers that stayed softmax have their own keys and values."""
    parent = base_config(family)
    options = {"feature_map": "elu", "gate": True, "window_size": 5, "softmax_layers": [1]}
    config = FAMILIES[family].rfa_config.from_base(parent, **options)
    softmax, rfa = bench.pair(config, 40)
    expected = bench.pair(parent, 40, **options)
    for model, other in zip((softmax, rfa), expected, strict=True):
        assert type(model) is type(other)
        theirs = {name: value for name, value in other.config.to_dict().items() if name != "architectures"}
        assert {name: model.config.to_dict().get(name) for name in theirs} == theirs
    others = dict(rfa.named_parameters())
    assert all(torch.equal(parameter, others[name]) for name, parameter in softmax.named_parameters())
    cache = cache_at(rfa, step_inputs(rfa, 2, 7), 30)
    assert getattr(cache, "self_attention_cache", cache).layers[1].keys.shape[-2] == 30
    with pytest.raises(InputError, match="has its own gate"):
        bench.pair(config, 40, gate=True)


def test_the_command_writes_figures(run_cli, tmp_path, capsys):
    tiny_parent_config().save_pretrained(tmp_path)
    tasks = [word for task in ("decoding", "prefill", "training") for word in ("--task", task)]
    options = ["--lengths", "8,32", "--batches", "1,2", "--steps", 2, "--static", "--output", tmp_path / "speed"]
    assert run_cli("bench", "--model", tmp_path, *tasks, *options) == 0
    speed = json.loads((tmp_path / "speed.json").read_text())
    assert all(speed[name] >= 0 for name in ("threads", "cores", "load"))
    for task, points in speed["points"].items():
        assert [(point["batch"], point["length"]) for point in points] == [(1, 8), (1, 32), (2, 8), (2, 32)]
        names = {"softmax", "RFA"} | ({"softmax, static cache"} if task == "decoding" else set())
        assert all(set(point["milliseconds"]) == names for point in points)
        assert all(set(point["cache_bytes"]) == names for point in points) or sys.platform != "linux"
    RFAGPT2Config.from_base(tiny_parent_config(), feature_map="elu").save_pretrained(tmp_path)
    assert run_cli("bench", "--model", tmp_path, "--lengths", "8", "--steps", 1, *options[-2:]) == 0
    assert json.loads((tmp_path / "speed.json").read_text())["config"]["feature_map"] == "elu"
    assert "speed-up" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--lengths", "8,a"], "'--lengths': it must be whole numbers"),
        (["--batches", "0"], "'--batches': it must be whole numbers"),
        (["--dtype", "int4"], "Invalid value for '--dtype'"),
        (["--task", "prefill", "--static"], "are about decoding"),
        (["--model", "bart", "--task", "training"], "timed at decoding"),
        (["--model", "./nowhere"], "cannot read the configuration"),
        (["--model", "."], "cannot make the models: attn_logit_softcapping"),
    ],
)
def test_what_cannot_be_timed_is_refused(options, match, run_cli, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Gemma2Config().save_pretrained(tmp_path)
    BartConfig().save_pretrained(tmp_path / "bart")
    assert run_cli("bench", *options) == 1
    assert match in capsys.readouterr().err
