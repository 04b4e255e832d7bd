"""Texts past the trained length: old tokens move along, whatever the pieces, and up to L nothing changes."""

from __future__ import annotations

import copy
import gzip
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as functional
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CompileConfig, DynamicCache, LlamaForCausalLM

from hf_rfa.models.cache_names import cache_argument
from hf_rfa.models.importance import LearnedImportance
from hf_rfa.models.state_attention import StateAttentionMixin
from hf_rfa.models.streaming import can_move, prepare_step
from hf_rfa.models.summary_feature_map import SummaryMap
from tests.conftest import DEMO_TEXT, ROOT
from tests.decoders import converted, every_decoder, parent
from tests.families import use_flex_attention
from tests.stream_by_loop import stream_by_loop

L, B = 12, 5
#: Families that scale columns of keys by weights after their rotation: no rotation turns these.
HAS_WEIGHTS_AFTER_ROTATION = ("hunyuan_v1_dense", "hunyuan_v1_moe")
#: Families form cosines in float32, whatever the dtype.
assert_close = partial(torch.testing.assert_close, atol=2e-5, rtol=1e-4)
SIZES: dict[str, dict[str, Any]] = {
    "window": {"window_size": 3},
    "sinks": {"window_size": 4, "num_sinks": 2},
    "slots": {"window_size": 3, "num_sinks": 2, "num_slots": 4},
    "long window": {"window_size": 10, "num_sinks": 1, "num_slots": 2},
    "retrieval": {"window_size": 2, "num_sinks": 1, "num_slots": 3},
}
SIZES["retrieval"] |= {"retrieval_heads": [[0, 1], [2, 0]], "retrieval_window": 6, "retrieval_slots": 4}
SIZES["summary"] = SIZES["retrieval"] | {"feature_map": "summary", "num_features": 4}


def models(
    name: str = "llama", sizes: str = "slots", dtype: torch.dtype = torch.float64, **fields: Any
) -> tuple[Any, Any]:
    """Return a softmax model and an RFA model whose slots are chosen by random importance."""
    softmax = parent(name, **fields).to(dtype)
    rfa = converted(softmax, **{"feature_map": "none", "max_distance": L, "distance_step": B} | SIZES[sizes])
    for module in rfa.modules():
        if isinstance(module, LearnedImportance):
            module.weight.normal_()
            module.recency.uniform_(0, 0.3)
        if isinstance(module, SummaryMap):
            for parameter in module.parameters():
                parameter.data.normal_(0, 0.5)
    return softmax, rfa


