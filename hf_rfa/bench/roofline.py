"""What the machine could do at best: bytes over its bandwidth, or operations over its peak, whichever takes longer."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hf_rfa.models.configuration_rfa import RFAConfigMixin
from hf_rfa.models.linear_attention import state_shape


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
        """Return the least time for so many bytes and operations."""
        return 1000.0 * max(num_bytes / self.bandwidth, operations / self.peak)


@dataclass(frozen=True)
class Load:
    """What else ran on a machine when figures were measured.

    Attributes:
        threads: that torch computes with on a CPU.
        cores: that the machine has.
        load: how many threads of all processes ran or waited for a core, the mean of the minute before.
    """

    threads: int
    cores: int
    load: float

    @classmethod
    def now(cls) -> Load:
        """Return what it is now; called before the work, which is a load itself."""
        return cls(torch.get_num_threads(), os.cpu_count() or 1, os.getloadavg()[0])

    def __str__(self) -> str:
        """Say it in a caption."""
        return f"{self.threads} thread{'s' if self.threads > 1 else ''} on {self.cores} cores, load {self.load:.1f}"

    def warning(self) -> str | None:
        """Return what to say where threads will not find a core each, or None."""
        if self.load <= self.cores - self.threads + 0.5:  # starting takes a part of the minute too
            return None
        return (
            f"warning: {self}: other processes take cores that this needs. Threads then wait for each other at every "
            "operation, which slows a step of many small ones most, RFA's more than softmax's: no figure holds, and no "
            "ratio. Wait until the machine is idle, or time fewer threads, say with OMP_NUM_THREADS=1."
        )


def synchronise(device: torch.device) -> None:
    """Wait for what runs on a device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _best(run: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    times = []
    for _ in range(repeats):
        synchronise(device)
        start = time.perf_counter()
        run()
        synchronise(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


@torch.no_grad()
def measure_machine(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Machine:
    """Measure a device; takes a few seconds and half a gigabyte."""
    device = torch.device(device)
    matrix = torch.randn(8192, 16384, device=device).to(dtype)
    vector = torch.randn(16384, device=device).to(dtype)
    reading = _best(lambda: matrix @ vector, device)
    bandwidth = matrix.numel() * matrix.element_size() / reading
    size = 2048 if device.type == "cpu" else 8192
    square = torch.randn(size, size, device=device).to(dtype)
    return Machine(bandwidth, 2.0 * size**3 / _best(lambda: square @ square, device))


def weights(model: Any) -> int:
    """Return how many weights a decoding step multiplies with: all of the decoder's matrices, and the output's."""
    decoder = model.get_decoder() if model.config.is_encoder_decoder else model.base_model
    embeddings = {id(parameter) for name, parameter in decoder.named_parameters() if _is_embedding(name)}
    counted = sum(p.numel() for p in decoder.parameters() if id(p) not in embeddings)
    if model.config.is_encoder_decoder:  # the keys and values of a source are made once
        counted -= sum(
            p.numel()
            for name, p in decoder.named_parameters()
            if "encoder_attn.k_proj" in name or "encoder_attn.v_proj" in name
        )
    return counted + model.get_output_embeddings().weight.numel()


def _is_embedding(name: str) -> bool:
    return any(part in name for part in ("wte", "wpe", "embed_tokens", "embed_positions", "shared"))


def decoding_floor(model: Any, machine: Machine, *, batch: int, cache_bytes: int) -> float:
    """Return the least milliseconds of a decoding step.

    Weights are read once, keys and values once, a causal state is read and written once.

    Args:
        model: the model.
        machine: its device's limits.
        batch: sequences.
        cache_bytes: of all its layers.
    """
    config, count = model.config, weights(model)
    size = next(model.parameters()).element_size()
    linear = machine.milliseconds(count * size, 2.0 * count * batch)
    if not isinstance(config, RFAConfigMixin) or not config.any_rfa("causal"):
        return linear + machine.milliseconds(cache_bytes, cache_bytes / size)
    heads, width = config.num_heads_for("causal"), config.head_dim_for("causal")
    layers = config.num_layers_for("causal") - len(config.softmax_layers_for("causal"))
    features = feature_dim(model, "causal")
    rows, columns = state_shape(features, width, signed=False)
    state = 4.0 * batch * heads * layers * rows * columns
    maps = layers * heads * config.num_features_for("causal") * width  # W, read once; q and k are multiplied with it
    operations = 4.0 * maps * batch + state
    return linear + machine.milliseconds(4.0 * maps + state + cache_bytes, operations)


def feature_dim(model: Any, kind: str) -> int:
    """Return F of a model's attention of a kind."""
    for module in model.modules():
        if getattr(module, "rfa_kind", None) == kind:
            return module.feature_map.feature_dim
    raise ValueError(f"the model has no {kind} attention with random features.")
