"""Softmax cross attention to runs of merged positions: the runs themselves, and the models that attend to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from transformers.modeling_outputs import BaseModelOutput

from hf_rfa.convert import convert
from hf_rfa.evaluation.memory import cache_memory
from hf_rfa.inference import cache_num_bytes, load_cache, load_model, save_cache
from hf_rfa.models.cache_names import cache_argument, returned_cache
from hf_rfa.models.merged_attention import merge_neighbours, runs_of_neighbours
from tests.conftest import refused
from tests.families import base_config, make, save_softmax_model, softmax_model, tokens

POSITIONS = 20
LAYERS = [0, 1, 2]


def merged(length: int = 7, **options: Any) -> Any:
    return make(
        "whisper", {"window_size": 60, "softmax_cross_layers": LAYERS, "merged_source_length": length, **options}
    )


def softmax_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT).softmax(-1) @ value


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key[..., :-1].mT + key[..., None, :, -1]).softmax(-1) @ value


@pytest.fixture
def encoded() -> BaseModelOutput:
    return BaseModelOutput(torch.randn(2, POSITIONS, base_config("whisper").d_model))


# Runs


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 9))
def test_positions_that_repeat_are_merged_and_nothing_is_lost(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    different = torch.randn(1, 2, len(lengths), 8, generator=generator, dtype=torch.float64)
    rows = different.repeat_interleave(torch.tensor(lengths), dim=2)
    key, value = rows.split(4, dim=-1)
    query = torch.randn(1, 2, 3, 4, generator=generator, dtype=torch.float64)
    merged_key, merged_value, runs = merge_neighbours(key, value, len(lengths))
    assert runs[0, 0].bincount().tolist() == lengths
    assert_close(attend(query, merged_key, merged_value), softmax_attention(query, key, value), atol=1e-5, rtol=1e-5)


def test_the_closest_neighbours_are_merged_by_the_lengths_of_their_runs():
    rows = torch.tensor([0.0, 1.0, 1.1, 3.0, 3.3, 9.0])[None, None, :, None]
    assert runs_of_neighbours(rows, 5)[0, 0].tolist() == [0, 1, 1, 2, 3, 4]
    assert runs_of_neighbours(rows, 4)[0, 0].tolist() == [0, 1, 1, 2, 2, 3]
    # 0 and the pair at 1.05 are 2/3 · 1.05² = 0.74 apart, the pairs at 1.05 and 3.15 are 2.1² = 4.41 apart
    assert runs_of_neighbours(rows, 3)[0, 0].tolist() == [0, 0, 0, 1, 1, 2]


def test_a_run_has_the_means_of_its_positions(encoded):
    key, value = torch.randn(2, 1, 2, 9, 4).unbind()
    merged_key, merged_value, runs = merge_neighbours(key, value, 4)
    for head in range(2):
        for run in range(4):
            members = runs[0, head] == run
            assert_close(merged_key[0, head, run, :-1], key[0, head, members].mean(0))
            assert_close(merged_key[0, head, run, -1].exp(), members.sum().float())
            assert_close(merged_value[0, head, run], value[0, head, members].mean(0))


# Models


@torch.no_grad()
def test_where_nothing_is_merged_outputs_and_weights_are_the_base_models(encoded):
    model = merged(POSITIONS)
    base = softmax_model(model, "whisper")
    base.set_attn_implementation("eager")
    inputs = {"encoder_outputs": encoded, "decoder_input_ids": tokens(2, 6), "output_attentions": True}
    output, expected = model(**inputs), base(**inputs)
    assert_close(output.logits, expected.logits, atol=1e-5, rtol=1e-4)
    assert_close(output.cross_attentions, expected.cross_attentions, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_steps_give_the_logits_of_the_whole(encoded, tmp_path):
    model, ids = merged(), tokens(2, 6)
    output = model(encoder_outputs=encoded, decoder_input_ids=ids, output_attentions=True)
    assert_close(output.cross_attentions[1].sum(-1), torch.ones(2, 3, 6))
    start = model(encoder_outputs=encoded, decoder_input_ids=ids[:, :3])
    cache = returned_cache(start)
    assert cache.cross_attention_cache.layers[0].keys.shape == (2, 3, 7, model.config.d_model // 3 + 1)
    save_cache(cache, tmp_path / "cache.safetensors")
    for cached in (load_cache(tmp_path / "cache.safetensors", model), cache):
        rest = model(encoder_outputs=encoded, decoder_input_ids=ids[:, 3:], **cache_argument(cached))
        assert_close(torch.cat([start.logits, rest.logits], 1), output.logits, atol=1e-5, rtol=1e-4)
    row, memory = model(encoder_outputs=BaseModelOutput(encoded[0][:1]), decoder_input_ids=ids[:1]), cache_memory(model)
    assert memory.after(6) == cache_num_bytes(returned_cache(row))
    assert memory.audio == 3 * 3 * 7 * (2 * (model.config.d_model // 3) + 1) * 4  # layers, heads, runs, numbers, bytes


def test_a_conversion_merges_and_the_checkpoint_says_so(encoded, tmp_path):
    save_softmax_model("whisper", tmp_path / "base")
    report = convert(tmp_path / "base", tmp_path / "merged", merged_source_length=7)
    model, _ = load_model(str(tmp_path / "merged"), kind="speech")
    assert model.config.merged_source_length == 7
    assert report.source_bytes == cache_memory(model).audio
    for options, message in (
        (
            {"merged_source_length": 7, "cross_layers": "all", "preset": "rfa"},
            "merged_source_length=7 applies to softmax cross",
        ),
        ({"merged_source_length": 0}, "merged_source_length must be at least 1, got 0"),
    ):
        refused(message, tmp_path / "base", tmp_path, **options)


def test_models_that_read_text_do_not_merge(checkpoints, tmp_path):
    message = "merged_source_length=7.*applies to softmax cross attention to audio"
    refused(message, checkpoints["bart"], tmp_path, merged_source_length=7)