def read(model: Any, ids: torch.Tensor, pieces: list[int], mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return the logits of a text in pieces."""
    cache, logits, start = DynamicCache(config=model.config), [], 0
    for piece in pieces:
        stop = start + piece
        part = None if mask is None else mask[:, :stop]
        logits.append(model(ids[:, start:stop], attention_mask=part, **cache_argument(cache)).logits)
        start = stop
    return torch.cat(logits, 1)


@pytest.mark.parametrize("sizes", SIZES)
def test_a_text_past_l_is_read_as_the_definition_says(sizes):
    softmax, rfa = models(sizes=sizes)
    ids = torch.randint(3, 61, (2, 41))
    expected = stream_by_loop(softmax, rfa, ids)
    with torch.no_grad():
        assert_close(rfa(ids, use_cache=False).logits, expected)
        assert_close(read(rfa, ids, [41]), expected)
        step = StateAttentionMixin._step
        with patch.object(StateAttentionMixin, "_step", autospec=True, side_effect=step) as steps:
            assert_close(read(rfa, ids, [1] * 41), expected)
        assert bool(steps.call_count) == (sizes == "summary")  # of all layers at once
        assert_close(read(rfa, ids, [11, 1, 1, 1, 7, 1, 19]), expected)


@torch.no_grad()
def test_a_summary_reads_the_same_wherever_positions_begin():
    _, rfa = models(sizes="summary")
    ids, positions, cache = torch.randint(3, 61, (2, 41)), torch.arange(41)[None] + 7, DynamicCache(config=rfa.config)
    expected = rfa(ids, use_cache=False).logits
    assert_close(rfa(ids, position_ids=positions, use_cache=False).logits, expected)
    for start, stop in ((0, 5), (5, 6), (6, 20), (20, 21), (21, 41)):
        part = rfa(ids[:, start:stop], position_ids=positions[:, start:stop], **cache_argument(cache))
        assert_close(part.logits, expected[:, start:stop])


@torch.no_grad()
@pytest.mark.parametrize("sizes", ["slots", "retrieval", "summary"])
@settings(max_examples=8)
@given(data=st.data())
def test_any_padding_and_any_pieces_are_the_definition(sizes, data):
    softmax, rfa = models(sizes=sizes)
    length = data.draw(st.integers(13, 36))
    ids = torch.randint(3, 61, (2, length), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    mask = torch.ones_like(ids)
    mask[0, : data.draw(st.integers(0, length - 2))] = 0
    mask[1, data.draw(st.integers(1, length - 1)) :][: data.draw(st.integers(0, 4))] = 0
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=8)))
    pieces = [stop - start for start, stop in zip([0, *cuts], [*cuts, length], strict=True)]
    expected = stream_by_loop(softmax, rfa, ids, padding=mask)[mask != 0]
    assert_close(read(rfa, ids, pieces, mask)[mask != 0], expected)
    assert_close(rfa(ids, attention_mask=mask, use_cache=False).logits[mask != 0], expected)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "interleaved"), [("cohere", True), ("glm", True), ("gemma3_text", False), ("ministral", False)]
)
def test_other_rotations_and_sliding_layers_beside(name, interleaved):
    """Pairs side by side, of a part of the columns; and layers with a sliding window, which see true distances."""
    softmax, rfa = models(name)
    ids = torch.randint(3, 61, (2, 40))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    expected = stream_by_loop(softmax, rfa, ids, padding=mask, interleaved=interleaved)[mask != 0]
    assert_close(rfa(ids, attention_mask=mask, use_cache=False).logits[mask != 0], expected)
    for pieces in ([40], [1] * 40, [9, 8, 1, 1, 1, 20]):
        assert_close(read(rfa, ids, pieces, mask)[mask != 0], expected)


@torch.no_grad()
def test_at_once_by_flex_attention(monkeypatch):
    use_flex_attention(monkeypatch, block=8)
    softmax, rfa = models(dtype=torch.float32)
    ids = torch.randint(3, 61, (2, 41))
    expected = stream_by_loop(softmax.double(), copy.deepcopy(rfa).double(), ids).float()
    assert_close(rfa(ids, use_cache=False).logits, expected, atol=1e-4, rtol=1e-3)
    assert_close(read(rfa, ids, [14, 27]), expected, atol=1e-4, rtol=1e-3)


def test_gradients_through_moved_tokens_are_those_of_the_definition():
    softmax, rfa = models(sizes="sinks")
    ids = torch.randint(3, 61, (1, 30))
    for model, logits in ((softmax, stream_by_loop(softmax, rfa, ids)), (rfa, rfa(ids, use_cache=False).logits)):
        logits.log_softmax(-1)[..., 7].sum().backward()
        assert model.model.layers[0].self_attn.k_proj.weight.grad is not None
    expected = dict(softmax.named_parameters())
    for name, parameter in rfa.named_parameters():
        assert_close(parameter.grad, expected[name].grad, atol=1e-4, rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_generate_goes_on_past_l_whatever_it_does_with_the_cache(name, tmp_path):
    """Greedy, beams, an assistant whose guesses are taken back, steps that are compiled, and a cache from disk."""
    _, rfa = models(name, "slots", torch.float32)
    ids = torch.randint(3, 61, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
    answer = rfa.generate(ids, attention_mask=mask, **options)
    grown = torch.cat([mask, mask.new_ones(2, 30)], 1)
    logits = rfa(answer, attention_mask=grown, use_cache=False).logits
    assert torch.equal(logits[:, 8:-1].argmax(-1), answer[:, 9:])

    beams = rfa.generate(
        ids, attention_mask=mask, num_beams=3, output_scores=True, return_dict_in_generate=True, **options
    )
    scores = rfa(beams.sequences, attention_mask=grown, use_cache=False).logits[:, 8:-1].log_softmax(-1)
    mean = scores.gather(-1, beams.sequences[:, 9:, None])[..., 0].mean(-1)
    assert_close(mean, beams.sequences_scores, atol=1e-4, rtol=1e-4)

    one = rfa.generate(ids[1:], **options)
    assert torch.equal(rfa.generate(ids[1:], prompt_lookup_num_tokens=3, **options), one)
    _, assistant = models(name, "sinks", torch.float32)
    assert torch.equal(rfa.generate(ids[1:], assistant_model=assistant, **options), one)

    if name == "gemma3_text":  # transformers' own static caches of sliding layers compile every step again
        return
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = CompileConfig(backend="eager", mode=None, fullgraph=True, dynamic=False)
    config._compile_all_devices = True
    compiled = {"cache_implementation": "static", "compile_config": config}
    assert torch.equal(rfa.generate(ids, attention_mask=mask, **options, **compiled), answer)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "an epoch compiled a step again"


@torch.no_grad()
def test_steps_that_a_user_compiled_do_not_go_past_l_unmoved():
    """Nothing asks for an epoch before them, as `generate` does."""
    _, rfa = models(dtype=torch.float32)
    ids = torch.randint(3, 61, (1, 40))
    expected = rfa(ids, use_cache=False).logits
    torch._dynamo.reset()
    step = torch.compile(rfa, backend="eager", fullgraph=True)
    cache = rfa(ids[:, :9], use_cache=True).past_key_values
    for t in range(9, L):
        assert_close(step(ids[:, t : t + 1], **cache_argument(cache)).logits, expected[:, t : t + 1])
    before = copy.deepcopy(cache)
    with pytest.raises(RuntimeError, match="max_distance"):
        step(ids[:, L : L + 1], **cache_argument(cache))
    assert_close(rfa(ids[:, L : L + 1], **cache_argument(before)).logits, expected[:, L : L + 1])
    for t in range(L + 1, 40):
        prepare_step(rfa.model, before)
        assert_close(step(ids[:, t : t + 1], **cache_argument(before)).logits, expected[:, t : t + 1])


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "ministral"])
def test_tokens_that_are_taken_back_across_an_epoch_leave_nothing(name):
    if name == "ministral" and transformers.__version__.startswith("5.17."):
        pytest.skip(
            "recording softmax layers of transformers 5.17 have more keys than their masks, in the base model, too"
        )
    _, rfa = models(name, dtype=torch.float32)
    ids, other = torch.randint(3, 61, (2, 40)), torch.randint(3, 61, (2, 9))
    expected = rfa(ids, use_cache=False).logits
    for first, pieces, keep in ((L - 2, [5], 1), (L - 2, [1, 1, 1, 1], 2), (L - 1, [9], 0), (L + B - 3, [3, 4], 4)):
        cache = rfa(ids[:, :first], use_cache=True).past_key_values
        for layer in cache.layers:
            layer.activate_past_recording()
        draft = torch.cat([ids[:, first : first + keep], other], 1)[:, : sum(pieces)]
        for piece in draft.split(pieces, dim=1):
            rfa(piece, **cache_argument(cache))
        cache.crop(keep - sum(pieces))
        assert_close(read_on(rfa, cache, ids[:, first + keep :]), expected[:, first + keep :])


@torch.no_grad()
@every_decoder
def test_every_rotary_decoder_goes_on_past_l(name):
    """At once, in pieces and one by one it is the same; what cannot move says so where it ends."""
    softmax = parent(name)
    options = {"feature_map": "none", "window_size": 3, "num_sinks": 1, "num_slots": 2}
    rfa = converted(softmax, **options)
    if not rfa.config.streams():
        assert not getattr(softmax.config, "rope_parameters", None)
        return
    rfa = converted(softmax, **options, max_distance=L, distance_step=B)
    ids = torch.randint(3, 61, (2, 45))
    if name in HAS_WEIGHTS_AFTER_ROTATION:
        assert not can_move(rfa.rfa_stacks[0])
        ids = torch.randint(3, 61, (1, rfa.config.max_position_embeddings + 1))
        with pytest.raises(ValueError, match="positions"):
            rfa(ids, use_cache=False)
        return
    expected = rfa(ids, use_cache=False).logits
    assert can_move(rfa.rfa_stacks[0])
    pieces = [10, 1, 1, 1, 7, 1, 24]
    if torch.allclose(read(softmax, ids, pieces), softmax(ids, use_cache=False).logits, atol=1e-3):  # Bamba's is not
        assert_close(read(rfa, ids, pieces), expected, atol=2e-2, rtol=1e-3)
    if name == "ministral3":  # scales queries by their positions
        return
    apart = rfa(ids, position_ids=torch.arange(45)[None] + 77, use_cache=False).logits
    assert_close(apart, expected, atol=2e-2, rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "stablelm"])
def test_packed_documents_each_begin_at_0(name):
    softmax, rfa = models(name)
    ids, lengths = torch.randint(3, 61, (1, 60)), [2, 29, B, L - 1, 13]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    apart = [rfa(part, use_cache=False).logits for part in ids.split(lengths, dim=1)]
    assert_close(rfa(ids, position_ids=positions, use_cache=False).logits, torch.cat(apart, 1))
    if name == "llama":
        assert_close(apart[1], stream_by_loop(softmax, rfa, ids[:, 2:31]))


@torch.no_grad()
def test_up_to_l_nothing_changes():
    _, rfa = models(dtype=torch.float32)
    plain = converted(parent("llama"), feature_map="none", max_distance=100, **SIZES["slots"])
    plain.load_state_dict(rfa.state_dict())
    ids = torch.randint(3, 61, (2, L))
    assert torch.equal(read(rfa, ids, [5, 1, 6]), read(plain, ids, [5, 1, 6]))
    assert not hasattr(rfa.model, "rotations"), "rotations were looked for before they are needed"


@torch.no_grad()
def test_token_ten_million_is_as_good_as_token_ten():
    """What a cache holds, counted from 10⁷ tokens on."""
    _, rfa = models(dtype=torch.float32)
    ids, far = torch.randint(3, 61, (2, 60)), 2 * 10**6 * B
    cache = rfa(ids[:, :20], use_cache=True).past_key_values
    expected = read_on(rfa, copy.deepcopy(cache), ids[:, 20:])
    for layer in cache.layers:
        (places,) = (memory.places for memory in layer.memories)
        places.arrival[places.arrival >= 0] += far  # sinks too: they are behind all others from here on
        places.arrival[places.score == float("inf")] -= far
        places.origin += far
        layer.cumulative_length += far
        layer.ask_again()
    assert_close(read_on(rfa, cache, ids[:, 20:]), expected)


def read_on(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of tokens that follow what a cache holds, first some at once and then one by one."""
    parts = [ids[:, :17], *ids[:, 17:].split(1, dim=1)]
    return torch.cat([model(part, **cache_argument(cache)).logits for part in parts], 1)


@torch.no_grad()
@pytest.mark.parametrize("sizes", [{"num_slots": 24}, {"retrieval_heads": [[1, 0]], "retrieval_window": 100}], ids=str)
def test_the_loss_of_a_trained_model_stays_flat_over_20_000_tokens(sizes):
    """A model of 256 positions beside softmax in fresh blocks of these; slots and sinks are the first tokens, for good."""
    softmax = LlamaForCausalLM.from_pretrained(ROOT / "tests" / "data" / "rotary")
    rfa = converted(softmax, feature_map="none", window_size=40, num_sinks=4, **sizes)
    assert rfa.config.motion_of("causal") == (256, 128)
    text = gzip.decompress(DEMO_TEXT.read_bytes())[:20_480]
    ids = torch.tensor([list(text)])
    labels = ids[0, 1:]
    cache, logits = DynamicCache(config=rfa.config), []
    for piece in ids.split(1000, dim=1):
        logits.append(rfa(piece, **cache_argument(cache)).logits[0])
    loss = functional.cross_entropy(torch.cat(logits)[:-1], labels, reduction="none")
    blocks = softmax(ids.view(-1, 256), use_cache=False).logits[:, :-1]
    expected = functional.cross_entropy(blocks.flatten(0, 1), ids.view(-1, 256)[:, 1:].flatten(), reduction="none")
    added = torch.cat([loss, loss[-1:]]).view(-1, 256)[:, :-1] - expected.view(-1, 255)  # nats more than softmax
    by_part = added.view(5, -1).mean(1)
    assert by_part.max() < 0.02  # keys that stay where they were: 0.5
    assert (by_part[1:] - by_part[0]).abs().max() < 0.015
