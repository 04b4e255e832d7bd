"""The command line: ``hf-rfa convert``, ``generate`` and ``evaluate``.

This module stands above the three packages; no model needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

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


def _indices(text: str | None) -> list[int] | None:
    """Read layer indices: "0,2,4-7"."""
    if text is None:
        return None
    indices: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise InputError(f"--layers takes indices and ranges such as 0,2,4-7, got {text!r}.")
        indices += range(int(first), int(last or first) + 1)
    return indices


@app.command("convert")
def convert_command(
    source: Annotated[str, typer.Argument(help="Folder of a softmax checkpoint, or its name on the hub.")],
    destination: Annotated[Path, typer.Argument(help="Folder to write.")],
    feature_map: Annotated[str, typer.Option(help="Feature map.")] = "positive",
    num_features: Annotated[int | None, typer.Option(help="D, rows of W per head. Default: the map's own.")] = None,
    unit_norm: Annotated[bool, typer.Option("--unit-norm", help="Normalise q and k (the paper's RFA).")] = False,
    iid: Annotated[bool, typer.Option("--iid", help="Draw W independently, not in orthogonal blocks.")] = False,
    trainable_projection: Annotated[
        bool, typer.Option("--trainable-projection", help="Make W a parameter, for training.")
    ] = False,
    redraw_pool: Annotated[int, typer.Option(help="Redraw W from a pool of this size at every step of training.")] = 0,
    gate: Annotated[bool, typer.Option("--gate/--no-gate", help="Add a recency gate per head.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the random features.")] = 0,
    layers: Annotated[
        str | None, typer.Option(help="Layers to convert, such as 0,2,4-7. Default: all. Others stay softmax.")
    ] = None,
    max_positions: Annotated[int | None, typer.Option(help="Extend the learned positions to this number.")] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="Text to calibrate on (.txt, .jsonl, plain or .gz). Default: random tokens.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint at the destination.")] = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Load weights that exist only as a pickle. Only if you trust them.")
    ] = False,
) -> None:
    """Convert a softmax checkpoint into an RFA checkpoint."""
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

        report = convert(
            source,
            destination,
            feature_map=feature_map,
            num_features=num_features,
            unit_norm=unit_norm,
            orthogonal=not iid,
            trainable_projection=trainable_projection,
            redraw_pool=redraw_pool,
            gate=gate,
            seed=seed,
            layers=_indices(layers),
            max_positions=max_positions,
            calibrate_on=calibrate,
            dtype=dtype,
            overwrite=overwrite,
            allow_pickle=allow_pickle,
            progress=on_progress,
        )
        progress.update(task, completed=progress.tasks[task].total)
    console.print(report.table())
    for note in report.notes:
        console.print(note)


@app.command("generate")
def generate_command(
    model: Annotated[str, typer.Argument(help="Folder of a checkpoint, or its name on the hub.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 100,
    sample: Annotated[bool, typer.Option("--sample/--greedy", help="Sample, or take the likeliest token.")] = False,
    temperature: Annotated[float, typer.Option(help="Of the sampling.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from so many likeliest tokens; 0 for all.")] = 50,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens of this total probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at the end-of-text token.")] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
) -> None:
    """Continue a prompt, streaming the text, and report speed and memory."""
    from transformers import TextStreamer

    from .inference import generate_text, load_causal_lm

    options: dict[str, Any] = {"do_sample": sample}
    if sample:
        options |= {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    elif (temperature, top_k, top_p) != (1.0, 50, 1.0):
        raise InputError("--temperature, --top-k and --top-p act on sampling: pass --sample with them.")
    loaded, tokenizer = load_causal_lm(model, dtype=dtype)
    result = generate_text(
        loaded,
        tokenizer,
        prompt,
        max_new_tokens=max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True),
        seed=seed,
        ignore_eos=ignore_eos,
        **options,
    )
    errors.print(
        f"{result.new_tokens} tokens in {result.seconds:.2f} s ({result.new_tokens / result.seconds:.1f} tokens/s), "
        f"cache {result.cache_bytes:,} bytes after {result.prompt_tokens + result.new_tokens} tokens"
    )


@app.command("evaluate")
def evaluate_command(
    model: Annotated[str, typer.Argument(help="Folder of a checkpoint, or its name on the hub.")],
    text: Annotated[Path, typer.Argument(help="Text (.txt, or .jsonl with a 'text' field; plain or .gz).")],
    context: Annotated[
        int | None, typer.Option(help="Tokens per window. Default: the positions, at most 1024.")
    ] = None,
    stride: Annotated[int | None, typer.Option(help="Tokens from window to window. Default: disjoint windows.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=2, help="Read only so many tokens of the text.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows at a time.")] = 8,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
) -> None:
    """Measure the perplexity of a text."""
    from .convert.texts import read_documents
    from .finetune.evaluation import perplexity, tokenize
    from .inference import load_causal_lm

    documents = list(read_documents(text))
    loaded, tokenizer = load_causal_lm(model, dtype=dtype)
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


def main() -> None:
    """Run the command line: input that cannot be used ends it with a message and status 1, an interrupt with 130 (typer)."""
    try:
        app()
    except InputError as error:
        errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
