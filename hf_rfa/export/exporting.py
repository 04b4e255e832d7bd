"""``hf-rfa export``: a checkpoint's decoder as a folder for another runtime, compared with torch before it is there."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM

from ..errors import InputError
from ..inference.loading import kind_of, load_model, read_config
from ..io.atomic_io import check_destination, check_space, new_folder
from .figures import ExportReport, Running, measure
from .graph import DecoderGraph, check_exportable
from .step import check_shapes

Format = Literal["onnx", "executorch"]
Runtime = Literal["genai", "transformers.js"]
#: Called with the name of every step, and 1.
Progress = Callable[[str, int], None]
#: The packages of a format, and the extra that installs them.
NEEDED = {"onnx": (("onnx", "onnxscript", "onnxruntime"), "export"), "executorch": (("executorch",), "executorch")}
#: Largest difference of two logits, over the largest logit, that a float32 graph may have.
MAX_DIFFERENCE = 1e-3


def export(
    checkpoint: str,
    folder: str | Path,
    *,
    to: Format = "onnx",
    int8: bool = False,
    runtime: Runtime | None = None,
    overwrite: bool = False,
    progress: Progress = lambda step, number: None,
) -> ExportReport:
    """Export a converted decoder to one graph whose states never grow.

    An ONNX graph reads any number of tokens of any number of texts. Inputs are ``input_ids`` [batch, tokens];
    ``attention_mask`` [batch, any number], whose last columns are 0 where a token is padding; and the states, which begin as
    zeros. Outputs are the logits of the last token, and the states after it. Positions do not end where those of the
    checkpoint do not.

    An ExecuTorch program, ``model.pte``, has the methods that ExecuTorch's own text runner calls, and its states in buffers.
    ``forward(tokens [1, 1], input_pos [1])`` reads one token and returns its logits [1, 1, vocabulary]. A text begins at
    position 0, and ends where the positions end that the model was trained for: logits past them are NaN.

    Args:
        checkpoint: folder of the checkpoint, or its name on the hub.
        folder: what is written, whole or not at all.
        to: the format, ``"onnx"`` or ``"executorch"``.
        int8: store weights of an ONNX graph in 8 bits, for transformers.js in a coarser way that browsers multiply faster.
        runtime: whose names and files an ONNX graph gets; None for onnxruntime itself.
        overwrite: replace a checkpoint that is there.
        progress: called with the name of every step, and 1.

    Returns:
        The figures, which stand in the folder's ``export.json`` too.

    Raises:
        InputError: if the checkpoint cannot be exported, if packages are missing, or if the graph's logits are not the
            model's; nothing is written then.
    """
    folder = Path(folder)
    if to == "executorch" and (runtime or int8):
        raise InputError("8 bits and names of a runtime (--int8, --for) are of --to onnx: leave them out.")
    _check(checkpoint, folder, to, overwrite)
    progress("loading", 1)
    model, tokenizer = load_model(checkpoint, kind="causal", dtype="float32", need_tokenizer=False)
    check_space(folder, (1 if int8 else 4) * sum(weight.numel() for weight in model.parameters()))
    with new_folder(folder) as work:
        model.config.to_json_file(work / "config.json")
        if to == "onnx":
            path, state_bytes, running = _write_onnx(model, work, int8, runtime, progress)
        else:
            path, state_bytes, running = _write_program(model, work, progress)
        progress("comparing it with torch", 1)
        measured = measure(model, running)
        if not int8 and not measured.difference <= MAX_DIFFERENCE:
            raise InputError(
                f"the graph's logits differ from the model's by {measured.difference:.1e} of the largest; it is not kept."
            )
        if tokenizer is not None:
            tokenizer.save_pretrained(work)
        report = ExportReport(
            source=str(checkpoint),
            destination=str(folder),
            int8=int8,
            num_bytes=sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*")),
            state_bytes=state_bytes,
            **asdict(measured),
        )
        (work / "export.json").write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    return report


def _check(checkpoint: str, folder: Path, to: Format, overwrite: bool) -> None:
    """Raise an `InputError` unless packages are there, a folder may be written, and the model can be exported."""
    packages, extra = NEEDED[to]
    if missing := [name for name in packages if find_spec(name) is None]:
        raise InputError(f"an export needs {', '.join(missing)}: pip install 'hf-rfa[{extra}]'.")
    check_destination(folder, overwrite=overwrite, sources=(Path(checkpoint),))
    config: Any = read_config(checkpoint)
    if kind_of(config) != "causal":
        raise InputError(f"this {config.model_type} model has an encoder, and only decoders are exported.")
    if to == "executorch":
        return check_shapes(config)
    with torch.device("meta"):
        check_exportable(AutoModelForCausalLM.from_config(config))


def _write_onnx(
    model: Any, work: Path, int8: bool, runtime: Runtime | None, progress: Progress
) -> tuple[Path, int, Running]:
    """Write a graph and its runtime's files, and return its path, the bytes of its states, and what runs it."""
    from . import runtimes
    from .int8 import quantize
    from .onnx_model import make_model, save
    from .running import RunningGraph

    progress("writing the graph", 1)
    graph, path = DecoderGraph(model), work / "model.onnx"
    exported = make_model(graph, model.config.vocab_size)
    if int8:
        progress("storing weights in 8 bits", 1)
        quantize(exported, by_blocks=runtime != "transformers.js")
    if runtime == "genai":
        runtimes.name_for_genai(exported.graph)
        runtimes.write_genai_config(model, work)
    elif runtime == "transformers.js":
        path = work / "onnx" / f"model{'_quantized' if int8 else ''}.onnx"
        path.parent.mkdir()
        runtimes.write_transformers_js_config(model, runtimes.name_for_transformers_js(exported.graph), path.name, work)
    save(exported, path)
    return path, sum(4 * math.prod(shape) for _, shape in graph.states()), RunningGraph(path)


def _write_program(model: Any, work: Path, progress: Progress) -> tuple[Path, int, Running]:
    """Write an ExecuTorch program, and return its path, the bytes of its states, and what runs it."""
    from .executorch_program import RunningProgram, write_program

    path = work / "model.pte"
    return path, write_program(model, path, progress), RunningProgram(path)
