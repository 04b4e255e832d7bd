"""Images pixel by pixel, as in Katharopoulos et al. 2020, section 4.2: the handwritten digits that scikit-learn ships.

An image is 8 × 8 pixels of 17 levels, read row by row, a letter a pixel. Quality is bits per pixel of held-out images.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_rfa  # noqa: F401  # registers the RFA models

from .experiment import Column, Experiment, Options
from .rows import USUAL

LEVELS, HELD_OUT, PIXELS = 17, 360, 64
#: What every image begins with, and the letter of level 0.
START, DARK = "^", "a"


def digits() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the images to train on and the held-out ones, [N, 64] levels each, in an order drawn once."""
    images = load_digits().data.astype(np.int64)
    images = images[np.random.default_rng(0).permutation(len(images))]
    return images[:-HELD_OUT], images[-HELD_OUT:]


def letters(image: NDArray[np.int64]) -> str:
    """Return an image, [64] levels, as a text."""
    return "".join(chr(ord(DARK) + level) for level in image)


def prepare(data: Path | None, work: Path) -> Options:
    """Write the images as texts."""
    paths = {name: work / f"{name}.jsonl" for name in ("train", "evaluate")}
    for path, images in zip(paths.values(), digits(), strict=True):
        rows = ({"prompt": START, "text": letters(image)} for image in images)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {name: str(path) for name, path in paths.items()}


def chance(options: Options) -> dict[str, float]:
    """Return the bits per pixel of independent pixels, each with the frequencies of its levels in the training images."""
    train, held_out = digits()
    counts = np.stack([np.bincount(train[:, pixel], minlength=LEVELS) for pixel in range(PIXELS)]) + 1.0
    shares = counts / counts.sum(1, keepdims=True)
    return {"bits": float(-np.log2(shares[np.arange(PIXELS), held_out]).mean())}


@torch.no_grad()
def measure(folder: Path, options: Options) -> dict[str, float]:
    """Return the bits per pixel of the held-out images, whole and of their lower halves."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [START + letters(image) for image in digits()[1]]
    ids = torch.tensor(tokenizer(texts, add_special_tokens=False)["input_ids"])
    likelihoods = model(ids[:, :-1], use_cache=False).logits.double().log_softmax(-1)
    bits = -likelihoods.gather(-1, ids[:, 1:, None])[:, -PIXELS:, 0] / math.log(2.0)
    return {"bits": float(bits.mean()), "lower_half_bits": float(bits[:, PIXELS // 2 :].mean())}


EXPERIMENT = Experiment(
    recipe="digits",
    rows=USUAL,
    columns=(
        Column("bits", "bits per pixel", ".3f", "bits"),
        Column("lower_half_bits", "… of the lower half", ".3f"),
    ),
    prepare=prepare,
    measure=measure,
    chance=chance,
)
