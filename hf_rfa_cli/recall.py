"""``hf-rfa recall``."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from .console import console, shown_count, starting
from .options import Device, Model, ModelDtype, Record, Seed, in_a_folder, text_file

#: Most tokens of a text that are read.
TEXT_TOKENS = 200_000


def _view(text: str) -> tuple[int, int]:
    """Return (window, sinks) of a control such as "64" or "60+4"."""
    window, plus, sinks = text.partition("+")
    if not (window.isdigit() and int(window) > 0 and (sinks.isdigit() if plus else not sinks)):
        raise typer.BadParameter(f"it must be a window, or window+sinks, such as 64 or 60+4, got {text!r}.")
    return int(window), int(sinks or 0)


def recall_command(
    model: Model,
    text: Annotated[Path, Argument(callback=text_file, help="Text, as for hf-rfa evaluate.")],
    teacher: Annotated[str | None, Option(help="Softmax model that it was made from, to compare with.")] = None,
    control: Annotated[
        list[Any] | None,
        Option(
            parser=_view,
            metavar="WINDOW+SINKS",
            help="Softmax that sees these alone; repeatable. Default: of the same bytes.",
        ),
    ] = None,
    max_length: Annotated[int | None, Option(min=128, help="Tokens a row. Default: positions, at most 2048.")] = None,
    quick: Annotated[bool, Option("--quick", help="Fewer rows and lengths: about a fifth of the time.")] = False,
    seed: Seed = 0,
    document_end: Annotated[str | None, Option(help="Token after each document. Default: end of text.")] = None,
    output: Annotated[Path | None, Option(callback=in_a_folder, help="Folder for the table and its JSON.")] = None,
    record: Record = False,
    dtype: ModelDtype = "auto",
    device: Device = "auto",
) -> None:
    """Measure what perplexity hides: text said again, and needles in a text."""
    starting(f"measuring the recall of {model}")
    from hf_rfa.evaluation.cards import check_recordable
    from hf_rfa.evaluation.recall import recall_suite, report_table, write_report
    from hf_rfa.evaluation.recall.report import FILES
    from hf_rfa.inference import load_model
    from hf_rfa.io.atomic_io import check_file
    from hf_rfa.io.text_io import read_documents, tokenize

    folder = check_recordable(model) if record else None
    for place, name in product((output, folder), FILES):
        if place is not None and place.exists():
            check_file(place / name)
    documents = list(read_documents(text))
    loaded, tokenizer = load_model(model, dtype=dtype, device=device)
    softmax = None
    if teacher is not None:
        softmax, _ = load_model(teacher, need_tokenizer=False, dtype=dtype, device=device)
    ids = tokenize(tokenizer, documents, most=TEXT_TOKENS, end=document_end)
    with shown_count("measuring recall") as progress:
        report = recall_suite(
            loaded,
            tokenizer,
            ids,
            teacher=softmax,
            controls=control or None,
            max_length=max_length,
            quick=quick,
            seed=seed,
            progress=progress,
        )
    console.print(report_table(report))
    console.print(f"protocol: {report.protocol}", soft_wrap=True)
    if output is not None:
        write_report(report, output, data=text.name)
        console.print(f"written: recall.json and recall.md in {output}")
    if folder is not None:
        write_report(report, folder, data=text.name, card=True)
