"""`torch.compile` of decoding steps: one graph under every mode, as no input changes its shape, its strides or a number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig

from hf_rfa.inference.generation import compiled_steps
from tests.families import has_encoder, tokens
from tests.inference.test_generation import generate, long, prompt_for

STEPS = 25
SLOW = pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # of the inductor's imports
@pytest.mark.parametrize(("family", "variant"), CASES)
def test_generate_compiles_by_itself_with_a_static_cache(family, variant):
    """As it does on a GPU; here it is asked to, and the inductor compiles."""
    model, ids = long(family, variant, torch.float32), prompt_for(family)
    torch._dynamo.reset()
    expected = generate(model, ids, max_new_tokens=STEPS)
    found = generate(model, ids, max_new_tokens=STEPS, **compiled_steps())
    assert graphs() > 0
    assert torch.equal(found, expected)
