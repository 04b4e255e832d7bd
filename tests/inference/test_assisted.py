"""Recording and cropping a state, and what does both: assisted decoding, a stop that is seen late, and static caches."""

from __future__ import annotations

import copy
import pickle
from itertools import product

import pytest
import torch
from torch.testing import assert_close
from transformers import StaticCache
from transformers.cache_utils import StaticLayer

from hf_rfa.models.cache_names import cache_argument
from tests import families
from tests.families import has_encoder, logits, read, softmax_model, tokens

VARIANTS = {"positive": {}, "gate": {"gate": True}, "signed": {"feature_map": "gaussian", "unit_norm": True}}
VARIANTS |= {"window": {"window_size": 3, "gate": True}, "hybrid": {"softmax_layers": [1]}}


SIZES = {"n_embd": 16, "n_head": 2, "n_positions": 200, "vocab_size": 40, "eos_token_id": 39}


def make(name: str, **options):
    return families.make("gpt2", {"num_features": 8, **VARIANTS[name]}, **{**SIZES, **options})


MODELS = {name: make(name) for name in VARIANTS}


def test_what_was_not_recorded_cannot_be_removed():
    model = MODELS["positive"]
    ids = torch.arange(1, 13)[None]
    with torch.no_grad():
        cache = model(ids[:, :4]).past_key_values
        with pytest.raises(ValueError, match="0 tokens were recorded"):
            cache.crop(-1)
        cache.activate_past_recording()
        model(ids[:, 4:7], **cache_argument(cache))
        for wrong in (-4, 2):
            with pytest.raises(ValueError, match="3 tokens were recorded"):
                cache.crop(wrong)
        fork = copy.deepcopy(cache)
        fork.crop(-2)
        assert (fork.get_seq_length(), cache.get_seq_length()) == (5, 7)
        cache.batch_select_indices(torch.tensor([0]))
        with pytest.raises(ValueError, match="0 tokens were recorded"):
            cache.crop(-1)


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_a_recording_cache_can_be_pickled_and_copied(name):
    """It and its copies, which hold tensors only, are cropped and go on as if the tokens had never been."""
    model, ids = MODELS[name], torch.arange(1, 13)[None]
    with torch.no_grad():
        cache = model(ids[:, :4]).past_key_values
        cache.activate_past_recording()
        for start in (4, 7):
            model(ids[:, start : start + 3], **cache_argument(cache))
        answers = []
        for each in (cache, pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)):
            each.crop(-4)
            answers.append(model(ids[:, 6:], **cache_argument(each)).logits)
        expected = model(ids).logits[:, 6:]
    for answer in answers:
        assert torch.equal(answer, answers[0])
        assert_close(answer, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "assistant"),
    [*product(VARIANTS, ("itself", "prompt")), *product(("gate", "hybrid"), ("other", "softmax"))],
)
def test_assisted_decoding_says_what_greedy_search_says(name, assistant):
    model = MODELS[name]
    options = {
        "itself": lambda: {"assistant_model": copy.deepcopy(model)},
        "other": lambda: {"assistant_model": make("gate", n_layer=1)},
        "softmax": lambda: {"assistant_model": softmax_model(model, "gpt2", **SIZES)},
        "prompt": lambda: {"prompt_lookup_num_tokens": 3},
    }[assistant]()
    prompt = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    shared = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, **shared)
    assert torch.equal(model.generate(prompt, **shared, **options), expected)


@pytest.mark.parametrize("family", ["gpt2", "bart"])
def test_an_rfa_model_assists_another_model(family):
    """A softmax GPT-2 continues, an RFA-BART with other features translates."""
    if not has_encoder(family):
        model, assistant = softmax_model(make("positive"), family, **SIZES), MODELS["window"]
    else:
        model, assistant = (families.make(family, {"num_features": count}) for count in (8, 4))
    prompt, shared = torch.tensor([[5, 6, 7, 8, 9, 2]]), {"max_new_tokens": 30, "do_sample": False, "num_beams": 1}
    expected = model.generate(prompt, **shared, pad_token_id=1)
    assert torch.equal(model.generate(prompt, **shared, pad_token_id=1, assistant_model=assistant), expected)


# Steps that transformers takes back without an assistant

#: Of models whose layers are all RFA, and some.
ROLLBACKS = [{"window_size": 4, "gate": True}, {"softmax_layers": [1]}]


@pytest.mark.parametrize("options", ROLLBACKS, ids=str)
@torch.no_grad()
def test_a_static_cache_takes_tokens_back(options):
    if not StaticLayer.is_croppable:
        pytest.skip("static layers take tokens back since transformers 5.24")
    model, ids = families.make("llama", options), tokens(2, 15)
    cache = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=24)
    read(model, ids[:, :6], **cache_argument(cache))
    cache.activate_past_recording()
    first = read(model, torch.cat([ids[:, 6:8], tokens(2, 4)], dim=1), **cache_argument(cache)).logits[:, :2]
    assert cache.is_croppable
    cache.crop(-4)
    rest = read(model, ids[:, 8:], **cache_argument(cache)).logits
    assert_close(torch.cat([first, rest], dim=1), logits(model, ids)[:, 6:], atol=2e-4, rtol=1e-3)
