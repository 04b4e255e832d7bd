"""Decoding steps of whole models: with and without CUDA graphs, and by batch and position."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig

from hf_rfa import bench
from hf_rfa.bench.measure import interleaved
from hf_rfa.bench.models import cache_at, step_inputs
from hf_rfa.inference.loading import read_config
from hf_rfa.models.cache_names import cache_argument

from .trial import FAILED, Setting, attempt

#: The models that are timed, by name: options of the conversion. All take the memory of 63 tokens.
MODELS: dict[str, dict[str, Any]] = {
    "31 + 4 tokens, 28 slots": {"feature_map": "none", "window_size": 31, "num_sinks": 4, "num_slots": 28},
    "128 features": {"feature_map": "positive", "num_features": 128},
}
POSITION = 2048
#: SmolLM2-135M's shape.
SHAPE = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
)


def shape(setting: Setting) -> Any:
    """Return the configuration of the model that is timed: tiny in a dry run, by default SmolLM2's."""
    if setting.model is not None:
        return read_config(setting.model)
    config = copy.deepcopy(SHAPE)
    if setting.dry:
        config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.vocab_size = 2, 36, 48, 64
        config.num_attention_heads, config.num_key_value_heads, config.head_dim = 6, 3, 6
    return config


def models(setting: Setting, positions: int, options: dict[str, Any]) -> tuple[Any, Any]:
    """Return the softmax and the RFA model on the device, in 16 bits."""
    dtype = torch.float32 if setting.dry else torch.bfloat16
    softmax, rfa = bench.pair(shape(setting), positions, **options)
    return softmax.to(setting.device, dtype), rfa.to(setting.device, dtype)


def run_graphs(setting: Setting) -> dict[str, Any]:
    """Time a step as it is and replayed from a CUDA graph, with what the graph's logits differ by."""
    found: dict[str, Any] = {}
    for name, options in MODELS.items():
        for batch in (1,) if setting.dry else (1, 8, 32):
            found[f"{name}, batch {batch}"] = attempt(partial(_graph, setting, options, batch))
    return found


@torch.no_grad()
def _graph(setting: Setting, options: dict[str, Any], batch: int) -> dict[str, Any]:
    torch.manual_seed(0)
    softmax, rfa = models(setting, POSITION + 64, options)
    steps = 1 if setting.dry else 15
    contestants: dict[str, Any] = {"softmax": softmax, "RFA": rfa}
    calls: dict[str, Callable[[], object]] = {}
    result: dict[str, Any] = {}
    for name, model in contestants.items():
        inputs = step_inputs(model, batch, 0)
        # Positions as tensors: what a graph replays reads no number of Python.
        inputs["position_ids"] = torch.full((batch, 1), POSITION, device=setting.device)
        cache = cache_at(model, step_inputs(model, batch, 0), POSITION, room=64)
        calls[name] = partial(model, **inputs, **cache_argument(cache))
        if setting.device.type == "cuda" and name == "RFA":
            step = captured(model, inputs, copy.deepcopy(cache))
            result["difference"] = difference(step, model, inputs, copy.deepcopy(cache))
            calls[f"{name}, graph"] = step
    if setting.device.type != "cuda":
        result["left out"] = "graphs need a CUDA device"
    return result | {"milliseconds": interleaved(calls, steps)}


@dataclass
class Captured:
    """A decoding step in a CUDA graph.

    Attributes:
        graph: the graph.
        logits: where a replay writes them.
        tensors: the tensors of the cache, which a replay reads and writes. The graph does not keep them: without a reference
            their memory would go to other tensors.
    """

    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    tensors: list[torch.Tensor]

    def __call__(self) -> torch.Tensor:
        """Take a step, and return its logits."""
        self.graph.replay()
        return self.logits


def captured(model: Any, inputs: dict[str, Any], cache: Any) -> Captured:
    """Return a step in a CUDA graph, with ``cache`` as it was before.

    A replay reads and changes the tensors that the cache held at the capture, as a step does. What the steps that warm up did
    is undone.
    """
    before = [tensor.clone() for tensor in _tensors(cache)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(**inputs, **cache_argument(cache))
    torch.cuda.current_stream().wait_stream(stream)
    tensors = _tensors(cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model(**inputs, **cache_argument(cache)).logits
    for tensor, value in zip(tensors, before, strict=True):
        tensor.copy_(value)
    return Captured(graph, logits, tensors)


def difference(step: Callable[[], torch.Tensor], model: Any, inputs: dict[str, Any], cache: Any) -> float:
    """Return the largest difference of a step's logits from the model's, as a share of the largest, in three steps.

    Every step has tokens of its own, written to where ``inputs`` has them. With the same tokens all values in a state would
    be equal, and no mistake in it would show.
    """
    worst = 0.0
    for _ in range(3):
        inputs["input_ids"].random_(model.config.vocab_size)
        expected = model(**inputs, **cache_argument(cache)).logits
        worst = max(worst, float((step() - expected).abs().max() / expected.abs().max()))
    return worst


def _tensors(cache: Any) -> list[torch.Tensor]:
    return [tensor for layer in cache.layers for tensor in (*layer.tensors().values(), layer.cumulative_length)]


def show_graphs(results: dict[str, Any], console: Console) -> None:
    """Print a row a model and batch."""
    table = Table(
        "model", "softmax, ms", "RFA, ms", "RFA from a graph, ms", "difference of its logits", title=f"at {POSITION:,}"
    )
    for name, found in results.items():
        if name == "seconds":
            continue
        times = found.get("milliseconds", {})
        cells = [f"{times[each]:.2f}" if each in times else FAILED for each in ("softmax", "RFA")]
        graph = f"{times['RFA, graph']:.2f}" if "RFA, graph" in times else found.get("left out", FAILED)
        table.add_row(name, *cells, graph, f"{found['difference']:.1e}" if "difference" in found else "")
    console.print(table)


def run_positions(setting: Setting) -> dict[str, Any]:
    """Time decoding beside softmax attention, by batch and position."""
    lengths, batches = ((16, 64), (1,)) if setting.dry else ((128, 2048, 8192, 32768), (1, 8, 32))
    return {name: attempt(partial(_positions, setting, options, lengths, batches)) for name, options in MODELS.items()}


def _positions(
    setting: Setting, options: dict[str, Any], lengths: tuple[int, ...], batches: tuple[int, ...]
) -> dict[str, Any]:
    softmax, rfa = models(setting, max(lengths) + 64, options)
    steps = 1 if setting.dry else 9
    points = [
        bench.decoding(softmax, rfa, length=length, batch=batch, steps=steps)
        for batch, length in product(batches, lengths)
    ]
    return {"points": [asdict(point) for point in points]}


def show_positions(results: dict[str, Any], console: Console) -> None:
    """Print a table a model."""
    for name, found in results.items():
        if name != "seconds" and FAILED not in found:
            console.print(bench.table([bench.Point(**point) for point in found["points"]], name))
