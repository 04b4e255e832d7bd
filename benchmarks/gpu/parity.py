"""Attention to features on the device against its quadratic form in float64: outputs, gradients and decoding steps.

An error is the largest difference to the truth, relative to the largest entry, and a case fails if one is over `LIMITS`. One
token's output is its value: the gradients of query and key are zero, and their errors are relative to the value's. Features
with signs are an exception, whose normaliser can be at its floor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hf_rfa.models.feature_maps import FEATURE_MAPS, FeatureMap
from hf_rfa.models.linear_attention import DEFAULT_CHUNK_SIZE, Tokens, linear_attention

from .trial import FAILED, Setting, attempt

#: Largest errors that pass, by precision.
LIMITS = {"float32": 2e-5, "bfloat16": 2e-2}
Tensors = list[Tensor]


def run(setting: Setting) -> dict[str, Any]:
    """Compare every map, with gates and without, in every precision, at odd lengths."""
    lengths, width, features = ((5, 37), 8, 12) if setting.dry else ((1, 63, 1000), 64, 64)
    found: dict[str, Any] = {}
    for name in [name for name in FEATURE_MAPS if name != "none"]:
        for dtype in setting.dtypes:
            for gated in (False, True):
                for length in lengths:
                    case = f"{name}, {dtype}, {'gate' if gated else 'no gate'}, {length}"
                    found[case] = attempt(lambda: compare(make(name, width, features), dtype, gated, length, setting))  # noqa: B023
    return found


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
    """Return errors, by what is compared."""
    feature_map = feature_map.to(setting.device)
    query, key, value = _inputs(feature_map, length, getattr(torch, dtype), setting.device)
    decay = -torch.rand(query.shape[:3], device=setting.device) if gated else None
    floor = feature_map.denominator_floor

    def attention(each: FeatureMap, chunk_size: int, *tensors: Tensor) -> Tensor:
        features = each(*tensors[:2], least_shift=each.least_shift(None))
        gates = None if decay is None else decay.to(features.query.dtype)
        given = Tokens(features.key, tensors[2], gates)
        return linear_attention(features.query, given, denominator_floor=floor, chunk_size=chunk_size)[0]

    exact, chunk_size = copy.deepcopy(feature_map).double(), 16 if setting.dry else DEFAULT_CHUNK_SIZE
    truth = _outputs_and_gradients(
        lambda *each: attention(exact, length, *each), [x.double() for x in (query, key, value)]
    )
    found = _outputs_and_gradients(lambda *each: attention(feature_map, chunk_size, *each), [query, key, value])
    names = ("output", "query's gradient", "key's gradient", "value's gradient")
    vanish = length == 1 and not feature_map.signed  # gradients of query and key
    scales = [truth[0], *(truth[3] if vanish else each for each in truth[1:])]
    errors = {name: error(*each) for name, *each in zip(names, found, truth, scales, strict=True)}
    if length == 1 and not feature_map.signed:
        errors |= _steps(feature_map, query, key, value, decay)
    return judged(errors, LIMITS[dtype])


def judged(errors: dict[str, float], limit: float) -> dict[str, Any]:
    """Return errors by what they are of, and what failed, if anything did."""
    wrong = [f"{name} {size:.1e}" for name, size in errors.items() if size > limit]
    return {"errors": errors} | ({FAILED: f"over {limit:.0e}: " + "; ".join(wrong)} if wrong else {})


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
def _steps(
    feature_map: FeatureMap, query: Tensor, key: Tensor, value: Tensor, decay: Tensor | None
) -> dict[str, float]:
    """Return the errors of a decoding step's output and state."""
    state = torch.rand(*query.shape[:2], feature_map.feature_dim, query.shape[-1] + 1, device=query.device) + 0.1

    def step(each: FeatureMap, *tensors: Tensor) -> tuple[Tensor, ...]:
        features = each(*tensors[:2])
        gates = None if decay is None else decay.to(features.query.dtype)
        before = state.to(features.query.dtype, copy=True)
        return linear_attention(features.query, Tokens(features.key, tensors[2], gates), initial_state=before)[:2]

    truth = step(copy.deepcopy(feature_map).double(), query.double(), key.double(), value.double())
    found = step(feature_map, query, key, value)
    return {f"step's {name}": error(*each) for name, *each in zip(("output", "state"), found, truth, strict=True)}


def error(found: Tensor, truth: Tensor, scale: Tensor | None = None) -> float:
    """Return the largest difference to the truth, relative to the largest entry of it or ``scale``; infinite for NaN."""
    size = (truth if scale is None else scale).abs().max().clamp_min(1e-30)
    largest = ((found.double() - truth).abs().max() / size).item()
    return largest if largest == largest else float("inf")


def show(results: dict[str, Any], console: Console) -> None:
    """Print a row a case."""
    table = Table("case", "", "largest error", "of")
    for case, found in results.items():
        if case == "seconds":
            continue
        if "errors" not in found:
            table.add_row(case, FAILED, "", "")
            continue
        where, largest = max(found["errors"].items(), key=lambda item: item[1])
        table.add_row(case, FAILED if FAILED in found else "agrees", f"{largest:.1e}", where)
    console.print(table)
