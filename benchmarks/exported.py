"""An exported decoder beside its base model as a graph with a growing cache: milliseconds of CPU time a step, one thread.

python -m benchmarks.exported smollm2 float32/model.onnx int8/model.onnx --output benchmarks/results/exported.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
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
from hf_rfa.export.onnx_model import OPSET, save
from hf_rfa.export.running import Running

from .figures import print_as_is

LENGTHS = (128, 2_048, 8_192)


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


class Softmax:
    """A softmax graph with some tokens in its cache."""

    def __init__(self, path: Path, length: int) -> None:
        self.running, self.length = Running(path, threads=1), length
        shapes = [value.shape for value in self.running.session.get_inputs()[2:]]
        zeros = (np.zeros([1, shape[1], length, shape[3]], np.float32) for shape in shapes)
        self.running.states = [OrtValue.ortvalue_from_numpy(state) for state in zeros]

    def read(self, ids: Tensor) -> None:
        """Read a token."""
        self.running.read(ids, torch.tensor([[self.length]]))


def main() -> None:
    """Measure, in turns, and write the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base")
    parser.add_argument("graphs", nargs=2, type=Path, help="of float32, and of 8 bits")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    rows = []
    with TemporaryDirectory() as folder:
        paths = softmax_graphs(options.base, Path(folder))
        for graph, path in zip(options.graphs, paths, strict=True):
            for length in LENGTHS:
                ours, theirs = Running(graph, threads=1), Softmax(path, length)
                ours.read(torch.arange(5, 5 + min(length, 512))[None])
                times: dict[str, list[float]] = {"exported": [], "softmax": []}
                for _ in range(options.runs):
                    for kind, running in (("exported", ours), ("softmax", theirs)):
                        start = time.process_time()
                        running.read(torch.tensor([[5]]))
                        times[kind].append(1e3 * (time.process_time() - start))
                found = {kind: round(median(each[1:]), 2) for kind, each in times.items()}
                rows.append({"weights": path.stem, "tokens": length, **found})
                print_as_is(str(rows[-1]))
    about = {"command": " ".join(["python -m benchmarks.exported", *sys.argv[1:]]), "load": os.getloadavg()[0]}
    about |= {"onnxruntime": onnxruntime.__version__, "torch": torch.__version__}
    options.output.write_text(json.dumps({**about, "milliseconds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
