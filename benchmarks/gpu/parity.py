"""The kernels against attention in torch on the same device: outputs, gradients and decoding steps.

The truth is attention in torch in float64. An error is the largest difference to it, relative to the largest entry, and a
kernel passes if its error is at most `TIMES` times that of torch in the kernel's own precision, or at most `LEAST`. One
token's output is its value: the gradients of query and key are zero, and their errors are relative to the value's. Features
with signs are an exception, whose normaliser can be at its floor.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hf_rfa.backends.fla_attention import available as fla_available
from hf_rfa.backends.fla_attention import fla_chunked
from hf_rfa.backends.triton_attention import fused_attention, fused_step, kernel_inputs
from hf_rfa.models.feature_maps import FEATURE_MAPS, FeatureMap
from hf_rfa.models.linear_attention import Tokens, chunked, linear_attention

from .trial import FAILED, Setting, attempt

#: What a kernel's error may be of that of torch, and the error below which all are alike.
TIMES, LEAST = 4.0, {"float32": 2e-5, "bfloat16": 2e-2}
Tensors = list[Tensor]


def run(setting: Setting) -> dict[str, Any]:
    """Compare every map that has kernels, with gates and without, in every precision, at odd lengths."""
    lengths, width, features = ((5, 37), 8, 12) if setting.dry else ((1, 63, 1000), 64, 64)
    found: dict[str, Any] = {}
    for name in with_kernels():
        for dtype in setting.dtypes:
            for gated in (False, True):
                for length in lengths:
                    case = f"{name}, {dtype}, {'gate' if gated else 'no gate'}, {length}"
                    found[case] = attempt(lambda: compare(make(name, width, features), dtype, gated, length, setting))  # noqa: B023
    if fla_available(setting.device):
        for gated in (False, True):
            found[f"fla, {gated=}"] = attempt(lambda: compare_fla(gated, setting))  # noqa: B023
    elif importlib.util.find_spec("fla") is None:
        found["fla"] = {"left out": "flash-linear-attention is not installed"}
    else:
        found["fla"] = {"left out": "flash-linear-attention needs a CUDA device"}
    return found


def with_kernels() -> list[str]:
    """Return the names of the maps that have kernels."""
    nothing = torch.zeros(2, 1, 1, 1, 2)
    return [
        name for name, cls in FEATURE_MAPS.items() if kernel_inputs(cls(num_heads=1, head_dim=2), *nothing) is not None
    ]


def make(name: str, width: int, features: int) -> FeatureMap:
    """Return a map with weights that are not its initial ones."""
    cls = FEATURE_MAPS[name]
    torch.manual_seed(0)
    count = None if cls.default_num_features is None else features
    made = cls(num_heads=2, head_dim=width, num_features=count, scaling=width**-0.5, trainable=True)
    with torch.no_grad():
        for tensor in made.state_dict().values():
            tensor.add_(0.1 * torch.rand_like(tensor))
    return made


def compare(feature_map: FeatureMap, dtype: str, gated: bool, length: int, setting: Setting) -> dict[str, Any]:
    """Return errors of the kernels and of torch, by what is compared."""
    feature_map = feature_map.to(setting.device)
    query, key, value = _inputs(feature_map, length, getattr(torch, dtype), setting.device)
    decay = -torch.rand(query.shape[:3], device=setting.device) if gated else None
    floor, chunk = feature_map.denominator_floor, {"chunk": 16} if setting.dry else {}

    def torch_form(each: FeatureMap, *tensors: Tensor) -> Tensor:
        features = each(*tensors[:2], least_shift=each.least_shift(None))
        gates = None if decay is None else decay.to(features.query.dtype)
        return linear_attention(features.query, Tokens(features.key, tensors[2], gates), denominator_floor=floor)[0]

    def kernels(each: FeatureMap, *tensors: Tensor) -> Tensor:
        inputs: Any = kernel_inputs(each, *tensors[:2])
        options: Any = {"least_shift": each.least_shift(None), "denominator_floor": floor, "log_decay": decay} | chunk
        return fused_attention(inputs, tensors[2], **options)[0]

    exact = copy.deepcopy(feature_map).double()
    truth = _outputs_and_gradients(lambda *each: torch_form(exact, *each), [x.double() for x in (query, key, value)])
    mine = _outputs_and_gradients(lambda *each: kernels(feature_map, *each), [query, key, value])
    theirs = _outputs_and_gradients(lambda *each: torch_form(feature_map, *each), [query, key, value])
    names = ("output", "query's gradient", "key's gradient", "value's gradient")
    vanish = length == 1 and not feature_map.signed  # gradients of query and key
    scales = [truth[0], *(truth[3] if vanish else each for each in truth[1:])]
    errors = {
        name: (error(a, t, scale), error(b, t, scale))
        for name, a, b, t, scale in zip(names, mine, theirs, truth, scales, strict=True)
    }
    if length == 1 and not feature_map.signed:
        errors |= _steps(feature_map, query, key, value, decay)
    return judged(errors, LEAST[dtype])


def judged(errors: dict[str, tuple[float, float]], least: float) -> dict[str, Any]:
    """Return errors (of the kernel, of torch) by what they are of, and what failed, if anything did."""
    wrong = [
        f"{name} {kernel:.1e}, torch {plain:.1e}"
        for name, (kernel, plain) in errors.items()
        if kernel > max(TIMES * plain, least)
    ]
    return {"errors": errors} | ({FAILED: "error of " + "; ".join(wrong)} if wrong else {})


def _inputs(feature_map: FeatureMap, length: int, dtype: torch.dtype, device: torch.device) -> Tensors:
    shape = (2, feature_map.num_heads, length, feature_map.head_dim)
    torch.manual_seed(length)
    return [torch.randn(shape).to(device, dtype) for _ in range(3)]


def _outputs_and_gradients(attention: Callable[..., Tensor], inputs: Tensors) -> Tensors:
    leaves = [each.detach().requires_grad_() for each in inputs]
    output = attention(*leaves)
    torch.manual_seed(1)
    weights = torch.randn(output.shape, dtype=torch.float64).to(output)
    return [output, *torch.autograd.grad(output, leaves, weights)]


@torch.no_grad()
def _steps(feature_map: FeatureMap, query: Tensor, key: Tensor, value: Tensor, decay: Tensor | None) -> dict[str, Any]:
    """Return the errors of a decoding step's output and state, of the kernel and of torch."""
    state = torch.rand(*query.shape[:2], feature_map.feature_dim, query.shape[-1] + 1, device=query.device) + 0.1

    def torch_step(each: FeatureMap, *tensors: Tensor) -> Tensors:
        features = each(*tensors[:2])
        gates = None if decay is None else decay.to(features.query.dtype)
        tokens = Tokens(features.key, tensors[2], gates)
        return list(
            linear_attention(features.query, tokens, initial_state=state.to(features.query.dtype, copy=True))[:2]
        )

    mine = state.clone()
    inputs: Any = kernel_inputs(feature_map, query, key)
    output = fused_step(inputs, value, mine, log_decay=decay)
    truth = torch_step(copy.deepcopy(feature_map).double(), query.double(), key.double(), value.double())
    theirs = torch_step(feature_map, query, key, value)
    pairs = zip(("step's output", "step's state"), (output, mine), theirs, truth, strict=True)
    return {name: (error(a, t), error(b, t)) for name, a, b, t in pairs}


