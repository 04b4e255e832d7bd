"""What ``hf-rfa evaluate`` does with ``--suite`` and ``--tasks``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .console import console, shown_count, starting
from .options import UsageError

#: Most tokens of a text that are read.
TEXT_TOKENS = 200_000


def views(words: list[str] | None) -> list[tuple[int, int]] | None:
    """Return (window, sinks) of controls such as "64" and "60+4", or None where none is named."""
    found = []
    for word in words or []:
        window, plus, sinks = word.partition("+")
        if not (window.isdigit() and int(window) > 0 and (sinks.isdigit() if plus else not sinks)):
            raise UsageError(f"--control takes a window, or window+sinks, such as 64 or 60+4, got {word!r}.")
        found.append((int(window), int(sinks or 0)))
    return found or None


def measure_recall(
    name: str,
    text: Path | None,
    *,
    teacher: str | None,
    controls: list[str] | None,
    max_length: int | None,
    quick: bool,
    seed: int,
    document_end: str | None,
    output: Path | None,
    record: bool,
    dtype: str,
    device: str,
) -> None:
    """Run the recall suite on a checkpoint, print its table, and write its files where they are asked for."""
    limits = views(controls)
    starting(f"measuring the recall of {name}")
    from hf_rfa.evaluation.cards import check_recordable
    from hf_rfa.evaluation.recall import FULL, QUICK, recall_suite, report_table, write_report
    from hf_rfa.evaluation.recall.report import check_output
    from hf_rfa.inference import load_model
    from hf_rfa.io.text_io import read_documents, tokenize

    folder = check_recordable(name) if record else None
    check_output(output)
    documents = None if text is None else list(read_documents(text))
    where: Any = {"dtype": dtype, "device": device}
    model, tokenizer = load_model(name, **where)
    softmax = None if teacher is None else load_model(teacher, need_tokenizer=False, **where)[0]
    ids = None if documents is None else tokenize(tokenizer, documents, most=TEXT_TOKENS, end=document_end)
    with shown_count("measuring recall") as progress:
        report = recall_suite(
            model,
            tokenizer,
            teacher=softmax,
            text=ids,
            controls=limits,
            max_length=max_length,
            effort=QUICK if quick else FULL,
            seed=seed,
            progress=progress,
        )
    console.print(report_table(report))
    for probe, reason in report.skipped.items():
        console.print(f"left out: {probe} ({reason})", markup=False, highlight=False)
    console.print(f"protocol: {report.protocol}", markup=False, highlight=False, soft_wrap=True)
    data = None if text is None else text.name
    for each in [] if output is None else [output]:
        write_report(report, each, data=data)
        console.print(f"written: recall.json, recall.md and recall.png in {each}", markup=False, highlight=False)
    if folder is not None:
        write_report(report, folder, data=data, card=True)


def run_tasks(
    name: str, tasks: str, *, tasks_folder: Path | None, output: Path | None, batch_size: int, dtype: str, device: str
) -> None:
    """Hand a checkpoint over to lm-eval, print its table, and write its results where they are asked for."""
    starting(f"running {tasks} on {name}")
    from hf_rfa.errors import InputError
    from hf_rfa.evaluation.recall.report import check_output
    from hf_rfa.inference import load_model
    from hf_rfa.io.atomic_io import new_file

    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table
    except ImportError as error:
        raise InputError("--tasks needs lm-eval: pip install 'hf-rfa[lm-eval]'.") from error
    check_output(output)
    manager = TaskManager(include_path=None if tasks_folder is None else str(tasks_folder))
    wanted = tasks.split(",")
    unknown = [task for task in wanted if task not in manager.all_tasks]
    if unknown:
        raise InputError(
            f"lm-eval has no task {unknown[0]!r}. Its own are listed by `lm-eval ls tasks`; see --tasks-folder."
        )
    model, tokenizer = load_model(name, dtype=dtype, device=device)
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    results: Any = lm_eval.simple_evaluate(model=wrapped, tasks=wanted, task_manager=manager, log_samples=False)
    console.print(make_table(results), markup=False, highlight=False, soft_wrap=True)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        with new_file(output / "tasks.json") as file:
            json.dump({"results": results["results"], "versions": results["versions"]}, file, indent=2, default=str)
