"""Least possible time of a decoding step: bytes over the machine's bandwidth, or operations over its peak."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_rfa.models.attention import RFAAttentionMixin

from .measure import interleaved


@dataclass(frozen=True)
class Machine:
    """Measured limits of a device.

    Attributes:
        bandwidth: bytes per second that a matrix-vector product reads.
        peak: floating-point operations per second of a large matrix product.
    """

    bandwidth: float
    peak: float

    def milliseconds(self, num_bytes: float, operations: float) -> float:
        """Return the least time for a number of bytes and of operations."""
        return 1000.0 * max(num_bytes / self.bandwidth, operations / self.peak)


@torch.no_grad()
def measure_machine(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Machine:
    """Measure a device; takes a few seconds and half a gigabyte."""
    device = torch.device(device)
    size = 2048 if device.type == "cpu" else 8192
    matrix = torch.randn(8192, 16384, device=device).to(dtype)
    vector = torch.randn(16384, device=device).to(dtype)
    square = torch.randn(size, size, device=device).to(dtype)
    reading = interleaved({"": lambda: matrix @ vector}, 5, device)[""] / 1000
    multiplying = interleaved({"": lambda: square @ square}, 5, device)[""] / 1000
    return Machine(matrix.numel() * matrix.element_size() / reading, 2.0 * size**3 / multiplying)


def decoding_parameters(model: Any) -> int:
    """Return the number of parameters that a decoding step multiplies with: the decoder's, and the output's matrix."""
    decoder = model.get_decoder() if model.config.is_encoder_decoder else model.base_model
    unused = {id(p) for module in decoder.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    counted = sum(
        parameter.numel()
        for name, parameter in decoder.named_parameters()
        # keys and values of an encoder's output are computed once, before the first step
        if id(parameter) not in unused and not ("encoder_attn.k_proj" in name or "encoder_attn.v_proj" in name)
    )
    return counted + model.get_output_embeddings().weight.numel()


def decoding_floor(model: Any, machine: Machine, *, batch: int, cache_bytes: int) -> float:
    """Return the least milliseconds of a decoding step.

    Weights are read once, keys and values once, a causal state is read and written once.

    Args:
        model: the model.
        machine: its device's limits.
        batch: sequences.
        cache_bytes: size of its cache.
    """
    config, count = model.config, decoding_parameters(model)
    size = next(model.parameters()).element_size()
    linear = machine.milliseconds(count * size, 2.0 * count * batch)
    layers = [each for each in model.modules() if isinstance(each, RFAAttentionMixin) and each.rfa_kind == "causal"]
    if not layers:
        return linear + machine.milliseconds(cache_bytes, cache_bytes / size)
    heads, width = len(layers) * config.num_heads_for("causal"), config.head_dim_for("causal")
    state = 4.0 * batch * heads * layers[0].feature_map.feature_dim * (width + 1)
    maps = heads * config.num_features_for("causal") * width  # W, read once; q and k are multiplied with it
    return linear + machine.milliseconds(4.0 * maps + state + cache_bytes, 4.0 * maps * batch + state)
