"""Conversion of a checkpoint with calibration, as `hf-rfa convert` does it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoTokenizer

from .models import RFA, SOFTMAX, build
from .trial import Case, Setting

DEMO = Path(__file__).parents[2] / "demo"


def cases(setting: Setting) -> Iterator[Case]:
    """Yield the one conversion."""
    yield Case("conversion", "calibrated", RFA, partial(run, setting))


def run(setting: Setting) -> dict[str, Any]:
    """Convert in a folder that is removed again."""
    from hf_rfa.convert import convert  # not needed to list the cases

    with TemporaryDirectory() as folder:
        base = setting.model or (DEMO / "model" if setting.dry else _random(Path(folder) / "base"))
        start = time.perf_counter()
        text = setting.data or DEMO / "calibration.txt.gz"
        report = convert(base, Path(folder) / "converted", calibrate_on=text, trained="model")
        seconds = time.perf_counter() - start
    perplexities = report.perplexities
    return {"s": seconds} | ({} if perplexities is None else {"perplexity": perplexities.calibrated})


def _random(folder: Path) -> Path:
    """Write a model of SmolLM2's shape and random weights with the demo's tokenizer, and return its folder."""
    build("SmolLM2", SOFTMAX, torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO / "model").save_pretrained(folder)
    return folder
