"""Images pixel by pixel, as in Katharopoulos et al. 2020, section 4.2: the handwritten digits that scikit-learn ships.

An image is 8 × 8 pixels of 17 levels, read row by row, a letter a pixel. Quality is bits per pixel of held-out images.
"""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_rfa  # noqa: F401  # registers the RFA models
from hf_rfa.bench.measure import interleaved

from .charts import draw_values
from .experiment import Column, Experiment, Options

SIDE, LEVELS, HELD_OUT = 8, 17, 360
PIXELS = SIDE * SIDE
#: What every image begins with, and the letter of level 0.
START, DARK = "^", "a"
#: Images that are drawn at once, and how often that is timed.
DRAWN, TIMES = 64, 5


def digits() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the images to train on and the held-out ones, [N, 64] levels each, in an order drawn once."""
    images = load_digits().data.astype(np.int64)
    images = images[np.random.default_rng(0).permutation(len(images))]
    return images[:-HELD_OUT], images[-HELD_OUT:]


def prepare(data: Path | None, work: Path) -> Options:
    """Write the images as texts."""
    paths = {}
    for name, images in zip(("train", "evaluate"), digits(), strict=True):
        paths[name] = str(work / f"{name}.jsonl")
        texts = ("".join(chr(ord(DARK) + level) for level in image) for image in images)
        Path(paths[name]).write_text("".join(json.dumps({"prompt": START, "text": text}) + "\n" for text in texts))
    return paths


def chance(options: Options) -> dict[str, float]:
    """Return the bits per pixel of independent pixels, each with the frequencies of its levels in the training images."""
    train, held_out = digits()
    counts = np.stack([np.bincount(train[:, pixel], minlength=LEVELS) for pixel in range(PIXELS)]) + 1.0
    shares = counts / counts.sum(1, keepdims=True)
    return {"bits": float(-np.log2(shares[np.arange(PIXELS), held_out]).mean())}


def tokens_of_levels(tokenizer: Any) -> list[int]:
    """Return the token id of every level."""
    ids = tokenizer("".join(chr(ord(DARK) + level) for level in range(LEVELS)), add_special_tokens=False)["input_ids"]
    assert len(ids) == LEVELS
    return ids


def start_tokens(tokenizer: Any) -> list[int]:
    """Return the token ids that an image begins with."""
    return tokenizer(START, add_special_tokens=False)["input_ids"]


@torch.no_grad()
def measure(folder: Path, options: Options) -> dict[str, float]:
    """Return the bits per pixel of the held-out images, whole and of their lower halves."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    levels = torch.tensor(tokens_of_levels(tokenizer))
    pixels = levels[torch.from_numpy(digits()[1])]  # [N, 64]
    start = torch.tensor(start_tokens(tokenizer)).expand(len(pixels), -1)
    logits = model(torch.cat([start, pixels], 1), use_cache=False).logits[:, start.shape[1] - 1 : -1]
    nats = -logits.double().log_softmax(-1).gather(-1, pixels[..., None])[..., 0]
    bits = nats / math.log(2.0)
    return {"bits": float(bits.mean()), "lower_half_bits": float(bits[:, PIXELS // 2 :].mean())}


@torch.no_grad()
def draw_images(model: PreTrainedModel, tokenizer: Any, *, above: Tensor, seed: int) -> Tensor:
    """Return images [N, 64] of levels, drawn by a model after the pixels [N, P] that are arguments."""
    levels = torch.tensor(tokens_of_levels(tokenizer))
    start = torch.tensor(start_tokens(tokenizer)).expand(len(above), -1)
    others = sorted(set(range(model.config.vocab_size)) - set(levels.tolist()))
    torch.manual_seed(seed)
    found: Any = model.generate(  # type: ignore[operator]
        torch.cat([start, levels[above]], 1),
        attention_mask=torch.ones(len(above), start.shape[1] + above.shape[1], dtype=torch.long),
        do_sample=True,
        top_k=0,
        max_new_tokens=PIXELS - above.shape[1],
        min_new_tokens=PIXELS - above.shape[1],
        suppress_tokens=others,
        pad_token_id=others[0],
    )
    place = torch.zeros(model.config.vocab_size, dtype=torch.long)
    place[levels] = torch.arange(LEVELS)
    return place[found[:, start.shape[1] :]]


def finish(folders: dict[str, Path], options: Options, output: Path) -> dict[str, dict[str, float]]:
    """Draw samples and completions of every row, and return images per second, timed in turns."""
    loaded = {
        row: (AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder))
        for row, folder in folders.items()
    }
    nothing = torch.zeros(DRAWN, 0, dtype=torch.long)
    calls = {row: partial(draw_images, *pair, above=nothing, seed=0) for row, pair in loaded.items()}
    milliseconds = interleaved(calls, TIMES, warmup=0)
    whole = torch.from_numpy(digits()[1][:10])
    empty, half = whole[:, :0], whole[:, : PIXELS // 2]
    figure = Figure(figsize=(11, 0.62 * (2 * len(loaded) + 1)), layout="tight")
    panels = figure.subplots(2 * len(loaded) + 1, 1)
    strips = [("held out", whole)]
    for row, (model, tokenizer) in loaded.items():
        strips.append((f"{row}, drawn", draw_images(model, tokenizer, above=empty, seed=1)))
        strips.append((f"{row}, lower half", draw_images(model, tokenizer, above=half, seed=1)))
    for axes, (title, images) in zip(panels, strips, strict=True):
        rows = torch.cat([torch.nn.functional.pad(image.view(SIDE, SIDE), (0, 2), value=0) for image in images], 1)
        axes.imshow(rows.numpy(), cmap="gray", vmin=0, vmax=LEVELS - 1)
        axes.set_ylabel(title, rotation=0, ha="right", va="center", fontsize=8)
        axes.set(xticks=[], yticks=[])
    figure.savefig(output / "images-drawn.png", dpi=110)
    return {row: {"images_per_second": 1000 * DRAWN / time} for row, time in milliseconds.items()}


def draw(whole: dict[str, Any], path: Path) -> None:
    """Draw bits per pixel and images per second of every row."""
    draw_values(whole, path, [("bits", "bits per pixel"), ("images_per_second", "images per second")], chance="bits")


EXPERIMENT = Experiment(
    recipe="digits",
    rows=("softmax", "RFA-Gaussian", "RFA-arccos", "RFA-Gate-Gaussian", "elu"),
    columns=(
        Column("bits", "bits per pixel", ".3f", "bits"),
        Column("lower_half_bits", "… of the lower half", ".3f"),
        Column("images_per_second", "images per second", ".1f", side_by_side=True),
    ),
    prepare=prepare,
    measure=measure,
    chance=chance,
    finish=finish,
    draw=draw,
)
