"""Compile the fused kernels for a GPU that need not be there, and write what each takes: run without Triton's interpreter."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_rfa.backends import triton_attention, triton_kernels
from hf_rfa.models.feature_maps import FEATURE_MAPS

#: An H100 or H200.
TARGET = GPUTarget("cuda", 90, 32)
NAMES = ("states_kernel", "outputs_kernel", "gradients_kernel", "step_kernel")
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int32: "*i32"}


class Recorder:
    """Stands for a kernel, and keeps what it is called with."""

    def __init__(self, kernel, calls: list) -> None:
        self.kernel, self.calls = kernel, calls

    def __getitem__(self, grid):
        return lambda *args, **options: self.calls.append((self.kernel, args, options))


def shared_bytes(kernel, args, options) -> int:
    """Compile a kernel for a call, and return the shared memory of one of its programs."""
    given = dict(zip(kernel.arg_names, args, strict=False))
    given |= {name: value for name, value in options.items() if name in kernel.arg_names}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    for parameter in kernel.params:
        value = given[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        else:
            signature[parameter.name] = TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32"
    launch = {name: value for name, value in options.items() if name not in kernel.arg_names}
    return triton.compile(ASTSource(kernel, signature, constants), target=TARGET, options=launch).metadata.shared


def main(map_name: str, width: int, features: int, dtype: str) -> None:
    """Write the shared memory of every kernel of a map, in bytes, by name."""
    calls: list = []
    for name in NAMES:
        setattr(triton_kernels, name, Recorder(getattr(triton_kernels, name), calls))
    feature_map = FEATURE_MAPS[map_name](num_heads=2, head_dim=width, num_features=features, scaling=width**-0.5)
    query, key, value = torch.randn(3, 1, 2, 100, width, dtype=getattr(torch, dtype), requires_grad=True)
    inputs = triton_attention.kernel_inputs(feature_map, query, key)
    assert inputs is not None
    floor = feature_map.denominator_floor
    triton_attention.fused_attention(inputs, value, denominator_floor=floor)[0].sum().backward()
    if not feature_map.signed:
        state = torch.rand(1, 2, feature_map.feature_dim, width + 1)
        one = triton_attention.kernel_inputs(feature_map, query[:, :, :1], key[:, :, :1])
        assert one is not None
        triton_attention.fused_step(one, value[:, :, :1], state)
    json.dump([(kernel.fn.__name__, shared_bytes(kernel, *call)) for kernel, *call in calls], sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
