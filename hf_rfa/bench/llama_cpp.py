"""llama.cpp as a further contestant: steps of one sequence on a CPU, from a GGUF file, by the package xllamacpp.

It runs beside torch in this process, but not in turn with it: a position at a time, after torch's contestants.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hf_rfa.errors import InputError
from hf_rfa.gguf_files import open_gguf

from .tasks import Point, Progress

NAME = "llama.cpp"
#: Tokens of its context beside those of a prompt and of the steps timed.
SPARE = 16
#: The package that has llama.cpp's server.
PACKAGE = "xllamacpp"


def llama_cpp_positions(gguf: Path, *, steps: int = 0) -> int:
    """Return the last position that llama.cpp can be timed at: it takes no more tokens than a model was trained with.

    Raises:
        InputError: if llama.cpp cannot be had, or if a file is no GGUF file.
    """
    if importlib.util.find_spec(PACKAGE) is None:
        raise InputError(f"llama.cpp is timed by the package {PACKAGE}, which is not installed: pip install {PACKAGE}")
    return int(getattr(open_gguf(gguf).config, "max_position_embeddings", 0)) - steps - SPARE


def with_llama_cpp(
    points: Sequence[Point], gguf: Path, *, most: int, steps: int, progress: Progress | None = None
) -> list[Point]:
    """Return decoding points with llama.cpp's mean milliseconds a step among them, at those of batch 1 that it can reach.

    It computes with as many threads as torch, on a CPU, with its own defaults: keys and values in float16.

    Args:
        points: of `hf_rfa.bench.decoding`.
        gguf: the model.
        most: the last position that it can be timed at (`llama_cpp_positions`).
        steps: steps timed per point.
        progress: receives (points done, points in all).

    Raises:
        InputError: if llama.cpp cannot be had, or refuses the model or a length.
    """
    lengths = sorted({point.length for point in points if point.batch == 1 and point.length <= most})
    if not lengths:
        raise InputError(
            f"llama.cpp is timed with one sequence, of up to {most} tokens of this model: there is no such point."
        )
    found: dict[int, float] = {}
    server = _server(gguf, max(lengths) + steps + SPARE)
    for number, length in enumerate(lengths, start=1):
        found[length] = _milliseconds(server, length, steps)
        if progress is not None:
            progress(number, len(lengths))
    return [
        replace(point, milliseconds={**point.milliseconds, NAME: found[point.length]})
        if point.batch == 1 and point.length in found
        else point
        for point in points
    ]


def _server(gguf: Path, context: int) -> Any:
    """Return llama.cpp's server for one sequence of so many tokens."""
    package: Any = importlib.import_module(PACKAGE)
    settings = package.CommonParams()
    settings.model.path = str(gguf)
    settings.n_ctx, settings.n_parallel, settings.n_gpu_layers = context, 1, 0
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = torch.get_num_threads()
    settings.verbosity = -1
    try:
        return package.Server(settings)
    except Exception as error:  # it has no class of errors of its own
        raise InputError(f"llama.cpp cannot load {gguf}: {error}") from error


def _milliseconds(server: Any, length: int, steps: int) -> float:
    """Return the mean milliseconds of the steps after ``length`` tokens; what shorter prompts left is not read again."""
    request = {"prompt": [1] * length, "n_predict": steps + 1, "ignore_eos": True, "cache_prompt": True}
    answer = server.handle_completions({**request, "temperature": 0.0})
    if "timings" not in answer:
        raise InputError(f"llama.cpp refuses {length} tokens: {answer.get('error', answer)}")
    return float(answer["timings"]["predicted_per_token_ms"])
