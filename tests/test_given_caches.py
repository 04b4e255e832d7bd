"""Caches that were not built for the model: without a configuration, or with keys and values in them already."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel, PrefixTuningConfig, get_peft_model
from transformers import DynamicCache, EncoderDecoderCache, GPT2Config, StaticCache

from hf_rfa import (
    RFABartConfig,
    RFABartForCausalLM,
    RFABartForConditionalGeneration,
    RFAGPT2Config,
    RFAGPT2LMHeadModel,
    RFAMarianConfig,
    RFAMarianMTModel,
)

from .conftest import tiny_parent_config, tiny_seq2seq_config

# peft 0.21 still reads transformers' old name of it.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")

SEQ2SEQ = {
    "bart": (RFABartConfig, RFABartForConditionalGeneration),
    "marian": (RFAMarianConfig, RFAMarianMTModel),
}
OPTIONS = [
    {"gate": True},
    {"feature_map": "gaussian", "num_features": 8},
    {"window": 3, "gate": True},
    {"softmax_layers": [0]},
    {"softmax_layers": [1], "window": 3},
]
GENERATE = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 1}


def build(family: str = "gpt2", model_class=None, **options):
    torch.manual_seed(0)
    if family == "gpt2":
        config = RFAGPT2Config.from_parent(tiny_parent_config(eos_token_id=2), **options)
        return RFAGPT2LMHeadModel(config).eval()
    config_class, own = SEQ2SEQ[family]
    return (model_class or own)(config_class.from_parent(tiny_seq2seq_config(family), **options)).eval()


def some_ids(length: int = 9, rows: int = 2) -> torch.Tensor:
    return torch.randint(3, 60, (rows, length), generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("options", OPTIONS)
@torch.no_grad()
def test_a_cache_without_a_configuration_serves_a_decoder(options):
    model, ids = build(**options), some_ids()
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    expected = model(ids, attention_mask=mask, use_cache=False).logits[mask == 1]
    for cache in (DynamicCache(), DynamicCache(config=GPT2Config(n_layer=2))):
        first = model(ids[:, :5], attention_mask=mask[:, :5], past_key_values=cache)
        assert first.past_key_values is cache
        second = model(ids[:, 5:], attention_mask=mask, past_key_values=cache)
        found = torch.cat([first.logits, second.logits], dim=1)[mask == 1]
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)
    for beams in (1, 3):
        given = {"attention_mask": mask, "num_beams": beams, **GENERATE}
        assert torch.equal(model.generate(ids, past_key_values=DynamicCache(), **given), model.generate(ids, **given))


@pytest.mark.parametrize("options", [{"gate": True}, {"softmax_layers": [0], "cross_softmax_layers": [1]}])
@pytest.mark.parametrize("family", ["bart", "marian"])
@torch.no_grad()
def test_caches_without_a_configuration_serve_an_encoder_and_a_decoder(family, options):
    model, ids, start = build(family, **options), some_ids(), some_ids(5)
    expected = model(ids, decoder_input_ids=start, use_cache=False).logits
    for cache in (EncoderDecoderCache(DynamicCache(), DynamicCache()), DynamicCache()):
        first = model(ids, decoder_input_ids=start[:, :3], past_key_values=cache)
        second = model(ids, decoder_input_ids=start[:, 3:], past_key_values=first.past_key_values)
        found = torch.cat([first.logits, second.logits], dim=1)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)
    for beams in (1, 3):
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        found = model.generate(ids, past_key_values=cache, num_beams=beams, **GENERATE)
        assert torch.equal(found, model.generate(ids, num_beams=beams, **GENERATE))


@torch.no_grad()
def test_a_step_on_such_a_cache_is_one_graph():
    model, ids = build(softmax_layers=[0]), some_ids()
    cache, expected_cache = DynamicCache(), DynamicCache()
    model(ids, past_key_values=cache)
    model(ids, past_key_values=expected_cache)
    torch._dynamo.reset()
    found = torch.compile(model, fullgraph=True, backend="eager")(ids[:, :1], past_key_values=cache).logits
    torch.testing.assert_close(found, model(ids[:, :1], past_key_values=expected_cache).logits)


def keys_and_values(model, ids, count, **inputs) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return what self-attention computes of the first tokens in every layer, RFA or softmax."""
    cache = DynamicCache()
    layers = [module for module in model.modules() if getattr(module, "rfa_kind", None) == "causal"]
    projected = {}
    for layer in layers:
        whole = layer.project

        def keep(hidden, layer=layer, whole=whole):
            projected[layer.rfa_layer_idx] = whole(hidden)[1:]
            return whole(hidden)

        layer.project = keep
    model(ids, past_key_values=cache, **inputs)
    for layer in layers:
        del layer.project
    held = [projected.get(index) or (layer.keys, layer.values) for index, layer in enumerate(cache.layers)]
    return [(key[..., :count, :], value[..., :count, :]) for key, value in held]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("family", ["gpt2", "bart"])
