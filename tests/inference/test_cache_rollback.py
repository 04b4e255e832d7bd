"""Steps that transformers takes back without an assistant: a stop that is seen a step late, and static caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import StaticCache
from transformers.cache_utils import StaticLayer
from transformers.generation.utils import DeferredStopCheck

from hf_rfa.models.cache_names import CACHE_NAME, cache_argument, returned_cache
from tests.families import logits, make, read, tokens

#: Models whose layers are all RFA, and some.
VARIANTS: dict[str, dict[str, Any]] = {"window": {"window_size": 4, "gate": True}, "hybrid": {"softmax_layers": [1]}}

every_variant = pytest.mark.parametrize("variant", VARIANTS)


class NoWait:
    """An event of a device that never has to be waited for."""

    def __init__(self, **options: Any) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@pytest.mark.parametrize("family", ["gpt2", "llama", "bart"])
@every_variant
@torch.no_grad()
def test_a_step_past_the_end_is_taken_back(family, variant, monkeypatch):
    """On some devices `generate` sees a step late that all rows have ended; the cache that it returns has no such step."""
    if family == "bart" and CACHE_NAME != "cache":
        pytest.skip("transformers before 5.24 looks for layers of an EncoderDecoderCache, which has none")
    model, ids = make(family, VARIANTS[variant]), tokens(1, 9)
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, "pad_token_id": 1}
    expected = model.generate(ids, **options)
    end = int(expected.sequences[0, -8])  # where the text ends, at the latest

    undone = []
    monkeypatch.setattr(torch, "Event", NoWait)
    supported, finish = DeferredStopCheck.is_supported, DeferredStopCheck.finish
    on_mps = staticmethod(lambda device, *rest, **more: supported(torch.device("mps"), *rest, **more))
    monkeypatch.setattr(DeferredStopCheck, "is_supported", on_mps)
    monkeypatch.setattr(DeferredStopCheck, "finish", lambda self: undone.append(finish(self)) or undone[-1])
    found = model.generate(ids, eos_token_id=end, **options)
    assert undone == [1]
    count = found.sequences.shape[1]
    assert torch.equal(found.sequences, expected.sequences[:, :count])

    cache, written = returned_cache(found), found.sequences if family != "bart" else found.sequences[:, -count:]
    assert cache.get_seq_length() == count - 1
    more = torch.cat([written[:, -1:], tokens(1, 4)], dim=1)
    given = {} if family != "bart" else {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    whole = logits(model, torch.cat([written, more[:, 1:]], dim=1), **given)
    assert_close(read(model, more, **cache_argument(cache), **given).logits, whole[:, -5:], atol=2e-4, rtol=1e-3)


@every_variant
@torch.no_grad()
def test_a_static_cache_takes_tokens_back(variant):
    if not StaticLayer.is_croppable:
        pytest.skip("static layers take tokens back since transformers 5.24")
    model, ids = make("llama", VARIANTS[variant]), tokens(2, 15)
    cache = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=24)
    read(model, ids[:, :6], **cache_argument(cache))
    cache.activate_past_recording()
    first = read(model, torch.cat([ids[:, 6:8], tokens(2, 4)], dim=1), **cache_argument(cache)).logits[:, :2]
    assert cache.is_croppable
    cache.crop(-4)
    rest = read(model, ids[:, 8:], **cache_argument(cache)).logits
    assert_close(torch.cat([first, rest], dim=1), logits(model, ids)[:, 6:], atol=2e-4, rtol=1e-3)
