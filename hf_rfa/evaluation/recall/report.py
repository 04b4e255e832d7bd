"""The recall suite's figures as a table, for a terminal and for a model card, and as a picture."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure as Picture
from rich.table import Table

from hf_rfa.evaluation.cards import RECALL_HEADING, load_card, markdown_table, replace_section
from hf_rfa.io.atomic_io import folder_beside, new_file

from .suite import Column, Figure, RecallReport

#: The files that `write_report` writes.
FILES = ("recall.json", "recall.png", "recall.md")
#: What the numbers of the table are.
LEGEND = (
    "Percent of the tokens of a text that is said again, or of the needles' numbers, that the model gives the highest "
    "probability, and in brackets nats per token, or per number. A guess gets one of 900 numbers."
)
#: Panels of the picture, by title: a probe, and whether it is drawn against depth instead of length.
PANELS = {
    "text again: % right by length": ("text again", False),
    "needle in text: % right by length": ("needle in text", False),
    "needle in text: % right by depth": ("needle in text", True),
}


def report_rows(report: RecallReport) -> list[list[str]]:
    """Return what was measured and a text per column: memory, then a row per setting, needles averaged over their depths."""
    columns = [_cells(column) for column in report.columns]
    rows = [[name, *(cells[name] for cells in columns)] for name in columns[0]]
    return [row for row in rows if any(row[1:])]


def _cells(column: Column) -> dict[str, str]:
    """Return the texts of a column by the names of the table's rows; one that says nothing is empty."""
    memory = column.memory
    sizes = (memory.state, memory.window, memory.sinks, memory.slots, memory.retrieval)
    others = sum(size * most for size, most in memory.sliding) + memory.recurrent
    by_length: dict[str, list[Figure]] = {}
    for figure in column.figures:
        by_length.setdefault(f"{figure.probe}, {figure.length} tokens", []).append(figure)
    return {
        "cache, bytes": f"{column.num_bytes:,}",
        "of it state + window + sinks + slots + retrieval heads": " + ".join(f"{size:,}" for size in sizes),
        "of it sliding and recurrent layers, at most": f"{others:,}" if others else "",
        "cache, tokens of the teacher's": "" if column.worth is None else f"{column.worth:,.0f}",
        **{
            name: f"{_percent(figures):.1f} ({fmean(figure.nats for figure in figures):.2f})"
            for name, figures in by_length.items()
        },
    }


def _percent(figures: list[Figure]) -> float:
    return 100 * fmean(figure.accuracy for figure in figures)


def report_table(report: RecallReport) -> Table:
    """Return the report as a table for a terminal."""
    table = Table("", *(column.name for column in report.columns), caption=LEGEND)
    for row in report_rows(report):
        table.add_row(*row)
    return table


def draw_report(report: RecallReport, path: Path) -> None:
    """Draw recall against distance to a PNG file, a line per model."""
    picture = Picture(figsize=(13, 3.8))  # no pyplot: a notebook's backend is not ours to change
    for panel, (title, (probe, by_depth)) in zip(picture.subplots(1, 3), PANELS.items(), strict=True):
        for column in report.columns:
            points: dict[float, list[Figure]] = {}
            for figure in column.figures:
                if figure.probe == probe:
                    place = figure.depth if by_depth and figure.depth is not None else figure.length
                    points.setdefault(place, []).append(figure)
            values = [_percent(points[place]) for place in sorted(points)]
            panel.plot(sorted(points), values, "o-", ms=3, label=column.name)
        if not by_depth:
            panel.set_xscale("log", base=2)
        panel.set_ylim(-3, 103)
        panel.set_title(title, fontsize=9)
        panel.tick_params(labelsize=7)
        panel.grid(alpha=0.3)
    lines, names = picture.axes[0].get_legend_handles_labels()
    picture.legend(lines, names, loc="lower center", ncols=len(report.columns), fontsize=8)
    picture.tight_layout(rect=(0, 0.08, 1, 1))
    picture.savefig(path, dpi=130)


def write_report(report: RecallReport, folder: Path, *, data: str, card: bool = False) -> None:
    """Write a report as JSON, as a picture, and as a table in Markdown or in a checkpoint's model card.

    Args:
        report: the figures.
        folder: where to; made if it is not there.
        data: name of the text.
        card: whether the folder is a checkpoint, in whose model card the table becomes a section.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with new_file(folder / "recall.json") as file:
        json.dump({"data": data, **asdict(report)}, file, indent=2)
    with folder_beside(folder / "recall.png") as beside:
        draw_report(report, beside / "recall.png")
        (beside / "recall.png").replace(folder / "recall.png")
    table = markdown_table(["", *(column.name for column in report.columns)], report_rows(report))
    text = (
        f"![recall](recall.png)\n\n{table}\n\n{LEGEND} Protocol: {report.protocol}.\n\n"
        f"Text: {data}. `recall.json` has the needles by depth.\n"
    )
    if card:
        model_card = load_card(folder)
        replace_section(model_card, RECALL_HEADING, text)
        text = str(model_card)
    with new_file(folder / ("README.md" if card else "recall.md")) as file:
        file.write(text)
