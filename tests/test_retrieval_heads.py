"""Retrieval heads: against the softmax model under a mask per head, and with features in the other heads."""

from __future__ import annotations

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from hf_rfa.errors import InputError
from hf_rfa.evaluation.recall import window_and_sinks
from hf_rfa.evaluation.recall.memory import cache_memory
from hf_rfa.evaluation.recall.window_control import window_and_sinks_mask
from hf_rfa.export import DecodingStep
from hf_rfa.inference import cache_num_bytes, load_cache, save_cache
from hf_rfa.models.cache_names import cache_argument
from hf_rfa.models.memory import in_order

from .families import draw_importance, make, softmax_model
from .softmax_under_a_mask import assert_same_gradients, assert_same_logits, close

WINDOW, SINKS = 4, 2
#: A window of all positions.
ALL = 96
#: Retrieval heads by family: two of GPT-2's three heads in one layer, and one of Llama's two key-value heads.
HEADS = {"gpt2": [[0, 2], [0, 0], [1, 1]], "llama": [[1, 1]]}
CASES = [("gpt2", 9), ("gpt2", ALL), ("llama", 9), ("llama", ALL)]


def with_retrieval_heads(family, retrieval_window, **fields):
    fields = {"feature_map": "none", "window_size": WINDOW, "num_sinks": SINKS, **fields}
    return make(family, {"retrieval_heads": HEADS[family], "retrieval_window": retrieval_window, **fields})


