"""Pictures of attention: every head's divergence from softmax, and attention maps of both models side by side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from transformers import PreTrainedModel

from .calibrate.activations import capture_inputs, compare_weights, layer_activations, layer_divergence, padding_masks
from .checkpoint.base_model import rfa_layers
from .inputs import Inputs, cut, trim

#: Queries and keys in a map.
SHOWN = 64


@dataclass(frozen=True)
class HeadMap:
    """Attention weights of one head on one sequence, [queries, keys]: the base model's and the RFA model's.

    ``divergence`` is KL(softmax ‖ RFA) in nats per query of this sequence.
    """

    name: str
    head: int
    divergence: float
    softmax: Tensor
    rfa: Tensor


@torch.no_grad()
def compare_attention(model: nn.Module, base_model: PreTrainedModel, inputs: Inputs) -> list[HeadMap]:
    """Return the maps of the heads with the least, the median and the largest divergence.

    The first `SHOWN` tokens of the first row of the models' ``inputs`` are compared.
    """
    row = trim({name: tensor[:1].to(base_model.device) for name, tensor in inputs.items() if name != "labels"})
    row = cut(row, slice(SHOWN))
    layers, masks = rfa_layers(model), padding_masks(row)
    captured = capture_inputs(base_model, layers, row)
    activations = {
        name: layer_activations(layers[name], layer_inputs, masks) for name, layer_inputs in captured.items()
    }
    heads = sorted(
        (float(divergence), name, head)
        for name, layer_inputs in captured.items()
        for head, divergence in enumerate(layer_divergence(layers[name], activations[name], layer_inputs.hidden_states))
    )
    maps = []
    for divergence, name, head in (heads[index] for index in sorted({0, len(heads) // 2, len(heads) - 1}) if heads):
        layer, activation = layers[name], activations[name]
        groups, width = layer.feature_map.groups, activation.key.shape[2]
        comparisons = compare_weights(layer, activation, captured[name].hidden_states)
        both = [torch.stack([target.softmax, log_weights.exp()]) for target, log_weights, _ in comparisons]
        # Of query heads that share a key-value head the first one is shown.
        blocks = [F.pad(block[:, 0, head, ::groups], (0, width - block.shape[-1])) for block in both]
        softmax, rfa = torch.cat(blocks, dim=1).cpu()
        count = layer.feature_map.num_heads + len(layer.retrieval_heads)
        with_features = [index for index in range(count) if index not in layer.retrieval_heads]
        maps.append(HeadMap(name, with_features[head], divergence, softmax, rfa))
    return maps


def draw_attention(path: Path, stages: dict[str, dict[str, tuple[float, ...]]], maps: list[HeadMap]) -> None:
    """Draw every head's divergence after each stage, and below it maps of `compare_attention`, to a PNG file.

    ``stages`` has KL(softmax ‖ RFA) of every head in nats per query, by stage and layer.
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
    for panels, shown in zip(axes[1:], maps, strict=True):
        shades = float(max(shown.softmax.max(), shown.rfa.max())) ** 0.5
        for panel, title, weights in zip(panels, ("base model", "RFA model"), (shown.softmax, shown.rfa), strict=False):
            panel.imshow(weights.clamp_min(0).sqrt().numpy(), vmin=0, vmax=shades, cmap="viridis")
            panel.set_title(f"{title}: {shown.name} head {shown.head} ({shown.divergence:.3f} nats)", fontsize=6)
            panel.tick_params(labelsize=5)
    for panel in (panel for row in axes for panel in row if not panel.has_data()):
        panel.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
