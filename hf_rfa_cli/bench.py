"""``hf-rfa bench``."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .console import console, shown_count, starting, warn
from .options import UsageError, in_a_folder


class Task(StrEnum):
    """The tasks that `bench_command` times."""

    decoding = "decoding"
    prefill = "prefill"
    training = "training"


def bench_command(
    model: Annotated[
        str,
        typer.Option(help="gpt2, bart-base or smollm2-135m for their shapes, or a checkpoint, softmax or RFA."),
    ] = "gpt2",
    task: Annotated[list[Task] | None, typer.Option(help="What to time; may be repeated. Default: decoding.")] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Positions, or tokens at once: 128,2048,16384. Default: by task.")
    ] = None,
    batches: Annotated[str, typer.Option(help="Sequences at once: 1,8,32.")] = "8",
    sources: Annotated[str, typer.Option(help="Tokens of the encoder's input, for models with an encoder.")] = "512",
    feature_map: Annotated[str | None, typer.Option(help="The RFA model's feature map. Default: positive.")] = None,
    num_features: Annotated[int | None, typer.Option(min=1, help="D. Default: the map's.")] = None,
    window_size: Annotated[int, typer.Option(min=0, help="W, size of the sliding window of softmax attention.")] = 0,
    gate: Annotated[bool, typer.Option("--gate", help="With gates.")] = False,
    static: Annotated[bool, typer.Option("--static", help="Softmax on a StaticCache as well.")] = False,
    compiled: Annotated[bool, typer.Option("--compile", help="Both under torch.compile as well.")] = False,
    steps: Annotated[int, typer.Option(min=1, help="Steps timed per point; medians are reported.")] = 11,
    device: Annotated[str, typer.Option(help="cpu, cuda, …")] = "cpu",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        typer.Option(help="Precision of both."),
    ] = "float32",
    output: Annotated[
        Path | None,
        typer.Option(callback=in_a_folder, help="Write OUTPUT.json, and one picture a task, OUTPUT-TASK.png."),
    ] = None,
) -> None:
    """Time RFA against its softmax parent (SDPA), same weights, in one process, in turn: medians and ratios."""
    tasks = task or [Task.decoding]
    sizes = {"batches": _numbers("--batches", batches), "sources": _numbers("--sources", sources)}
    default = {each: "128,512,2048,8192" if each == "decoding" else "1024,4096" for each in tasks}
    chosen = {each: _numbers("--lengths", default[each] if lengths is None else lengths) for each in tasks}
    if (static or compiled) and "decoding" not in tasks:
        raise UsageError("--static and --compile are about decoding: pass --task decoding with them.")

    starting(f"timing {model} ({', '.join(tasks)})")
    import torch
    from huggingface_hub.errors import StrictDataclassError

    from hf_rfa import bench
    from hf_rfa.bench.models import SHAPES
    from hf_rfa.errors import InputError
    from hf_rfa.inference.loading import read_config
    from hf_rfa.io.atomic_io import check_file, new_file

    files = {end: Path(f"{output}{end}") for end in (".json", *(f"-{each}.png" for each in tasks)) if output}
    for path in files.values():
        check_file(path)
    config: Any = SHAPES[model] if model in SHAPES else read_config(model)
    if config.is_encoder_decoder and set(tasks) != {"decoding"}:
        raise InputError("models with an encoder are timed at decoding: pass --task decoding.")
    load = bench.Load.now()
    if device == "cpu" and (warning := load.warning()):
        warn(warning)
    longest = max(max(each) for each in [*chosen.values(), sizes["sources"] if config.is_encoder_decoder else [0]])
    given = {"feature_map": feature_map, "num_features": num_features, "window_size": window_size, "gate": gate}
    try:
        torch.empty(0, device=device)  # before models are made for one that is not there
        options = {name: value for name, value in given.items() if value}
        softmax, rfa = bench.pair(config, longest + steps + 16, **options)
        computed = getattr(torch, dtype)
        softmax, rfa = (each.to(device, computed) for each in (softmax, rfa))
    except (ValueError, RuntimeError, AssertionError, StrictDataclassError) as error:
        raise InputError(f"cannot make the models: {error}") from error
    caption = f"{model}, {dtype}, {device}, {load}"
    results: dict[str, list[bench.Point]] = {}
    for each in tasks:
        with shown_count(each) as progress:
            shared: dict[str, Any] = {"lengths": chosen[each], "batches": sizes["batches"], "steps": steps}
            shared["progress"] = progress
            if each == "decoding":
                shared |= {"sources": sizes["sources"]} if config.is_encoder_decoder else {}
                shared |= {"static": static, "compiled": compiled}
                results[each] = bench.decoding(softmax, rfa, **shared)
            else:
                results[each] = bench.whole_sequences(each, softmax, rfa, **shared)
        console.print(bench.table(results[each], caption))
        if output is not None:
            bench.plot(results[each], files[f"-{each}.png"], f"{each}, {caption}")
    if output is not None:
        about: dict[str, Any] = {"model": model, "dtype": dtype, "device": device, **asdict(load)}
        about |= {"torch": torch.__version__, "options": {name: getattr(rfa.config, name) for name in given}}
        about |= {"points": {each: [asdict(point) for point in found] for each, found in results.items()}}
        with new_file(files[".json"]) as file:
            json.dump(about, file, indent=1)


def _numbers(option: str, text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise UsageError(f"{option} must be whole numbers of at least 1, such as 128,2048, got {text!r}.")
    return [int(word) for word in words]
