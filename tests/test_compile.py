"""`torch.compile` of decoding steps, by hand and by `generate`."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from hf_rfa.inference.generation import compiled_steps
from hf_rfa.models.cache_names import cache_argument

from .families import has_encoder, make, read, source, tokens
from .test_generation import generate, long, prompt_for

# The inductor imports what torch itself has deprecated.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")]

STEPS = [("gpt2", variant) for variant in ("positive", "positive-gate", "window-gate")]
STEPS += [("llama", variant) for variant in ("slots", "retrieval")]
STEPS += [(family, "both-gate") for family in ("bart", "marian")]
LOOPS = [("gpt2", variant) for variant in ("positive-gate", "hybrid", "window-gate")]
LOOPS += [("bart", variant) for variant in ("both-gate", "per-layer")]


@torch.no_grad()
@pytest.mark.parametrize(("family", "variant"), STEPS)
def test_a_compiled_decoding_step_is_one_graph(family, variant):
    """`torch.compile(fullgraph=True)` of a decoding step equals the eager one, and settles after a few graphs."""
    model, eager = (make(family, variant) for _ in range(2))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    length = 1000 if family == "llama" else 40  # no learned positions end there
    ids, first = tokens(2, length), tokens(2, 7)
    given = {} if not has_encoder(family) else {"encoder_outputs": model.get_encoder()(source(2)["input_ids"])}
    cache, expected_cache = (read(each, first, **given).past_key_values for each in (model, eager))
    torch._dynamo.utils.counters.clear()
    for t in range(length):
        if t == 10:
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        step = {"input_ids" if not has_encoder(family) else "decoder_input_ids": ids[:, t : t + 1], **given}
        found = compiled(**cache_argument(cache), **step)
        assert_close(found.logits, eager(**cache_argument(expected_cache), **step).logits, atol=1e-4, rtol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs <= 3
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize(("family", "variant"), LOOPS)
def test_generate_compiles_by_itself_with_a_static_cache(family, variant):
    """As it does on a GPU; here it is asked to."""
    model, ids = long(family, variant, torch.float32), prompt_for(family)
    torch._dynamo.reset()
    expected = generate(model, ids, max_new_tokens=25)
    found = generate(model, ids, max_new_tokens=25, **compiled_steps())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert torch.equal(found, expected)
