"""Tables and a chart of all that was measured of streams."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from rich.table import Table

from hf_rfa.evaluation.cards import markdown_table
from hf_rfa.io.atomic_io import new_file

from .measure import nats_in_blocks

SOFTMAX = "softmax"
#: Kinds of streams, and the colors of their lines from the smallest memory to the largest.
COLORS = {"ours": ("#a9c4e2", "#5f92c7", "#174a80"), "streaming-llm": ("#efc3a4", "#dd9464", "#b3440f")}
#: Parts of the longest stream, each a row of the table by position.
PARTS = 10


@dataclass(frozen=True)
class Figures:
    """A table of figures.

    Attributes:
        title: what it has.
        head: the names of its columns.
        rows: its cells.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def collect(folder: Path) -> dict[str, Any]:
    """Return what the measurements have written to their folders, and write it to ``streams.json``.

    Returns:
        ``blocks``: the rows of every stream, by its name; ``windows``: comparisons on the windows of `recomputed`;
        ``steps``: ms by place, by the name of the stream.
    """
    blocks = {path.parent.name: json.loads(path.read_text()) for path in sorted(folder.glob("*/rows.json"))}
    steps = {path.parent.name: json.loads(path.read_text()) for path in sorted(folder.glob("*/step.json"))}
    sizes = sorted(int(path.name.removeprefix("recomputed-")) for path in folder.glob("recomputed-*"))
    windows = [row for memory in sizes for row in compare_windows(folder, memory)]
    data = {"blocks": dict(sorted(blocks.items(), key=lambda item: order(item[0]))), "windows": windows, "steps": steps}
    with new_file(folder / "streams.json") as file:
        file.write(json.dumps(data, indent=1) + "\n")
    return data


def order(name: str) -> tuple[int, int]:
    """Return where a stream stands: softmax first, then by kind and memory."""
    kind, _, memory = name.rpartition("-")
    return (list(COLORS).index(kind) + 1, int(memory)) if kind in COLORS else (0, 0)


def compare_windows(folder: Path, memory: int) -> list[dict[str, Any]]:
    """Return rows that compare two ways to read at one memory, on the windows that both have.

    A row's ``ratio`` is that of their perplexities. Its ``standard_error`` is that of the mean difference of windows' nats,
    times the ratio.
    """
    files = [torch.load(path) for path in sorted((folder / f"recomputed-{memory}").glob("*.pt"))]
    if not files:
        return []
    starts = torch.cat([file["starts"] for file in files])
    nats = {"recomputed": torch.cat([file["nats"] for file in files])}
    nats |= {kind: nats_in_blocks(folder / f"{kind}-{memory}", starts) for kind in COLORS}
    rows = []
    for row, other in (("ours", "recomputed"), ("streaming-llm", "recomputed"), ("ours", "streaming-llm")):
        means = torch.stack([nats[row], nats[other]]).double().mean(-1)
        means = means[:, ~means.isnan().any(0)]
        count = means.shape[1]
        if count > 1:
            difference = means[0] - means[1]
            ratio = math.exp(float(difference.mean()))
            error = ratio * float(difference.std()) / math.sqrt(count)
            perplexity, of_other = means.mean(1).exp().tolist()
            found = {"windows": count, "perplexity": perplexity, "perplexity_of_other": of_other}
            rows.append(
                {"memory": memory, "row": row, "other": other, **found, "ratio": ratio, "standard_error": error}
            )
    return rows


def nats_by_token(rows: list[dict[str, Any]]) -> dict[int, float]:
    """Return the mean nats of scored blocks by the block's first token, in the order of the text."""
    ordered = sorted(rows, key=lambda row: row["block"])
    return {row["block"] * row["tokens"]: row["nats"] for row in ordered if "nats" in row}


def by_position(blocks: dict[str, list[dict[str, Any]]]) -> Figures:
    """Return perplexity by position, as softmax has it, and of streams relative to it on the blocks that both have."""
    nats = {name: nats_by_token(rows) for name, rows in blocks.items()}
    softmax = nats.pop(SOFTMAX, {})
    most = max((row["block"] + 1) * row["tokens"] for rows in blocks.values() for row in rows)

    def cells(first: float, end: float) -> list[str]:
        inside = [start for start in softmax if first <= start < end]
        texts = [f"{perplexity([softmax[start] for start in inside]):.2f}" if inside else ""]
        for of_stream in nats.values():
            differences = [of_stream[start] - softmax[start] for start in inside if start in of_stream]
            texts.append(f"{perplexity(differences):.3f}" if differences else "")
        return texts

    edges = [most * part / PARTS for part in range(PARTS + 1)]
    rows = [[f"{first:,.0f}", *cells(first, end)] for first, end in pairwise(edges)]
    head = ["from token", SOFTMAX, *(f"{name} / softmax" for name in nats)]
    return Figures("Perplexity by position", head, [row for row in (*rows, ["all", *cells(0, most)]) if any(row[1:])])


