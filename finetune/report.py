"""What a distillation tells: figures, a table and pictures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from hf_rfa.convert.pictures import HeadMap

from .distillation import StageResult
from .recipe import Recipe

#: Items of the data, the last ones, that are not trained on but measure what attention transfer gained.
HELD_OUT = 8


@dataclass(frozen=True)
class DistillationReport:
    """The figures of one distillation.

    Attributes:
        command: the command that does it again.
        data: name of the text that was learned from.
        recipe: its settings.
        before: KL(softmax ‖ implied) by layer and head on held-out data, in nats per query, before training.
        after: the same after attention transfer; empty if that stage was left out.
        stages: what each stage logged.
        perplexities: on the held-out items: of the parent, of the converted model, and after each stage.
        maps: attention of some heads, parent and model side by side.
    """

    command: str
    data: str
    recipe: Recipe
    before: dict[str, tuple[float, ...]]
    after: dict[str, tuple[float, ...]]
    stages: tuple[StageResult, ...]
    perplexities: dict[str, float]
    maps: tuple[HeadMap, ...]

    def summary(self) -> str:
        """Return what was trained, in words."""
        words = {
            "attention transfer": "feature maps and gates learned the parent's attention (attention transfer, {} steps)",
            "end to end": "the whole model learned the parent's outputs (end to end, {} steps)",
        }
        stages = ", then ".join(words[stage.name].format(f"{stage.steps:,}") for stage in self.stages)
        kept = "" if self.stages[-1].name == "end to end" else " All other weights were left as they were."
        return f"distilled on {self.data}: {stages}.{kept}"

    def rows(self) -> list[tuple[str, str]]:
        """Return the figures as (what, value) pairs, for the table and the model card."""
        rows = []
        if self.after:
            before, after = (
                fmean(value for heads in values.values() for value in heads) for values in (self.before, self.after)
            )
            rows.append(("KL to the softmax weights, held-out text", f"{before:.3f} nats, {after:.3f} after transfer"))
        for stage in self.stages:
            losses = [entry["loss"] for entry in stage.log if "loss" in entry]
            if losses:
                rows.append(
                    (
                        f"{stage.name}, {stage.steps:,} steps",
                        f"loss {losses[0]:.3f} → {losses[-1]:.3f}, {self._rates(stage)}",
                    )
                )
        found = ", ".join(f"{name} {value:.2f}" for name, value in self.perplexities.items())
        rows.append((f"perplexity of the {HELD_OUT} items held out", found))
        return rows

    def _rates(self, stage: StageResult) -> str:
        """Return the learning rates of a stage in words."""
        if stage.name == "attention transfer":
            return f"learning rate {self.recipe.transfer.learning_rate:g}"
        settings = self.recipe.end_to_end
        return f"learning rate {settings.learning_rate:g}, of feature maps and gates {settings.rfa_learning_rate:g}"

    def table(self) -> Table:
        """Return the figures as a table to print."""
        table = Table(title="distillation", show_header=False)
        for what, value in self.rows():
            table.add_row(what, value)
        return table

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        stages = [{"name": stage.name, "steps": stage.steps, "log": list(stage.log)} for stage in self.stages]
        return {
            "command": self.command,
            "data": self.data,
            "recipe": self.recipe.to_dict(),
            "divergence_before": self.before,
            "divergence_after_transfer": self.after,
            "stages": stages,
            "held_out_perplexities": self.perplexities,
        }

    def plot(self, path: Path) -> None:
        """Draw the loss of every stage."""
        figure = Figure(figsize=(4.8 * len(self.stages), 3.4))
        axes = figure.subplots(1, len(self.stages), squeeze=False)
        for panel, stage in zip(axes[0], self.stages, strict=True):
            points = [(entry["step"], entry["loss"]) for entry in stage.log if "loss" in entry]
            panel.plot(*zip(*points, strict=True), color="#1f6f8b")
            panel.set_title(stage.name, fontsize=10)
            panel.set_xlabel("step")
            panel.set_ylabel("loss, nats")
            panel.grid(alpha=0.3)
        figure.tight_layout()
        figure.savefig(path, dpi=150)
