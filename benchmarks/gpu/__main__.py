"""All that waits for a GPU, in one command of less than 25 minutes.

    python -m benchmarks.gpu --output FOLDER          # a CUDA device
    python -m benchmarks.gpu --dry --output FOLDER    # tiny shapes on a CPU, to see that all parts run

``FOLDER/gpu.json`` is written after each part, with a chart of attention's times, and parts that are in it are not run again.
What fails, a result that is wrong or a length that does not fit, is recorded with its reason, shown in the tables and
counted at the end; the rest goes on. The status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

from hf_rfa.io.atomic_io import new_file

from . import attention, conversion, decoding, parity
from .trial import Setting, failures

PARTS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "parity": parity.run,
    "attention": attention.run,
    "graphs": decoding.run_graphs,
    "decoding": decoding.run_positions,
    "conversion": conversion.run,
}
TABLES: dict[str, Callable[[dict[str, Any], Console], None]] = {
    "parity": parity.show,
    "attention": attention.show,
    "graphs": decoding.show_graphs,
    "decoding": decoding.show_positions,
    "conversion": conversion.show,
}


def about(setting: Setting) -> dict[str, Any]:
    """Return what the figures are of: device and versions."""
    cuda = setting.device.type == "cuda"
    found = {"device": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu", "dry": setting.dry}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return found | versions | {"python": platform.python_version()}


def main() -> None:
    """Run the parts that are missing, and show all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for gpu.json")
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument(
        "--model", type=Path, help="checkpoint to convert and time; default: random weights, SmolLM2's shape"
    )
    parser.add_argument("--data", type=Path, help="text to calibrate and train on; default: the demo's")
    arguments = parser.parse_args()
    if not arguments.dry and not torch.cuda.is_available():
        parser.error("there is no CUDA device here. --dry runs tiny shapes on a CPU.")
    setting = Setting(
        arguments.dry,
        torch.device("cpu" if arguments.dry else "cuda"),
        arguments.output,
        arguments.model,
        arguments.data,
    )
    arguments.output.mkdir(parents=True, exist_ok=True)
    path, console = arguments.output / "gpu.json", Console()
    results: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    results.setdefault("about", about(setting))
    if results["about"]["dry"] != arguments.dry:
        parser.error(
            f"{path} is of a run {'with' if results['about']['dry'] else 'without'} --dry. Choose another folder."
        )
    for name in arguments.part or PARTS:
        if name not in results:
            start = time.perf_counter()
            found = PARTS[name](setting)
            results[name] = found | {"seconds": time.perf_counter() - start}
            with new_file(path) as file:
                file.write(json.dumps(results, indent=1) + "\n")
            if name == "attention":
                attention.draw(results[name], arguments.output / "attention.png")
        console.rule(f"{name}: {results[name]['seconds']:.0f} s")
        TABLES[name](results[name], console)
    failed = failures(results)
    for where, reason in failed:
        console.print(f"{where} failed: {reason}", markup=False, highlight=False, soft_wrap=True)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