def perplexity(nats: list[float]) -> float:
    """Return the perplexity of blocks from their mean nats, or the ratio of two from their differences."""
    return math.exp(sum(nats) / len(nats))


def by_time(blocks: dict[str, list[dict[str, Any]]]) -> Figures:
    """Return ms a token of scored blocks, and memory, at the beginning and at the end of every stream."""
    lines = []
    for name, rows in blocks.items():
        scored = [row for row in rows if "nats" in row]
        if name != SOFTMAX and scored:
            tenth = max(1, len(scored) // PARTS)
            times = [
                median(1000 * row["seconds"] / row["tokens"] for row in part)
                for part in (scored[:tenth], scored[-tenth:])
            ]
            sizes = [row["process_bytes"] / 2**20 for row in (rows[0], rows[-1])]
            tokens = (rows[-1]["block"] + 1) * rows[-1]["tokens"]
            lines.append([name, f"{tokens:,}", *(f"{time:.2f}" for time in times), *(f"{size:,.0f}" for size in sizes)])
    head = ["stream", "tokens", "ms a token, first tenth", "last", "process, MiB, first block", "last"]
    return Figures("Time and memory of scored blocks", head, lines)


def of_windows(windows: list[dict[str, Any]]) -> Figures:
    """Return the comparisons with windows read from scratch."""
    head = ["memory", "row", "perplexity", "beside", "perplexity", "ratio", "±", "windows"]
    lines = [
        [
            *(str(row["memory"]), row["row"], f"{row['perplexity']:.2f}"),
            *(row["other"], f"{row['perplexity_of_other']:.2f}"),
            *(f"{row['ratio']:.3f}", f"{row['standard_error']:.3f}", f"{row['windows']:,}"),
        ]
        for row in windows
    ]
    return Figures("Beside a window read from scratch", head, lines)


def of_steps(steps: dict[str, dict[str, Any]]) -> Figures:
    """Return ms of a step, and of a prompt's token, by where in the stream."""
    lines = [
        [name, f"{int(place):,}", f"{of_stream['step'][place]:.2f}", f"{of_stream['prompt'][place]:.2f}"]
        for name, of_stream in steps.items()
        for place in of_stream["step"]
    ]
    return Figures("A step and a prompt", ["stream", "after token", "ms a step", "ms a token of a prompt"], lines)


def tables(data: dict[str, Any]) -> list[Figures]:
    """Return the tables of what there is."""
    found = [by_position(data["blocks"]), by_time(data["blocks"])] if data["blocks"] else []
    found += [of_windows(data["windows"]), of_steps(data["steps"])]
    return [each for each in found if each.rows]


def rich_tables(found: list[Figures]) -> list[Table]:
    """Return tables for a terminal."""
    made = []
    for each in found:
        table = Table(*each.head, title=each.title)
        for cells in each.rows:
            table.add_row(*cells)
        made.append(table)
    return made


def markdown(found: list[Figures]) -> str:
    """Return tables for a page."""
    return "\n\n".join(f"{each.title}:\n\n{markdown_table(each.head, each.rows)}" for each in found)


def draw(data: dict[str, Any], path: Path) -> None:
    """Draw perplexity by position, and its ratio to softmax's, to a PNG and an SVG file, ``path`` without its suffix."""
    figure = Figure(figsize=(8, 5))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1))
    softmax = nats_by_token(data["blocks"].get(SOFTMAX, []))
    sizes = sorted({order(name)[1] for name in data["blocks"]} - {0})
    if softmax:
        above.plot(
            list(softmax),
            [math.exp(nats) for nats in softmax.values()],
            color="#555555",
            marker=".",
            label="softmax, fresh blocks",
        )
    for name, rows in data["blocks"].items():
        kind, memory = name.rpartition("-")[0], order(name)[1]
        if kind in COLORS:
            nats = nats_by_token(rows)
            style: dict[str, Any] = {"color": COLORS[kind][-1 - min(2, len(sizes) - 1 - sizes.index(memory))]}
            style |= {"marker": ".", "label": f"{kind.replace('ours', 'hf-rfa')}, {memory} tokens"}
            above.plot(list(nats), [math.exp(each) for each in nats.values()], **style)
            shared = [start for start in nats if start in softmax]
            below.plot(shared, [math.exp(nats[start] - softmax[start]) for start in shared], **style)
    below.axhline(1, color="#555555")
    above.set_ylabel("perplexity")
    below.set_ylabel("perplexity / softmax's")
    below.set_xlabel("tokens so far")
    below.xaxis.set_major_formatter("{x:,.0f}")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    above.legend(frameon=False, fontsize=7, ncols=2)
    figure.tight_layout()
    with matplotlib.rc_context({"svg.hashsalt": "hf-rfa", "svg.fonttype": "none"}):
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    figure.savefig(path.with_suffix(".png"), dpi=150)
