"""Time and peak memory of calls, the load of the machine that they run on, and the least time of a decoding step on it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_rfa.models.attention import RFAAttentionMixin
from hf_rfa.process_memory import give_back_memory

#: Calls that `interleaved` makes first and does not count.
WARMUP_CALLS = 2
#: Writing 5 to it resets the peak of a process's memory (Linux, ``man proc_pid_clear_refs``).
RESET = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Load:
    """Load of the machine when figures were measured.

    Attributes:
        threads: torch's threads on a CPU.
        cores: cores of the machine.
        load: threads of all processes that ran or waited for a core, mean of the last minute.
    """

    threads: int
    cores: int
    load: float

    @classmethod
    def now(cls) -> Load:
        """Return the current load. Call it before the measurement, which is a load itself."""
        return cls(torch.get_num_threads(), os.cpu_count() or 1, os.getloadavg()[0])

    def __str__(self) -> str:
        """Return a line for a caption."""
        return f"{self.threads} thread{'s' if self.threads > 1 else ''} on {self.cores} cores, load {self.load:.1f}"

    def warning(self) -> str | None:
        """Return a warning if there are fewer free cores than threads, or None."""
        if self.load <= self.cores - self.threads + 0.5:  # starting takes a part of the minute too
            return None
        return (
            f"{self}: other processes take cores that this needs. Threads then wait for each other at every operation, which "
            "slows a step of many small ones most, RFA's more than softmax's: no figure holds, and no ratio. Wait until the "
            "machine is idle, or time fewer threads, say with OMP_NUM_THREADS=1."
        )


def interleaved(
    calls: Mapping[str, Callable[[], object]], steps: int, device: torch.device, warmup: int = WARMUP_CALLS
) -> dict[str, float]:
    """Return the median milliseconds of some calls, made in turn ``steps`` times after ``warmup`` times not counted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for step in range(-warmup, steps):
        for name, call in calls.items():
            _synchronize(device)
            start = time.perf_counter()
            call()
            _synchronize(device)
            if step >= 0:
                times[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Return the most bytes that one call takes in addition to what was allocated before it, such as weights.

    On an accelerator torch's allocations are counted, on a CPU the whole process, which Linux alone reports: None elsewhere.
    """
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        call()
        return torch.accelerator.max_memory_allocated(device) - before
    give_back_memory()  # freed memory that the process keeps would be reused without being counted
    try:
        RESET.write_text("5")
        before = _status_bytes("VmRSS")
    except OSError:
        call()
        return None
    call()
    return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    """Return a field of the process's status file in bytes."""
    return next(1024 * int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))


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
    size = 8192
    if device.type == "cpu":  # many have no operations in 16 bits, and take minutes for a larger product
        size = 2048 if dtype.itemsize >= 4 else 512
    matrix = torch.randn(8192, 16384, device=device).to(dtype)
    vector = torch.randn(16384, device=device).to(dtype)
    square = torch.randn(size, size, device=device).to(dtype)
    reading = interleaved({"": lambda: matrix @ vector}, 5, device)[""] / 1000
    multiplying = interleaved({"": lambda: square @ square}, 5, device)[""] / 1000
    return Machine(matrix.numel() * matrix.element_size() / reading, 2.0 * size**3 / multiplying)


def decoding_weights(model: Any) -> list[Tensor]:
    """Return the parameters that a decoding step multiplies with: the decoder's, and the output's matrix."""
    decoder = model.get_decoder() if model.config.is_encoder_decoder else model.base_model
    unused = {id(p) for module in decoder.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    used = [
        parameter
        for name, parameter in decoder.named_parameters()
        # keys and values of an encoder's output are computed once, before the first step
        if id(parameter) not in unused and not ("encoder_attn.k_proj" in name or "encoder_attn.v_proj" in name)
    ]
    return [*used, model.get_output_embeddings().weight]


def decoding_floor(model: Any, machine: Machine, *, batch: int, cache_bytes: int) -> float:
    """Return the least milliseconds of a decoding step of ``batch`` sequences with a cache of ``cache_bytes``.

    Weights are read once, keys and values once, a causal state is read and written once.
    """
    config, weights, size = model.config, decoding_weights(model), model.dtype.itemsize
    read, count = sum(each.nbytes for each in weights), sum(each.numel() for each in weights)
    linear = machine.milliseconds(read, 2.0 * count * batch)
    layers = [each for each in model.modules() if isinstance(each, RFAAttentionMixin) and each.rfa_kind == "causal"]
    if not layers:
        return linear + machine.milliseconds(cache_bytes, cache_bytes / size)
    heads, width = sum(each.feature_map.num_heads for each in layers), config.head_dim_for("causal")
    states = (replace(each.memory_layout(model.dtype), window=0, sinks=0, slots=0) for each in layers)
    state = float(batch * sum(each.num_bytes() for each in states))  # and as many operations: four a number
    maps = heads * config.num_features_for("causal") * width  # W, read once; q and k are multiplied with it
    return linear + machine.milliseconds(4.0 * maps + state + cache_bytes, 4.0 * maps * batch + state)
