"""An exported decoder beside its base model as a graph with a growing cache: milliseconds of CPU time a token, one thread.

Every graph runs alone in a process, in turns: of two in one process, the one that was loaded first is up to 15 % slower.

python -m benchmarks.exported smollm2 float32/model.onnx int8/model.onnx --output benchmarks/results/exported.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from onnxruntime import OrtValue
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM

from hf_rfa.export.int8 import quantize
from hf_rfa.export.onnx_model import save
from hf_rfa.export.running import RunningGraph
from hf_rfa.export.traced import OPSET

from .figures import print_as_is

#: Tokens that are there, and tokens that are read: a prompt, and steps.
CASES = ((0, 1_000), (128, 1), (2_048, 1), (8_192, 1))


class Growing(nn.Module):
    """A softmax model whose keys and values are inputs and outputs."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        AttentionInterface.register("growing", self.attend)
        model.set_attn_implementation("growing")

    def forward(self, ids: Tensor, positions: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """Return the logits of the last token, and keys and values."""
        self.states = list(states)
        logits = self.model(ids, position_ids=positions, use_cache=False, logits_to_keep=1).logits
        return logits, *self.states

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        """Attend, as a function of transformers' attention interface."""
        place = slice(2 * module.layer_idx, 2 * module.layer_idx + 2)
        key, value = (torch.cat(pair, 2) for pair in zip(self.states[place], (key, value), strict=True))
        self.states[place] = key, value
        queries = query.unflatten(1, (key.shape[1], -1)) * module.scaling
        last, every = query.shape[2], torch.arange(key.shape[2])
        seen = every <= torch.arange(last)[:, None] + (key.shape[2] - last)
        logits = torch.where(seen, queries @ key[:, :, None].mT, -1e30)
        return (logits.softmax(-1) @ value[:, :, None]).flatten(1, 2).transpose(1, 2), None


def softmax_graphs(base: str, folder: Path) -> list[Path]:
    """Return the files of a softmax model's graph, of float32 and of 8 bits."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    config, size = model.config, torch.export.Dim.DYNAMIC
    states = [
        torch.zeros(1, config.num_key_value_heads, 7, config.head_dim) for _ in range(2 * config.num_hidden_layers)
    ]
    arguments = (torch.zeros(1, 5, dtype=torch.long), torch.arange(7, 12)[None], *states)
    shapes = ({1: size}, {1: size}, tuple({2: size} for _ in states))
    with torch.no_grad():
        program: Any = torch.onnx.export(
            Growing(model), arguments, dynamo=True, verbose=False, opset_version=OPSET, dynamic_shapes=shapes
        )
    save(program.model, folder / "float32.onnx")
    quantized = ir.load(folder / "float32.onnx")
    quantize(quantized)
    save(quantized, folder / "int8.onnx")
    return [folder / "float32.onnx", folder / "int8.onnx"]


def token_times(path: Path, length: int, count: int, grows: bool, runs: int) -> list[float]:
    """Return milliseconds a token of some tokens behind others, of which a cache that grows has zeros."""
    running, positions, times = RunningGraph(path, threads=1), None, []
    if grows:
        shapes = [value.shape for value in running.session.get_inputs()[2:]]
        zeros = (np.zeros([1, shape[1], length, shape[3]], np.float32) for shape in shapes)
        running.states = [OrtValue.ortvalue_from_numpy(state) for state in zeros]
        positions = torch.arange(length, length + count)[None]
    elif length:
        running.read(torch.arange(5, 5 + min(length, 512))[None])
    states = running.states
    for _ in range(runs):
        running.states = states
        start = time.process_time()
        running.read(torch.arange(5, 5 + count)[None], positions)
        times.append(1e3 * (time.process_time() - start) / count)
    return times[1:]


def main() -> None:
    """Measure, in turns, and write the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base")
    parser.add_argument("graphs", nargs=2, type=Path, help="of float32, and of 8 bits")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    with (
        TemporaryDirectory() as folder,
        ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as alone,
    ):
        for graph, path in zip(options.graphs, softmax_graphs(options.base, Path(folder)), strict=True):
            for length, count in CASES:
                times: dict[str, list[float]] = {"exported": [], "softmax": []}
                for _ in range(3):
                    for kind, file in (("exported", graph), ("softmax", path)):
                        case = (file, length, count, kind == "softmax", 40 if count == 1 else 4)
                        times[kind] += alone.submit(token_times, *case).result()
                medians = {kind: round(median(numbers), 2) for kind, numbers in times.items()}
                rows.append({"weights": path.stem, "tokens": length, "read": count, **medians})
                print_as_is(str(rows[-1]))
    about = {"command": " ".join(["python -m benchmarks.exported", *sys.argv[1:]]), "torch": torch.__version__}
    about |= {"onnxruntime": onnxruntime.__version__}
    options.output.write_text(json.dumps({**about, "milliseconds a token": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
