"""All that waits for a GPU, in one command of at most eight minutes.

    python -m benchmarks.gpu --output FOLDER          # a CUDA device
    python -m benchmarks.gpu --dry --output FOLDER    # tiny shapes on a CPU, to see that all cases run

``FOLDER/gpu.json`` is written after each case, and cases that are in it are not run again. What fails, a result that is wrong
or a length that does not fit, is recorded with its reason, shown in the tables and listed at the end; the rest goes on. What
the deadline leaves out is no failure, and is run by the next call. The status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

from hf_rfa.io.atomic_io import new_file

from . import attention, conversion, generation, parity, tables, training
from .trial import Case, Results, Setting, failures, run


def cases(setting: Setting) -> Iterator[Case]:
    """Yield all cases; what takes compilers long and has no target comes last."""
    yield from parity.cases(setting)
    yield from training.cases(setting, compiled=False)
    yield from attention.cases(setting)
    yield from generation.cases(setting, generation.AS_THEY_COME)
    yield from conversion.cases(setting)
    yield from generation.cases(setting, generation.OTHERS)
    yield from training.cases(setting, compiled=True)


def about(setting: Setting) -> dict[str, Any]:
    """Return what the figures are of: device and versions."""
    cuda = setting.device.type == "cuda"
    device = torch.cuda.get_device_name() if cuda else platform.processor() or "cpu"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"device": device, "dry": setting.dry} | versions | {"python": platform.python_version()}


def main() -> None:
    """Run the cases that are missing, and show all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for gpu.json")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("--model", type=Path, help="checkpoint to convert; default: random weights, SmolLM2's shape")
    parser.add_argument("--data", type=Path, help="text to calibrate on; default: the demo's")
    parser.add_argument("--deadline", type=float, default=480, help="seconds in which all ends (default: 480)")
    arguments = parser.parse_args()
    if not arguments.dry and not torch.cuda.is_available():
        parser.error("there is no CUDA device here. --dry runs tiny shapes on a CPU.")
    device = torch.device("cpu" if arguments.dry else "cuda")
    setting = Setting(arguments.dry, device, arguments.model, arguments.data)
    arguments.output.mkdir(parents=True, exist_ok=True)
    path, console = arguments.output / "gpu.json", Console(width=140)
    results: Results = json.loads(path.read_text()) if path.is_file() else {}
    facts = results.pop("about", about(setting))
    if facts["dry"] != arguments.dry:
        parser.error(f"{path} is of a run {'with' if facts['dry'] else 'without'} --dry. Choose another folder.")

    def save() -> None:
        with new_file(path) as file:
            file.write(json.dumps({"about": facts, **results}, indent=1) + "\n")

    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    run(cases(setting), results, arguments.deadline, save)
    tables.show(results, console)
    failed = failures(results)
    for where, reason in failed:
        console.print(f"{where} failed: {reason}", markup=False, highlight=False, soft_wrap=True)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
