"""`generate` on RFA models with an encoder against hand-rolled loops over full forward passes."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CompileConfig, EncoderDecoderCache

from hf_rfa import RFALayer, RFASourceLayer, cache_num_bytes

from .test_seq2seq import make

GENERATING = ["both", "both-gate", "paper", "cross-only", "causal-only", "everything", "per-layer"]
POSITIONS = {"max_position_embeddings": 300}
START = 2


@pytest.fixture
def source():
    return torch.randint(3, 61, (2, 9))


def generate(model, source, **options):
    """Generate without an end-of-text token, so that lengths are known."""
    options = {"eos_token_id": None, "do_sample": False, **options}
    mask = options.pop("attention_mask", torch.ones_like(source))
    return model.generate(source, attention_mask=mask, **options)


@torch.no_grad()
def full_forward(model, source, ids):
    return model(source, decoder_input_ids=ids, use_cache=False).logits[:, -1]


@pytest.mark.parametrize("family", ["bart", "marian"])
@pytest.mark.parametrize("name", GENERATING)
def test_greedy_is_the_argmax_of_full_forwards(name, family, source):
    model = make(name, family=family, dtype=torch.float64, **POSITIONS)
    ids = torch.full((2, 1), START)
    for _ in range(60):
        ids = torch.cat([ids, full_forward(model, source, ids).argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(generate(model, source, max_new_tokens=60), ids)


def beam_search_by_full_forwards(model, source, *, beams, new_tokens, eos=None, length_penalty=1.0):
    """Beam search for one source: hypotheses end with ``eos`` and are scored by their mean log-probability."""
    running, finished = [(0.0, torch.full((1, 1), START))], []
    for step in range(1, new_tokens + 1):
        candidates = []
        for score, ids in running:
            logprobs = full_forward(model, source, ids)[0].log_softmax(-1)
            for logprob, token in zip(*logprobs.topk(2 * beams), strict=True):
                candidates.append((score + float(logprob), torch.cat([ids, token.view(1, 1)], dim=1)))
        candidates = sorted(candidates, key=lambda item: -item[0])[: 2 * beams]
        running = []
        for rank, (score, ids) in enumerate(candidates):
            if eos is not None and int(ids[0, -1]) == eos:
                if rank < beams:
                    finished.append((score / step**length_penalty, ids))
            elif len(running) < beams:
                running.append((score, ids))
        finished = sorted(finished, key=lambda item: -item[0])[:beams]
        if len(finished) == beams and finished[-1][0] >= running[0][0] / step**length_penalty:
            break
    else:
        finished += [(score / new_tokens**length_penalty, ids) for score, ids in running]
    return [ids for _, ids in sorted(finished, key=lambda item: -item[0])[:beams]]


@pytest.mark.parametrize("family", ["bart", "marian"])
@pytest.mark.parametrize("name", GENERATING)
def test_beam_search_equals_a_hand_rolled_one(name, family, source):
    """Several sources at once, each with its beams on one cross-attention state."""
    model = make(name, family=family, dtype=torch.float64, **POSITIONS)
    found = generate(model, source, num_beams=4, num_return_sequences=4, max_new_tokens=12, length_penalty=0.0)
    for row in range(2):
        expected = beam_search_by_full_forwards(
            model, source[row : row + 1], beams=4, new_tokens=12, length_penalty=0.0
        )
        assert torch.equal(found[4 * row : 4 * row + 4], torch.cat(expected))


@pytest.mark.parametrize("name", ["both-gate", "per-layer"])
def test_beam_search_with_ends_equals_a_hand_rolled_one(name, source):
    """With an end-of-text token that ends hypotheses at different lengths."""
    ended = 0
    model = make(name, dtype=torch.float64, **POSITIONS)
    for eos in range(3, 15):
        found = generate(model, source[:1], num_beams=4, max_new_tokens=12, eos_token_id=eos, early_stopping=False)
        expected = beam_search_by_full_forwards(model, source[:1], beams=4, new_tokens=12, eos=eos)[0]
        assert torch.equal(found[:, : expected.shape[1]], expected), eos
        assert (found[:, expected.shape[1] :] == 1).all()
        ended += expected.shape[1] < 13
    assert ended > 0


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("name", GENERATING)
def test_batches_of_mixed_source_lengths_equal_single_runs(name, beams):
    model = make(name, dtype=torch.float64, **POSITIONS)
    sources = [torch.randint(3, 61, (1, length)) for length in (11, 4, 7)]
    batch, mask = torch.ones(3, 11, dtype=torch.long), torch.zeros(3, 11, dtype=torch.long)
    for row, ids in enumerate(sources):
        batch[row, : ids.shape[1]], mask[row, : ids.shape[1]] = ids[0], 1
    found = generate(model, batch, attention_mask=mask, max_new_tokens=25, num_beams=beams)
    for row, ids in enumerate(sources):
        assert torch.equal(found[row : row + 1], generate(model, ids, max_new_tokens=25, num_beams=beams))


CONSTRAINTS = {
    "forced_bos_token_id": {"forced_bos_token_id": 7},
    "forced_eos_token_id": {"forced_eos_token_id": 9},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "min_length": {"min_length": 15, "eos_token_id": list(range(3, 30))},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "bad_words_ids": {"bad_words_ids": [[token] for token in range(3, 30)]},
    "length_penalty": {"length_penalty": 2.0, "eos_token_id": 5},
    "num_return_sequences": {"num_return_sequences": 2},
}


@pytest.mark.parametrize("family", ["bart", "marian"])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", sorted(CONSTRAINTS))
def test_constraints_hold_and_act_as_without_a_cache(name, beams, family, source):
    """The processors of transformers see the same scores as on full forward passes, and do what they are there for."""
    model = make("both-gate", family=family, dtype=torch.float64, **POSITIONS)
    options = {"max_new_tokens": 20, "num_beams": beams, **CONSTRAINTS[name]}
    if name == "num_return_sequences" and beams == 1:
        options |= {"do_sample": True, "top_k": 5}
    torch.manual_seed(3)
    found = generate(model, source, **options)
    torch.manual_seed(3)
    assert torch.equal(found, generate(model, source, use_cache=False, **options))
    if name == "forced_bos_token_id":
        assert (found[:, 1] == 7).all()
    elif name == "forced_eos_token_id":
        assert (found[:, -1] == 9).all()
    elif name == "no_repeat_ngram_size":
        for row in found.tolist():
            pairs = list(pairwise(row))
            assert len(set(pairs)) == len(pairs)
        plain = generate(model, source, max_new_tokens=20, num_beams=beams)[0].tolist()
        pairs = list(pairwise(plain))
        assert len(set(pairs)) < len(pairs), "without the constraint this model repeats itself"
    elif name == "min_length":
        assert found.shape[1] >= 15
        assert not torch.isin(found[:, 1:14], torch.arange(3, 30)).any()
    elif name == "bad_words_ids":
        assert not torch.isin(found[:, 1:], torch.arange(3, 30)).any()
    elif name == "num_return_sequences":
        assert found.shape[0] == 4
        assert not torch.equal(found[0], found[1])


@torch.no_grad()
@pytest.mark.parametrize("name", ["both", "paper"])
def test_beams_share_one_state_of_the_source_and_no_step_copies_it(name, source, monkeypatch):
    model = make(name, **POSITIONS)
    built, selected = [], []
    fill, select = RFASourceLayer.fill, RFALayer._select
    monkeypatch.setattr(RFASourceLayer, "fill", lambda self, state, **k: (built.append(state), fill(self, state, **k)))
    monkeypatch.setattr(RFALayer, "_select", lambda self, index: (selected.append(self), select(self, index)))
    output = generate(model, source, num_beams=4, max_new_tokens=30, return_dict_in_generate=True)
    layers = output.past_key_values.cross_attention_cache.layers
    assert len(built) == len(layers) == 3, "the state is built once per layer"
    for state, layer in zip(built, layers, strict=True):
        assert state.shape[0] == 2, "one row per source, not per beam"
        assert layer.rows_per_state == 4
        assert layer.state.data_ptr() == state.data_ptr()
    assert selected, "self-attention states follow their beams"
    assert not any(isinstance(layer, RFASourceLayer) for layer in selected)


@torch.no_grad()
def test_operations_on_the_state_of_a_source(source):
    model = make(dtype=torch.float64)
    target = torch.randint(3, 61, (2, 5))

    def step(cache, rows, tokens):
        return model(source[rows], decoder_input_ids=tokens, past_key_values=cache).logits

    def cache_for(rows):
        return model(source[rows], decoder_input_ids=target[rows]).past_key_values

    rows = torch.tensor([0, 0, 1, 1])
    tokens = torch.randint(3, 61, (4, 1))
    expected = step(cache_for(rows), rows, tokens)
    repeated = cache_for(torch.tensor([0, 1]))
    repeated.batch_repeat_interleave(2)
    assert repeated.cross_attention_cache.layers[0].rows_per_state == 2
    torch.testing.assert_close(step(copy.deepcopy(repeated), rows, tokens), expected)
    twice = copy.deepcopy(repeated)
    twice.batch_repeat_interleave(2)
    order = torch.tensor([6, 0, 3, 2, 5, 4, 1, 7])
    twice.reorder_cache(order)
    torch.testing.assert_close(step(twice, rows[order // 2], tokens[order // 2]), expected[order // 2])
    within = copy.deepcopy(repeated)
    within.reorder_cache(torch.tensor([1, 1, 3, 2]))
    assert within.cross_attention_cache.layers[0].rows_per_state == 2
    across = copy.deepcopy(repeated)
    across.reorder_cache(torch.tensor([2, 0, 1, 3]))
    other = rows[[2, 0, 1, 3]]
    torch.testing.assert_close(step(across, other, tokens), step(cache_for(other), other, tokens))
    fewer = copy.deepcopy(repeated)
    fewer.batch_select_indices(torch.tensor([3]))
    torch.testing.assert_close(
        step(fewer, torch.tensor([1]), tokens[:1]), step(cache_for(rows[3:]), rows[3:], tokens[:1])
    )
    layer = repeated.cross_attention_cache.layers[0]
    layer.offload()
    layer.prefetch()
    rebuilt = EncoderDecoderCache(repeated.self_attention_cache, repeated.cross_attention_cache)
    assert rebuilt.is_updated == {0: True, 1: True, 2: True}
    repeated.reset()
    assert layer.state is None
    assert layer.get_seq_length() == 0
    torch.testing.assert_close(
        model(source, decoder_input_ids=target, past_key_values=repeated).logits,
        model(source, decoder_input_ids=target).logits,
    )


@pytest.mark.parametrize("name", GENERATING)
@pytest.mark.parametrize("beams", [1, 3])
def test_a_static_cache_gives_the_same(name, beams, source):
    model = make(name, dtype=torch.float64, **POSITIONS)
    options = {"max_new_tokens": 20, "num_beams": beams}
    options |= {"output_scores": True, "return_dict_in_generate": True}
    found = generate(model, source, cache_implementation="static", **options)
    expected = generate(model, source, **options)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.scores, expected.scores)


@torch.no_grad()
def test_an_encoder_run_once_serves_many_outputs(source):
    """Encoder outputs handed to `generate`, and a cache copied and continued in two ways."""
    model = make("both-gate", dtype=torch.float64, **POSITIONS)
    encoded = model.get_encoder()(source)
    whole = generate(model, source, max_new_tokens=20)
    mask = torch.ones_like(source)
    found = model.generate(
        encoder_outputs=encoded, attention_mask=mask, max_new_tokens=20, do_sample=False, eos_token_id=None
    )
    assert torch.equal(found, whole)
    cache = model(source, decoder_input_ids=whole[:, :6]).past_key_values
    for token in (5, 8):
        prefix = torch.cat([whole[:, :6], torch.full((2, 1), token)], dim=1)
        options = {"decoder_input_ids": prefix, "max_new_tokens": 9}
        mask = torch.ones_like(prefix)  # by which transformers sees that the prefix holds what the cache has seen
        forked = generate(model, source, past_key_values=copy.deepcopy(cache), decoder_attention_mask=mask, **options)
        assert torch.equal(forked, generate(model, source, **options))


@torch.no_grad()
@pytest.mark.parametrize("name", ["both", "paper"])
def test_cache_bytes_do_not_depend_on_lengths(name):
    model = make(name, max_position_embeddings=4100)
    sizes = set()
    for source_length in (32, 4000):
        source = torch.randint(3, 61, (2, source_length))
        for output_length in (10, 4000):
            ids = torch.randint(3, 61, (2, output_length))
            cache = model(source, decoder_input_ids=ids).past_key_values
            sizes.add(cache_num_bytes(cache))
    assert len(sizes) == 1
    assert sizes.pop() > 0


def test_generation_past_the_positions_is_refused(source):
    model = make("both", max_position_embeddings=20)
    with pytest.raises(ValueError, match="--max-positions"):
        generate(model, source, max_new_tokens=30)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("family", ["bart", "marian"])
def test_a_compiled_decoding_step_is_one_graph(family, source):
    model, eager = (make("both-gate", family=family, **POSITIONS) for _ in range(2))
    torch._dynamo.reset()
    encoded = model.get_encoder()(source)
    first = torch.full((2, 1), START)
    cache, expected_cache = (
        m(encoder_outputs=encoded, decoder_input_ids=first).past_key_values for m in (model, eager)
    )
    compiled = torch.compile(model, fullgraph=True)
    tokens = torch.randint(3, 61, (2, 40))
    torch._dynamo.utils.counters.clear()
    for t in range(40):
        if t == 10:
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        step = {"encoder_outputs": encoded, "decoder_input_ids": tokens[:, t : t + 1]}
        found = compiled(past_key_values=cache, **step)
        expected = eager(past_key_values=expected_cache, **step)
        torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs <= 3
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["both-gate", "per-layer"])
def test_generate_compiles_by_itself_with_a_static_cache(name, source):
    """As it does on a GPU; here it is told to."""
    model = make(name, **POSITIONS)
    torch._dynamo.reset()
    expected = generate(model, source, max_new_tokens=25)
    compile_config = CompileConfig(mode="default")
    compile_config._compile_all_devices = True
    found = generate(model, source, max_new_tokens=25, cache_implementation="static", compile_config=compile_config)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert torch.equal(found, expected)


class Operations(TorchDispatchMode):
    """Records every operation with the shapes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        shapes = tuple(tuple(x.shape) for x in tree_leaves((args, kwargs)) if torch.is_tensor(x))
        self.seen.append((str(func), shapes))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("name", ["both", "paper"])
def test_a_step_is_the_same_operations_at_any_output_position_and_source_length(name):
    """Not one tensor of a decoding step depends on how long the output or the source is: it costs the same."""
    model = make(name, max_position_embeddings=4100)
    steps = {}
    for source_length in (32, 4000):
        encoded = model.get_encoder()(torch.randint(3, 61, (2, source_length)))
        mask = torch.ones(2, source_length, dtype=torch.long)
        mask[0, 20:] = 0
        for position in (10, 4000):
            prefix = torch.randint(3, 61, (2, position))
            inputs = {"encoder_outputs": encoded, "attention_mask": mask}
            cache = model(decoder_input_ids=prefix, **inputs).past_key_values
            token = torch.full((2, 1), 5)
            with Operations() as operations:
                model(decoder_input_ids=token, past_key_values=cache, **inputs)
            steps[source_length, position] = operations.seen
    first = steps.pop((32, 10))
    assert len(first) > 100
    for setting, operations in steps.items():
        assert operations == first, setting
