"""Caches: operations, caches that were built for another model or filled by something else, caches on disk, names."""

from __future__ import annotations

import copy
import errno
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache, EncoderDecoderCache, GPT2Config, StaticCache
from transformers.cache_utils import DynamicLayer

from hf_rfa import InputError
from hf_rfa.inference import cache_files, cache_num_bytes, load_cache, save_cache
from hf_rfa.models.cache_names import CACHE_NAME, cache_argument, returned_cache
from tests.families import (
    base_config,
    every_generating_head,
    has_encoder,
    logits,
    logits_by_steps,
    make,
    make_head,
    read,
    softmax_model,
    state_of,
    tokens,
)

WITHOUT_CONFIGURATION = [
    {"gate": True},
    {"feature_map": "gaussian", "num_features": 8},
    {"window_size": 3, "gate": True},
]
WITHOUT_CONFIGURATION += [{"softmax_layers": [0]}, {"softmax_layers": [1], "window_size": 3}]
GENERATE = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 1}


# Operations


@torch.no_grad()
def test_operations_on_the_state_of_a_source():
    """Rows that are repeated or reordered within their source share its state."""
    model, source, target = make("bart", dtype=torch.float64), tokens(2, 9), tokens(2, 5)

    def step(cache: Any, rows: Tensor, ids: Tensor) -> Tensor:
        return model(source[rows], decoder_input_ids=ids, **cache_argument(cache)).logits

    def cache_for(rows: Tensor) -> Any:
        return model(source[rows], decoder_input_ids=target[rows]).past_key_values

    def states(cache: Any) -> int:
        (count,) = {state_of(layer).shape[0] for layer in cache.cross_attention_cache.layers}
        return count

    rows, ids = torch.tensor([0, 0, 1, 1]), tokens(4, 1)
    expected = step(cache_for(rows), rows, ids)
    repeated = cache_for(torch.tensor([0, 1]))
    repeated.batch_repeat_interleave(2)
    assert states(repeated) == 2
    assert_close(step(copy.deepcopy(repeated), rows, ids), expected)
    within = copy.deepcopy(repeated)
    within.reorder_cache(torch.tensor([1, 1, 3, 2]))
    assert states(within) == 2
    across, other = copy.deepcopy(repeated), rows[[2, 0, 1, 3]]
    across.reorder_cache(torch.tensor([2, 0, 1, 3]))
    assert_close(step(across, other, ids), step(cache_for(other), other, ids))
    fewer = copy.deepcopy(repeated)
    fewer.batch_select_indices(torch.tensor([3]))
    assert_close(step(fewer, torch.tensor([1]), ids[:1]), step(cache_for(rows[3:]), rows[3:], ids[:1]))
    repeated.reset()
    found = model(source, decoder_input_ids=target, **cache_argument(repeated)).logits
    assert_close(found, model(source, decoder_input_ids=target).logits)


@torch.no_grad()
@pytest.mark.parametrize("variant", ["positive-gate", "slots-gate", "retrieval-gate"])
def test_a_memory_stays_where_it_lies(variant):
    model, ids = make("gpt2", variant), tokens(1, 19)
    cache = model(ids[:, :9]).past_key_values

    def places() -> list[int]:
        return [tensor.data_ptr() for layer in cache.layers for tensor in layer.tensors().values()]

    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    before, expected = places(), logits(model, ids)
    for piece in (slice(9, 10), slice(10, 18), slice(18, 19)):
        found = model(ids[:, piece], **cache_argument(cache)).logits
        assert_close(found, expected[:, piece], atol=2e-4, rtol=1e-4)
        assert places() == before
    cache.reset()
    assert cache.get_seq_length() == 0
    assert_close(model(ids, **cache_argument(cache)).logits, expected, atol=2e-4, rtol=1e-4)
    assert places() == before


@pytest.mark.parametrize(("family", "variant"), [("llama", "retrieval"), ("gpt2", "window-gate")])
def test_a_cache_that_was_filled_in_inference_mode_can_be_continued(family, variant):
    """Its tensors cannot be changed in place outside of that mode."""
    model, ids = make(family, variant), tokens(2, 20)
    with torch.inference_mode():
        cache = model(ids[:, :19]).past_key_values
    options = {"attention_mask": torch.ones_like(ids), "eos_token_id": None, **GENERATE}
    found = model.generate(ids, **cache_argument(cache), **options)
    assert torch.equal(found, model.generate(ids, **options))
    with torch.inference_mode():  # and back again
        model(ids[:, :1], **cache_argument(cache))


# Caches without a configuration


@pytest.mark.parametrize("options", WITHOUT_CONFIGURATION, ids=str)
@torch.no_grad()
def test_a_cache_without_a_configuration_serves_a_decoder(options):
    model, ids = make("gpt2", options, eos_token_id=2), tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    expected = logits(model, ids, mask=mask)
    for cache in (DynamicCache(), DynamicCache(config=GPT2Config(n_layer=2))):
        found, filled = logits_by_steps(model, ids, [5], cache=cache, mask=mask)
        assert filled is cache
        assert_close(found[mask == 1], expected[mask == 1], atol=2e-4, rtol=1e-3)
    for beams in (1, 3):
        given = {"attention_mask": mask, "num_beams": beams, **GENERATE}
        assert torch.equal(model.generate(ids, **cache_argument(DynamicCache()), **given), model.generate(ids, **given))


