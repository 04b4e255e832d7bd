"""Copying, as in Katharopoulos et al. 2020, section 4.1: sequences of up to 15 digits, and the same digits again."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_rfa  # noqa: F401  # registers the RFA models

from ..synthetic import copy_task
from .experiment import Column, Experiment, Options

#: Pairs to train on and held out, the digits of sequences that are measured, and how many of each length.
TRAINED_ON, HELD_OUT, LENGTHS, BATCH = 40_000, 200, (3, 7, 11, 15), 100


def prepare(data: Path | None, work: Path) -> Options:
    """Write sequences and their copies."""
    paths = {"train": work / "train.jsonl", "evaluate": work / "valid.jsonl"}
    for seed, (path, count) in enumerate(zip(paths.values(), (TRAINED_ON, HELD_OUT), strict=True)):
        rows = copy_task(count, min_length=1, max_length=max(LENGTHS), seed=seed)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {name: str(path) for name, path in paths.items()}


@torch.no_grad()
def measure(folder: Path, options: Options) -> dict[str, float]:
    """Return the share of the digits of new sequences that are copied, by the length of the sequence."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = {}
    for length in LENGTHS:
        rows = list(copy_task(BATCH, min_length=length, max_length=length, seed=2))
        texts = [row["prompt"] + row["text"] for row in rows]
        ids = torch.tensor(tokenizer(texts, add_special_tokens=False)["input_ids"])
        predicted = model(ids, use_cache=False).logits[:, :-1].argmax(-1)
        found[f"copied_{length}"] = float((predicted == ids[:, 1:])[:, -length:].double().mean())
    return found


EXPERIMENT = Experiment(
    recipe="copy",
    rows=("softmax", "RFA-Gaussian", "elu", "RFA-Gate-Gaussian"),
    columns=tuple(Column(f"copied_{length}", f"{length} digits", ".3f", "copied") for length in LENGTHS),
    prepare=prepare,
    measure=measure,
    chance=lambda options: {"copied": 0.1},
)
