"""Sinks, and windows and sinks without features: against the softmax model under the same mask."""

from __future__ import annotations

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, GPT2LMHeadModel
from transformers.cache_utils import DynamicCache

from hf_rfa.convert import convert
from hf_rfa.errors import InputError
from hf_rfa.evaluation.recall import window_and_sinks
from hf_rfa.inference import cache_num_bytes, use_attention_component

from .conftest import leftovers
from .families import make, make_gpt2, save_softmax_model
from .softmax_under_a_mask import assert_same_gradients, assert_same_logits, close

SHAPES = [(1, 0), (1, 7), (5, 0), (5, 3), (40, 4)]


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parent")
    save_softmax_model("gpt2", folder)
    return folder


@pytest.fixture(params=SHAPES, ids=str)
def pair(request, parent, tmp_path):
    """A model of a window and sinks alone, and the softmax model that it was made from, under that mask."""
    window, sinks = request.param
    convert(parent, tmp_path / "out", preset="exact", window_size=window, num_sinks=sinks, num_slots=0)
    teacher = GPT2LMHeadModel.from_pretrained(parent)
    with window_and_sinks(teacher, window, sinks):
        yield AutoModelForCausalLM.from_pretrained(tmp_path / "out"), teacher


def test_without_features_it_is_softmax_with_that_mask(pair):
    assert_same_logits(*pair)


@pytest.mark.parametrize("beams", [1, 3])
def test_it_generates_what_softmax_with_that_mask_generates(pair, beams):
    model, teacher = pair
    ids = torch.randint(1, 61, (2, 12))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    options = {"max_new_tokens": 30, "min_new_tokens": 30, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
    found = model.generate(ids, attention_mask=mask, **options)
    for row, first in ((0, 5), (1, 0)):  # the teacher's sinks would be padding
        prompt = ids[row : row + 1, first:]
        expected = teacher.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        assert torch.equal(found[row : row + 1, first:], expected)


@torch.no_grad()
def test_a_window_as_long_as_the_text_is_the_parent(parent, tmp_path):
    convert(parent, tmp_path / "out", preset="exact", window_size=96, num_sinks=0, num_slots=0)
    ids = torch.randint(1, 61, (2, 96))
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits
    close(found, GPT2LMHeadModel.from_pretrained(parent)(ids).logits)


def test_gradients_are_those_of_softmax_with_that_mask(pair):
    assert_same_gradients(*pair)


@torch.no_grad()
@pytest.mark.parametrize("variant", [{"feature_map": "none"}, {"num_features": 16}, {"num_features": 16, "gate": True}])
def test_the_cache_holds_window_and_sinks_however_long_the_text(variant):
    model = make_gpt2({"window_size": 5, "num_sinks": 3, **variant})
    sizes = set()
    for length in (1, 2, 7, 8, 9, 90):
        cache = model(torch.randint(1, 61, (1, length))).past_key_values
        sizes.add(cache_num_bytes(cache))
    rows = 0 if "num_features" not in variant else model.config.num_features_for("causal")
    assert sizes == {2 * (3 * (8 * 18 + rows * 9) + 1) * 4}


@torch.no_grad()
def test_sinks_never_join_the_state_and_are_never_forgotten():
    """Far behind the window, what the sinks say counts as if they stood next to the query."""
    query, key, value = (torch.randn(1, 3, 60, 8) for _ in range(3))
    key[:, :, 1] = query[:, :, -1] * 20  # the last query asks for the second token
    hidden, outputs = torch.randn(1, 60, 24), []
    for sinks in (2, 0):
        model = make_gpt2({"window_size": 4, "num_sinks": sinks, "num_features": 16, "gate": True})
        attention = model.transformer.h[0].attn
        attention.gate.bias.fill_(-3.0)  # all that is in the state is forgotten within a token or two
        outputs.append(attention.attend(query, key, value, hidden_states=hidden)[0][:, :, -1])
    torch.testing.assert_close(outputs[0], value[:, :, 1], rtol=1e-3, atol=1e-3)
    assert float((outputs[1] - value[:, :, 1]).norm()) > 1.0


@torch.no_grad()
@pytest.mark.parametrize("variant", [{"feature_map": "none"}, {"num_features": 16, "gate": True}, {"num_features": 16}])
def test_packed_texts_have_sinks_of_their_own(variant):
    """Several texts in one row give what each gives alone; and the state at the end is of the last."""
    model = make_gpt2({"window_size": 4, "num_sinks": 3, **variant})
    texts = [torch.randint(1, 61, (1, length)) for length in (9, 2, 1, 17)]
    positions = torch.cat([torch.arange(text.shape[1]) for text in texts])[None]
    found = model(torch.cat(texts, dim=1), position_ids=positions).logits
    alone = torch.cat([model(text).logits for text in texts], dim=1)
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)

    attention, cache, own = model.transformer.h[0].attn, *(DynamicCache(config=model.config) for _ in range(2))
    query, key, value = (torch.randn(1, 3, 29, 8) for _ in range(3))
    hidden = torch.randn(1, 29, 24)
    attention.attend(query, key, value, hidden_states=hidden, cache=cache, document_starts=positions == 0)
    last = (each[:, :, 12:] for each in (query, key, value))
    attention.attend(*last, hidden_states=hidden[:, 12:], cache=own)
    one, other = (each.layers[0].memories[0] for each in (cache, own))
    torch.testing.assert_close(one.keys_values, other.keys_values, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(one.state, other.state, rtol=1e-4, atol=1e-4)


def test_features_that_are_not_there_cannot_be_looked_at_alone():
    model = make_gpt2({"feature_map": "none", "window_size": 4})
    with pytest.raises(InputError, match="attention_component=linear needs features"):
        use_attention_component(model, "linear")
    use_attention_component(model, "window")
    assert torch.isfinite(model(torch.randint(1, 61, (1, 9))).logits).all()


def test_a_decoder_with_softmax_cross_attention_may_do_without_features():
    fields = {"feature_map": "none", "window_size": 4, "num_sinks": 1, "softmax_cross_layers": [0, 1, 2]}
    assert make("bart", fields).config.num_features == 0
    with pytest.raises((ValueError, StrictDataclassError), match="leaves cross attention nothing to see"):
        make("bart", fields | {"softmax_cross_layers": [0]})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "exact", "window_size": 0}, "must come with a sliding window"),
        ({"preset": "rfa", "num_sinks": 4}, "num_sinks=4 must come with a sliding window"),
        ({"window_size": 4, "num_sinks": -1}, "num_sinks must be"),
        ({"window_size": 4, "num_sinks": 97}, "num_sinks must be from 0 to 96"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(options, message, parent, tmp_path):
    with pytest.raises((InputError, ValueError), match=message):
        convert(parent, tmp_path / "out", **options)
    assert leftovers(tmp_path) == []


def test_the_command_line_has_both(parent, tmp_path, run_cli, capsys):
    words = ["--preset", "exact", "--window-size", 5, "--sinks", 2, "--slots", 0]
    assert run_cli("convert", parent, tmp_path / "out", *words) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "--preset exact --window-size 5 --sinks 2 --slots 0" in card
    assert "attention.png" not in card
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "out").config
    assert (config.feature_map, config.window_size, config.num_sinks) == ("none", 5, 2)
