"""Decoders that read a source: cross attention of GPT-2, which stays softmax, and models of an encoder and such a decoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import (
    BartForCausalLM,
    BertConfig,
    BertModel,
    EncoderDecoderModel,
    GPT2LMHeadModel,
    VisionEncoderDecoderModel,
    ViTConfig,
    ViTModel,
)
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

from hf_rfa import FAMILIES
from hf_rfa.models.cache_names import cache_argument
from tests.families import (
    ROWS,
    SOURCE_LENGTH,
    WIDTH,
    base_config,
    every_family,
    has_encoder,
    logits,
    logits_by_steps,
    make,
    read,
    tokens,
)

#: A window that all texts fit in, and what leaves tokens to slots and features.
WHOLE, SMALL = {"window_size": 60, "num_features": 8}, {"window_size": 3, "num_slots": 2, "num_features": 8}
#: The shape of the encoders.
ENCODER = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 32}


def pair(family: str, options: dict[str, Any], **fields: Any) -> tuple[Any, Any]:
    """Return a softmax decoder with cross attention, and an RFA one with its weights."""
    fields |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 1, "is_decoder": True}
    softmax_class: Any = GPT2LMHeadModel if family == "gpt2" else BartForCausalLM
    fields |= {"encoder_layers": 3} if family == "bart" else {}  # as many as the decoder's: BART's caches have these
    base = base_config(family, add_cross_attention=True, **fields)
    torch.manual_seed(1)
    softmax = softmax_class(base).eval()
    rfa: Any = FAMILIES[family].architectures[softmax_class.__name__][1]
    if family == "bart":
        options = {**options, "softmax_cross_layers": [0, 1, 2]}
    model = rfa(FAMILIES[family].rfa_config.from_base(base, **options)).eval()
    assert not model.load_state_dict(softmax.state_dict(), strict=False).unexpected_keys
    return softmax, model


# Masks that transformers prepares for the decoder of a model of two


def prepared(mask: Tensor, maker: Any, implementation: str) -> Tensor:
    """Return the mask per query, as booleans or as numbers to add, that transformers makes of a padding mask [B, T]."""
    config = base_config("gpt2", attn_implementation=implementation)
    return maker(config, torch.zeros(*mask.shape, 1), mask, None)


@torch.no_grad()
@every_family
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_prepared_causal_mask_is_read_as_the_padding_that_it_was_made_of(family, implementation):
    model, ids, mask = make(family, SMALL), tokens(length=12), torch.ones(ROWS, 12, dtype=torch.long)
    mask[1, :5], mask[2, 8:] = 0, 0
    whole = prepared(mask, create_causal_mask, implementation)
    assert whole.shape == (ROWS, 1, 12, 12)
    assert_close(logits(model, ids, mask=whole)[mask > 0], logits(model, ids, mask=mask)[mask > 0])
    _, cache = logits_by_steps(model, ids[:, :11], [], mask=mask[:, :11])
    step = whole[:, :, -1:]
    found = read(model, ids[:, 11:], mask=step, **cache_argument(cache), use_cache=True).logits
    assert_close(found[:2], logits(model, ids, mask=mask)[:2, 11:], atol=1e-4, rtol=1e-4)


@every_family
def test_any_other_mask_per_query_is_refused(family):
    model, ids, mask = make(family, SMALL), tokens(length=12), torch.ones(ROWS, 12, dtype=torch.long)
    mask[1, :5] = 0
    banded = prepared(mask, create_causal_mask, "sdpa") & torch.ones(12, 12, dtype=torch.bool).triu(-3)
    others = [prepared(mask, create_bidirectional_mask, "sdpa").expand(-1, -1, 12, -1), banded]
    others += [torch.ones(ROWS, 1, 12, 12)]
    others += [prepared(mask, create_causal_mask, "eager") / 1e38]  # numbers that hide nothing
    for wrong in (*others, prepared(mask, create_causal_mask, "sdpa").expand(-1, 2, -1, -1)):
        with pytest.raises(ValueError, match=r"A mask per query cannot be honored.*softmax_layers"):
            logits(model, ids, mask=wrong)
    if has_encoder(family):
        reads_all = make(family, {"softmax_encoder_layers": []})
        with pytest.raises(ValueError, match="softmax_layers"):
            read(reads_all, ids, attention_mask=torch.ones(ROWS, 1, SOURCE_LENGTH, SOURCE_LENGTH))


# Inside models of two


def two_parts(kind: str, decoder: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return a model of a tiny encoder and a decoder, and inputs of it."""
    torch.manual_seed(2)
    if kind == "text":
        encoder: Any = BertModel(BertConfig(vocab_size=61, **ENCODER), add_pooling_layer=False)
        mask = torch.ones(ROWS, 9, dtype=torch.long)
        mask[1, 5:] = 0
        wrapper, inputs = EncoderDecoderModel, {"input_ids": tokens(length=9), "attention_mask": mask}
    else:
        encoder = ViTModel(ViTConfig(image_size=8, patch_size=4, **ENCODER), add_pooling_layer=False)
        wrapper, inputs = VisionEncoderDecoderModel, {"pixel_values": torch.randn(ROWS, 3, 8, 8)}
    model: Any = wrapper(encoder=encoder, decoder=decoder).eval()
    for config in (model.config, model.generation_config):
        config.decoder_start_token_id = config.bos_token_id = 1
        config.pad_token_id, config.eos_token_id = 0, 60
    return model, inputs


