"""Greedy generation by `model.generate` in bfloat16, SmolLM2's shape: what a token takes, after prompts of some lengths."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import torch

from .models import RFA, SOFTMAX, build, compiled
from .trial import Case, Setting, free_memory, seconds_of

PART = "generation"
STATIC, EAGER = f"{SOFTMAX}, static cache", f"{RFA}, eager"
#: The contestants: RFA and softmax as they come, and what `generate` compiles or not when it is told.
AS_THEY_COME, OTHERS = (RFA, SOFTMAX), (STATIC, EAGER)
#: New tokens of two calls, whose difference tells what a token takes, and how often each is made; the least time counts.
FEW, MANY, ROUNDS = 16, 80, 2


def cases(setting: Setting, names: tuple[str, ...]) -> Iterator[Case]:
    """Yield some contestants: of one text first, then of a batch."""
    workloads = ((1, 16), (1, 40), (2, 24)) if setting.dry else ((1, 128), (1, 32_768), (32, 8192))
    for part in (workloads[:2], workloads[2:]):
        for name in names:
            for rows, length in part:
                yield Case(PART, f"{rows} × {length:,}", name, partial(generate, setting, name, rows, length))


@lru_cache(maxsize=1)
def _model(setting: Setting, name: str, rows: int, length: int) -> Any:
    """Return a model that nothing was compiled for but texts of these sizes: other ones make a compiler take any."""
    torch.compiler.reset()
    free_memory()
    return build(setting.shape, SOFTMAX if name.startswith(SOFTMAX) else RFA, torch.bfloat16).to(setting.device)


def generate(setting: Setting, name: str, rows: int, length: int) -> dict[str, Any]:
    """Time a contestant. A compiled step of RFA is the same at every length, and is compiled once."""
    model = _model(setting, name, rows, length if name == STATIC else 0)
    ids = torch.randint(3, model.config.vocab_size, (rows, length), device=setting.device)
    options = {STATIC: compiled(setting), EAGER: {"disable_compile": True}}.get(name, {})

    def call(tokens: int) -> None:
        lengths = {"min_new_tokens": tokens, "max_new_tokens": tokens}
        mask = torch.ones_like(ids)
        model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **lengths, **options)

    few, many, rounds = (4, 12, 1) if setting.dry else (FEW, MANY, ROUNDS)
    first = seconds_of(partial(call, many))  # a static cache is as long as the longest call needs
    short, long = (min(seconds_of(partial(call, tokens)) for _ in range(rounds)) for tokens in (few, many))
    seconds = (long - short) / (many - few)
    figures = {"ms a token": 1000 * seconds, "tokens/s": rows / seconds, "prompt, s": short - few * seconds}
    return figures | {"first call, s": first, "compiled": hasattr(model, "_compiled_call")}