@pytest.mark.parametrize("options", [{"gate": True}, {"softmax_layers": [0], "softmax_cross_layers": [1]}], ids=str)
@pytest.mark.parametrize("family", ["bart", "marian"])
@torch.no_grad()
def test_caches_without_a_configuration_serve_an_encoder_and_a_decoder(family, options):
    model, ids, start = make(family, options), tokens(2, 9), tokens(2, 5)
    expected = model(ids, decoder_input_ids=start, use_cache=False).logits
    for cache in (EncoderDecoderCache(DynamicCache(), DynamicCache()), DynamicCache()):
        found, _ = logits_by_steps(model, start, [3], cache=cache, input_ids=ids, attention_mask=None)
        assert_close(found, expected, atol=2e-4, rtol=1e-3)
    for beams in (1, 3):
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        found = model.generate(ids, **cache_argument(cache), num_beams=beams, **GENERATE)
        assert torch.equal(found, model.generate(ids, num_beams=beams, **GENERATE))


# Caches that are refused


@torch.no_grad()
def test_caches_of_another_kind_are_refused():
    ids, ours = tokens(), make("gpt2")
    rebuild = r"DynamicCache\(config=model.config\)"
    with pytest.raises(TypeError, match=rebuild):
        ours(ids, **cache_argument(StaticCache(config=base_config("gpt2"), max_cache_len=20)))
    softmax = softmax_model(ours, "gpt2")
    with pytest.raises(TypeError, match=rebuild):
        softmax(ids, **cache_argument(DynamicCache(config=ours.config)))
    of_a_source = read(make("bart"), ids).past_key_values.cross_attention_cache
    with pytest.raises(TypeError, match="self-attention layer wrote"):
        softmax(ids, **cache_argument(of_a_source))


@every_generating_head
def test_what_is_no_cache_is_refused(family, head):
    model, keys = make_head(family, head), torch.zeros(3, 3, 2, 8)
    for wrong in (((keys, keys),) * 3, [], "a cache", {"keys": keys}):
        with pytest.raises(TypeError, match=rf"{CACHE_NAME}.*DynamicCache\(config=model.config\)"):
            read(model, tokens(), **cache_argument(wrong))


@torch.no_grad()
def test_a_cache_of_another_model_is_refused():
    ours, ids = make("bart"), tokens()
    used = read(softmax_model(ours, "bart"), ids).past_key_values
    for variant, cache in (("both", used), ("cross-only", used), ("causal-only", read(ours, ids).past_key_values)):
        with pytest.raises(TypeError, match="filled by another model"):
            read(make("bart", variant), ids, **cache_argument(cache))
        kept = {type(layer) for layer in used.self_attention_cache.layers}
        assert kept == {DynamicLayer}, "refused before it is changed"


# Caches on disk


SAVED = [("gpt2", each) for each in ({}, {"gate": True, "window_size": 3}, {"softmax_layers": [1]})]
RETRIEVAL = {"retrieval_heads": [[0, 1], [2, 0]], "retrieval_window": 6, "retrieval_slots": 2}
SAVED += [("llama", {"window_size": 3, "num_slots": 4, **RETRIEVAL})]
SAVED += [("gpt2", {"add_cross_attention": True})]  # which saw no encoder's output
SAVED += [("bart", {"softmax_cross_layers": each}) for each in ([], [0, 1, 2])]
SAVED += [("bart", {"softmax_layers": [0], "softmax_cross_layers": [1]})]


@pytest.mark.parametrize(("family", "options"), SAVED, ids=str)
@torch.no_grad()
def test_a_cache_continues_from_disk(family, options, tmp_path):
    model, ids = make(family, options), tokens(2, 9)
    _, cache = logits_by_steps(model, ids[:, :-1], [])
    save_cache(cache, tmp_path / "prompt.safetensors")
    size = cache_num_bytes(cache)
    expected = read(model, ids[:, -1:], **cache_argument(cache)).logits
    for _ in range(2):  # a loaded cache does not change the file
        loaded = load_cache(tmp_path / "prompt.safetensors", model)
        assert loaded.get_seq_length() == 8
        assert cache_num_bytes(loaded) == size
        assert torch.equal(read(model, ids[:, -1:], **cache_argument(loaded)).logits, expected)
    assert [path.name for path in tmp_path.iterdir()] == ["prompt.safetensors"]
    loaded = load_cache(tmp_path / "prompt.safetensors", model)
    if not has_encoder(family):
        again = model.generate(ids, **cache_argument(loaded), **GENERATE)
        assert torch.equal(again, model.generate(ids, **GENERATE))
    else:
        other = make(family, {**options, "softmax_cross_layers": [2] if options["softmax_cross_layers"] else [0]})
        with pytest.raises(InputError, match=r"of cross attention: the file has .*, and the model "):
            load_cache(tmp_path / "prompt.safetensors", other)


