"""What was measured of streams: one file of figures, and tables of them."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hf_rfa.evaluation.cards import markdown_table
from hf_rfa.io.atomic_io import new_file

from .measure import nats_in_blocks

SOFTMAX = "softmax"
#: Kinds of streams, in the order of the tables.
KINDS = ("ours", "streaming-llm")
#: Parts of the longest stream, each a row of the table by position.
PARTS = 10


def collect(folder: Path) -> dict[str, Any]:
    """Return what the measurements have written to their folders, and write it to ``streams.json``.

    Returns:
        ``blocks``: the rows of every stream, by its name; ``windows``: comparisons on the windows of `recomputed`.
    """
    blocks = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/rows.json")}
    sizes = sorted(int(path.name.removeprefix("recomputed-")) for path in folder.glob("recomputed-*"))
    windows = [row for memory in sizes for row in compare_windows(folder, memory)]
    data = {"blocks": dict(sorted(blocks.items(), key=lambda item: order(item[0]))), "windows": windows}
    with new_file(folder / "streams.json") as file:
        file.write(json.dumps(data, indent=1) + "\n")
    return data


def order(name: str) -> tuple[int, int]:
    """Return where a stream stands: softmax first, then by kind and memory."""
    kind, _, memory = name.rpartition("-")
    return (KINDS.index(kind) + 1, int(memory)) if kind in KINDS else (0, 0)


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
    nats |= {kind: nats_in_blocks(folder / f"{kind}-{memory}", starts) for kind in KINDS}
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


def by_position(blocks: dict[str, list[dict[str, Any]]]) -> str:
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
    return markdown_table(head, [row for row in (*rows, ["all", *cells(0, most)]) if any(row[1:])])


def perplexity(nats: list[float]) -> float:
    """Return the perplexity of blocks from their mean nats, or the ratio of two from their differences."""
    return math.exp(sum(nats) / len(nats))


def by_time(blocks: dict[str, list[dict[str, Any]]]) -> str:
    """Return ms a token of scored blocks, and memory, at the beginning and at the end of every stream."""
    lines = []
    for name, rows in blocks.items():
        scored = [row for row in rows if "nats" in row]
        if name != SOFTMAX and scored:
            tenth = max(1, len(scored) // PARTS)
            parts = (scored[:tenth], scored[-tenth:])
            times = [median(1000 * row["seconds"] / row["tokens"] for row in part) for part in parts]
            sizes = [row["process_bytes"] / 2**20 for row in (rows[0], rows[-1])]
            tokens = (rows[-1]["block"] + 1) * rows[-1]["tokens"]
            lines.append([name, f"{tokens:,}", *(f"{time:.2f}" for time in times), *(f"{size:,.0f}" for size in sizes)])
    head = ["stream", "tokens", "ms a token, first tenth", "last", "process, MiB, first block", "last"]
    return markdown_table(head, lines)


def of_windows(windows: list[dict[str, Any]]) -> str:
    """Return the comparisons with windows read from scratch."""
    head = ["memory", "row", "perplexity", "beside", "perplexity", "ratio", "±", "windows"]
    lines = []
    for row in windows:
        cells = [str(row["memory"]), row["row"], f"{row['perplexity']:.2f}", row["other"]]
        cells += [f"{row['perplexity_of_other']:.2f}", f"{row['ratio']:.3f}", f"{row['standard_error']:.3f}"]
        lines.append([*cells, f"{row['windows']:,}"])
    return markdown_table(head, lines)


def tables(data: dict[str, Any]) -> str:
    """Return the tables of what there is, as Markdown."""
    found = [by_position(data["blocks"]), by_time(data["blocks"])] if data["blocks"] else []
    return "\n\n".join([*found, of_windows(data["windows"])] if data["windows"] else found)
