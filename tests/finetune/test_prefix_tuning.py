"""Prefix tuning by peft: keys and values of virtual tokens before every text."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from packaging.version import Version
from peft import PeftModel, PrefixTuningConfig, get_peft_model
from torch.testing import assert_close

from hf_rfa.models.cache_names import CACHE_NAME
from tests.families import make, tokens
from tests.finetune.test_peft_and_trl import pytestmark, train  # noqa: F401 (the mark is of this module too)
from tests.models.test_cache import FILLED_BY, GENERATE

#: Whether PEFT hands the prefix to `generate` in the cache that the installed transformers reads.
GENERATES = CACHE_NAME == "past_key_values" or Version(peft.__version__) >= Version("0.22")


def prefixed(model: Any) -> Any:
    """Return the model with a random prefix."""
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


@pytest.mark.parametrize("options", FILLED_BY, ids=str)
def test_prefix_tuning_of_a_decoder(options, tmp_path):
    """A prefix is trained, saved and loaded; generating on the cache equals reading each text anew, padded or not."""
    ids = tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    adapted = prefixed(make("gpt2", options))
    given = {"input_ids": ids, "attention_mask": mask, **GENERATE, "eos_token_id": None}
    with torch.no_grad():
        if GENERATES:
            assert adapted.generate(**given, num_beams=3).shape == (2, 15)
            for row, written in enumerate(adapted.generate(**given)):
                text = ids[row, mask[row] == 1][None]
                for token in written[ids.shape[1] :]:
                    assert token == adapted(text).logits[0, -1].argmax()
                    text = torch.cat([text, token[None, None]], dim=1)
        else:
            with pytest.raises(TypeError, match=r"two caches.*PEFT up to 0\.21"):
                adapted.generate(**given)
    losses = train(adapted, {"input_ids": ids, "attention_mask": mask, "labels": ids}, rate=0.1)
    assert losses[-1] < losses[0] - 0.05
    adapted.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(make("gpt2", options), tmp_path).eval()
    with torch.no_grad():
        assert_close(loaded(ids, attention_mask=mask).logits, adapted(ids, attention_mask=mask).logits)


@pytest.mark.parametrize("family", ["bart", "marian"])
def test_prefix_tuning_of_an_encoder_and_a_decoder(family):
    ids, written = tokens(2, 9), torch.full((2, 1), 2)
    adapted = prefixed(make(family, "both-gate"))
    with torch.no_grad():
        for _ in range(6):
            logits = adapted(ids, attention_mask=torch.ones_like(ids), decoder_input_ids=written).logits[:, -1]
            written = torch.cat([written, logits.argmax(-1)[:, None]], dim=1)
        if GENERATES:
            assert torch.equal(adapted.generate(input_ids=ids, **GENERATE, eos_token_id=None), written)
        else:
            with pytest.raises(TypeError, match=r"two caches.*PEFT up to 0\.21"):
                adapted.generate(input_ids=ids, **GENERATE)
    adapted(ids, labels=ids).loss.backward()
    (gradient,) = (parameter.grad for parameter in adapted.prompt_encoder.parameters())
    assert gradient.abs().sum() > 0
