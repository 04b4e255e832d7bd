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
    rows = [("cache, bytes", [f"{column.num_bytes:,}" for column in report.columns])]
    held = [each.memory for each in report.columns]
    kinds = [[each.state, each.window, each.sinks, each.slots, each.retrieval] for each in held]
    name = "of it state + window + sinks + slots + retrieval heads"
    rows.append((name, [" + ".join(f"{size:,}" for size in each) for each in kinds]))
    others = [sum(size * most for size, most in each.sliding) + each.recurrent for each in held]
    rows.append(("of it sliding and recurrent layers, at most", [f"{size:,}" if size else "" for size in others]))
    texts = ["" if column.worth is None else f"{column.worth:,.0f}" for column in report.columns]
    rows.append(("cache, tokens of the teacher's", texts))
    groups = [_groups(column) for column in report.columns]
    for name in groups[0]:
        cells = [_cell(each[name]) for each in groups]
        chance = groups[0][name][0].chance
        rows.append((name if chance is None else f"{name} (chance {100 * chance:.2g} %)", cells))
    written = [column.written for column in report.columns if column.written is not None]
    if written:
        rows.append(("greedy tokens like the teacher's", [_number(each.agreement, ".1f") for each in written]))
        nats = [each.teacher_nats for each in written]
        texts = ["" if each is None else shown(perplexity_of(each), 1) for each in nats]
        rows.append(("teacher's perplexity of what it writes", texts))
        rows.append(("4-grams written again, %", [f"{100 * each.repeated:.1f}" for each in written]))
    return [row for row in rows if any(row[1])]


def _groups(column: Column) -> dict[str, list[Figure]]:
    """Return the figures of a column by the names of the table's rows."""
    found: dict[str, list[Figure]] = {}
    for each in column.figures:
        found.setdefault(f"{each.probe}, {each.setting.split(', depth')[0]}", []).append(each)
    return found


def _cell(figures: list[Figure]) -> str:
    """Return perplexity for text, and else accuracy in percent with nats."""
    nats = fmean(each.nats for each in figures)
    if figures[0].accuracy is None:
        return shown(perplexity_of(nats))
    return f"{100 * _accuracy(figures):.1f} ({nats:.2f})"


def _accuracy(figures: list[Figure]) -> float:
    return fmean(each.accuracy for each in figures if each.accuracy is not None)


def _number(value: float | None, shown: str) -> str:
    return "" if value is None else format(value, shown)


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
    """Draw perplexity and recall against distance, a line per model.

    Args:
        report: the figures.
        path: PNG to write.
    """
    figure = Picture(figsize=(13, 7))  # no pyplot: a notebook's backend is not ours to change
    panels = figure.subplots(2, 3).flatten()

    def exp_nats(figures: list[Figure]) -> float:
        return perplexity_of(fmean(each.nats for each in figures))

    def percent(figures: list[Figure]) -> float:
        return 100 * _accuracy(figures)

    _panel(panels[0], report, "text", "perplexity by context", exp_nats)
    for panel, name in zip(
        panels[1:5], ("random tokens again", "text again", "phone book", "needle in text"), strict=True
    ):
        _panel(panel, report, name, f"{name}: % right by length", percent)
    _panel(panels[5], report, "needle in text", "needle in text: % right by depth", percent, by_depth=True)
    for panel in panels:
        if not panel.has_data():
            panel.text(0.5, 0.5, "not measured", ha="center", transform=panel.transAxes)
    handles = [line for line in panels[1].get_lines() if not str(line.get_label()).startswith("_")]
    figure.legend(handles=handles, loc="lower center", ncols=len(report.columns), fontsize=8)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=130)


def _panel(
    panel: Axes,
    report: RecallReport,
    probe: str,
    title: str,
    value: Callable[[list[Figure]], float],
    *,
    by_depth: bool = False,
) -> None:
    """Draw one probe of every column against the number in its setting: tokens, entries or depth."""
    for shade, column in enumerate(report.columns):
        points: dict[float, list[Figure]] = {}
        for each in column.figures:
            if each.probe == probe and not each.setting.endswith(("seen bigrams", "others")):
                length, _, depth = each.setting.partition(", depth ")
                number = depth if by_depth else next(word for word in length.split() if word.isdigit())
                points.setdefault(float(number), []).append(each)
        if points:
            places = sorted(points)
            panel.plot(places, [value(points[x]) for x in places], "o-", ms=3, color=f"C{shade}", label=column.name)
            if not by_depth:
                panel.set_xscale("log", base=2)
            if "%" in title:
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
        found = load_card(folder)
        replace_section(found, RECALL_HEADING, body)
        with new_file(folder / "README.md") as file:
            file.write(str(found))
    else:
        with new_file(folder / "recall.md") as file:
            file.write(body)
