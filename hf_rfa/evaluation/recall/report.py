"""The recall suite's figures as a table, for a terminal, a file and a model card."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from rich.table import Table

from hf_rfa.evaluation.cards import RECALL_HEADING, load_card, markdown_table, replace_section
from hf_rfa.io.atomic_io import new_file

from .suite import Figure, RecallReport

#: The files that `write_report` writes.
FILES = ("recall.json", "recall.md")
#: What the numbers of the table are.
LEGEND = (
    "Percent of the tokens of a text that is said again, or of the needles' numbers, that the model gives the highest "
    "probability, and in brackets nats per token, or per number. A guess gets one of 900 numbers."
)


def report_rows(report: RecallReport) -> list[list[str]]:
    """Return what was measured and a text per column: bytes, then a row per length, needles averaged over their depths."""
    rows = {"cache, bytes": [f"{column.num_bytes:,}" for column in report.columns]}
    worth = ["" if column.worth is None else f"{column.worth:,.0f}" for column in report.columns]
    rows["cache, tokens of the teacher's"] = worth
    for column in report.columns:
        by_length: dict[str, list[Figure]] = {}
        for figure in column.figures:
            by_length.setdefault(f"{figure.probe}, {figure.length} tokens", []).append(figure)
        for name, figures in by_length.items():
            accuracy, nats = fmean(each.accuracy for each in figures), fmean(each.nats for each in figures)
            rows.setdefault(name, []).append(f"{100 * accuracy:.1f} ({nats:.2f})")
    return [[name, *texts] for name, texts in rows.items()]


def report_table(report: RecallReport) -> Table:
    """Return the report as a table for a terminal."""
    table = Table("", *(column.name for column in report.columns), caption=LEGEND)
    for row in report_rows(report):
        table.add_row(*row)
    return table


def write_report(report: RecallReport, folder: Path, *, data: str, card: bool = False) -> None:
    """Write a report on a text into a folder: as JSON, and as a table in Markdown or, with ``card``, in its model card."""
    folder.mkdir(parents=True, exist_ok=True)
    with new_file(folder / "recall.json") as file:
        json.dump({"data": data, **asdict(report)}, file, indent=2)
    table = markdown_table(["", *(column.name for column in report.columns)], report_rows(report))
    text = (
        f"{table}\n\n{LEGEND} Protocol: {report.protocol}.\n\nText: {data}. `recall.json` has the needles by depth.\n"
    )
    if card:
        model_card = load_card(folder)
        replace_section(model_card, RECALL_HEADING, text)
        text = str(model_card)
    with new_file(folder / ("README.md" if card else "recall.md")) as file:
        file.write(text)
