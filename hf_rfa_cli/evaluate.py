"""``hf-rfa evaluate``."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import (
    BatchSize,
    Beams,
    LoadedDtype,
    Model,
    ModelDtype,
    References,
    UsageError,
    in_a_folder,
    number,
    text_file,
)

#: A thousand tokens of a text and another thousand of it differ by a seventh in perplexity (the demo's model on its text).
FEW_TOKENS = 1000


class Task(StrEnum):
    """What `evaluate_command` measures."""

    perplexity = "perplexity"
    translation = "translation"
    summarization = "summarization"


class Branch(StrEnum):
    """The parts of attention with an exact window."""

    both = "both"
    linear = "linear"
    window = "window"


#: Options of `evaluate_command` that belong to one kind of task, with their defaults.
PERPLEXITY_OPTIONS = {"context": None, "stride": None, "max_tokens": None}
GENERATION_OPTIONS = {
    "references": None,
    "source_field": "source",
    "target_field": "target",
    "num_beams": 1,
    "max_new_tokens": None,
    "limit": None,
    "truncate": False,
    "bleu_tokenizer": "13a",
    "save_predictions": None,
}


def evaluate_command(
    context: typer.Context,
    model: Model,
    text: Annotated[
        Path,
        typer.Argument(
            callback=text_file, help="Text (.txt, or .jsonl with a 'text' field; plain or .gz), or sources, one a line."
        ),
    ],
    task: Annotated[
        Task, typer.Option(help="Perplexity, or BLEU or ROUGE of what the model generates.")
    ] = Task.perplexity,
    window: Annotated[
        int | None,
        number("Perplexity: tokens per window. Default: the positions, at most 1024.", 2, name="--context"),
    ] = None,
    stride: Annotated[
        int | None,
        number("Perplexity: tokens from window to window. Default: disjoint windows.", 1),
    ] = None,
    max_tokens: Annotated[int | None, number("Perplexity: read only so many tokens of the text.", 2)] = None,
    references: References = None,
    source_field: Annotated[str, typer.Option(help="Generation: the sources' name in a .jsonl file.")] = "source",
    target_field: Annotated[str, typer.Option(help="Generation: the references' name in it.")] = "target",
    num_beams: Beams = 1,
    max_new_tokens: Annotated[
        int | None, number("Generation: most tokens of an answer. Default: the checkpoint's, or the positions.", 1)
    ] = None,
    limit: Annotated[int | None, number("Generation: read only so many sources.", 1)] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Generation: cut sources longer than the encoder's positions.")
    ] = False,
    bleu_tokenizer: Annotated[str, typer.Option(help="Translation: sacreBLEU's tokenizer.")] = "13a",
    save_predictions: Annotated[
        Path | None,
        typer.Option(
            callback=in_a_folder, help="Generation: write sources, references and answers to this .jsonl file."
        ),
    ] = None,
    branch: Annotated[
        Branch, typer.Option(help="Of attention with an exact window: both parts, or one alone.")
    ] = Branch.both,
    record: Annotated[
        bool, typer.Option("--record", help="Add the result to evaluation.json and the model card of the checkpoint.")
    ] = False,
    batch_size: BatchSize = 8,
    dtype: ModelDtype = LoadedDtype.auto,
) -> None:
    """Measure the perplexity of a text, or how well a model translates or summarises.

    Below 1,000 tokens a perplexity says little, and a warning says so.
    """
    others = GENERATION_OPTIONS if task == Task.perplexity else PERPLEXITY_OPTIONS
    given = {"context" if name == "window" else name: value for name, value in context.params.items()}
    for name, default in others.items():
        if given[name] != default:
            raise UsageError(f"--{name.replace('_', '-')} has no effect with --task {task.value}. Leave it out.")
    from hf_rfa.convert.text_io import read_pairs
    from hf_rfa.finetune import results

    folder = results.check_recordable(model) if record else None
    shared: dict[str, Any] = {"batch_size": batch_size, "dtype": dtype.value, "branch": branch.value}
    if task == Task.perplexity:
        scores, protocol = _evaluate_perplexity(model, text, window, stride, max_tokens, **shared)
    else:
        sources, targets = read_pairs(
            text, references, source_field=source_field, target_field=target_field, limit=limit
        )
        scores, protocol = _evaluate_generation(
            model,
            sources,
            targets,
            save_predictions,
            task=task.value,
            num_beams=num_beams,
            max_new_tokens=max_new_tokens,
            truncate=truncate,
            bleu_tokenizer=bleu_tokenizer,
            **shared,
        )
    if folder is not None:
        if branch != Branch.both:
            protocol += f"; {branch.value} branch alone"
        results.record(folder, task=task.value, data=text.name, scores=scores, protocol=protocol)


def _evaluate_perplexity(
    model: str,
    text: Path,
    context: int | None,
    stride: int | None,
    max_tokens: int | None,
    *,
    batch_size: int,
    dtype: str,
    branch: Any,
) -> tuple[dict[str, float], str]:
    from hf_rfa.convert.calibration_data import tokenize
    from hf_rfa.convert.text_io import read_documents
    from hf_rfa.finetune.evaluation import perplexity
    from hf_rfa.inference import load_model, use_attention_component

    from .console import console, errors, progress_bar

    documents = list(read_documents(text))
    loaded, tokenizer = load_model(model, kind="causal", dtype=dtype)
    use_attention_component(loaded, branch)
    ids = tokenize(tokenizer, documents)[:max_tokens]
    with progress_bar() as progress:
        task = progress.add_task("evaluating", total=None)
        result = perplexity(
            loaded,
            ids,
            context=context,
            stride=stride,
            batch_size=batch_size,
            on_batch=lambda done, total: progress.update(task, completed=done, total=total),
        )
    console.print(f"perplexity {result.perplexity:.2f} ({result.nats:.4f} nats per token)")
    console.print(f"protocol: {result.protocol}")
    if result.tokens_counted < FEW_TOKENS:
        errors.print(
            f"warning: {result.tokens_counted} tokens were scored; below {FEW_TOKENS:,} a perplexity is a matter of "
            "chance, by a seventh and more. Pass a longer text.",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )
    return {"perplexity": result.perplexity}, result.protocol


def _evaluate_generation(
    model: str,
    sources: list[str],
    references: list[str],
    save_predictions: Path | None,
    *,
    dtype: str,
    branch: Any,
    **options: Any,
) -> tuple[dict[str, float], str]:
    from hf_rfa.convert.atomic_io import check_new_file, new_file
    from hf_rfa.finetune.generation import evaluate_generation
    from hf_rfa.inference import load_model, use_attention_component

    from .console import console, progress_bar

    if save_predictions is not None:
        check_new_file(save_predictions)
    loaded, tokenizer = load_model(model, kind="seq2seq", dtype=dtype)
    use_attention_component(loaded, branch)
    with progress_bar() as progress:
        task = progress.add_task("generating", total=len(sources))
        result = evaluate_generation(
            loaded,
            tokenizer,
            sources,
            references,
            on_batch=lambda done, total: progress.update(task, completed=done, total=total),
            **options,
        )
    if save_predictions is not None:
        with new_file(save_predictions) as file:
            for source, target, prediction in zip(sources, references, result.predictions, strict=True):
                record = {"source": source, "target": target, "prediction": prediction}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
    for name, value in result.scores.items():
        console.print(f"{name} {value:.2f}")
    console.print(f"protocol: {result.protocol}", markup=False, highlight=False, soft_wrap=True)
    return result.scores, result.protocol
