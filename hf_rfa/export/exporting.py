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
from .figures import ExportReport, Measured, measure
from .graph import DecoderGraph, check_exportable
from .step import DecodingStep

Runtime = Literal["genai", "transformers.js"]
#: What the extras ``hf-rfa[export]`` and ``hf-rfa[executorch]`` install.
ONNX, EXECUTORCH = ("onnx", "onnxscript", "onnxruntime"), ("executorch",)
#: Largest difference of two logits, over the largest logit, that a float32 graph may have.
MAX_DIFFERENCE = 1e-3


def export_onnx(
    checkpoint: str,
    folder: str | Path,
    *,
    int8: bool = False,
    runtime: Runtime | None = None,
    overwrite: bool = False,
    progress: Callable[[str, int], None] = lambda step, number: None,
) -> ExportReport:
    """Export a converted decoder to one ONNX graph whose states never grow.

    The graph reads any number of tokens of any number of texts. Inputs are ``input_ids`` [batch, tokens]; ``attention_mask``
    [batch, any number], whose last columns are 0 where a token is padding; and the states, which begin as zeros. Outputs are
    the logits of the last token, and the states after it. Positions do not end where those of the checkpoint do not.

    Args:
        checkpoint: folder of the checkpoint, or its name on the hub.
        folder: what is written, whole or not at all.
        int8: store weights in 8 bits, for transformers.js in a coarser way that browsers multiply faster.
        runtime: whose names and files the folder gets; None for onnxruntime itself.
        overwrite: replace a checkpoint that is there.
        progress: called with the name of every step, and 1.

    Returns:
        The figures, which stand in the folder's ``export.json`` too.

    Raises:
        InputError: if the checkpoint cannot be exported, if packages are missing, or if the graph's logits are not the
            model's; nothing is written then.
    """
    folder = Path(folder)
    _check(checkpoint, folder, check_exportable, packages=ONNX, extra="export", overwrite=overwrite)
    from . import runtimes
    from .int8 import quantize
    from .onnx_model import make_model, save
    from .running import Running

    progress("loading", 1)
    model, tokenizer = load_model(checkpoint, kind="causal", dtype="float32", need_tokenizer=False)
    check_space(folder, (1 if int8 else 4) * sum(weight.numel() for weight in model.parameters()))
    graph = DecoderGraph(model)
    progress("writing the graph", 1)
    exported = make_model(graph, model.config.vocab_size)
    if int8:
        progress("storing weights in 8 bits", 1)
        quantize(exported, by_blocks=runtime != "transformers.js")
    if runtime == "genai":
        runtimes.name_for_genai(exported.graph)
    elif runtime == "transformers.js":
        layers = runtimes.name_for_transformers_js(exported.graph)
    with new_folder(folder) as work:
        path = work / "model.onnx"
        if runtime == "transformers.js":
            path = work / "onnx" / f"model{'_quantized' if int8 else ''}.onnx"
            path.parent.mkdir()
        save(exported, path)
        del exported
        progress("comparing it with torch", 1)
        found = measure(model, Running(path))
        if not int8:
            _check_figures(found)
        model.config.to_json_file(work / "config.json")
        if runtime == "genai":
            runtimes.write_genai_config(model, work)
        elif runtime == "transformers.js":
            runtimes.write_transformers_js_config(model, layers, path.name, work)
        return _finish(
            work,
            tokenizer,
            source=str(checkpoint),
            destination=str(folder),
            int8=int8,
            num_bytes=sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*")),
            state_bytes=sum(4 * math.prod(shape) for _, shape in graph.states()),
            **asdict(found),
        )


def export_executorch(
    checkpoint: str,
    folder: str | Path,
    *,
    overwrite: bool = False,
    progress: Callable[[str, int], None] = lambda step, number: None,
) -> ExportReport:
    """Export a converted decoder to one ExecuTorch program, whose states are buffers that never grow.

    ``model.pte`` has the methods that ExecuTorch's own text runner calls. ``forward(tokens [1, 1], input_pos [1])`` reads one
    token and returns its logits [1, 1, vocabulary]. A text begins at position 0, and ends where the positions end that the
    model was trained for: logits past them are NaN.

    Args:
        checkpoint: folder of the checkpoint, or its name on the hub.
        folder: what is written, whole or not at all.
        overwrite: replace a checkpoint that is there.
        progress: called with the name of every step, and 1.

    Returns:
        The figures, which stand in the folder's ``export.json`` too.

    Raises:
        InputError: if the checkpoint cannot be exported, if packages are missing, or if the program's logits are not the
            model's; nothing is written then.
    """
    folder = Path(folder)
    _check(checkpoint, folder, DecodingStep, packages=EXECUTORCH, extra="executorch", overwrite=overwrite)
    from .executorch_program import RunningProgram, write_program

    progress("loading", 1)
    model, tokenizer = load_model(checkpoint, kind="causal", dtype="float32", need_tokenizer=False)
    check_space(folder, 4 * sum(weight.numel() for weight in model.parameters()))
    with new_folder(folder) as work:
        path = work / "model.pte"
        progress("writing the program", 1)
        state_bytes = write_program(model, path)
        progress("comparing it with torch", 1)
        found = measure(model, RunningProgram(path))
        _check_figures(found)
        model.config.to_json_file(work / "config.json")
        return _finish(
            work,
            tokenizer,
            source=str(checkpoint),
            destination=str(folder),
            int8=False,
            num_bytes=path.stat().st_size,
            state_bytes=state_bytes,
            **asdict(found),
        )


def _check(
    checkpoint: str,
    folder: Path,
    check: Callable[[Any], Any],
    *,
    packages: tuple[str, ...],
    extra: str,
    overwrite: bool,
) -> None:
    """Raise an `InputError` unless packages are there, a folder may be written, and ``check`` takes the model."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise InputError(f"an export needs {', '.join(missing)}: pip install 'hf-rfa[{extra}]'.")
    check_destination(folder, overwrite=overwrite, sources=(Path(checkpoint),))
    config: Any = read_config(checkpoint)
    if kind_of(config) != "causal":
        raise InputError(f"this {config.model_type} model has an encoder, and only decoders are exported.")
    with torch.device("meta"):
        check(AutoModelForCausalLM.from_config(config))


def _check_figures(found: Measured) -> None:
    """Raise an `InputError` unless float32 logits are the model's."""
    if not found.difference <= MAX_DIFFERENCE:
        raise InputError(
            f"the graph's logits differ from the model's by {found.difference:.1e} of the largest; it is not kept."
        )


def _finish(work: Path, tokenizer: Any, **figures: Any) -> ExportReport:
    """Write the tokenizer and the figures to a folder, and return these."""
    if tokenizer is not None:
        tokenizer.save_pretrained(work)
    report = ExportReport(**figures)
    (work / "export.json").write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    return report
