"""The fused kernels against the forms in torch: on a GPU if there is one, otherwise under Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from hf_rfa import InputError, RFAGPT2Config, RFAGPT2LMHeadModel
from hf_rfa.backends import use_backend
from hf_rfa.backends.triton_attention import available, fused_attention, fused_step, kernel_inputs
from hf_rfa.models.attention import RFAAttentionMixin
from hf_rfa.models.feature_maps import FEATURE_MAPS
from hf_rfa.models.masking import MASKED_LOGIT
from tests.conftest import ROOT
from tests.families import attend_with_features

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
B, H, D = 2, 2, 8


def has_kernel(cls) -> bool:
    return kernel_inputs(cls(num_heads=1, head_dim=2), *torch.zeros(2, 1, 1, 1, 2)) is not None


MAPS = {
    **{name: {} for name, cls in FEATURE_MAPS.items() if has_kernel(cls)},
    "gaussian, norm carried": {"feature_map": "gaussian"},
    "gaussian": {"unit_norm": True},
}


def make_map(name: str):
    options = dict(MAPS[name])
    cls = FEATURE_MAPS[options.pop("feature_map", name)]
    count = None if cls.default_num_features is None else 12
    torch.manual_seed(1)
    made = cls(num_heads=H, head_dim=D, num_features=count, scaling=0.35, trainable=True, **options)
    with torch.no_grad():
        for tensor in made.state_dict().values():
            tensor.add_(0.2 * torch.rand_like(tensor))
    return made.to(DEVICE)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE)


def problem(name: str, length: int, *, gate=True, weights=True, state=True):
    """Return the map, q, k, v, and the options of both forms."""
    feature_map = make_map(name)
    query, key, value = (draw(B, H, length, D, seed=seed).requires_grad_() for seed in range(3))
    options = {
        "log_decay": (-draw(B, H, length, seed=4).abs()).requires_grad_() if gate else None,
        "input_scale": draw(B, H, length, seed=5).abs().requires_grad_() if weights else None,
        "initial_state": None,
    }
    if state:  # of other tokens, so that what a state promises of itself holds
        before = [draw(B, H, 6, D, seed=seed) for seed in range(6, 9)]
        signs = {"denominator_floor": feature_map.denominator_floor}
        with torch.no_grad():
            options["initial_state"] = attend_with_features(*feature_map(*before[:2])[:2], before[2], **signs)[1]
        options["initial_state"].requires_grad_()
    return feature_map, query, key, value, options


def assert_close(found, expected, tolerance=2e-5):
    found, expected = found.detach(), expected.detach()
    assert found.shape == expected.shape
    scale = expected.abs().max().clamp_min(1e-30)
    assert float((found - expected).abs().max() / scale) < tolerance


def assert_forms_agree(feature_map, query, key, value, options, *, starts=None, tolerance=2e-5):
    """Outputs, states and gradients of the kernels are those of the plain form."""
    floor, plain = {"denominator_floor": feature_map.denominator_floor}, dict(options)
    if starts is not None:
        gate = torch.zeros(query.shape[:3], device=DEVICE) if options["log_decay"] is None else options["log_decay"]
        plain["log_decay"] = gate.masked_fill(starts[:, None], MASKED_LOGIT)
    expected = attend_with_features(*feature_map(query, key)[:2], value, **plain, **floor)[:2]
    inputs = kernel_inputs(feature_map, query, key)
    found = fused_attention(inputs, value, **options, **floor, document_starts=starts, chunk=16)
    leaves = [query, key, value, *(each for each in options.values() if each is not None), *feature_map.parameters()]
    weights = [torch.randn_like(each) / each.detach().abs().max() for each in expected]
    gradients = [
        torch.autograd.grad(sum((each * weight).sum() for each, weight in zip(both, weights, strict=True)), leaves)
        for both in (found, expected)
    ]
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, tolerance)
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other, 2e-4)


@pytest.mark.parametrize("length", [1, 16, 37])
@pytest.mark.parametrize("name", list(MAPS))
def test_outputs_states_and_gradients_are_those_of_the_plain_form(name, length):
    assert_forms_agree(*problem(name, length))


@pytest.mark.parametrize("name", ["exponential", "gaussian, norm carried"])
@pytest.mark.parametrize("without", ["gate", "weights", "state", "everything"])
def test_what_is_left_out_is_left_out(without, name):
    kept = {each: without not in (each, "everything") for each in ("gate", "weights", "state")}
    *inputs, options = problem(name, 21, **kept)
    assert [each is not None for each in options.values()] == list(kept.values())
    assert_forms_agree(*inputs, options)


@pytest.mark.parametrize("name", ["positive", "gaussian"])
@pytest.mark.parametrize("gated", [False, True])
def test_documents_see_nothing_of_each_other(name, gated):
    """Starts within chunks, at their borders, and several in one."""
    starts = torch.zeros(B, 50, dtype=torch.bool, device=DEVICE)
    starts[0, [0, 7, 8, 16, 40]] = True
    starts[1, 33] = True
    assert_forms_agree(*problem(name, 50, gate=gated, state=False), starts=starts, tolerance=2e-4)


@pytest.mark.parametrize("name", [name for name in MAPS if not name.startswith("gaussian")])
def test_a_step_is_the_recurrence_and_works_in_place(name):
    feature_map, query, key, value, options = problem(name, 1)
    with torch.no_grad():
        mine, theirs = options["initial_state"].detach().clone(), options["initial_state"].detach().clone()
        given = {each: options[each] for each in ("log_decay", "input_scale")}
        expected, theirs, _ = attend_with_features(*feature_map(query, key)[:2], value, initial_state=theirs, **given)
        found = fused_step(kernel_inputs(feature_map, query, key), value, mine, **given)
    assert_close(found, expected)
    assert_close(mine, theirs)


@pytest.mark.parametrize("options", [{"gate": True}, {"feature_map": "gaussian", "unit_norm": True}])
def test_a_model_on_the_kernels_is_the_model(options):
    """Logits, gradients, padding, and decoding on the cache; packed documents."""
    torch.manual_seed(0)
    config = RFAGPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=64, vocab_size=40, num_features=8, **options)
    model = RFAGPT2LMHeadModel(config).eval().to(DEVICE)
    ids = torch.randint(0, 40, (2, 19), device=DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    positions = torch.cat([torch.arange(11), torch.arange(8)]).expand(2, -1).to(DEVICE)
    found = {}
    for backend in ("torch", "fused"):
        use_backend(model, backend)
        model.zero_grad()
        loss = model(ids, attention_mask=mask, labels=ids).loss
        packed = model(ids, position_ids=positions, labels=ids, use_cache=False).loss
        (loss + packed).backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        given = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        given |= {"return_dict_in_generate": True, "output_logits": True}
        tokens = model.generate(ids[:, :9], attention_mask=mask[:, :9], **given)
        found[backend] = (loss, packed, torch.stack(tokens.logits), gradients)
    for one, other in zip(found["fused"][:3], found["torch"][:3], strict=True):
        assert_close(one, other, 1e-4)
    for name, gradient in found["torch"][3].items():
        assert_close(found["fused"][3][name], gradient, 1e-3)


def test_backends_that_cannot_be_had_are_refused(monkeypatch):
    config = RFAGPT2Config(n_layer=1, n_embd=8, n_head=2, n_positions=8, vocab_size=20, num_features=4)
    model = RFAGPT2LMHeadModel(config)
    with pytest.raises(InputError, match="backend must be one of torch, fused, fla, got 'flash'"):
        use_backend(model, "flash")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not available(torch.device("cpu"))
    with pytest.raises(InputError, match=r"needs Triton .* and a CUDA device, and this model is on cpu"):
        use_backend(model, "fused")
    assert {module.backend for module in model.modules() if isinstance(module, RFAAttentionMixin)} == {"torch"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler for GPUs comes with its builds for Linux")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("name", "width"), [("exponential", 64), ("gaussian", 64), ("gaussian", 128)])
def test_kernels_compile_for_a_gpu_and_fit_its_shared_memory(name, width, dtype):
    """An H100 gives one program 227 KiB at most; kernels that take more do not start there."""
    script = ROOT / "tests" / "kernels_for_a_gpu.py"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", script, name, str(width), "64", dtype]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert {kernel for kernel, _ in found} >= {"states_kernel", "outputs_kernel", "gradients_kernel"}
    assert max(shared for _, shared in found) <= 227 * 1024, found
