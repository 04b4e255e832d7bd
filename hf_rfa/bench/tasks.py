"""What is timed. Contestants of one point run in turn in one process, and their medians are compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from hf_rfa.console import progress_bar
from hf_rfa.models.cache_rfa import cache_num_bytes

from .models import cache_at, step_inputs
from .peak import peak_bytes
from .roofline import Machine, decoding_floor, synchronise

#: Slots that a static cache has past the position where it is timed.
ROOM = 64
#: Steps that do not count, and where models are compiled: a graph is made for the first step, and another one, in which the
#: number of tokens may vary, for the second or third.
WARM, WARM_COMPILED = 2, 6


@dataclass(frozen=True)
class Point:
    """Medians at one length.

    Attributes:
        task: "decoding", "prefill" or "training".
        length: the position of the step, or the tokens read at once.
        batch: sequences.
        milliseconds: by contestant.
        cache_bytes: of a contestant's cache (decoding), or the most that it took beside the weights (`peak_bytes`).
        floor: least milliseconds by contestant (`decoding_floor`).
        source: tokens of the source, 0 without an encoder.
    """

    task: str
    length: int
    batch: int
    milliseconds: dict[str, float]
    cache_bytes: dict[str, int] = field(default_factory=dict)
    floor: dict[str, float] = field(default_factory=dict)
    source: int = 0

    @property
    def softmax(self) -> str:
        """The fastest softmax contestant."""
        return min(
            (name for name in self.milliseconds if name.startswith("softmax")), key=self.milliseconds.__getitem__
        )


def interleaved(
    runs: Mapping[str, Callable[[], object]], steps: int, device: torch.device | None = None, warm: int = WARM
) -> dict[str, float]:
    """Return the median milliseconds of some calls, run in turn ``steps`` times after ``warm`` that do not count."""
    device = device or torch.device("cpu")
    times: dict[str, list[float]] = {key: [] for key in runs}
    for step in range(steps + warm):
        for key, run in runs.items():
            synchronise(device)
            start = time.perf_counter()
            run()
            synchronise(device)
            if step >= warm:
                times[key].append(1000 * (time.perf_counter() - start))
    return {key: statistics.median(values) for key, values in times.items()}


@torch.no_grad()
def decoding(
    softmax: Any,
    rfa: Any,
    *,
    lengths: Sequence[int],
    batches: Sequence[int],
    sources: Sequence[int] = (0,),
    steps: int = 11,
    static: bool = False,
    compiled: bool = False,
    machine: Machine | None = None,
) -> list[Point]:
    """Time decoding steps at some positions.

    Args:
        softmax: the softmax model, with positions enough.
        rfa: the RFA model, with positions enough.
        lengths: positions to time at.
        batches: sequences decoded at once.
        sources: tokens of the source, for models with an encoder; it has been read before.
        steps: steps timed per point and contestant.
        static: let the softmax model run on a `StaticCache` as well.
        compiled: let both run under ``torch.compile`` as well, compiled anew for every point, the softmax model on a
            `StaticCache`.
        machine: for the floor.
    """
    contestants: list[tuple[str, Any, bool, bool]] = []  # name, model, whether it is compiled, and on a StaticCache
    for name, model in (("softmax", softmax), ("RFA", rfa)):
        contestants.append((name, model, False, False))
        if static and name == "softmax":
            contestants.append((f"{name}, static cache", model, False, True))
        if compiled:
            contestants.append((f"{name}, compiled", model, True, True))
    points = [(source, batch, length) for source in sources for batch in batches for length in lengths]
    results = []
    with progress_bar() as progress:
        bar = progress.add_task("decoding", total=len(points))
        for source, batch, length in points:
            runs: dict[str, Callable[[], object]] = {}
            sizes: dict[str, int] = {}
            floor: dict[str, float] = {}
            if compiled:
                torch.compiler.reset()  # graphs of other points count towards the limit from which on nothing is compiled
            for name, model, compile_it, fixed in contestants:
                inputs = step_inputs(model, batch, source)
                cache = cache_at(model, inputs, length, room=ROOM + steps if fixed else 0)
                sizes[name] = cache_num_bytes(cache)
                runs[name] = partial(torch.compile(model) if compile_it else model, **inputs, past_key_values=cache)
                if machine is not None:
                    floor[name] = decoding_floor(model, machine, batch=batch, cache_bytes=sizes[name])
            times = interleaved(runs, steps, rfa.device, warm=WARM_COMPILED if compiled else WARM)
            results.append(Point("decoding", length, batch, times, sizes, floor, source))
            progress.advance(bar)
    return results


@torch.no_grad()
def prefill(softmax: Any, rfa: Any, *, lengths: Sequence[int], batches: Sequence[int], steps: int = 3) -> list[Point]:
    """Time reading prompts of some lengths into a cache, up to the logits of the last token; arguments as for `decoding`."""
    return _whole_texts("prefill", softmax, rfa, lengths, batches, steps)


def training(softmax: Any, rfa: Any, *, lengths: Sequence[int], batches: Sequence[int], steps: int = 3) -> list[Point]:
    """Time a loss and its gradients on texts of some lengths; arguments as for `decoding`."""
    return _whole_texts("training", softmax, rfa, lengths, batches, steps)


def _whole_texts(
    task: str, softmax: Any, rfa: Any, lengths: Sequence[int], batches: Sequence[int], steps: int
) -> list[Point]:
    results = []
    points = [(batch, length) for batch in batches for length in lengths]
    run = _read if task == "prefill" else _learn
    with progress_bar() as progress:
        bar = progress.add_task(task, total=len(points))
        for batch, length in points:
            ids = torch.randint(0, rfa.config.vocab_size, (batch, length), device=rfa.device)
            runs: dict[str, Callable[[], object]] = {
                "softmax": partial(run, softmax, ids),
                "RFA": partial(run, rfa, ids),
            }
            peaks = {
                name: peak_bytes(each, rfa.device) for name, each in runs.items()
            }  # their first, which does not count
            times = interleaved(runs, steps, rfa.device, warm=0)
            known = {name: peak for name, peak in peaks.items() if peak is not None}
            results.append(Point(task, length, batch, times, known))
            progress.advance(bar)
    return results


def _read(model: Any, ids: torch.Tensor) -> None:
    options = {"decoder_input_ids": ids[:, :1]} if model.config.is_encoder_decoder else {"logits_to_keep": 1}
    model(ids, use_cache=True, **options)


def _learn(model: Any, ids: torch.Tensor) -> None:
    model(ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad(set_to_none=True)
