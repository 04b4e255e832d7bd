"""The fused kernels beside attention in torch, flash-linear-attention and softmax, forward and backward.

    python -m benchmarks.fused --output fused.json                 # a CUDA device, bfloat16, 1k to 64k tokens
    TRITON_INTERPRET=1 python -m benchmarks.fused --device cpu --dtype float32 --lengths 64 --heads 2 --steps 1   # a trial

Contestants: (fused) queries, keys and values to outputs in our kernels; (torch) features and recurrence in torch; (fla)
features in torch and `chunk_simple_gla` of flash-linear-attention, where that is installed; (softmax)
`scaled_dot_product_attention`.
All see the same random queries, keys and values, run in turn, and medians are reported.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hf_rfa.backends.triton_attention import KernelInputs, fused_attention, fused_step, kernel_inputs
from hf_rfa.bench.measure import interleaved
from hf_rfa.convert.atomic_io import new_file
from hf_rfa.models.feature_maps import FEATURE_MAPS, FeatureMap
from hf_rfa.models.linear_attention import Tokens, divide, linear_attention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384, 32768, 65536])
    parser.add_argument("--tokens", type=int, default=65536, help="tokens per batch; sequences are as many as fit")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--feature-map", default="exponential", choices=sorted(FEATURE_MAPS))
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--output", type=Path, help="JSON to write")
    args = parser.parse_args()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    feature_map = FEATURE_MAPS[args.feature_map](
        num_heads=args.heads, head_dim=args.head_dim, scaling=args.head_dim**-0.5
    ).to(device)
    attentions, console, rows = contestants(feature_map), Console(), []
    for length in args.lengths:
        shape = (max(1, args.tokens // length), args.heads, length, args.head_dim)
        if device.type == "cpu":
            shape = (1, *shape[1:])
        inputs = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
        calls: dict[str, Callable[[], object]] = {name: partial(each, *inputs) for name, each in attentions.items()}
        with torch.no_grad():
            forward = interleaved(calls, args.steps, device)
        calls = {name: partial(backward, each, inputs) for name, each in attentions.items()}
        both = interleaved(calls, args.steps, device)
        rows.append({"length": length, "batch": shape[0], "forward": forward, "forward and backward": both})
        console.print(f"{length:,} tokens: {forward}, with gradients {both}")
    ratios = ("softmax", "fla")
    columns = ("tokens", "what", *attentions, *(f"{name} / fused" for name in ratios))
    table = Table(*columns, title=f"attention, {args.feature_map}, {args.dtype}, {args.device}: ms")
    for row in rows:
        for what in ("forward", "forward and backward"):
            times: dict[str, float] = row[what]
            cells = [f"{times[name] / times['fused']:.2f} ×" if name in times else "" for name in ratios]
            table.add_row(f"{row['length']:,}", what, *(f"{times[name]:.2f}" for name in attentions), *cells)
    console.print(table)
    step = _step(feature_map, device, dtype, args.steps)
    console.print(f"one decoding step of one layer, batch 32: {step}")
    if args.output is not None:
        arguments = {name: str(value) for name, value in vars(args).items()}
        with new_file(args.output) as file:
            json.dump({"arguments": arguments, "rows": rows, "step": step}, file, indent=1)


@torch.no_grad()
def _step(feature_map: FeatureMap, device: torch.device, dtype: torch.dtype, steps: int) -> dict[str, float]:
    """Return the milliseconds of one decoding step of one layer in a fused kernel and in torch."""
    if feature_map.signed:
        return {}
    shape = (32, feature_map.num_heads, 1, feature_map.head_dim)
    query, key, value = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    state = torch.rand(*shape[:2], feature_map.feature_dim, feature_map.head_dim + 1, device=device)
    feature_map.eval()
    runs: dict[str, Callable[[], object]] = {
        "fused": lambda: fused_step(cast(KernelInputs, kernel_inputs(feature_map, query, key)), value, state),
        "torch": lambda: plain(feature_map, query, key, value, initial_state=state),
    }
    return interleaved(runs, steps, device)


if __name__ == "__main__":
    main()
