"""Draws the pictures of README.md and docs/results.md from benchmarks/results: python -m docs.make_pictures.

The pages beside each JSON say how it was made.
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parent / "benchmarks" / "results"
SOFTMAX, OURS, WINDOW, SLOTS, SUMMARY = "#b3440f", "#174a80", "#dd9464", "#7ba7d4", "#1b7a4b"
#: Rows of memory.json by memory, for every line of the chart of equal bytes; the trained ones have " trained" after the name.
EQUAL_BYTES = {
    "window + sinks": (SOFTMAX, ("60+4", "124+4", "252+4")),
    "exact (slots)": (SLOTS, ("31+4+28", "32+4+90", "64+4+184")),
    "exact with retrieval heads": (OURS, ("20+4+20r8x251", "32+4+52r8x506", "50+4+123r8x1016")),
    "with a summary too": (SUMMARY, ("16+4+24s8r12x16+137", "26+4+58s8r8x26+442", "41+4+135s8r8x41+900")),
}
MEMORIES = (64, 128, 256)
#: Sizes that were trained, where they are others than those of `EQUAL_BYTES`: chosen by hand.
TRAINED = {
    "20+4+20r8x251": "20+4+21r8x240",
    "32+4+52r8x506": "32+4+55r8x480",
    "50+4+123r8x1016": "48+4+125r8x1020",
}
#: Methods of eviction in the chart beside ours, as they are drawn.
PEERS = {"window with sinks, absolute positions": "s", "TOVA": "^", "SnapKV": "v", "H2O": "D"}


def draw_token_life(axes: Axes) -> None:
    """Draw where a token is kept as the text goes on: sinks, window, slots, state."""
    axes.set(xlim=(0, 100), ylim=(0, 60))
    axes.axis("off")
    axes.set_title("the life of a token", fontsize=10)
    boxes = (
        (2, 40, 28, 12, "#c5e0b4", "sinks", "the first tokens, for good"),
        (66, 40, 32, 12, "#fff2cc", "window", "the last tokens"),
        (36, 22, 34, 12, "#f4b183", "slots", "the most important ones"),
        (36, 4, 34, 12, "#9dc3e6", "state", "a summary of the others"),
    )
    for x, y, width, height, color, name, text in boxes:
        axes.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor="#444444"))
        axes.text(x + width / 2, y + 7.2, name, ha="center", va="center", fontsize=9, fontweight="bold")
        axes.text(x + width / 2, y + 3.2, text, ha="center", va="center", fontsize=6.5)
    arrows = (
        ((98, 57.5), (88, 52.5), "a new token", (80, 57)),
        ((76, 40), (60, 34.5), "leaves the window", (71, 36)),
        ((51, 22), (51, 16.5), "evicted", (53, 18.5)),
    )
    for start, end, text, place in arrows:
        axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, color="#444444"))
        axes.text(
            place[0], place[1], text, fontsize=7, color="#444444", ha="right" if text == "a new token" else "left"
        )
    axes.text(1, 10, "every box has a fixed size:\nthe cache never grows", fontsize=7.5, va="center")


def draw_speed(times: Axes, sizes: Axes) -> None:
    """Draw milliseconds and MiB of a decoding step by position, softmax and converted."""
    points: list[dict[str, Any]] = json.loads((RESULTS / "speed-smollm2.json").read_text())["points"]["decoding"]
    lengths = [point["length"] for point in points]
    softmax = [min(ms for name, ms in point["milliseconds"].items() if name != "RFA") for point in points]
    times.plot(lengths, softmax, color=SOFTMAX, marker="o", markersize=3, label="softmax")
    ours = [point["milliseconds"]["RFA"] for point in points]
    times.plot(lengths, ours, color=OURS, marker="o", markersize=3, label="converted")
    times.set(title="ms per token", ylim=(0, None))
    for name, color in (("softmax", SOFTMAX), ("RFA", OURS)):
        mebibytes = [point["cache_bytes"][name] / 2**20 for point in points]
        sizes.plot(lengths, mebibytes, color=color, marker="o", markersize=3)
    sizes.set(title="MiB of the cache", yscale="log")
    for axes in (times, sizes):
        axes.set_title(axes.get_title(), fontsize=10)
        axes.set_xscale("log", base=2)
        axes.set_xticks([128, 2048, 32768], ["128", "2,048", "32,768"], fontsize=7)
        axes.tick_params(axis="y", labelsize=7)
        axes.minorticks_off()
        axes.set_xlabel("tokens so far", fontsize=8)
        axes.grid(alpha=0.3)
    times.legend(frameon=False, fontsize=8, loc="upper left")


def overview() -> Figure:
    """Return the picture of the README in two halves."""
    figure = Figure(figsize=(10, 3))
    life, times, sizes = figure.subplots(1, 3, width_ratios=(2, 1, 1))
    draw_token_life(life)
    draw_speed(times, sizes)
    return figure


def speed() -> Figure:
    """Return its right half alone."""
    figure = Figure(figsize=(8, 3))
    draw_speed(*figure.subplots(1, 2))
    return figure


def draw_memories(axes: Axes) -> None:
    """Make an axis of memories, and a line where softmax attention stands."""
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(MEMORIES, [str(memory) for memory in MEMORIES])
    axes.minorticks_off()
    axes.set_xlabel("memory, tokens of the softmax cache", fontsize=8)
    axes.grid(alpha=0.3)


def equal_bytes() -> Figure:
    """Return perplexity relative to softmax by memory, one panel a context, untrained and trained."""
    perplexity = memory_perplexity()
    figure = Figure(figsize=(8, 3.4))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, context in zip(panels, (1024, 2048), strict=True):
        for label, (color, names) in EQUAL_BYTES.items():
            for suffix, style in (("", "-"), (" trained", "--")):
                rows = [f"{TRAINED.get(name, name)} trained" if suffix else name for name in names]
                points = [
                    (memory, perplexity[row, context] / perplexity["softmax", context])
                    for memory, row in zip(MEMORIES, rows, strict=True)
                    if (row, context) in perplexity
                ]
                if points:
                    axes.plot(
                        *zip(*points, strict=True), style, color=color, marker="o", markersize=4, label=label + suffix
                    )
        draw_memories(axes)
        axes.set_title(f"at {context:,} tokens", fontsize=10)
    panels[0].set_ylabel("perplexity / softmax's", fontsize=8)
    panels[0].set_ylim(top=1.5)  # room for the legend
    panels[1].legend(frameon=False, fontsize=7)
    return figure


def memory_perplexity() -> dict[tuple[str, int], float]:
    """Return the perplexities of memory.json by row and context."""
    rows = json.loads((RESULTS / "memory.json").read_text())
    return {(row["name"], row["context"]): row["perplexity"] for row in rows}


def peers() -> Figure:
    """Return perplexity relative to softmax by memory of other methods of eviction and of ours, untrained."""
    perplexity = memory_perplexity()
    softmax = perplexity["softmax", 1024]
    rows = json.loads((RESULTS / "peers.json").read_text())
    figure = Figure(figsize=(5, 3.4))
    axes = figure.subplots()
    for method, marker in PEERS.items():
        figures = {
            row["budget"]: row["figure"] for row in rows if (row["method"], row["task"]) == (method, "perplexity 1,024")
        }
        memories = [memory for memory in MEMORIES if memory in figures]
        ratios = [figures[memory] / softmax for memory in memories]
        axes.plot(memories, ratios, color=WINDOW, marker=marker, markersize=4, label=method)
    for label, (color, names) in list(EQUAL_BYTES.items())[1:]:
        points = [
            (memory, perplexity[name, 1024] / softmax)
            for memory, name in zip(MEMORIES, names, strict=True)
            if (name, 1024) in perplexity
        ]
        axes.plot(*zip(*points, strict=True), color=color, marker="o", markersize=4, label=f"hf-rfa, {label}")
    draw_memories(axes)
    axes.set_ylabel("perplexity / softmax's", fontsize=8)
    axes.legend(frameon=False, fontsize=7)
    return figure


def stream_nats(file: str) -> dict[str, dict[int, float]]:
    """Return the loss of every block of a file of streams, by name and by first token."""
    blocks: dict[str, list[dict[str, Any]]] = json.loads((RESULTS / file).read_text())["blocks"]
    return {
        name: dict(sorted((row["block"] * row["tokens"], row["nats"]) for row in rows if "nats" in row))
        for name, rows in blocks.items()
    }


def stream_milliseconds(blocks_at_once: int = 10) -> dict[int, float]:
    """Return milliseconds a token of the stream of 256 tokens, the median of every ``blocks_at_once``, by first token."""
    rows = json.loads((RESULTS / "streams.json").read_text())["blocks"]["ours-256"]
    groups = [rows[start : start + blocks_at_once] for start in range(0, len(rows), blocks_at_once)]
    return {
        group[0]["block"] * group[0]["tokens"]: statistics.median(1e3 * row["seconds"] / row["tokens"] for row in group)
        for group in groups
    }


def streams() -> Figure:
    """Return perplexity by position in a stream, its ratio to softmax's in fresh blocks and to StreamingLLM's, and times."""
    nats, others = stream_nats("streams.json"), stream_nats("streams-peers.json")
    softmax, ours = nats["softmax"], nats["ours-256"]
    figure = Figure(figsize=(8, 6))
    above, below, times = figure.subplots(3, 1, sharex=True, height_ratios=(5, 5, 3))
    for label, color, of_line in (
        ("softmax, every block from scratch", "#555555", softmax),
        ("hf-rfa, 256 tokens", OURS, ours),
    ):
        above.plot(list(of_line), [math.exp(each) for each in of_line.values()], color=color, marker=".", label=label)
    lines = (
        ("hf-rfa", OURS, ".", ours, softmax),
        ("hf-rfa, one novel, with retrieval heads", SLOTS, "o", others["ours-256"], others["softmax"]),
        ("StreamingLLM, the same novel", WINDOW, "s", others["streaming-llm-256"], others["softmax"]),
    )
    for label, color, marker, line, base in lines:
        shared = [start for start in line if start in base]
        ratios = [math.exp(line[start] - base[start]) for start in shared]
        below.plot(shared, ratios, color=color, marker=marker, markersize=4, label=label)
    below.axhline(1, color="#555555")
    below.set_ylim(bottom=0.97)  # room for the legend
    above.set_ylabel("perplexity")
    below.set(ylabel="perplexity / softmax's")
    milliseconds = stream_milliseconds()
    times.plot(list(milliseconds), list(milliseconds.values()), color=OURS, marker=".")
    times.set(ylabel="ms per token", xlabel="tokens so far", ylim=(0, 12))
    times.xaxis.set_major_formatter("{x:,.0f}")
    above.legend(frameon=False, fontsize=7)
    below.legend(frameon=False, fontsize=7, ncols=3, loc="lower center")
    for axes in (above, below, times):
        axes.grid(alpha=0.3)
    return figure


PICTURES = {
    "overview": overview,
    "equal-bytes": equal_bytes,
    "peers": peers,
    "speed": speed,
    "streams": streams,
}


def main(folder: Path = FOLDER) -> None:
    """Write every picture as NAME.svg."""
    with matplotlib.rc_context({"svg.hashsalt": "hf-rfa", "svg.fonttype": "none"}):
        for name, draw in PICTURES.items():
            figure = draw()
            figure.tight_layout()
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