def compare_fla(gated: bool, setting: Setting) -> dict[str, Any]:
    """Return the errors of flash-linear-attention's recurrence and of ours in float32."""
    torch.manual_seed(0)
    query, key, value = (torch.rand(2, 4, 1000, 64, device=setting.device) for _ in range(3))
    decay = -0.1 * torch.rand(query.shape[:3], device=setting.device) if gated else None
    output = fla_chunked(query, Tokens(key, value, decay))[0]
    double = None if decay is None else decay.double()
    truth = chunked(query.double(), Tokens(key.double(), value.double(), double))[0]
    errors = {"output": (error(output, truth), error(chunked(query, Tokens(key, value, decay))[0], truth))}
    return judged(errors, 1e-2)  # its products round as tensor cores do


def error(found: Tensor, truth: Tensor, scale: Tensor | None = None) -> float:
    """Return the largest difference to the truth, relative to the largest entry of it or ``scale``; infinite for NaN."""
    size = (truth if scale is None else scale).abs().max().clamp_min(1e-30)
    largest = ((found.double() - truth).abs().max() / size).item()
    return largest if largest == largest else float("inf")


def show(results: dict[str, Any], console: Console) -> None:
    """Print a row a case."""
    table = Table("case", "", "error of the kernels", "of torch", "worst in")
    for case, found in results.items():
        if case == "seconds":
            continue
        if "errors" not in found:
            table.add_row(case, f"left out: {found['left out']}" if "left out" in found else FAILED, "", "", "")
            continue
        where, (kernel, plain) = max(found["errors"].items(), key=lambda item: cast(float, item[1][0]))
        table.add_row(case, FAILED if FAILED in found else "agrees", f"{kernel:.1e}", f"{plain:.1e}", where)
    console.print(table)
