"""The recall suite's figures as a table, for a terminal and for a model card, and as a picture."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture
from rich.table import Table

from hf_rfa.errors import InputError
from hf_rfa.evaluation.cards import RECALL_HEADING, load_card, replace_section
from hf_rfa.evaluation.perplexity import perplexity_of, shown
from hf_rfa.io.atomic_io import check_file, folder_beside, new_file

from .suite import Column, Figure, RecallReport


def report_rows(report: RecallReport) -> list[tuple[str, list[str]]]:
    """Return (what was measured, a text per column): memory, then a row per setting, needles averaged over their depths."""
    columns, memories = report.columns, [column.memory for column in report.columns]
    parts = [(memory.state, memory.window, memory.sinks, memory.slots, memory.retrieval) for memory in memories]
    others = [sum(size * most for size, most in memory.sliding) + memory.recurrent for memory in memories]
    rows = [
        ("cache, bytes", [f"{column.num_bytes:,}" for column in columns]),
        (
            "of it state + window + sinks + slots + retrieval heads",
            [" + ".join(f"{size:,}" for size in sizes) for sizes in parts],
        ),
        ("of it sliding and recurrent layers, at most", [f"{size:,}" if size else "" for size in others]),
        ("cache, tokens of the teacher's", [_number(column.worth, ",.0f") for column in columns]),
    ]
    settings = [_figures_by_setting(column) for column in columns]
    for name, (first, *_) in settings[0].items():
        label = name if first.chance is None else f"{name} (chance {100 * first.chance:.2g} %)"
        rows.append((label, [_cell(figures[name]) for figures in settings]))
    written = [column.written for column in columns if column.written is not None]
    nats = [text.teacher_nats for text in written]
    rows += [
        ("greedy tokens like the teacher's", [_number(text.agreement, ".1f") for text in written]),
        (
            "teacher's perplexity of what it writes",
            ["" if mean is None else shown(perplexity_of(mean), 1) for mean in nats],
        ),
        ("4-grams written again, %", [f"{100 * text.repeated:.1f}" for text in written]),
    ]
    return [(name, texts) for name, texts in rows if any(texts)]


def _figures_by_setting(column: Column) -> dict[str, list[Figure]]:
    """Return the figures of a column by the names of the table's rows."""
    by_setting: dict[str, list[Figure]] = {}
    for figure in column.figures:
        by_setting.setdefault(f"{figure.probe}, {figure.setting.split(', depth')[0]}", []).append(figure)
    return by_setting


def _cell(figures: list[Figure]) -> str:
    """Return perplexity for text, and else accuracy in percent with nats."""
    nats = fmean(figure.nats for figure in figures)
    if figures[0].accuracy is None:
        return shown(perplexity_of(nats))
    return f"{_percent_right(figures):.1f} ({nats:.2f})"


def _perplexity(figures: list[Figure]) -> float:
    return perplexity_of(fmean(figure.nats for figure in figures))


def _percent_right(figures: list[Figure]) -> float:
    return 100 * fmean(figure.accuracy for figure in figures if figure.accuracy is not None)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


#: What the numbers of the table are.
LEGEND = (
    "text: perplexity, of all tokens, of those whose bigram occurred before in the row, and of the others. All else: % of "
    "the tokens, of the numbers in the phone book or of the needles that the model gives the highest probability, and in "
    "brackets nats per token, or per number."
)


def report_table(report: RecallReport) -> Table:
    """Return the report as a table for a terminal."""
    table = Table("", *(column.name for column in report.columns), caption=LEGEND)
    for name, cells in report_rows(report):
        table.add_row(name, *cells)
    return table


