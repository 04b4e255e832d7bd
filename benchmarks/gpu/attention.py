"""The fused kernels beside attention in torch, flash-linear-attention and softmax, forward and backward.

Contestants: (fused) queries, keys and values to outputs in our kernels; (torch) features and recurrence in torch; (fla)
features in torch and `chunk_simple_gla` of flash-linear-attention, where that is installed; (softmax)
`scaled_dot_product_attention`.
All see the same random queries, keys and values, and medians are reported.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hf_rfa.backends.triton_attention import KernelInputs, fused_attention, fused_step, kernel_inputs
from hf_rfa.bench.measure import interleaved
from hf_rfa.models.feature_maps import FEATURE_MAPS, FeatureMap
from hf_rfa.models.linear_attention import Tokens, divide, linear_attention

from .trial import FAILED, Setting, attempt

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
#: Feature maps whose kernels are timed: without signs and with.
MAPS = ("exponential", "gaussian")
COLORS = {"fused": "#174a80", "torch": "#7ba7d4", "fla": "#3f6f1d", "softmax": "#555555"}


def plain(feature_map: FeatureMap, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Attend in torch."""
    query, key, *_ = feature_map(query, key, least_shift=feature_map.least_shift(None))
    return linear_attention(query, Tokens(key, value), **options)[0]


def fused(feature_map: FeatureMap, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend in the kernels."""
    inputs = cast(KernelInputs, kernel_inputs(feature_map, query, key))  # of a map of this package
    least, floor = feature_map.least_shift(None), feature_map.denominator_floor
    return fused_attention(inputs, value, denominator_floor=floor, least_shift=least)[0]


def contestants(feature_map: FeatureMap) -> dict[str, Attention]:
    """Return what is compared, by name: queries, keys and values [B, H, T, d] in, outputs out."""
    found: dict[str, Attention] = {
        "fused": lambda q, k, v: fused(feature_map, q, k, v),
        "torch": lambda q, k, v: plain(feature_map, q, k, v, denominator_floor=feature_map.denominator_floor),
        "softmax": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    }
    if importlib.util.find_spec("fla") is not None and not feature_map.signed:
        from fla.ops.simple_gla import chunk_simple_gla

        def fla(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            query, key = (features.to(q.dtype).transpose(1, 2) for features in feature_map(q, k)[:2])
            value = F.pad(v, (0, 1), value=1.0).transpose(1, 2)
            sums, _ = chunk_simple_gla(query, key, value, scale=1.0)
            sums = sums.transpose(1, 2)
            return divide(sums[..., :-1], sums[..., -1:])

        found["fla"] = fla
    return found


def backward(attention: Attention, inputs: list[Tensor]) -> None:
    """Run an attention and its gradients."""
    output = attention(*inputs)
    torch.autograd.grad(output, inputs, torch.ones_like(output))


def run(setting: Setting) -> dict[str, Any]:
    """Time all contestants, forward and with gradients, by length; and one decoding step."""
    lengths = (64,) if setting.dry else (1024, 2048, 4096, 8192, 16384, 32768, 65536)
    heads, width, dtype = (2, 16, "float32") if setting.dry else (12, 64, "bfloat16")
    steps, tokens = (1, 64) if setting.dry else (7, 65536)
    found: dict[str, Any] = {"dtype": dtype, "heads": heads, "head_dim": width}
    for name in ("exponential",) if setting.dry else MAPS:
        torch.manual_seed(0)
        feature_map = FEATURE_MAPS[name](num_heads=heads, head_dim=width, scaling=width**-0.5).to(setting.device)
        rows: dict[str, Any] = {}
        for length in lengths:
            shape = (max(1, tokens // length), heads, length, width)
            inputs = [
                torch.randn(shape, device=setting.device, dtype=getattr(torch, dtype), requires_grad=True)
                for _ in range(3)
            ]
            rows[f"{length}"] = {
                contestant: attempt(partial(_times, attention, inputs, steps))
                for contestant, attention in contestants(feature_map).items()
            }
        found[name] = {"lengths": rows, "step": attempt(partial(_step, feature_map, setting, dtype, steps))}
    return found


def _times(attention: Attention, inputs: list[Tensor], steps: int) -> dict[str, Any]:
    """Return the milliseconds of an attention, without gradients and with."""
    with torch.no_grad():
        forward = interleaved({"": lambda: attention(*inputs)}, steps)[""]
    return {
        "forward": forward,
        "with gradients": interleaved({"": lambda: backward(attention, inputs)}, steps)[""],
    }


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the times by length, of a map a panel, to a PNG file."""
    names = [name for name in MAPS if name in results]
    figure = Figure(figsize=(1.8 + 4.2 * len(names), 3.6), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        rows = results[name]["lengths"]
        for contestant, color in COLORS.items():
            for what, style in (("forward", "o-"), ("with gradients", "o--")):
                points = [
                    (int(length), found[contestant][what])
                    for length, found in rows.items()
                    if contestant in found and FAILED not in found[contestant]
                ]
                if points:
                    axes.plot(
                        *zip(*points, strict=True), style, color=color, markersize=3, label=f"{contestant}, {what}"
                    )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(xlabel="tokens of a text", title=f"{name} features")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("ms")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)


def show(results: dict[str, Any], console: Console) -> None:
    """Print a table a map."""
    for name in MAPS:
        if name not in results:
            continue
        rows, step = results[name]["lengths"], results[name]["step"]
        names = list(next(iter(rows.values())))
        table = Table("tokens", "what", *names, title=f"attention, {name}, {results['dtype']}: ms")
        for length, found in rows.items():
            for what in ("forward", "with gradients"):
                cells = (FAILED if FAILED in found[each] else f"{found[each][what]:.2f}" for each in names)
                table.add_row(f"{int(length):,}", what, *cells)
        console.print(table)
        if FAILED not in step:
            console.print(
                "one decoding step of one layer, batch 32: " + ", ".join(f"{k} {v:.3f} ms" for k, v in step.items())
            )


@torch.no_grad()
def _step(feature_map: FeatureMap, setting: Setting, dtype: str, steps: int) -> dict[str, float]:
    """Return the milliseconds of one decoding step of one layer in a fused kernel and in torch."""
    shape = (32, feature_map.num_heads, 1, feature_map.head_dim)
    query, key, value = (torch.randn(shape, device=setting.device, dtype=getattr(torch, dtype)) for _ in range(3))
    state = torch.rand(*shape[:2], feature_map.feature_dim, feature_map.head_dim + 1, device=setting.device)
    feature_map.eval()
    runs: dict[str, Callable[[], object]] = {
        "torch": lambda: plain(feature_map, query, key, value, initial_state=state),
    }
    if not feature_map.signed:
        runs["fused"] = lambda: fused_step(cast(KernelInputs, kernel_inputs(feature_map, query, key)), value, state)
    return interleaved(runs, steps)
