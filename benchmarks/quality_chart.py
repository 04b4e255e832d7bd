"""Draws benchmarks/results/quality.png from the JSON beside it: python -m benchmarks.quality_chart."""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.figure import Figure

DATA = Path(__file__).with_name("results") / "quality.json"


def main() -> None:
    """Draw the ratio to the base model's perplexity by stage of training, one panel a recipe."""
    data = json.loads(DATA.read_text())
    figure = Figure(figsize=(10, 3.8))
    for axes, panel in zip(figure.subplots(1, len(data["panels"])), data["panels"], strict=True):
        for name, points in panel["ratios"].items():
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
        axes.axhline(1, color="black", linewidth=1, label="base model")
        axes.axhline(panel["base model, fine-tuned"], color="black", linestyle="--", label="base model, fine-tuned")
        axes.set_xticks(range(len(panel["ticks"])), panel["ticks"])
        axes.set_title(panel["title"], fontsize=9)
        axes.grid(alpha=0.3)
        axes.set_ylim(top=1 + 1.5 * (axes.get_ylim()[1] - 1))  # room for the legend
        axes.legend(frameon=False, fontsize=7, ncols=2, loc="upper right")
    figure.axes[0].set_ylabel("perplexity / base model's")
    figure.suptitle(data["model"], fontsize=10)
    figure.tight_layout()
    figure.savefig(DATA.with_suffix(".png"), dpi=150)


if __name__ == "__main__":
    main()