@pytest.fixture(params=CASES, ids=str)
def pair(request):
    """A model with retrieval heads and no features, and the softmax model under the mask that they make."""
    family, retrieval_window = request.param
    model = with_retrieval_heads(family, retrieval_window)
    teacher = softmax_model(model, family)
    heads = model.config.num_heads_for("causal")

    def attention(module, query, key, value, mask, **kwargs):
        length = query.shape[2]
        near = window_and_sinks_mask(length, length, WINDOW, SINKS)
        far = window_and_sinks_mask(length, length, retrieval_window, SINKS)
        seen = torch.stack([far if [module.layer_idx, head] in HEADS[family] else near for head in range(heads)])
        seen = seen.repeat_interleave(query.shape[1] // heads, dim=0)[None]
        return sdpa_attention_forward(module, query, key, value, seen, **kwargs)

    AttentionInterface.register("test_retrieval_heads", attention)
    AttentionMaskInterface.register("test_retrieval_heads", lambda *args, **kwargs: None)
    teacher.set_attn_implementation("test_retrieval_heads")
    return model, teacher


def test_without_features_it_is_softmax_with_that_mask(pair):
    assert_same_logits(*pair)


def test_gradients_are_those_of_softmax_with_that_mask(pair):
    assert_same_gradients(*pair)


@torch.no_grad()
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("retrieval_window", [9, ALL])
def test_it_generates_alone_what_it_generates_in_a_padded_batch(beams, retrieval_window):
    model = with_retrieval_heads("llama", retrieval_window)
    ids = torch.randint(3, 61, (2, 14))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
    found = model.generate(ids, attention_mask=mask, **options)
    for row, first in ((0, 5), (1, 0)):
        prompt = ids[row : row + 1, first:]
        alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        assert torch.equal(found[row : row + 1, first:], alone)


VARIANTS = [
    {"feature_map": "none", "num_slots": 3},
    {"feature_map": "positive", "num_features": 16},
    {"feature_map": "positive", "num_features": 16, "window_size": 0, "num_sinks": 0},
    {"feature_map": "gaussian", "num_features": 16, "gate": True},
    {"feature_map": "hedgehog", "num_slots": 3},
]


@torch.no_grad()
@pytest.mark.parametrize("fields", VARIANTS, ids=lambda fields: "-".join(map(str, fields.values())))
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("retrieval_window", [9, ALL])
def test_pieces_and_padding_change_nothing(family, retrieval_window, fields):
    model = with_retrieval_heads(family, retrieval_window, **fields)
    draw_importance(model)
    ids = torch.randint(3, 61, (2, 40))
    expected = model(ids).logits
    for lengths in ([7, 1, 1, 20, 1, 10], [1] * 40):
        cache = DynamicCache(config=model.config)
        pieces = [model(piece, **cache_argument(cache)).logits for piece in ids.split(lengths, dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=1e-4, atol=1e-4)
    mask = torch.ones(2, 45, dtype=torch.long)
    mask[0, :5], mask[1, 2], mask[1, 41:] = 0, 0, 0
    padded = torch.zeros_like(mask).masked_scatter(mask.bool(), ids)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    found = model(padded, attention_mask=mask, position_ids=positions).logits[mask.bool()].view(expected.shape)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_other_heads_are_those_of_a_model_without_retrieval_heads():
    """A head's output depends on no other head: with all columns of one layer's output projection but its own at 0."""
    model = with_retrieval_heads("llama", ALL, feature_map="positive", num_features=16)
    plain = make("llama", {"feature_map": "positive", "num_features": 16, "window_size": WINDOW, "num_sinks": SINKS})
    attention, other = (each.model.layers[1].self_attn for each in (model, plain))
    for name, tensor in attention.feature_map.named_buffers():
        own = getattr(other.feature_map, name)
        own[: tensor.shape[0]] = tensor
    query, key, value = torch.randn(2, 4, 30, 6), torch.randn(2, 2, 30, 6), torch.randn(2, 2, 30, 6)
    hidden = torch.randn(2, 30, 24)
    found, expected = (each.attend(query, key, value, hidden_states=hidden)[0] for each in (attention, other))
    close(found[:, :2], expected[:, :2])
    scores = (query[:, 2:] * attention.scaling) @ key[:, 1:].mT
    seen = torch.ones(30, 30, dtype=torch.bool).tril()
    close(found[:, 2:], scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value[:, 1:])


@torch.no_grad()
@pytest.mark.parametrize("retrieval_window", [40, ALL])
def test_learned_sinks_take_their_share_in_retrieval_heads(retrieval_window):
    """Every query head has a logit of its own, also in a group; a softmax with it, in steps and at once."""
    model = with_retrieval_heads("llama", retrieval_window)
    attention = model.model.layers[1].self_attn
    query, key, value = torch.randn(2, 4, 30, 6), torch.randn(2, 2, 30, 6), torch.randn(2, 2, 30, 6)
    logits, hidden = torch.tensor([-1.0, 0.5, 2.0, 0.0]), torch.randn(2, 30, 24)
    found = attention.attend(query, key, value, hidden_states=hidden, sink_logits=logits)[0]
    scores = (query[:, 2:] * attention.scaling) @ key[:, 1:].mT
    scores = scores.masked_fill(~torch.ones(30, 30, dtype=torch.bool).tril(), -torch.inf)
    scores = torch.cat([scores, logits[2:].view(1, 2, 1, 1).expand(2, -1, 30, -1)], dim=-1)
    close(found[:, 2:], scores.softmax(-1)[..., :-1] @ value[:, 1:])
    plain = make("llama", {"feature_map": "none", "window_size": WINDOW, "num_sinks": SINKS}).model.layers[1].self_attn
    close(found[:, :2], plain.attend(query, key, value, hidden_states=hidden, sink_logits=logits)[0][:, :2])
    cache = DynamicCache(config=model.config)
    steps = [
        attention.attend(
            query[:, :, t : t + 1], key[:, :, t : t + 1], value[:, :, t : t + 1],
            hidden_states=hidden[:, t : t + 1], cache=cache, sink_logits=logits,
        )[0]
        for t in range(30)
    ]  # fmt: skip
    close(torch.cat(steps, dim=2), found)


@torch.no_grad()
@pytest.mark.parametrize("retrieval_window", [6, ALL])
def test_attention_weights_are_those_that_give_the_output(retrieval_window):
    model = with_retrieval_heads("llama", retrieval_window, feature_map="positive", num_features=16)
    attention = model.model.layers[1].self_attn
    query, key, value = torch.randn(2, 4, 30, 6), torch.randn(2, 2, 30, 6), torch.randn(2, 2, 30, 6)
    output, weights = attention.attend(query, key, value, hidden_states=torch.randn(2, 30, 24), output_attentions=True)
    close(weights @ value.repeat_interleave(2, dim=1), output)
    close(weights.sum(-1), torch.ones(2, 4, 30))


@torch.no_grad()
@pytest.mark.parametrize("retrieval_window", [6, ALL])
def test_packed_texts_see_nothing_of_each_other(retrieval_window):
    model = with_retrieval_heads("llama", retrieval_window, num_sinks=1)
    texts = [torch.randint(3, 61, (1, length)) for length in (19, 2, 1, 27)]
    positions = torch.cat([torch.arange(text.shape[1]) for text in texts])[None]
    found = model(torch.cat(texts, dim=1), position_ids=positions).logits
    close(found, torch.cat([model(text).logits for text in texts], dim=1))

    attention, cache, own = model.model.layers[1].self_attn, *(DynamicCache(config=model.config) for _ in range(2))
    query, key, value = torch.randn(1, 4, 49, 6), torch.randn(1, 2, 49, 6), torch.randn(1, 2, 49, 6)
    further = torch.randn(1, 4, 9, 6), torch.randn(1, 2, 9, 6), torch.randn(1, 2, 9, 6)
    hidden = torch.randn(1, 49, 24)
    attention.attend(query, key, value, hidden_states=hidden, cache=cache, document_starts=positions == 0)
    last = (each[:, :, 22:] for each in (query, key, value))
    attention.attend(*last, hidden_states=hidden[:, 22:], cache=own)
    after = [attention.attend(*further, hidden_states=hidden[:, :9], cache=each)[0] for each in (cache, own)]
    close(*after)


@torch.no_grad()
@pytest.mark.parametrize("retrieval_window", [9, ALL])
@pytest.mark.parametrize("fields", VARIANTS[:2], ids=str)
def test_a_cropped_cache_is_one_that_never_saw_the_tokens(retrieval_window, fields):
    model = with_retrieval_heads("llama", retrieval_window, **fields)
    draw_importance(model)
    ids = torch.randint(3, 61, (2, 30))
    cache = DynamicCache(config=model.config)
    model(ids[:, :12], **cache_argument(cache))
    cache.activate_past_recording()
    for start, stop in ((12, 13), (13, 20), (20, 22)):
        model(ids[:, start:stop], **cache_argument(cache))
    cache.crop(-6)  # through the middle of a step
    found = model(ids[:, 16:], **cache_argument(cache)).logits
    torch.testing.assert_close(found, model(ids).logits[:, 16:], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_they_take_the_same_bytes_however_long_the_text(tmp_path):
    model = with_retrieval_heads("llama", 9)
    row, own = (2 * 6 + 2) * 4, (9 + SINKS) * (2 * 6 + 2) * 4 + 4
    expected = (3 * 2 - 1) * (WINDOW + SINKS) * row + 3 * 4 + own
    for length in (1, 5, 11, 90):
        assert cache_num_bytes(model(torch.randint(3, 61, (1, length))).past_key_values) == expected
    memory = cache_memory(model)
    assert (memory.fixed, memory.per_token, memory.retrieval) == (expected, 0, own)

    ids = torch.randint(3, 61, (2, 20))
    cache = model(ids[:, :11]).past_key_values
    save_cache(cache, tmp_path / "cache.safetensors")
    loaded = load_cache(tmp_path / "cache.safetensors", model)
    assert type(loaded.layers[1]) is type(cache.layers[1])
    close(model(ids[:, 11:], **cache_argument(loaded)).logits, model(ids).logits[:, 11:])


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("retrieval_window", [9, ALL])
def test_in_16_bits_keys_are_kept_as_they_came(dtype, retrieval_window):
    model = with_retrieval_heads("llama", retrieval_window).to(dtype)
    attention = model.model.layers[1].self_attn
    query, key, value = (torch.randn(2, heads, 40, 6, dtype=dtype) for heads in (4, 2, 2))
    hidden = torch.randn(2, 40, 24, dtype=dtype)
    whole, _ = attention.attend(query, key, value, hidden_states=hidden)
    cache, pieces = DynamicCache(config=model.config), []
    for start, stop in ((0, 1), (1, 2), (2, 17), (17, 40)):
        piece = (each[:, :, start:stop] for each in (query, key, value))
        pieces.append(attention.attend(*piece, hidden_states=hidden[:, start:stop], cache=cache)[0])
    torch.testing.assert_close(torch.cat(pieces, dim=2), whole, rtol=1e-2, atol=1e-2)
    memory = in_order(cache.layers[1].memories[1])
    assert memory.keys_values.dtype == dtype
    count = min(retrieval_window, 40)
    assert torch.equal(memory.keys_values[:, 0, -count:, :6], key[:, 1, -count:])


@torch.no_grad()
def test_a_compiled_step_is_the_step():
    model = with_retrieval_heads("llama", 9, num_slots=3)
    draw_importance(model)
    ids = torch.randint(3, 61, (2, 20))
    cache = DynamicCache(config=model.config)
    model(ids[:, :8], **cache_argument(cache))
    step = torch.compile(model, backend="eager", fullgraph=False)
    found = [step(ids[:, place : place + 1], **cache_argument(cache)).logits for place in range(8, 20)]
    close(torch.cat(found, dim=1), model(ids).logits[:, 8:])


def test_a_decoding_step_of_fixed_shape():
    model = with_retrieval_heads("llama", 9)
    step, ids = DecodingStep(model), torch.randint(3, 61, (1, 12))
    with torch.no_grad():
        cache = model(ids[:, :11]).past_key_values
        found, _ = step(ids[:, 11:], torch.tensor([[11]]), step.states(cache))
        close(found, model(ids).logits[:, 11:])


@pytest.mark.parametrize(
    ("heads", "fields", "message"),
    [
        ([[0, 2]], {}, "of 3 layers of 2 key-value heads"),
        ([[3, 0]], {}, "of 3 layers"),
        ([0, 1], {}, "must be pairs"),
        ([[0, 0], [0, 1]], {}, "names all 2 heads of layer 0"),
        ([[0, 0], [0, 0]], {}, "names all|twice"),
        ([[0, 0]], {"softmax_layers": [0]}, "whose attention is not RFA"),
        ([], {"retrieval_window": 5}, "has no effect without retrieval_heads"),
        ([[0, 0]], {"retrieval_window": 1_000_000}, "retrieval_window must be from 0"),
        ([[0, 0]], {}, "must have a window of their own: set retrieval_window"),
    ],
)
def test_fields_that_do_not_fit_are_refused(heads, fields, message):
    with pytest.raises((ValueError, StrictDataclassError), match=message):
        make("llama", {"retrieval_heads": heads, **fields})


def test_a_model_with_retrieval_heads_cannot_be_a_control():
    with pytest.raises(InputError), window_and_sinks(with_retrieval_heads("llama", 9), 4):
        pass


def test_a_static_cache_serves_them():
    ids = torch.randint(3, 61, (2, 12))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 15, "min_new_tokens": 15, "do_sample": False}
    options |= {"pad_token_id": 0, "disable_compile": True}
    model = with_retrieval_heads("llama", 9, softmax_layers=[0])
    expected = model.generate(ids, **options)
    found = model.generate(ids, cache_implementation="static", return_dict_in_generate=True, **options)
    assert torch.equal(found.sequences, expected)
    assert found.past_key_values.is_compileable


@torch.no_grad()
@pytest.mark.parametrize("retrieval_window", [9, ALL])
def test_cropping_keeps_the_precision_of_what_is_kept(retrieval_window):
    """Beside a state in float32 keys and values are in the model's 16 bits."""
    fields = {"feature_map": "positive", "num_features": 16, "gate": True}
    model = with_retrieval_heads("llama", retrieval_window, **fields).to(torch.bfloat16)
    ids = torch.randint(3, 61, (2, 20))
    cache, other = (DynamicCache(config=model.config) for _ in range(2))
    model(ids[:, :8], **cache_argument(cache))
    cache.activate_past_recording()
    model(ids[:, 8:20], **cache_argument(cache))
    cache.crop(-5)
    for start, stop in ((0, 8), (8, 15)):
        model(ids[:, start:stop], **cache_argument(other))
    for found, expected in zip(cache.layers[1].memories, other.layers[1].memories, strict=True):
        found, expected = in_order(found), in_order(expected)
        assert found.keys_values.dtype == expected.keys_values.dtype == torch.bfloat16
        filled = expected.arrival >= 0
        assert torch.equal(found.arrival, expected.arrival)
        assert torch.equal(found.keys_values[filled], expected.keys_values[filled])