@torch.no_grad()
def test_keys_and_values_in_a_cache_are_tokens_seen(family, options):
    """Gates read nothing of such tokens, and start so that they read nothing of any."""
    if family == "gpt2":
        model, ids, count = build(**options), some_ids(), 5
    else:
        model, ids, count = build(family, RFABartForCausalLM, **options), some_ids(), 5
    mask = torch.ones_like(ids)
    mask[1, 1:3] = 0  # inside what the cache holds, and after it
    mask[0, 6] = 0
    for padding in (torch.ones_like(ids), mask):
        expected = model(ids, attention_mask=padding, use_cache=False).logits[:, count:]
        cache = DynamicCache(keys_and_values(model, ids, count, attention_mask=padding))
        assert cache.get_seq_length() == count
        first = model(ids[:, count:-1], attention_mask=padding[:, :-1], past_key_values=cache)
        assert cache.get_seq_length() == ids.shape[1] - 1
        second = model(ids[:, -1:], attention_mask=padding, past_key_values=cache)
        found = torch.cat([first.logits, second.logits], dim=1)
        seen = padding[:, count:] == 1
        torch.testing.assert_close(found[seen], expected[seen], atol=2e-4, rtol=1e-3)


@torch.no_grad()
def test_keys_and_values_of_a_static_cache_are_refused():
    model, ids = build(), some_ids()
    with pytest.raises(TypeError, match=r"DynamicCache\(config=model.config\)"):
        model(ids, past_key_values=StaticCache(config=tiny_parent_config(), max_cache_len=20))


def prefixed(model):
    """Return the model with keys and values of virtual tokens before every text, by peft."""
    seq2seq = model.config.is_encoder_decoder
    config = PrefixTuningConfig(
        task_type="SEQ_2_SEQ_LM" if seq2seq else "CAUSAL_LM",
        num_virtual_tokens=4,
        num_layers=model.config.decoder_layers if seq2seq else model.config.n_layer,
        num_attention_heads=3,
    )
    adapted = get_peft_model(model, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.prompt_encoder.parameters():
            parameter.normal_()
    return adapted.eval()


@pytest.mark.parametrize("options", OPTIONS)
def test_prefix_tuning_by_peft(options, tmp_path):
    """A prefix is trained, saved and loaded; generating on the cache equals reading each text anew, padded or not."""
    ids = some_ids()
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    adapted = prefixed(build(**options))
    with torch.no_grad():
        given = {"input_ids": ids, "attention_mask": mask, **GENERATE, "eos_token_id": None}
        assert adapted.generate(**given, num_beams=3).shape == (2, 15)
        for row, tokens in enumerate(adapted.generate(**given)):
            text = ids[row, mask[row] == 1][None]
            for token in tokens[ids.shape[1] :]:
                assert token == adapted(text).logits[0, -1].argmax()
                text = torch.cat([text, token[None, None]], dim=1)
    losses = []
    optimizer = torch.optim.Adam(adapted.prompt_encoder.parameters(), 0.1)
    for _ in range(6):
        loss = adapted(ids, attention_mask=mask, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.05
    adapted.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(build(**options), tmp_path).eval()
    with torch.no_grad():
        expected = adapted(ids, attention_mask=mask).logits
        torch.testing.assert_close(loaded(ids, attention_mask=mask).logits, expected)


@pytest.mark.parametrize("family", ["bart", "marian"])
def test_prefix_tuning_by_peft_of_a_decoder(family):
    ids = some_ids()
    adapted = prefixed(build(family, gate=True))
    start = torch.full((2, 1), 2)
    with torch.no_grad():
        texts = start
        for _ in range(6):
            logits = adapted(ids, attention_mask=torch.ones_like(ids), decoder_input_ids=texts).logits[:, -1]
            texts = torch.cat([texts, logits.argmax(-1)[:, None]], dim=1)
        found = adapted.generate(input_ids=ids, **(GENERATE | {"eos_token_id": None}))
        assert torch.equal(found, texts)
    adapted(ids, labels=ids).loss.backward()
    (gradient,) = (parameter.grad for parameter in adapted.prompt_encoder.parameters())
    assert gradient.abs().sum() > 0
