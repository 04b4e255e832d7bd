"""Pictures of attention: how far every head is from the softmax parent, and maps of both side by side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from transformers import PreTrainedModel

from .activations import compare_weights, layer_divergence, model_masks, record_inputs, sample_layer
from .calibration_data import Inputs
from .twin import rfa_layers

#: Queries and keys that a map shows.
SHOWN = 64


@dataclass(frozen=True)
class HeadMap:
    """Attention weights of one head on one text, [queries, keys]: the parent's and those that features imply.

    ``divergence`` is KL(softmax ‖ implied) in nats per query of this text.
    """

    name: str
    head: int
    divergence: float
    softmax: Tensor
    implied: Tensor


@torch.no_grad()
def compare_attention(model: nn.Module, parent: PreTrainedModel, inputs: Inputs) -> list[HeadMap]:
    """Return the maps of the head that is nearest its softmax weights, of the one in the middle, and of the farthest.

    Args:
        model: the RFA model.
        parent: the softmax model.
        inputs: what the models are called with; the first row is looked at, and its first `SHOWN` tokens.
    """
    row = {name: tensor[:1].to(parent.device) for name, tensor in inputs.items() if name != "labels"}
    masks = {name for name in row if name.endswith("attention_mask")}
    for mask in masks:  # the tokens before the padding, if any
        sides = {mask, mask.replace("attention_mask", "input_ids")}
        length = min(SHOWN, int(row[mask].sum()))
        row |= {name: row[name][:, row[mask][0].bool()][:, :length] for name in sides if name in row}
    row = {name: tensor[:, :SHOWN] for name, tensor in row.items()}
    layers = rfa_layers(model)
    with record_inputs({name: parent.get_submodule(name) for name in layers}) as recorded:
        body: Any = parent.base_model
        body(**row, use_cache=False)
    heads: list[tuple[float, str, int]] = []
    samples = {}
    for name, inputs_of_layer in recorded.items():
        samples[name] = sample_layer(layers[name], inputs_of_layer, model_masks(row))
        divergences = layer_divergence(layers[name], samples[name], inputs_of_layer[0])
        heads += [(float(value), name, head) for head, value in enumerate(divergences)]
    heads.sort()
    maps = []
    for divergence, name, head in (heads[index] for index in sorted({0, len(heads) // 2, len(heads) - 1}) if heads):
        target, log_weights = next(compare_weights(layers[name], samples[name], recorded[name][0]))
        maps.append(HeadMap(name, head, divergence, target.softmax[0, head].cpu(), log_weights[0, head].exp().cpu()))
    return maps


def draw_attention(path: Path, stages: dict[str, dict[str, tuple[float, ...]]], maps: list[HeadMap]) -> None:
    """Draw every head's divergence after each stage, and below it some maps, parent and model side by side.

    Args:
        path: PNG to write.
        stages: by stage and layer, KL(softmax ‖ implied) of every head, in nats per query.
        maps: from `compare_attention`.
    """
    layers = list(next(iter(stages.values())))
    columns = max(2, len(stages))
    heights = [max(1.6, 0.22 * len(layers)), *[2.6] * len(maps)]
    figure = Figure(figsize=(3.4 * columns, sum(heights) + 1))  # no pyplot: a notebook's backend is not ours to change
    axes = figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights)
    most = max(max(heads) for values in stages.values() for heads in values.values())
    widest = max(len(heads) for values in stages.values() for heads in values.values())
    for panel, (stage, values) in zip(axes[0], stages.items(), strict=False):
        grid = np.full((len(layers), widest), np.nan)
        for row, layer in enumerate(layers):
            grid[row, : len(values[layer])] = values[layer]
        image = panel.imshow(grid, vmin=0, vmax=most, aspect="auto", cmap="magma_r")
        panel.set_title(f"{stage}: KL, nats (mean {np.nanmean(grid):.3f})", fontsize=8)
        panel.set_xlabel("head", fontsize=7)
        panel.set_yticks(range(len(layers)), layers, fontsize=5)
        panel.tick_params(axis="x", labelsize=6)
        figure.colorbar(image, ax=panel)
    for panels, each in zip(axes[1:], maps, strict=True):
        shades = float(max(each.softmax.max(), each.implied.max())) ** 0.5
        for panel, title, weights in zip(panels, ("parent", "model"), (each.softmax, each.implied), strict=False):
            panel.imshow(weights.clamp_min(0).sqrt().numpy(), vmin=0, vmax=shades, cmap="viridis")
            panel.set_title(f"{title}: {each.name} head {each.head} ({each.divergence:.3f} nats)", fontsize=6)
            panel.tick_params(labelsize=5)
    for panel in (panel for row in axes for panel in row if not panel.has_data()):
        panel.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
