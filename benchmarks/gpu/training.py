"""A step of training, SmolLM2's shape: forward and backward in bfloat16 (autocast), without the optimizer's part."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .models import OPTIONS, SOFTMAX, build
from .trial import Case, Setting, milliseconds, seconds_of


def cases(setting: Setting, *, compiled: bool) -> Iterator[Case]:
    """Yield the contestants."""
    batch, length = (2, 64) if setting.dry else (8, 2048)
    how = ", layers compiled" if compiled else ""
    for name in (SOFTMAX, *OPTIONS):
        run = partial(train, setting, name, batch, length, compiled=compiled)
        yield Case("training", f"{batch} × {length:,}{how}", name, run)


def train(setting: Setting, name: str, batch: int, length: int, *, compiled: bool) -> dict[str, Any]:
    """Time a model's steps; compiled are its layers one by one, which have the same code."""
    torch.compiler.reset()
    model = build(setting.shape, name, torch.float32).to(setting.device).train()
    ids = torch.randint(0, model.config.vocab_size, (batch, length), device=setting.device)

    def loss(ids: Tensor) -> Tensor:
        with torch.autocast(setting.device.type, dtype=torch.bfloat16):
            return model(ids, labels=ids, use_cache=False).loss

    def step() -> None:
        loss(ids).backward()
        model.zero_grad(set_to_none=True)

    if compiled:
        with torch.no_grad():
            loss(ids[:1, :64])  # what layers keep from their first call on would make the compiler begin again
        for layer in model.model.layers:
            layer.compile(backend="eager" if setting.dry else "inductor")
    first = seconds_of(step)
    seconds = milliseconds(step, 1 if setting.dry else 5) / 1000
    figures = {"s": seconds, "tokens/s": batch * length / seconds, "first step, s": first}
    return figures | ({} if compiled or setting.dry else synchronizations(step))


def synchronizations(call: Callable[[], object]) -> dict[str, Any]:
    """Return how often a call waits for the device, and from which lines."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [each for each in caught if "synchroniz" in str(each.message)]
    lines = Counter(f"{'/'.join(Path(each.filename).parts[-2:])}:{each.lineno}" for each in waits)
    return {"synchronizations": len(waits), "from": dict(lines)}