def markdown_table(report: RecallReport) -> str:
    """Return the report as a table in Markdown, with its legend and its protocol."""
    names = [column.name for column in report.columns]
    lines = [f"| | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in report_rows(report)]
    left_out = "".join(f" Left out: {name} ({why})." for name, why in report.skipped.items())
    return "\n".join([*lines, "", f"{LEGEND[0].upper()}{LEGEND[1:]} Protocol: {report.protocol}.{left_out}", ""])


def draw_report(report: RecallReport, path: Path) -> None:
    """Draw perplexity and recall against distance to a PNG file, a line per model."""
    picture = Picture(figsize=(13, 7))  # no pyplot: a notebook's backend is not ours to change
    panels = picture.subplots(2, 3).flatten()
    _draw_probe(panels[0], report, "text", "perplexity by context", _perplexity)
    probes = ("random tokens again", "text again", "phone book", "needle in text")
    for panel, probe in zip(panels[1:5], probes, strict=True):
        _draw_probe(panel, report, probe, f"{probe}: % right by length", _percent_right)
    _draw_probe(panels[5], report, "needle in text", "needle in text: % right by depth", _percent_right, by_depth=True)
    lines = [line for line in panels[1].get_lines() if not str(line.get_label()).startswith("_")]
    picture.legend(handles=lines, loc="lower center", ncols=len(report.columns), fontsize=8)
    picture.tight_layout(rect=(0, 0.05, 1, 1))
    picture.savefig(path, dpi=130)


def _draw_probe(
    panel: Axes,
    report: RecallReport,
    probe: str,
    title: str,
    value: Callable[[list[Figure]], float],
    *,
    by_depth: bool = False,
) -> None:
    """Draw one probe of every column against the number in its setting: tokens, entries or depth."""
    for column in report.columns:
        points: dict[float, list[Figure]] = {}
        for figure in column.figures:
            if figure.probe == probe and not figure.setting.endswith(("seen bigrams", "others")):
                length, _, depth = figure.setting.partition(", depth ")
                number = depth if by_depth else next(word for word in length.split() if word.isdigit())
                points.setdefault(float(number), []).append(figure)
        if points:
            numbers = sorted(points)
            panel.plot(numbers, [value(points[number]) for number in numbers], "o-", ms=3, label=column.name)
    if not panel.has_data():
        panel.text(0.5, 0.5, "not measured", ha="center", transform=panel.transAxes)
    elif not by_depth:
        panel.set_xscale("log", base=2)
    if value is _percent_right:
        panel.set_ylim(-3, 103)
    panel.set_title(title, fontsize=9)
    panel.tick_params(labelsize=7)
    panel.grid(alpha=0.3)


#: The files that `write_report` writes.
FILES = ("recall.json", "recall.png", "recall.md")


def check_output(folder: Path | None) -> None:
    """Raise an `InputError` if a report cannot be written to a folder, which may not exist yet."""
    if folder is None or not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"{folder} is a file; it is kept. Choose another folder for the report.")
    for name in FILES:
        check_file(folder / name)


def write_report(report: RecallReport, folder: Path, *, data: str | None = None, card: bool = False) -> None:
    """Write a report as JSON, as a picture, and as a table in Markdown or in a checkpoint's model card.

    Args:
        report: the figures.
        folder: where to; made if it is not there.
        data: name of the text.
        card: whether the folder is a checkpoint, in whose model card the table becomes a section.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with new_file(folder / "recall.json") as file:
        json.dump({"data": data, **report.as_dict()}, file, indent=2)
    with folder_beside(folder / "recall.png") as beside:
        draw_report(report, beside / "recall.png")
        (beside / "recall.png").replace(folder / "recall.png")
    of = "" if data is None else f"Text: {data}. "
    body = f"![recall](recall.png)\n\n{markdown_table(report)}\n{of}`recall.json` has the needles by depth.\n"
    if card:
        model_card = load_card(folder)
        replace_section(model_card, RECALL_HEADING, body)
        with new_file(folder / "README.md") as file:
            file.write(str(model_card))
    else:
        with new_file(folder / "recall.md") as file:
            file.write(body)