CASES = [("text", "gpt2"), ("image", "gpt2"), ("text", "bart")]
GENERATE = {"do_sample": False, "min_new_tokens": 9, "max_new_tokens": 9}


@pytest.mark.filterwarnings("ignore:.*train encoder-decoder models:FutureWarning")
@pytest.mark.parametrize(("kind", "family"), CASES)
def test_a_model_of_two_learns_and_generates_as_with_a_softmax_decoder(kind, family):
    """The window covers the text. Beams and prompts of several tokens, padded on the left, come along."""
    softmax, model = (two_parts(kind, decoder) for decoder in pair(family, WHOLE))
    (softmax, inputs), (model, _) = softmax, model
    labels = tokens(length=7)
    losses = [each(**inputs, labels=labels).loss for each in (softmax, model)]
    assert_close(losses[1], losses[0], atol=1e-4, rtol=1e-4)
    sum(losses).backward()
    parts = dict(model.named_parameters())
    for name, parameter in softmax.named_parameters():
        if parameter.grad is not None:
            assert_close(parts[name].grad, parameter.grad, atol=1e-4, rtol=1e-3)
    prompt, mask = tokens(length=4), torch.ones(ROWS, 4, dtype=torch.long)
    mask[2, :2] = 0
    prompts: list[dict[str, Any]] = [{}, {"num_beams": 3}, {"decoder_input_ids": prompt}]
    prompts.append({"decoder_input_ids": prompt, "decoder_attention_mask": mask})
    for options in prompts:
        found = [each.generate(**inputs, **options, **GENERATE) for each in (model, softmax)]
        assert torch.equal(*found), options


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "family", "options"),
    [*((*case, SMALL) for case in CASES), ("text", "gpt2", {}), ("text", "gpt2", {**SMALL, "softmax_layers": [0]})],
)
def test_a_model_of_two_generates_what_it_would_without_a_cache(kind, family, options):
    model, inputs = two_parts(kind, pair(family, options)[1])
    ids = torch.ones(ROWS, 1, dtype=torch.long)
    for _ in range(9):
        scores = model(**inputs, decoder_input_ids=ids, use_cache=False).logits[:, -1]
        scores[:, 60] = -torch.inf  # the end of the text, not before it is long enough
        ids = torch.cat([ids, scores.argmax(-1, keepdim=True)], dim=1)
    answer = model.generate(**inputs, **GENERATE, return_dict_in_generate=True)
    assert torch.equal(answer.sequences, ids)
