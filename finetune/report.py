"""The figures and the loss curves of a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from hf_rfa.convert.pictures import HeadMap
from hf_rfa.evaluation.perplexity import shown

from .recipe import Recipe
from .trainers import StageResult

#: Items at the end of the data that are not trained on: perplexities and divergences are measured on them.
HELD_OUT = 8
#: The course of a stage in words, by its name.
STAGES = {
    "attention transfer": "feature maps and gates learned the teacher's attention (attention transfer, {} steps)",
    "end to end": "the whole model learned the teacher's outputs (end to end, {} steps)",
}


@dataclass
class DistillationReport:
    """The figures of one distillation.

    Attributes:
        command: the command that repeats it.
        data: name of the text that was learned from.
        recipe: its settings.
        before: KL(softmax weights ‖ weights that the features imply) by layer and head on held-out data, in nats per query,
            before training.
        after: the same after attention transfer; empty if that stage was left out.
        stages: the course of each stage.
        perplexities: on the held-out items: of the teacher, of the converted model, and after each stage.
        maps: attention of some heads, of teacher and model.
    """

    command: str
    data: str
    recipe: Recipe
    before: dict[str, tuple[float, ...]] = field(default_factory=dict)
    after: dict[str, tuple[float, ...]] = field(default_factory=dict)
    stages: list[StageResult] = field(default_factory=list)
    perplexities: dict[str, float] = field(default_factory=dict)
    maps: list[HeadMap] = field(default_factory=list)

    def summary(self) -> str:
        """Return the course of the training in words."""
        stages = ", then ".join(STAGES[stage.name].format(f"{stage.steps:,}") for stage in self.stages)
        others = "" if self.stages[-1].name == "end to end" else " All other weights were left as they were."
        return f"distilled on {self.data}: {stages}.{others}"

    def rows(self) -> list[tuple[str, str]]:
        """Return the figures as (name, value) pairs, for the table and the model card."""
        rows = []
        if self.after:
            before, after = (fmean(sum(values.values(), ())) for values in (self.before, self.after))
            rows.append(("KL to the softmax weights, held-out text", f"{before:.3f} nats, {after:.3f} after transfer"))
        end_to_end = self.recipe.end_to_end
        rates = {
            "attention transfer": f"{self.recipe.transfer.learning_rate:g}",
            "end to end": f"{end_to_end.learning_rate:g}, of feature maps and gates {end_to_end.rfa_learning_rate:g}",
        }
        for stage in self.stages:
            losses = [entry["loss"] for entry in stage.log if "loss" in entry]
            if losses:
                course = f"loss {losses[0]:.3f} → {losses[-1]:.3f}, learning rate {rates[stage.name]}"
                rows.append((f"{stage.name}, {stage.steps:,} steps", course))
        perplexities = ", ".join(f"{name} {shown(value)}" for name, value in self.perplexities.items())
        return [*rows, (f"perplexity of the {HELD_OUT} items held out", perplexities)]

    def table(self) -> Table:
        """Return the figures as a table to print."""
        table = Table(title="distillation", show_header=False)
        for row in self.rows():
            table.add_row(*row)
        return table

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        stages = [{"name": stage.name, "steps": stage.steps, "log": list(stage.log)} for stage in self.stages]
        return {
            "command": self.command,
            "data": self.data,
            "recipe": asdict(self.recipe),
            "divergence_before": self.before,
            "divergence_after_transfer": self.after,
            "stages": stages,
            "held_out_perplexities": self.perplexities,
        }


def plot_losses(path: Path, logs: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Draw the losses in logs of the Trainer, a panel for each log, under its name."""
    figure = Figure(figsize=(4.8 * len(logs), 3.4))  # no pyplot: a notebook's backend is not ours to change
    axes = figure.subplots(1, len(logs), squeeze=False)
    for panel, (title, log) in zip(axes[0], logs.items(), strict=True):
        for name, label, marker in (("loss", "training", None), ("eval_loss", "evaluation", ".")):
            points = [(entry["step"], entry[name]) for entry in log if name in entry]
            if points:
                panel.plot(*zip(*points, strict=True), marker=marker, label=label)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("step")
        panel.set_ylabel("loss, nats")
        panel.grid(alpha=0.3)
        if panel.lines:
            panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
