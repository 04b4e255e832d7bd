"""The tasks that are timed, and how: contestants run in turn in one process, and their medians are compared."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import timer

from hf_rfa.inference import cache_num_bytes
from hf_rfa.models.cache_names import cache_argument
from hf_rfa.models.modeling_rfa_decoder import COMPILING_DEVICES
from hf_rfa.process_memory import give_back_memory, process_bytes

from .models import cache_at, step_inputs

#: Slots that a static cache has past the position where it is timed, in addition to the steps timed.
STATIC_CACHE_MARGIN = 64
#: A compiled model makes a graph at the first step, and another, for any number of tokens, at the second or third.
WARMUP_CALLS_COMPILED = 6
#: Calls that `interleaved` makes first and does not count.
WARMUP_CALLS = 2
#: Writing 5 to it resets the peak of a process's memory (Linux, ``man proc_pid_clear_refs``).
RESET = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Point:
    """Medians at one length."""

    task: str  # "decoding", "prefill" or "training"
    length: int  # position of the step, or tokens processed at once
    batch: int  # sequences
    milliseconds: dict[str, float]  # by contestant
    # size of a contestant's cache (decoding), or its peak memory in addition to the weights (`peak_bytes`)
    cache_bytes: dict[str, int]
    source: int = 0  # tokens of the encoder's input, 0 without an encoder


@torch.no_grad()
def decoding(
    softmax: Any,
    rfa: Any,
    *,
    length: int,
    batch: int,
    source: int = 0,
    steps: int,
    static: bool = False,
    compiled: bool = False,
) -> Point:
    """Time decoding steps at a position ``length``, of which both models have enough.

    With ``source`` tokens of an encoder's input its output is computed before. ``static`` times the softmax model on a
    `StaticCache` too, ``compiled`` both under ``torch.compile``, compiled anew, the softmax model on a `StaticCache`.
    """
    contestants = [("softmax", softmax, False, False), ("RFA", rfa, False, False)]  # name, model, compile, StaticCache
    if static:
        contestants.insert(1, ("softmax, static cache", softmax, False, True))
    mode = "reduce-overhead" if rfa.device.type in COMPILING_DEVICES else None  # as `generate` compiles there
    if compiled:
        contestants.insert(-1, ("softmax, compiled", softmax, True, True))
        contestants.append(("RFA, compiled", rfa, True, False))
        torch.compiler.reset()  # graphs of other points count towards torch's limit on recompilation
    calls: dict[str, Callable[[], object]] = {}
    sizes: dict[str, int] = {}
    for name, model, compile_it, fixed in contestants:
        inputs = step_inputs(model, batch, source)
        cache = cache_at(model, inputs, length, room=STATIC_CACHE_MARGIN + steps if fixed else 0)
        sizes[name] = cache_num_bytes(cache)
        calls[name] = partial(
            torch.compile(model, mode=mode) if compile_it else model, **inputs, **cache_argument(cache)
        )
    times = interleaved(calls, steps, WARMUP_CALLS_COMPILED if compiled else WARMUP_CALLS)
    return Point("decoding", length, batch, times, sizes, source)


def whole_sequences(task: str, softmax: Any, rfa: Any, *, length: int, batch: int, steps: int) -> Point:
    """Time the processing of whole sequences, with arguments like those of `decoding`.

    The task is "prefill" to read prompts into a cache, up to the last token's logits, or "training" for a loss and its
    gradients.
    """

    def run(model: Any) -> None:
        if task == "prefill":
            with torch.no_grad():
                model(ids, use_cache=True, logits_to_keep=1)
        else:
            model(ids, labels=ids, use_cache=False).loss.backward()
            model.zero_grad(set_to_none=True)

    ids = torch.randint(0, rfa.config.vocab_size, (batch, length), device=rfa.device)
    calls = {"softmax": partial(run, softmax), "RFA": partial(run, rfa)}
    peaks = {name: peak_bytes(call, rfa.device) for name, call in calls.items()}  # the first calls, which warm up
    counted = {name: peak for name, peak in peaks.items() if peak is not None}
    return Point(task, length, batch, interleaved(calls, steps, warmup=0), counted)


def interleaved(calls: Mapping[str, Callable[[], object]], steps: int, warmup: int = WARMUP_CALLS) -> dict[str, float]:
    """Return the median milliseconds of some calls, made in turn ``steps`` times after ``warmup`` times not counted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for step in range(-warmup, steps):
        for name, call in calls.items():
            start = timer()  # when the accelerator has done what it was given
            call()
            if step >= 0:
                times[name].append(1000 * (timer() - start))
    return {name: statistics.median(values) for name, values in times.items()}


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
        before = process_bytes()
    except OSError:
        call()
        return None
    call()
    return process_bytes("VmHWM") - before
