"""Time and memory of one decoding step against the position in the text, RFA against its softmax parent.

    python -m benchmarks.decoding                      # GPT-2 small's shape, random weights; writes docs/decoding.*
    python -m benchmarks.decoding --model demo/model   # a checkpoint's shape

Both models have the same weights. Steps are timed interleaved in one process, and medians are reported: on a shared
machine only the ratios mean something. The softmax model runs scaled-dot-product attention on a `DynamicCache`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from hf_rfa import RFAGPT2Config, RFAGPT2LMHeadModel, cache_num_bytes

Key = TypeVar("Key", bound=Hashable)

LENGTHS = (128, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Step:
    """Medians at one position: milliseconds per step and bytes of the cache, for a batch."""

    position: int
    batch: int
    softmax_ms: float
    rfa_ms: float
    softmax_bytes: int
    rfa_bytes: int


def at_position(model: PreTrainedModel, position: int, batch: int) -> DynamicCache:
    """Return a cache as after ``position`` tokens: filled with random keys and values, or with a prefilled state.

    What a step costs does not depend on what the cache holds, so softmax layers get random numbers instead of a prefill.
    """
    config = model.config
    cache = DynamicCache(config=config)
    if isinstance(config, RFAGPT2Config):
        model(torch.zeros(batch, 1, dtype=torch.long), past_key_values=cache)
        for layer in cache.layers:
            layer.cumulative_length = position  # type: ignore[union-attr]
        return cache
    shape = (batch, config.n_head, position, config.n_embd // config.n_head)
    for index in range(config.n_layer):
        cache.update(torch.randn(shape, dtype=model.dtype), torch.randn(shape, dtype=model.dtype), index)
    return cache


def interleaved(runs: dict[Key, Callable[[], object]], steps: int) -> dict[Key, float]:
    """Return the median milliseconds of each of some calls, run in turn ``steps`` times after one that does not count."""
    times: dict[Key, list[float]] = {key: [] for key in runs}
    for step in range(steps + 1):
        for key, run in runs.items():
            start = time.perf_counter()
            run()
            if step:
                times[key].append(1000 * (time.perf_counter() - start))
    return {key: statistics.median(values) for key, values in times.items()}


@torch.no_grad()
def measure(
    softmax: PreTrainedModel, rfa: PreTrainedModel, *, lengths: Sequence[int], batch: int, steps: int = 11
) -> list[Step]:
    """Time decoding steps of two models at some positions.

    Args:
        softmax: the softmax model, with positions enough.
        rfa: the RFA model, with positions enough.
        lengths: positions to time at.
        batch: sequences decoded at once.
        steps: steps timed per position and model; one more is run first.

    Returns:
        Medians for each position.
    """
    results = []
    token = torch.zeros(batch, 1, dtype=torch.long)
    for position in track(lengths, description=f"decoding, batch {batch}"):
        caches = {model: at_position(model, position, batch) for model in (softmax, rfa)}
        sizes = {model: cache_num_bytes(cache) for model, cache in caches.items()}
        medians = interleaved({model: partial(model, token, past_key_values=caches[model]) for model in caches}, steps)
        results.append(Step(position, batch, medians[softmax], medians[rfa], sizes[softmax], sizes[rfa]))
    return results


def table(results: Sequence[Step]) -> Table:
    """Return the results as a table to print."""
    shown = Table(title="one decoding step")
    for column in ("position", "batch", "softmax ms", "RFA ms", "speed-up", "softmax cache MiB", "RFA state MiB"):
        shown.add_column(column, justify="right")
    for row in results:
        shown.add_row(
            f"{row.position:,}",
            str(row.batch),
            f"{row.softmax_ms:.2f}",
            f"{row.rfa_ms:.2f}",
            f"{row.softmax_ms / row.rfa_ms:.2f} ×",
            f"{row.softmax_bytes / 2**20:.2f}",
            f"{row.rfa_bytes / 2**20:.2f}",
        )
    return shown


def plot(results: Sequence[Step], path: Path, title: str) -> None:
    """Draw time and memory against the position."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.6))
    positions = [row.position for row in results]
    for axes, what, softmax, rfa in (
        (left, "ms per step", [row.softmax_ms for row in results], [row.rfa_ms for row in results]),
        (
            right,
            "cache, MiB",
            [row.softmax_bytes / 2**20 for row in results],
            [row.rfa_bytes / 2**20 for row in results],
        ),
    ):
        axes.plot(positions, softmax, marker="o", color="#b3432b", label="softmax")
        axes.plot(positions, rfa, marker="o", color="#1f6f8b", label="RFA")
        axes.set_xscale("log", base=2)
        axes.set_xticks(positions, [f"{position:,}" for position in positions], fontsize=8)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("position in the text")
        axes.set_ylabel(what)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def pair(config: GPT2Config, positions: int) -> tuple[GPT2LMHeadModel, RFAGPT2LMHeadModel]:
    """Return a softmax model of random weights with ``positions`` positions, and an RFA model with the same weights."""
    stretched = GPT2Config(**{**config.to_dict(), "n_positions": positions})
    softmax = GPT2LMHeadModel(stretched).eval()
    rfa = RFAGPT2LMHeadModel(RFAGPT2Config.from_parent(stretched)).eval()
    rfa.load_state_dict(softmax.state_dict(), strict=False)
    return softmax, rfa


def main() -> None:
    """Measure, print, and write JSON and PNG."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="checkpoint whose shape is taken; default GPT-2 small's")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--output", type=Path, default=Path("docs/decoding"), help="path without suffix")
    args = parser.parse_args()
    config = GPT2Config() if args.model is None else GPT2Config.from_pretrained(args.model)
    softmax, rfa = pair(config, max(args.lengths) + 64)
    results = measure(softmax, rfa, lengths=args.lengths, batch=args.batch)
    Console().print(table(results))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    name = args.model or "GPT-2 small's shape"
    about = {"model": name, "threads": torch.get_num_threads(), "torch": torch.__version__}
    args.output.with_suffix(".json").write_text(
        json.dumps({**about, "steps": [asdict(row) for row in results]}, indent=2) + "\n"
    )
    title = f"One decoding step, {name}, float32, batch {args.batch}, {torch.get_num_threads()} CPU threads"
    plot(results, args.output.with_suffix(".png"), title)


if __name__ == "__main__":
    main()
