"""Attention to features beside softmax, forward and backward, by the length of a text.

Contestants: (features) features and recurrence; (softmax) `scaled_dot_product_attention`. All see the same random queries,
keys and values, and medians are reported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hf_rfa.bench.measure import interleaved
from hf_rfa.models.feature_maps import FEATURE_MAPS, FeatureMap
from hf_rfa.models.linear_attention import Tokens, linear_attention

from .trial import FAILED, Setting, attempt

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
#: Feature maps that are timed: without signs and with.
MAPS = ("exponential", "gaussian")
COLORS = {"features": "#174a80", "softmax": "#555555"}


def attend(feature_map: FeatureMap, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend to features."""
    query, key, *_ = feature_map(query, key, least_shift=feature_map.least_shift(None))
    return linear_attention(query, Tokens(key, value), denominator_floor=feature_map.denominator_floor)[0]


def contestants(feature_map: FeatureMap) -> dict[str, Attention]:
    """Return what is compared, by name: queries, keys and values [B, H, T, d] in, outputs out."""
    return {
        "features": partial(attend, feature_map),
        "softmax": partial(F.scaled_dot_product_attention, is_causal=True),
    }


def backward(attention: Attention, inputs: list[Tensor]) -> None:
    """Run an attention and its gradients."""
    output = attention(*inputs)
    torch.autograd.grad(output, inputs, torch.ones_like(output))


def run(setting: Setting) -> dict[str, Any]:
    """Time all contestants, forward and with gradients, by length."""
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
        found[name] = rows
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
        rows = results[name]
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
        rows = results[name]
        names = list(next(iter(rows.values())))
        table = Table("tokens", "what", *names, title=f"attention, {name}, {results['dtype']}: ms")
        for length, found in rows.items():
            for what in ("forward", "with gradients"):
                cells = (FAILED if FAILED in found[each] else f"{found[each][what]:.2f}" for each in names)
                table.add_row(f"{int(length):,}", what, *cells)
        console.print(table)
