"""``hf-rfa bench``."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import Dtype, UsageError, in_a_folder, number


class Task(StrEnum):
    """What `bench_command` times."""

    decoding = "decoding"
    prefill = "prefill"
    training = "training"


#: Lengths unless told otherwise.
LENGTHS = {Task.decoding: [128, 512, 2048, 8192], Task.prefill: [1024, 4096], Task.training: [1024, 4096]}


def bench_command(
    model: Annotated[
        str, typer.Option(help="gpt2 or bart-base for their shapes, or a checkpoint, softmax or RFA, for its own.")
    ] = "gpt2",
    task: Annotated[list[Task] | None, typer.Option(help="What to time; may be repeated. Default: decoding.")] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Positions, or tokens at once: 128,2048,16384. Default: by task.")
    ] = None,
    batches: Annotated[str, typer.Option(help="Sequences at once: 1,8,32.")] = "8",
    sources: Annotated[str, typer.Option(help="Tokens of the source, for models with an encoder.")] = "512",
    feature_map: Annotated[str | None, typer.Option(help="The RFA model's feature map. Default: positive.")] = None,
    num_features: Annotated[int | None, number("D. Default: the map's.", 1)] = None,
    window: Annotated[int, number("W, tokens seen exactly.", 0)] = 0,
    gate: Annotated[bool, typer.Option("--gate", help="With gates.")] = False,
    static: Annotated[bool, typer.Option("--static", help="Softmax on a StaticCache as well.")] = False,
    compiled: Annotated[bool, typer.Option("--compile", help="Both under torch.compile as well.")] = False,
    steps: Annotated[int, number("Steps timed per point; medians are reported.", 1)] = 11,
    device: Annotated[str, typer.Option(help="cpu, cuda, …")] = "cpu",
    dtype: Annotated[Dtype, typer.Option(help="Precision of both.")] = Dtype.float32,
    output: Annotated[
        Path | None,
        typer.Option(callback=in_a_folder, help="Write OUTPUT.json, and one picture a task, OUTPUT-TASK.png."),
    ] = None,
) -> None:
    """Time RFA against its softmax parent (SDPA), same weights, in one process, in turn: medians and ratios."""
    tasks = task or [Task.decoding]
    counts = {"--batches": _numbers("--batches", batches), "--sources": _numbers("--sources", sources)}
    chosen = {each: LENGTHS[each] if lengths is None else _numbers("--lengths", lengths) for each in tasks}
    if (static or compiled) and Task.decoding not in tasks:
        raise UsageError("--static and --compile are about decoding: pass --task decoding with them.")

    import torch
    from huggingface_hub.errors import StrictDataclassError

    from hf_rfa import bench
    from hf_rfa.bench.models import SHAPES
    from hf_rfa.console import console, errors
    from hf_rfa.convert.atomic_io import check_file, new_file
    from hf_rfa.errors import InputError
    from hf_rfa.inference import read_config

    if output is not None:
        for end in (".json", *(f"-{each.value}.png" for each in tasks)):
            check_file(output.parent / f"{output.name}{end}")
    config: Any = SHAPES[model] if model in SHAPES else read_config(model)
    if config.is_encoder_decoder and set(tasks) != {Task.decoding}:
        raise InputError("models with an encoder are timed at decoding: pass --task decoding.")
    load = bench.Load.now()
    if device == "cpu" and (warning := load.warning()):
        errors.print(warning, style="yellow", markup=False, highlight=False, soft_wrap=True)
    longest = max(max(each) for each in chosen.values())
    if config.is_encoder_decoder:
        longest = max(longest, *counts["--sources"])
    given = {"feature_map": feature_map, "num_features": num_features, "window": window, "gate": gate}
    options = {name: value for name, value in given.items() if value}
    try:
        torch.empty(0, device=device)  # before models are made for one that is not there
        softmax, rfa = bench.pair(config, longest + steps + 16, **options)
        softmax, rfa = (each.to(device, getattr(torch, dtype)) for each in (softmax, rfa))
    except (ValueError, RuntimeError, AssertionError, StrictDataclassError) as error:
        raise InputError(f"cannot make the models: {error}") from error
    about: dict[str, Any] = {"model": model, "dtype": dtype, "device": device, **asdict(load)}
    about |= {"torch": torch.__version__, "options": {name: getattr(rfa.config, name) for name in given}}
    machine = bench.measure_machine(device, getattr(torch, dtype))
    about |= {"bandwidth": machine.bandwidth, "peak": machine.peak}
    console.print(f"{machine.bandwidth / 1e9:.1f} GB/s read, {machine.peak / 1e9:.0f} GFLOP/s")
    results = {}
    for each in tasks:
        shared: dict[str, Any] = {"lengths": chosen[each], "batches": counts["--batches"], "steps": steps}
        if each == Task.decoding:
            shared |= {"static": static, "compiled": compiled, "machine": machine}
            shared |= {"sources": counts["--sources"]} if config.is_encoder_decoder else {}
            results[each.value] = bench.decoding(softmax, rfa, **shared)
        else:
            results[each.value] = (bench.prefill if each == Task.prefill else bench.training)(softmax, rfa, **shared)
        caption = f"{model}, {dtype}, {device}, {load}"
        console.print(bench.table(results[each.value], caption))
        if output is not None:
            title = f"{each.value}, {caption}"
            bench.plot(results[each.value], output.parent / f"{output.name}-{each.value}.png", title)
    if output is not None:
        with new_file(output.parent / f"{output.name}.json") as file:
            points = {name: [asdict(point) for point in found] for name, found in results.items()}
            json.dump({**about, "points": points}, file, indent=1)


def _numbers(option: str, text: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise UsageError(f"{option} must be whole numbers of at least 1, such as 128,2048, got {text!r}.")
    return found
