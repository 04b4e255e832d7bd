"""`torch.compile` of decoding steps: one graph under every mode, as no input changes its shape, its strides or a number.

Training steps are one graph too.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import CompileConfig, StaticCache

from hf_rfa.inference.generation import compiled_steps
from hf_rfa.models import modeling_rfa_decoder
from hf_rfa.models.cache_names import cache_argument
from tests.families import ONE_LAYER, has_encoder, make, tokens, use_flex_attention
from tests.inference.test_generation import generate, long, prompt_for

STEPS = 25
SLOW = pytest.mark.slow
CASES = [
    ("llama", "slots"),
    ("gpt2", "window-gate"),
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
    size = ONE_LAYER[family] if variant != "per-layer" else {}
    model, ids = long(family, variant, torch.float32, **size), prompt_for(family)
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


@pytest.fixture
def as_on_a_gpu(monkeypatch) -> dict[str, Any]:
    """Have `generate` take this device for one whose steps it compiles by itself; return how."""
    monkeypatch.setattr(modeling_rfa_decoder, "COMPILING_DEVICES", ("cpu",))
    monkeypatch.setattr(modeling_rfa_decoder, "is_triton_available", lambda: True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return {"compile_config": compiled()["compile_config"]}


@pytest.mark.parametrize(
    ("family", "variant", "size"), [("llama", "slots", ONE_LAYER["llama"]), ("gpt2", "window-gaussian", {})]
)
def test_generate_compiles_by_itself_on_a_gpu(family, variant, size, as_on_a_gpu):
    """Rows of a batch with padding too, and beside softmax layers."""
    model, ids = long(family, variant, torch.float32, **size), tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    inputs = {"max_new_tokens": STEPS, "attention_mask": mask}
    expected = generate(model, ids, disable_compile=True, **inputs)
    assert graphs() == 0
    for _ in range(2):
        assert torch.equal(generate(model, ids, **inputs, **as_on_a_gpu), expected)
        assert graphs() == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize(
    "options",
    [
        {"disable_compile": True},
        {"cache_implementation": "dynamic"},
        {"use_cache": False},
        {"num_beams": 2},
        {"prompt_lookup_num_tokens": 2},
    ],
    ids=lambda options: next(iter(options)),
)
def test_generate_does_not_compile_what_would_not_stay_as_it_is(options, as_on_a_gpu):
    model, ids = long("llama", "slots", torch.float32), prompt_for("llama")
    expected = generate(model, ids, max_new_tokens=6, **options)
    assert torch.equal(generate(model, ids, max_new_tokens=6, **options, **as_on_a_gpu), expected)
    assert graphs() == 0


def test_a_static_cache_that_a_server_resets_compiles_no_second_time(as_on_a_gpu):
    """It stays at its addresses, which a CUDA graph takes as they are."""
    model, ids = long("llama", "slots", torch.float32, **ONE_LAYER["llama"]), prompt_for("llama")
    cache = StaticCache(config=model.config, max_cache_len=100)
    expected = generate(model, ids, max_new_tokens=STEPS)
    addresses = []
    for _ in range(3):
        cache.reset()
        inputs = {"max_new_tokens": STEPS, **cache_argument(cache), **as_on_a_gpu}
        assert torch.equal(generate(model, ids, **inputs), expected)
        addresses.append([tensor.data_ptr() for layer in cache.layers for tensor in layer.tensors().values()])
        assert graphs() == 1
    assert addresses[0] == addresses[1] == addresses[2]


@pytest.mark.parametrize("flex", [True, pytest.param(False, marks=SLOW)], ids=["as on a GPU", "as on a CPU"])
@pytest.mark.parametrize(
    ("family", "variant"),
    [
        ("llama", "slots"),
        *(pytest.param(*case, marks=SLOW) for case in (("llama", "slots-features"), ("gpt2", "slots-gate"))),
    ],
)
def test_a_training_step_is_one_graph(family, variant, flex, monkeypatch):
    """With the gradients of the step that is not compiled."""
    if flex:
        use_flex_attention(monkeypatch)
    model, ids = make(family, variant, **ONE_LAYER[family]).train(), tokens(2, 70)
    eager = copy.deepcopy(model)
    torch._dynamo.reset()
    eager(ids, labels=ids, use_cache=False).loss.backward()
    torch._dynamo.utils.counters.clear()
    step = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    for _ in range(2):
        model.zero_grad()
        step(ids, labels=ids, use_cache=False).loss.backward()
    assert graphs() == 1
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-4)


# Compiled by the inductor

LOOPS = [("gpt2", variant, False) for variant in ("positive-gate", "hybrid", "window-gate")]
LOOPS += [("bart", variant, False) for variant in ("both-gate", "per-layer")] + [("gpt2", "window-gate", True)]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "variant", "packed"), LOOPS)
def test_generate_compiles_by_itself_with_a_static_cache(family, variant, packed):
    """As it does on a GPU; here it is asked to, and the inductor may pack the weights."""
    model, ids = long(family, variant, torch.float32), prompt_for(family)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    expected = generate(model, ids, max_new_tokens=25)
    with torch._inductor.config.patch(freezing=packed):
        found = generate(model, ids, max_new_tokens=25, **compiled_steps())
    assert graphs() > 0
    if torch.backends.mkl.is_available():
        assert bool(torch._dynamo.utils.counters["inductor"]["mkldnn_linear_weight_pack_matcher_count"]) == packed
    assert torch.equal(found, expected)
