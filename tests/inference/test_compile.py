"""`torch.compile` of decoding steps: one graph under every mode, as no input changes its shape, its strides or a number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import CompileConfig

from hf_rfa.inference.generation import compiled_steps
from hf_rfa.models.cache_names import cache_argument
from tests.families import has_encoder, tokens
from tests.inference.test_generation import generate, long, prompt_for

STEPS = 25
SLOW = pytest.mark.slow
#: torch.compile imports what torch itself has deprecated.
INDUCTOR = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
CASES = [
    ("llama", "slots"),
    ("gpt2", "window-gate"),
    pytest.param("llama", "retrieval", marks=SLOW),
    pytest.param("gpt2", "positive-gate", marks=SLOW),
    pytest.param("gpt2", "hybrid", marks=SLOW),
    pytest.param("bart", "both-gate", marks=SLOW),
    pytest.param("bart", "per-layer", marks=SLOW),
]


def compiled() -> dict[str, Any]:
    """Return the arguments of `generate` with which it compiles steps as on a GPU, for shapes that stay as they are."""
    config = CompileConfig(backend="eager", mode=None, fullgraph=True, dynamic=False)
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config}


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("padded", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize(("family", "variant"), CASES)
def test_a_step_of_generate_is_one_graph(family, variant, padded):
    """A new cache needs no new one."""
    model, ids = long(family, variant, torch.float32), prompt_for(family)
    if padded and not has_encoder(family):
        ids = tokens(2, 9)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, slice(-3, None) if has_encoder(family) else slice(3)] = 0
    expected = generate(model, ids, max_new_tokens=STEPS, attention_mask=mask)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for _ in range(2):
        found: Tensor = generate(model, ids, max_new_tokens=STEPS, attention_mask=mask, **compiled())
        assert torch.equal(found, expected)
        assert graphs() == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@torch.no_grad()
@pytest.mark.slow
@INDUCTOR
def test_a_cache_that_is_reset_compiles_no_second_time():
    """Nor does a thousand tokens."""
    model = long("llama", "slots", torch.float32, 1100)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    ids = tokens(1, 1000)
    cache = model(ids[:, :5]).past_key_values
    addresses = [tensor.data_ptr() for layer in cache.layers for tensor in layer.tensors().values()]
    for _ in range(2):
        for t in range(5, 500):
            logits = step(ids[:, t : t + 1], **cache_argument(cache)).logits
        assert_close(logits, model(ids[:, :500]).logits[:, -1:], atol=1e-4, rtol=1e-4)
        cache.reset()
        model(ids[:, :5], **cache_argument(cache))
    assert graphs() == 1
    assert [tensor.data_ptr() for layer in cache.layers for tensor in layer.tensors().values()] == addresses


# Compiled by the inductor

LOOPS = [("gpt2", variant) for variant in ("positive-gate", "hybrid", "window-gate")]
LOOPS += [("llama", variant) for variant in ("slots", "retrieval")]
LOOPS += [("bart", variant) for variant in ("both-gate", "per-layer")]


@pytest.mark.slow
@INDUCTOR
@pytest.mark.parametrize(("family", "variant"), LOOPS)
def test_generate_compiles_by_itself_with_a_static_cache(family, variant):
    """As it does on a GPU; here it is asked to."""
    model, ids = long(family, variant, torch.float32), prompt_for(family)
    torch._dynamo.reset()
    expected = generate(model, ids, max_new_tokens=25)
    found = generate(model, ids, max_new_tokens=25, **compiled_steps())
    assert graphs() > 0
    assert torch.equal(found, expected)
