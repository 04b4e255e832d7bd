"""``hf-rfa bench``."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.progress import track
from typer import Option

from .console import console, errors, starting, warn
from .options import Device, UsageError, in_a_folder
from .threads import Load

#: Positions, or tokens at once, by task.
LENGTHS = {"decoding": [128, 512, 2048, 8192], "prefill": [1024, 4096], "training": [1024, 4096]}
#: Their names; typer reads no list of `Literal`.
Task = StrEnum("Task", ["decoding", "prefill", "training"])


def _sizes(text: str) -> list[int]:
    """Read whole numbers: "128,2048"."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise typer.BadParameter(f"it must be whole numbers of at least 1, such as 128,2048, got {text!r}.")
    return [int(word) for word in words]


sizes = partial(Option, parser=_sizes, metavar="SIZES")


def bench_command(
    model: Annotated[str | None, Option(help="A checkpoint, for its shape. Default: GPT-2's shape.")] = None,
    task: Annotated[list[Task] | None, Option(help="What to time; may be repeated. Default: decoding.")] = None,
    lengths: Annotated[Any, sizes(help="Positions, or tokens at once: 128,2048,16384. Default: by task.")] = None,
    batches: Annotated[Any, sizes(help="Sequences at once: 1,8,32.")] = "8",
    sources: Annotated[Any, sizes(help="Tokens of the encoder's input, for models with an encoder.")] = "512",
    static: Annotated[bool, Option("--static", help="Softmax on a StaticCache as well.")] = False,
    compiled: Annotated[bool, Option("--compile", help="Both under torch.compile too, as always on a GPU.")] = False,
    steps: Annotated[int, Option(min=1, help="Steps timed per point; medians are reported.")] = 11,
    device: Device = "cpu",
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], Option(help="Precision of both.")] = "float32",
    output: Annotated[Path | None, Option(callback=in_a_folder, help="Write OUTPUT.json.")] = None,
) -> None:
    """Time RFA against its softmax parent (SDPA), same weights, in one process, in turn: medians and ratios."""
    tasks = [each.value for each in task or [Task.decoding]]
    if (static or compiled) and "decoding" not in tasks:
        raise UsageError("--static and --compile are about decoding: pass --task decoding with them.")
    name = model or "gpt2"
    starting(f"timing {name} ({', '.join(tasks)})")
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from transformers import GPT2Config

    from hf_rfa import bench
    from hf_rfa.errors import InputError
    from hf_rfa.inference.loading import find_device, read_config
    from hf_rfa.io.atomic_io import check_file, new_file
    from hf_rfa.models.modeling_rfa_decoder import COMPILING_DEVICES

    path = Path(f"{output}.json")
    if output is not None:
        check_file(path)
    config: Any = GPT2Config() if model is None else read_config(model)
    if config.is_encoder_decoder and set(tasks) != {"decoding"}:
        raise InputError("models with an encoder are timed at decoding: pass --task decoding.")
    torch_device, load = find_device(device), Load.now()
    if torch_device.type == "cpu" and (warning := load.warning()):
        warn(warning)
    compiled = compiled or torch_device.type in COMPILING_DEVICES
    sources = sources if config.is_encoder_decoder else [0]
    cases = {each: list(product(sources, batches, lengths or LENGTHS[each])) for each in tasks}
    positions = max(max(source, length) for each in tasks for source, _, length in cases[each])
    try:
        pair = bench.pair(config, positions + steps + 16)
    except (ValueError, StrictDataclassError) as error:
        raise InputError(f"cannot make the models: {error}") from error
    softmax, rfa = (each.to(torch_device, getattr(torch, dtype)) for each in pair)
    caption = f"{name}, {dtype}, {torch_device}, {load}"
    points: dict[str, list[bench.Point]] = {each: [] for each in tasks}
    for each in tasks:
        for source, batch, length in track(cases[each], each, console=errors):
            time = partial(bench.whole_sequences, each)
            if each == "decoding":
                time = partial(bench.decoding, source=source, static=static, compiled=compiled)
            points[each].append(time(softmax, rfa, length=length, batch=batch, steps=steps))
        console.print(bench.table(points[each], caption))
    if output is not None:
        about = {"model": name, "dtype": dtype, "device": str(torch_device), **asdict(load), "torch": torch.__version__}
        about |= {"config": rfa.config.to_diff_dict(), "points": points}
        with new_file(path) as file:
            json.dump(about, file, indent=1, default=asdict)
