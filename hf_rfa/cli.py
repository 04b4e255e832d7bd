"""The command line: ``hf-rfa convert``, ``distill``, ``generate`` and ``evaluate``.

This module stands above the three packages; no model needs it.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .errors import InputError

app = typer.Typer(
    help="Turn softmax transformers into Random Feature Attention models whose decoding takes constant time and memory.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
console = Console()
errors = Console(stderr=True)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Show progress, with the time gone and an estimate of the time left."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=errors) as progress:
        yield progress


def _layers(option: str, text: str | None) -> Any:
    """Read the layers that an option names: "0,2,4-7", "all", "none", or None if it was not given."""
    if text is None or text == "all":
        return text
    if text == "none":
        return []
    indices: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise InputError(f"{option} takes all, none, or indices and ranges such as 0,2,4-7, got {text!r}.")
        indices += range(int(first), int(last or first) + 1)
    return indices


@app.command("convert")
def convert_command(
    source: Annotated[str, typer.Argument(help="Folder of a softmax checkpoint, or its name on the hub.")],
    destination: Annotated[Path, typer.Argument(help="Folder to write.")],
    feature_map: Annotated[
        str | None, typer.Option(help="Feature map. Default: positive; exponential with --distill-steps.")
    ] = None,
    num_features: Annotated[int | None, typer.Option(help="D, rows of W per head. Default: the map's own.")] = None,
    num_cross_features: Annotated[int | None, typer.Option(help="D of cross attention.")] = None,
    num_encoder_features: Annotated[int | None, typer.Option(help="D of an encoder's attention.")] = None,
    unit_norm: Annotated[bool, typer.Option("--unit-norm", help="Normalise q and k (the paper's RFA).")] = False,
    iid: Annotated[bool, typer.Option("--iid", help="Draw W independently, not in orthogonal blocks.")] = False,
    trainable_projection: Annotated[
        bool, typer.Option("--trainable-projection", help="Make W a parameter, for training.")
    ] = False,
    redraw_pool: Annotated[int, typer.Option(help="Redraw W from a pool of this size at every step of training.")] = 0,
    gate: Annotated[bool, typer.Option("--gate/--no-gate", help="Add a recency gate per head.")] = False,
    window: Annotated[
        int, typer.Option(min=0, help="Let causal attention see so many last tokens exactly, beside the features.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the random features.")] = 0,
    layers: Annotated[
        str, typer.Option(help="Layers whose causal attention to convert: all, none, or 0,2,4-7. Others stay softmax.")
    ] = "all",
    cross_layers: Annotated[
        str | None, typer.Option(help="Decoder layers whose cross attention to convert. Default: all.")
    ] = None,
    encoder_layers: Annotated[str | None, typer.Option(help="Encoder layers to convert. Default: none.")] = None,
    keep_softmax: Annotated[
        int,
        typer.Option(min=0, help="Leave so many layers softmax after all: those whose conversion does most damage."),
    ] = 0,
    max_positions: Annotated[int | None, typer.Option(help="Extend the positions to this number.")] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="Text to calibrate on (.txt, .jsonl, plain or .gz; for an encoder one source a line). Default: random "
            "tokens."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint at the destination.")] = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Load weights that exist only as a pickle. Only if you trust them.")
    ] = False,
    distill_steps: Annotated[
        int | None, typer.Option(min=1, help="Then learn the parent's attention from --data for so many steps.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Text to learn from (see distill); calibration reads it too, but for --calibrate."),
    ] = None,
    references: Annotated[
        Path | None, typer.Option(help="Outputs for the sources in --data, one a line, for a model with an encoder.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="With --distill-steps: go on where an interrupted training stopped.")
    ] = False,
) -> None:
    """Convert a softmax checkpoint into an RFA checkpoint."""
    if (distill_steps is None) != (data is None):
        raise InputError("--distill-steps and --data belong together: pass both, or neither.")
    for option, given in (("--references", references is not None), ("--resume", resume)):
        if given and data is None:
            raise InputError(f"{option} has no effect without --data. Leave it out.")
    if feature_map is None:
        feature_map = "positive" if distill_steps is None else "exponential"
    options: dict[str, Any] = {
        "feature_map": feature_map,
        "num_features": num_features,
        "num_cross_features": num_cross_features,
        "num_encoder_features": num_encoder_features,
        "unit_norm": unit_norm,
        "orthogonal": not iid,
        "trainable_projection": trainable_projection,
        "redraw_pool": redraw_pool,
        "gate": gate,
        "window": window,
        "seed": seed,
        "layers": _layers("--layers", layers),
        "cross_layers": _layers("--cross-layers", cross_layers),
        "encoder_layers": _layers("--encoder-layers", encoder_layers),
        "keep_softmax": keep_softmax,
        "max_positions": max_positions,
        "calibrate_on": calibrate or data,
        "dtype": dtype,
        "allow_pickle": allow_pickle,
    }
    if distill_steps is None:
        _convert(source, destination, overwrite=overwrite, **options)
        return
    from .convert.writer import check_destination
    from .finetune.distill import distill, training_folder

    check_destination(destination, overwrite=overwrite, sources=(Path(source),))
    training_folder(destination, resume=resume)
    destination.resolve().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{destination.name}.", dir=destination.resolve().parent) as folder:
        converted = Path(folder) / destination.name
        command = shlex.join(["hf-rfa", *(word for word in sys.argv[1:] if word != "--resume")])
        _convert(source, converted, overwrite=False, command=command, **options)
        report = distill(
            converted,
            destination,
            teacher=source,
            data=cast(Path, data),
            references=references,
            transfer_steps=distill_steps,
            end_to_end_steps=0,
            resume=resume,
            overwrite=overwrite,
            command=command,
        )
    console.print(report.table())


def _convert(source: str, destination: Path, **options: Any) -> None:
    """Convert with a progress bar, and print the report."""
    from .convert import convert

    with progress_bar() as progress:
        task: Any = None

        def on_progress(step: str | None, total: int) -> None:
            nonlocal task
            if step is None:
                progress.advance(task)
                return
            if task is not None:
                progress.update(task, completed=progress.tasks[task].total)
            task = progress.add_task(step, total=total)

        report = convert(source, destination, progress=on_progress, **options)
        progress.update(task, completed=progress.tasks[task].total)
    console.print(report.table())
    for note in report.notes:
        console.print(note)


@app.command("distill")
def distill_command(
    checkpoint: Annotated[str, typer.Argument(help="Folder of a converted checkpoint, or its name on the hub.")],
    teacher: Annotated[str, typer.Option(help="Its softmax parent: a folder, or a name on the hub.")],
    data: Annotated[
        Path,
        typer.Option(
            help="Text to learn from (.txt or .jsonl, plain or .gz); with an encoder sources, one a line, or a .jsonl file "
            "with source and target."
        ),
    ],
    output: Annotated[Path | None, typer.Option(help="Folder to write. Default: CHECKPOINT-distilled.")] = None,
    references: Annotated[Path | None, typer.Option(help="Outputs for the sources, one a line.")] = None,
    recipe: Annotated[str, typer.Option(help="A recipe that comes with hf-rfa, or a YAML file.")] = "default",
    transfer_steps: Annotated[
        int | None, typer.Option(min=0, help="Steps of attention transfer, instead of the recipe's.")
    ] = None,
    end_to_end_steps: Annotated[
        int | None, typer.Option(min=0, help="Steps of training end to end, instead of the recipe's.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run stopped.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint at the output.")] = False,
) -> None:
    """Let a converted checkpoint learn from its softmax parent: attention first, then the whole model."""
    from .finetune.distill import distill

    destination = Path(f"{checkpoint.rstrip('/')}-distilled") if output is None else output
    report = distill(
        checkpoint,
        destination,
        teacher=teacher,
        data=data,
        references=references,
        recipe=recipe,
        transfer_steps=transfer_steps,
        end_to_end_steps=end_to_end_steps,
        resume=resume,
        overwrite=overwrite,
    )
    console.print(report.table())
    console.print(f"written to {destination}")


@app.command("generate")
def generate_command(
    model: Annotated[str, typer.Argument(help="Folder of a checkpoint, or its name on the hub.")],
    prompt: Annotated[str, typer.Option(help="Text to continue; for a model with an encoder, the source.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 100,
    num_beams: Annotated[int, typer.Option(min=1, help="Beams; more than 1 shows the text at the end.")] = 1,
    sample: Annotated[bool, typer.Option("--sample/--greedy", help="Sample, or take the likeliest token.")] = False,
    temperature: Annotated[float, typer.Option(help="Of the sampling.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from so many likeliest tokens; 0 for all.")] = 50,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens of this total probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at the end-of-text token.")] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
) -> None:
    """Continue a prompt, or translate or summarise a source; stream the text, and report speed and memory."""
    from transformers import TextStreamer

    from .inference import generate_text, load_model

    options: dict[str, Any] = {"do_sample": sample, "num_beams": num_beams}
    if sample:
        options |= {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    elif (temperature, top_k, top_p) != (1.0, 50, 1.0):
        raise InputError("--temperature, --top-k and --top-p act on sampling: pass --sample with them.")
    loaded, tokenizer = load_model(model, dtype=dtype)
    streamer = TextStreamer(tokenizer, skip_special_tokens=True) if num_beams == 1 else None
    result = generate_text(
        loaded,
        tokenizer,
        prompt,
        max_new_tokens=max_new_tokens,
        streamer=streamer,
        seed=seed,
        ignore_eos=ignore_eos,
        **options,
    )
    if streamer is None:
        console.print(result.text, markup=False, highlight=False, soft_wrap=True)
    errors.print(
        f"{result.new_tokens} tokens in {result.seconds:.2f} s ({result.new_tokens / result.seconds:.1f} tokens/s), "
        f"cache {result.cache_bytes:,} bytes after {result.prompt_tokens + result.new_tokens} tokens"
    )


class Task(StrEnum):
    """What `evaluate_command` measures."""

    perplexity = "perplexity"
    translation = "translation"
    summarization = "summarization"


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


@app.command("evaluate")
def evaluate_command(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Folder of a checkpoint, or its name on the hub.")],
    text: Annotated[
        Path, typer.Argument(help="Text (.txt, or .jsonl with a 'text' field; plain or .gz), or sources, one a line.")
    ],
    task: Annotated[
        Task, typer.Option(help="Perplexity, or BLEU or ROUGE of what the model generates.")
    ] = Task.perplexity,
    window: Annotated[
        int | None,
        typer.Option("--context", help="Perplexity: tokens per window. Default: the positions, at most 1024."),
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Perplexity: tokens from window to window. Default: disjoint windows.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=2, help="Perplexity: read only so many tokens of the text.")
    ] = None,
    references: Annotated[Path | None, typer.Option(help="Generation: references, one a line.")] = None,
    source_field: Annotated[str, typer.Option(help="Generation: the sources' name in a .jsonl file.")] = "source",
    target_field: Annotated[str, typer.Option(help="Generation: the references' name in it.")] = "target",
    num_beams: Annotated[int, typer.Option(min=1, help="Generation: beams; 1 is greedy search.")] = 1,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Generation: most tokens of an answer. Default: 128.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Generation: read only so many sources.")] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Generation: cut sources longer than the encoder's positions.")
    ] = False,
    bleu_tokenizer: Annotated[str, typer.Option(help="Translation: sacreBLEU's tokenizer.")] = "13a",
    save_predictions: Annotated[
        Path | None, typer.Option(help="Generation: write sources, references and answers to this .jsonl file.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows or sources at a time.")] = 8,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
) -> None:
    """Measure the perplexity of a text, or how well a model translates or summarises."""
    others = GENERATION_OPTIONS if task == Task.perplexity else PERPLEXITY_OPTIONS
    given = {"context" if name == "window" else name: value for name, value in context.params.items()}
    for name, default in others.items():
        if given[name] != default:
            raise InputError(f"--{name.replace('_', '-')} has no effect with --task {task.value}. Leave it out.")
    shared: dict[str, Any] = {"batch_size": batch_size, "dtype": dtype}
    if task == Task.perplexity:
        _evaluate_perplexity(model, text, window, stride, max_tokens, **shared)
        return
    from .convert.texts import read_pairs

    sources, targets = read_pairs(text, references, source_field=source_field, target_field=target_field, limit=limit)
    _evaluate_generation(
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


def _evaluate_perplexity(
    model: str,
    text: Path,
    context: int | None,
    stride: int | None,
    max_tokens: int | None,
    *,
    batch_size: int,
    dtype: str,
) -> None:
    from .convert.texts import read_documents
    from .finetune.evaluation import perplexity, tokenize
    from .inference import load_model

    documents = list(read_documents(text))
    loaded, tokenizer = load_model(model, kind="causal", dtype=dtype)
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


def _evaluate_generation(
    model: str, sources: list[str], references: list[str], save_predictions: Path | None, *, dtype: str, **options: Any
) -> None:
    from .convert.writer import check_new_file, new_file
    from .finetune.generation import evaluate_generation
    from .inference import load_model

    if save_predictions is not None:
        check_new_file(save_predictions)
    loaded, tokenizer = load_model(model, kind="seq2seq", dtype=dtype)
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


def main() -> None:
    """Run the command line: input that cannot be used ends it with a message and status 1, an interrupt with 130 (typer)."""
    try:
        app()
    except InputError as error:
        errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
