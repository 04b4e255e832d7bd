"""flash-linear-attention as a backend: what is handed to it, against the forms in torch.

Its kernels need a GPU. Without one they are stood in for by a loop over tokens with the same arguments, and by its own
reference where the package is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import types

import pytest
import torch

from hf_rfa import InputError
from hf_rfa.backends import fla_attention, use_backend
from hf_rfa.backends.fla_attention import fla_chunked
from hf_rfa.models.attention import BACKENDS
from hf_rfa.models.cache_names import cache_argument
from hf_rfa.models.linear_attention import Tokens, chunked
from tests.backends.test_fused import DEVICE, draw
from tests.families import make as make_named
from tests.families import make_gpt2 as make
from tests.families import rfa_modules

B, H, F, M = 2, 3, 16, 9
REAL = fla_attention.available(DEVICE)
KINDS = ["kernels"] if REAL else ["loop", "reference"]
TOLERANCE = 1e-2 if REAL else 2e-5


def assert_near(found, expected):
    """Relative to the largest value, or to 1: a gate that acts on nothing has a gradient of 0, or of rounding."""
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) < TOLERANCE * max(1.0, float(expected.abs().max()))


def loop(q, k, v, g=None, scale=None, initial_state=None, output_final_state=False):
    """Take and return what ``chunk_simple_gla`` does, token by token in float64: [B, T, H, dim]."""
    for tensor in (q, k, v):
        assert tensor.is_contiguous()
        assert tensor.shape[:3] == q.shape[:3]
    assert scale == 1.0
    assert output_final_state
    state = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3], dtype=torch.float64, device=q.device)
    state = state if initial_state is None else initial_state.double()
    outputs = []
    for t in range(q.shape[1]):
        if g is not None:
            assert g.shape == q.shape[:3]
            state = state * g[:, t].double().exp()[..., None, None]
        state = state + torch.einsum("bhf,bhm->bhfm", k[:, t].double(), v[:, t].double())
        outputs.append(torch.einsum("bhf,bhfm->bhm", q[:, t].double(), state))
    return torch.stack(outputs, dim=1).to(v.dtype), state.float()


def reference(q, k, v, g=None, scale=None, initial_state=None, output_final_state=False):
    naive = importlib.import_module("fla.ops.simple_gla.naive").naive_chunk_simple_gla
    g = torch.zeros_like(q[..., 0]) if g is None else g
    output, state = naive(q, k, v, g, initial_state, output_final_state, 16, scale)
    return output, state


@pytest.fixture(params=KINDS)
def simple_gla(request, monkeypatch):
    if request.param == "kernels":
        return
    if request.param == "reference":
        if importlib.util.find_spec("fla") is None:
            pytest.skip("flash-linear-attention is not installed")
        importlib.import_module("fla.ops.simple_gla.naive")
    module = types.ModuleType("fla.ops.simple_gla")
    module.chunk_simple_gla = {"loop": loop, "reference": reference}[request.param]
    original = importlib.import_module
    stand_in = {module.__name__: module}
    monkeypatch.setattr(
        importlib, "import_module", lambda name, *package: stand_in.get(name) or original(name, *package)
    )
    monkeypatch.setattr(fla_attention, "available", lambda device: True)


@pytest.mark.parametrize(
    "without", [(), ("log_decay",), ("input_scale",), ("initial_state",), ("log_decay", "input_scale", "initial_state")]
)
@pytest.mark.parametrize("length", [1, 37])
def test_outputs_state_and_gradients_are_those_of_our_form(simple_gla, without, length):
    query, key = (draw(B, H, length, F, seed=seed).abs().requires_grad_() for seed in range(2))
    value = draw(B, H, length, M, seed=2).requires_grad_()
    options = {
        "log_decay": (-draw(B, H, length, seed=3).abs()).requires_grad_(),
        "input_scale": draw(B, 1, length, seed=4).abs().requires_grad_(),
        "initial_state": draw(B, H, F, M, seed=5).requires_grad_(),
    }
    options = {name: None if name in without else tensor for name, tensor in options.items()}
    tokens = Tokens(key, value, options["log_decay"], options["input_scale"])
    found, expected = (form(query, tokens, options["initial_state"]) for form in (fla_chunked, chunked))
    leaves = [query, key, value, *(tensor for tensor in options.values() if tensor is not None)]
    weights = [torch.randn_like(each) for each in expected]
    gradients = [
        torch.autograd.grad(sum((each * weight).sum() for each, weight in zip(both, weights, strict=True)), leaves)
        for both in (found, expected)
    ]
    for one, other in zip((*found, *gradients[0]), (*expected, *gradients[1]), strict=True):
        assert_near(one.detach(), other.detach())


@torch.no_grad()
@pytest.mark.parametrize("name", ["positive", "positive-gate", "gaussian-paper"])
def test_models_say_the_same(simple_gla, name, monkeypatch):
    """Padding, prefill in pieces, decoding; with and without a gate and signs."""
    model = make(name).to(DEVICE)
    ids = torch.randint(1, 61, (2, 21), device=DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    answers = []
    for backend in ("torch", "fla"):
        use_backend(model, backend)
        whole = model(ids, attention_mask=mask).logits
        cache, pieces = None, []
        for start, end in ((0, 9), (9, 20), (20, 21)):
            output = model(ids[:, start:end], attention_mask=mask[:, :end], **cache_argument(cache), use_cache=True)
            cache = output.past_key_values
            pieces.append(output.logits)
        answers.append((whole[:, 6:], torch.cat(pieces, dim=1)[:, 6:]))
    for one, other in zip(*answers, strict=True):
        assert_near(one.detach(), other.detach())


def test_the_recurrence_is_handed_over_and_documents_are_not(simple_gla, monkeypatch):
    calls = []

    def counted(*args, **options):
        calls.append(options)
        return fla_chunked(*args, **options)

    monkeypatch.setattr(fla_attention, "fla_chunked", counted)
    model = make("positive").to(DEVICE)
    use_backend(model, "fla")
    ids = torch.randint(1, 61, (1, 12), device=DEVICE)
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert len(calls) == model.config.n_layer
    assert all(torch.isfinite(each.grad).all() for each in model.parameters() if each.grad is not None)
    model(ids, position_ids=torch.tensor([[*range(5), *range(7)]], device=DEVICE))
    assert len(calls) == model.config.n_layer, "two documents in a row"
    model.double()(ids)
    assert len(calls) == model.config.n_layer, "float64"


def test_without_it_the_error_says_what_to_do():
    if REAL:
        pytest.skip("flash-linear-attention runs here")

    with pytest.raises(InputError, match="pip install flash-linear-attention"):
        use_backend(make("positive"), "fla")


@torch.no_grad()
def test_a_backend_of_ones_own_is_used_where_it_fits(monkeypatch):
    """It is asked once a layer; where it returns None, torch computes; a window and recorded tokens stay in torch."""
    asked = []

    class Half:
        @staticmethod
        def attend(layer, query, key, value, log_decay, input_scale, document_starts, state):
            asked.append(layer.rfa_layer_idx)
            return None if layer.rfa_layer_idx else (torch.zeros_like(value), torch.ones(1))

        @staticmethod
        def available(device):
            return True

    monkeypatch.setitem(BACKENDS, "half", Half)
    model, ids = make("positive"), torch.arange(1, 9)[None]
    expected = model(ids, use_cache=False).logits
    use_backend(model, "half")
    assert not torch.allclose(model(ids, use_cache=False).logits, expected)
    assert asked == list(range(model.config.n_layer))
    for useless in (make("window"), make_named("llama", "positive")):  # a window, and grouped queries
        with pytest.raises(InputError, match="no layer of this model has such attention"):
            use_backend(useless, "half")
        assert {layer.backend for layer in rfa_modules(useless).values()} == {"torch"}
