"""Conversion of a model of SmolLM2's size, and steps of end-to-end training on the device."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_rfa.convert import convert
from hf_rfa.finetune.distill import distill
from hf_rfa.finetune.recipe import Recipe, Stage

from .decoding import shape
from .trial import FAILED, Setting, attempt

DEMO = Path(__file__).parents[2] / "demo"
#: Steps of the training, and the tokens of one.
STEPS, BATCH, LENGTH = 20, 4, 1024


def run(setting: Setting) -> dict[str, Any]:
    """Convert and train, in a folder that is removed again."""
    work = setting.output / "conversion-work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        return attempt(lambda: _run(setting, work))
    finally:
        shutil.rmtree(work)


def _run(setting: Setting, work: Path) -> dict[str, Any]:
    text = setting.data or DEMO / "calibration.txt.gz"
    base = setting.model or (DEMO / "model" if setting.dry else _random(work / "base", setting))
    steps, batch, length = (2, 1, 64) if setting.dry else (STEPS, BATCH, LENGTH)
    start = time.perf_counter()
    convert(base, work / "converted", calibrate_on=str(text), trained="model")
    converted = time.perf_counter() - start
    stage = Stage(steps=steps, batch_size=batch, block_length=length, learning_rate=1e-4)
    start = time.perf_counter()
    report = distill(
        work / "converted", work / "trained", teacher=base, data=text, recipe=Recipe(end_to_end=stage, transfer=Stage())
    )
    trained = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() if setting.device.type == "cuda" else None
    losses = [each["loss"] for each in report.stages[-1].log if "loss" in each]
    facts = {"steps": steps, "tokens_a_step": batch * length, "losses": losses, "peak_bytes": peak}
    return facts | {"conversion_seconds": converted, "training_seconds": trained, "perplexities": report.perplexities}


def _random(folder: Path, setting: Setting) -> Path:
    """Write a model of random weights with the demo's tokenizer, and return its folder."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape(setting)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO / "model").save_pretrained(folder)
    return folder


def show(results: dict[str, Any], console: Console) -> None:
    """Print times, losses and memory."""
    if FAILED in results:
        return
    table = Table("conversion, s", "training, s", "steps", "tokens a step", "first and last loss", "peak, GiB")
    peak = f"{results['peak_bytes'] / 2**30:.1f}" if results["peak_bytes"] is not None else "measured on CUDA alone"
    losses = f"{results['losses'][0]:.3f}, {results['losses'][-1]:.3f}" if results["losses"] else ""
    table.add_row(
        *(f"{results[name]:.1f}" for name in ("conversion_seconds", "training_seconds")),
        *(f"{results[name]:,}" for name in ("steps", "tokens_a_step")),
        losses,
        peak,
    )
    console.print(table)
