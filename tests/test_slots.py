"""Slots: against the softmax model under a mask made token by token, and their calibration on attention that is known."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AutoModelForCausalLM, GPT2LMHeadModel
from transformers.cache_utils import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from hf_rfa.convert import convert
from hf_rfa.convert.activations import LayerActivations
from hf_rfa.convert.importance import far_weights, fit_importance
from hf_rfa.errors import InputError
from hf_rfa.evaluation.recall.memory import cache_memory
from hf_rfa.finetune.distill import distill
from hf_rfa.finetune.recipe import Recipe, Stage
from hf_rfa.inference import cache_num_bytes

from .conftest import leftovers, words
from .families import draw_importance, make_gpt2, save_softmax_model
from .grouped_layers import Layer
from .memory_by_loop import memory_by_loop
from .softmax_under_a_mask import assert_same_gradients, assert_same_logits
from .training import weights

WINDOW, SINKS, SLOTS = 4, 2, 5


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parent")
    save_softmax_model("gpt2", folder)
    return folder


@pytest.fixture
def pair(parent, tmp_path):
    """A model of window, sinks and slots alone, and its softmax parent under the mask that they make."""
    options = {"preset": "exact", "window_size": WINDOW, "num_sinks": SINKS, "num_slots": SLOTS}
    convert(parent, tmp_path / "out", **options)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    draw_importance(model)
    teacher = GPT2LMHeadModel.from_pretrained(parent)
    for block, own in zip(teacher.transformer.h, model.transformer.h, strict=True):
        block.attn.recency = own.attn.importance.recency
        block.attn.weight = own.attn.importance.weight
        block.attn.register_forward_pre_hook(lambda module, args: setattr(module, "came", args[0]))

    def attention(module, query, key, value, mask, **kwargs):
        importance = torch.einsum("btn,hn->bht", module.came.detach(), module.weight)
        seen, _ = memory_by_loop(importance, module.recency.tolist(), window=WINDOW, sinks=SINKS, slots=SLOTS)
        return sdpa_attention_forward(module, query, key, value, seen, **kwargs)

    AttentionInterface.register("test_slots", attention)
    AttentionMaskInterface.register("test_slots", lambda *args, **kwargs: None)
    teacher.set_attn_implementation("test_slots")
    return model, teacher


def test_without_features_it_is_softmax_with_that_mask(pair):
    assert_same_logits(*pair)


def test_gradients_are_those_of_softmax_with_that_mask(pair):
    assert_same_gradients(*pair)


@torch.no_grad()
@pytest.mark.parametrize("beams", [1, 3])
def test_it_generates_what_it_predicts(pair, beams):
    """Every greedy token is the teacher's choice; beams score as the whole text does."""
    model, teacher = pair
    ids = torch.randint(1, 61, (2, 12))
    options = {"max_new_tokens": 30, "min_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    options |= {"attention_mask": torch.ones_like(ids), "output_scores": True, "return_dict_in_generate": True}
    found = model.generate(ids, num_beams=beams, **options)
    logits = teacher(found.sequences).logits[:, 11:-1]
    if beams == 1:
        logits[..., model.config.eos_token_id] = -torch.inf  # not allowed before the end
        assert torch.equal(logits.argmax(-1), found.sequences[:, 12:])
    else:
        chosen = logits.log_softmax(-1).gather(-1, found.sequences[:, 12:, None].long())
        torch.testing.assert_close(chosen.mean((1, 2)), found.sequences_scores, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("variant", [{"feature_map": "none"}, {"num_features": 16}])
def test_the_cache_has_one_size_however_long_the_text(variant):
    model = make_gpt2({"window_size": 5, "num_sinks": 3, "num_slots": 4, **variant})
    sizes = set()
    for length in (1, 2, 7, 8, 9, 90):
        cache = model(torch.randint(1, 61, (1, length))).past_key_values
        sizes.add(cache_num_bytes(cache))
    rows = 0 if "num_features" not in variant else model.config.num_features_for("causal")
    assert sizes == {2 * (3 * (12 * 18 + rows * 9) + 1) * 4}
    memory = cache_memory(model)
    window, sinks, slots = (2 * 3 * count * 18 * 4 for count in (5, 3, 4))
    assert (memory.window, memory.sinks, memory.slots) == (window + 2 * 4, sinks, slots)  # and the number of tokens


@torch.no_grad()
@pytest.mark.parametrize("variant", [{"feature_map": "none"}, {"num_features": 16}])
def test_packed_texts_have_slots_of_their_own(variant):
    """Several texts in one row give what each gives alone; and the state at the end is of the last."""
    model = make_gpt2({"window_size": 4, "num_sinks": 1, "num_slots": 3, "chunk_size": 5, **variant})
    texts = [torch.randint(1, 61, (1, length)) for length in (19, 2, 1, 27)]
    positions = torch.cat([torch.arange(text.shape[1]) for text in texts])[None]
    found = model(torch.cat(texts, dim=1), position_ids=positions).logits
    alone = torch.cat([model(text).logits for text in texts], dim=1)
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)

    attention, cache, own = model.transformer.h[0].attn, *(DynamicCache(config=model.config) for _ in range(2))
    query, key, value = (torch.randn(1, 3, 49, 8) for _ in range(3))
    hidden, further = torch.randn(1, 49, 24), [torch.randn(1, 3, 9, 8) for _ in range(3)]
    attention.attend(query, key, value, hidden_states=hidden, cache=cache, document_starts=positions == 0)
    last = (each[:, :, 22:] for each in (query, key, value))
    attention.attend(*last, hidden_states=hidden[:, 22:], cache=own)
    after = [attention.attend(*further, hidden_states=hidden[:, :9], cache=each)[0] for each in (cache, own)]
    torch.testing.assert_close(*after, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_the_window_takes_half_the_bytes_and_holds_the_same_tokens(dtype):
    """Keys and values that came in 16 bits are kept as they came: in pieces or at once, what is seen is the same."""
    model = make_gpt2({"feature_map": "none", "window_size": 4, "num_sinks": 1, "num_slots": 6}, dtype=dtype)
    attention = model.transformer.h[0].attn
    query, key, value = (torch.randn(2, 3, 40, 8, dtype=dtype) for _ in range(3))
    hidden = torch.randn(2, 40, 24, dtype=dtype)
    whole, _ = attention.attend(query, key, value, hidden_states=hidden)
    cache, pieces = DynamicCache(config=model.config), []
    for start, stop in ((0, 1), (1, 2), (2, 17), (17, 40)):
        piece = (each[:, :, start:stop] for each in (query, key, value))
        pieces.append(attention.attend(*piece, hidden_states=hidden[:, start:stop], cache=cache)[0])
    torch.testing.assert_close(torch.cat(pieces, dim=2), whole, rtol=1e-2, atol=1e-2)
    window = cache.layers[0].memories[0].keys_values
    assert window.dtype == dtype
    assert window.shape == (2, 3, 11, 2 * 8)
    assert torch.isfinite(whole).all()
    kept = [(window[..., None, :8] == key[:, :, None]).all(-1).any(-1)[:, :, each] for each in (slice(1), slice(1, 11))]
    assert kept[0].all()
    assert kept[1].all(), "the slots are full, and hold keys that came"


@torch.no_grad()
def test_tokens_that_are_asked_for_later_become_important():
    """Queries look at the keys of some tokens, wherever these stand, and hidden states say which: the fit finds them."""
    layer = Layer(2, 3, feature_map="none", window_size=4, num_sinks=1, num_slots=3, hidden_size=5)
    query, hidden = torch.zeros(2, 6, 60, 4), torch.randn(2, 60, 5)
    key, value = torch.zeros(2, 2, 60, 4), torch.randn(2, 2, 60, 4)
    query[..., 0] = 6.0
    marked = torch.rand(2, 60) < 0.1
    key[:, 0, :, 0] = 3.0 * marked
    hidden[..., 0] = marked.float()
    activations = LayerActivations(query.unflatten(1, (2, 3)).transpose(2, 3).flatten(2, 3), key, value)
    fit_importance(layer, activations, hidden)
    importance = layer.importance(hidden)[:, 0]
    assert float(importance[marked].min()) > float(importance[~marked].max())

    target, weight = far_weights(layer, activations)
    softmax = (query @ key.repeat_interleave(3, dim=1).mT * layer.scaling).tril()
    softmax = softmax.masked_fill(~torch.ones(60, 60).tril().bool(), -1e30).softmax(-1).square()
    far = torch.ones(60, 60).tril(-4)
    expected = (softmax.unflatten(1, (2, 3)).sum(2) * far).sum(2) / far.sum(0).clamp_min(1)
    torch.testing.assert_close(target, expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(weight[0, 0], F.pad(far.sum(0)[1:], (1, 0)))


@torch.no_grad()
def test_padding_changes_no_importance():
    layer = Layer(2, 1, feature_map="none", window_size=3, num_sinks=1, num_slots=3, hidden_size=5)
    query, key, value = (torch.randn(1, 2, 30, 4) for _ in range(3))
    hidden = torch.randn(1, 30, 5)
    fit_importance(layer, LayerActivations(query, key, value), hidden)
    expected = layer.importance.weight.clone()
    mask = torch.ones(1, 37, dtype=torch.bool)
    mask[:, :7] = False
    padded = LayerActivations(*(F.pad(each, (0, 0, 7, 0), value=9.0) for each in (query, key, value)), mask, mask)
    fit_importance(layer, padded, F.pad(hidden, (0, 0, 7, 0), value=9.0))
    torch.testing.assert_close(layer.importance.weight, expected, rtol=1e-4, atol=1e-6)
    layer.importance.weight.fill_(7.0)
    fit_importance(layer, LayerActivations(*(each[:, :, :3] for each in (query, key, value))), hidden[:, :3])
    assert (layer.importance.weight == 7.0).all(), "a text shorter than the window says nothing"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "rfa", "num_slots": 4}, "num_slots=4 must come with a sliding window"),
        ({"num_slots": -1, "window_size": 4}, "num_slots must be"),
        ({"num_slots": 97, "window_size": 4}, "num_slots must be from 0 to 96"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(options, message, parent, tmp_path):
    with pytest.raises((InputError, ValueError), match=message):
        convert(parent, tmp_path / "out", **options)
    assert leftovers(tmp_path) == []


def test_the_command_line_calibrates_what_it_keeps(parent, tmp_path, run_cli):
    words = ["--preset", "exact", "--window-size", 5, "--sinks", 2, "--slots", 3]
    assert run_cli("convert", parent, tmp_path / "out", *words) == 0
    assert "--window-size 5 --sinks 2 --slots 3" in (tmp_path / "out" / "README.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.num_slots == 3
    assert all(block.attn.importance.weight.std() > 0 for block in model.transformer.h)


def test_distillation_leaves_importance_as_it_is_in_float32(parent, tmp_path):
    (tmp_path / "text.txt").write_text(words(900))
    options = {"preset": "exact", "window_size": 4, "num_sinks": 0, "num_slots": 3, "dtype": "bfloat16"}
    convert(parent, tmp_path / "rfa", calibrate_on=tmp_path / "text.txt", **options)
    recipe = Recipe(end_to_end=Stage(steps=2, batch_size=2, block_length=32, kl_weight=1.0))
    distill(tmp_path / "rfa", tmp_path / "out", teacher=parent, data=tmp_path / "text.txt", recipe=recipe)
    before, after = (weights(tmp_path / name) for name in ("rfa", "out"))
    found = {name for name in before if name.endswith("importance.weight")}
    assert len(found) == 2
    for name in found:
        assert after[name].dtype == torch.float32
        assert torch.equal(after[name], before[name])
        assert not torch.equal(after[name].bfloat16().float(), after[name])