@torch.no_grad()
def test_a_cache_of_beams_continues_from_disk(tmp_path):
    """The beams of a source share its state; they do in the file, and after it."""
    model, ids = make("bart", {"softmax_cross_layers": [1]}), tokens(2, 7)
    found = model.generate(ids, num_beams=3, eos_token_id=None, return_dict_in_generate=True, **GENERATE)
    save_cache(found.past_key_values, tmp_path / "c")
    loaded = load_cache(tmp_path / "c", model)
    assert cache_num_bytes(loaded) == cache_num_bytes(found.past_key_values)
    encoded = model.get_encoder()(ids).last_hidden_state.repeat_interleave(3, dim=0)
    given, results = {"decoder_input_ids": torch.arange(5, 11)[:, None], "encoder_outputs": (encoded,)}, []
    for cache in (found.past_key_values, loaded):
        cache.reorder_cache(torch.tensor([2, 0, 0, 3, 5, 4]))  # as beam search continues
        results.append(model(**given, **cache_argument(cache)).logits)
    assert_close(*results)


@torch.no_grad()
def test_a_cache_that_cannot_be_written_leaves_the_old_file(tmp_path, monkeypatch):
    cache = make("gpt2")(torch.tensor([[5, 6]])).past_key_values
    save_cache(cache, tmp_path / "prompt")
    before = (tmp_path / "prompt").read_bytes()

    def full_disk(tensors, path, metadata):
        path.write_bytes(before[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache_files, "save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_cache(cache, tmp_path / "prompt")
    assert [path.name for path in tmp_path.iterdir()] == ["prompt"]
    assert (tmp_path / "prompt").read_bytes() == before


def test_files_that_hold_no_cache_of_this_model_are_refused(tmp_path):
    model = make("gpt2")
    with pytest.raises(InputError, match="holds nothing yet"):
        save_cache(DynamicCache(config=model.config), tmp_path / "x")
    (tmp_path / "text").write_text("no tensors")
    save_file({"a": torch.ones(1)}, tmp_path / "other")
    with torch.no_grad():
        save_cache(model(torch.tensor([[5, 6]])).past_key_values, tmp_path / "own")
    for name, options, message in (
        ("nothing", {}, "cannot read a cache"),
        ("text", {}, "cannot read a cache"),
        ("other", {}, "holds no cache of hf-rfa"),
        ("own", {"softmax_layers": [0]}, "the file has state, and the model keys and values"),
        ("own", {"n_layer": 1}, "layers of self attention, and the model has 1"),
    ):
        with pytest.raises(InputError, match=message):
            load_cache(tmp_path / name, make("gpt2", options))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "own", "text"]


# Names: transformers up to 5.23 calls a cache ``past_key_values``, and later ones ``cache``

#: Families with an encoder and without, one of which hands its cache to attention under a third name.
NAMED: dict[str, dict[str, Any]] = {
    "gpt2": {"window_size": 5},
    "llama": {"window_size": 5, "softmax_layers": [1]},
    "gpt_neox": {"window_size": 5},
    "gemma3_text": {"window_size": 5},
    "bart": {"window_size": 5, "softmax_layers": [1], "softmax_cross_layers": [0]},
    "marian": {"window_size": 5},
}
every_named = pytest.mark.parametrize("family", NAMED)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@every_named
@torch.no_grad()
def test_a_cache_is_read_and_filled_under_either_name(family, name):
    """And transformers, which has dropped one of them, or will, gets the other: it warns of nothing."""
    model, ids = make(family, NAMED[family]), tokens(2, 19)
    cache: Any = DynamicCache(config=model.config.get_text_config(decoder=True))
    parts = []
    for piece in ids.split([9, 1, 1, 8], dim=1):
        output = read(model, piece, use_cache=True, **{name: cache})
        cache = returned_cache(output)
        parts.append(output.logits)
    assert cache.get_seq_length() == 19
    assert_close(torch.cat(parts, dim=1), logits(model, ids), atol=2e-4, rtol=1e-4)


@every_named
def test_a_cache_under_another_name_is_refused(family):
    """It would be dropped without a word, and every token would see itself alone."""
    model, cache = make(family, NAMED[family]), DynamicCache()
    with pytest.raises(TypeError, match=rf"DynamicCache came as kv_cache.*Pass it as {CACHE_NAME}"):
        read(model, tokens(), kv_cache=cache)
    assert cache.get_seq_length() == 0


@every_named
def test_two_caches_are_refused(family):
    """transformers 5.24 leaves one of them out, and PEFT 0.21 has the prefix in that one."""
    model, cache = make(family, NAMED[family]), DynamicCache()
    with pytest.raises(TypeError, match="two caches"):
        read(model, tokens(), cache=cache, past_key_values=DynamicCache())
    assert read(model, tokens(), cache=cache, past_key_values=None).logits.isfinite().all()
