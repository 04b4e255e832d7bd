"""``hf-rfa evaluate`` and ``hf-rfa score``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from . import options
from .console import console, shown_count, starting, warn

#: Two samples of 1,000 tokens of one text differ by a seventh in perplexity (the demo's model on its text).
FEW_TOKENS = 1000
#: Panels of the help, whose options have no effect with the other task.
TEXT, SPEECH = "Perplexity of a text", "Transcripts of speech, with --task transcription"
of_text = partial(typer.Option, rich_help_panel=TEXT)
of_speech = partial(typer.Option, rich_help_panel=SPEECH)


def evaluate_command(
    context: typer.Context,
    model: options.Model,
    data: Annotated[
        Path,
        typer.Argument(
            callback=options.data_path,
            help="Text: .txt, or .jsonl with a 'text' field; plain or .gz. Speech: a folder of .wav or .flac files, or .jsonl"
            " with a 'path' and maybe a 'text'.",
        ),
    ],
    task: Annotated[
        Literal["perplexity", "transcription"], typer.Option(help="Of a text, or word error rate of transcripts.")
    ] = "perplexity",
    context_length: Annotated[
        int | None, of_text(min=2, help="Tokens per window. Default: the positions, at most 1024.")
    ] = None,
    stride: Annotated[int | None, of_text(min=1, help="Tokens from window to window. Default: their length.")] = None,
    carry_state: Annotated[bool, of_text("--carry-state", help="Read past the positions, and keep the state.")] = False,
    max_tokens: Annotated[int | None, of_text(min=2, help="Most tokens of the text that are read.")] = None,
    attention_component: Annotated[
        Literal["both", "linear", "window"], of_text(help="Of attention with a sliding window, one part alone.")
    ] = "both",
    teacher: Annotated[str | None, of_speech(help="The base model, to compare transcripts with.")] = None,
    num_beams: Annotated[int, of_speech(min=1, help="Beams of generation; 1 for none.")] = 1,
    limit: Annotated[int | None, of_speech(min=1, help="Most files of speech that are read.")] = None,
    record: options.Record = False,
    batch_size: options.BatchSize = 8,
    dtype: options.ModelDtype = "auto",
    device: options.Device = "auto",
) -> None:
    """Measure the perplexity of a text, or the transcripts of speech.

    Of a converted model it also says how much of its attention goes to what is kept.

    Below 1,000 tokens a perplexity says little, and a warning says so.
    """
    options.refuse(
        context, f"has no effect with --task {task}. Leave it out.", SPEECH if task == "perplexity" else TEXT
    )
    starting(f"evaluating {model} on {data}")
    if task == "transcription":
        _evaluate_speech(model, data, teacher, limit, num_beams, batch_size, dtype, device, record=record)
        return
    from hf_rfa.convert.calibrate.attention_shares import attention_shares
    from hf_rfa.evaluation import perplexity
    from hf_rfa.evaluation.perplexity import shown
    from hf_rfa.inference import load_model, use_attention_component
    from hf_rfa.io.text_io import read_documents, tokenize

    folder = _folder_to_record(model, record)
    documents = list(read_documents(data))
    loaded, tokenizer = load_model(model, kind="causal", dtype=dtype, device=device)
    use_attention_component(loaded, attention_component)
    ids = tokenize(tokenizer, documents)[:max_tokens]
    with shown_count("scoring the text") as on_batch:
        result = perplexity(
            loaded,
            ids,
            context_length=context_length,
            stride=stride,
            carry_state=carry_state,
            batch_size=batch_size,
            on_batch=on_batch,
        )
    console.print(f"perplexity {shown(result.perplexity)} ({result.nats:.4f} nats per token)")
    if result.tokens < FEW_TOKENS:
        warn(
            f"{result.tokens} tokens were scored; below {FEW_TOKENS:,} a perplexity is a matter of chance, by a "
            "seventh and more. Pass a longer text."
        )
    protocol = result.protocol
    if attention_component != "both":
        protocol += f"; {attention_component} component alone"
    _finish(folder, task, data, {"perplexity": result.perplexity}, protocol)
    shares = attention_shares(loaded, ids) if attention_component == "both" else None
    if shares is not None:
        console.print(f"attention on the first {shares.tokens:,} tokens: {shares}", soft_wrap=True)


def _folder_to_record(model: str, record: bool) -> Path | None:
    """Return the folder that a result is written into, or None."""
    from hf_rfa.evaluation.cards import check_recordable

    return check_recordable(model) if record else None


def _finish(folder: Path | None, task: str, data: Path, scores: dict[str, float], protocol: str) -> None:
    """Print the protocol of some scores, and record both where there is a folder."""
    from hf_rfa.evaluation.cards import record_result

    console.print(f"protocol: {protocol}", soft_wrap=True)
    if folder is not None:
        record_result(folder, task=task, data=data.name, scores=scores, protocol=protocol)


def _evaluate_speech(
    model: str,
    data: Path,
    teacher: str | None,
    limit: int | None,
    num_beams: int,
    batch_size: int,
    dtype: str,
    device: str,
    *,
    record: bool,
) -> None:
    """Print word error rates of a model, and of its base model where there is one, with speed and bytes of the cache."""
    from rich.table import Table

    from hf_rfa.evaluation.transcription import evaluate_transcription
    from hf_rfa.inference import load_model
    from hf_rfa.inference.transcription import load_feature_extractor
    from hf_rfa.io.audio_io import read_utterances

    folder = _folder_to_record(model, record)
    utterances = read_utterances(data, limit=limit)
    if teacher is None and all(utterance.text is None for utterance in utterances):
        raise options.UsageError(
            f"{data} has no texts to score by. Pass a .jsonl file with path and text, or the base model (--teacher)."
        )
    results, base_texts = {}, None
    for name in filter(None, (teacher, model)):
        loaded, tokenizer = load_model(name, kind="speech", dtype=dtype, device=device)
        with shown_count(f"transcribing with {name}") as on_batch:
            result = evaluate_transcription(
                loaded,
                tokenizer,
                load_feature_extractor(name),
                utterances,
                base_texts=base_texts,
                num_beams=num_beams,
                batch_size=batch_size,
                on_batch=on_batch,
            )
        results[name], base_texts = result, result.transcripts.texts
    table = Table("", *result.scores, "tokens/s", "cache, bytes")
    for name, each in results.items():
        scores = [f"{each.scores[measure]:.2f} %" if measure in each.scores else "" for measure in result.scores]
        table.add_row(name, *scores, f"{each.tokens_per_second:.1f}", f"{each.cache_bytes:,}")
    console.print(table)
    _finish(folder, "transcription", data, result.scores, result.protocol)


def score_command(
    model: options.Model,
    sources: Annotated[
        Path,
        typer.Argument(callback=options.text_file, help="Sources, one a line, or .jsonl with 'source' and 'target'."),
    ],
    task: Annotated[
        Literal["translation", "summarization"], typer.Option(help="BLEU of translations, or ROUGE of summaries.")
    ] = "translation",
    references: options.References = None,
    num_beams: options.Beams = 1,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of an answer.")] = None,
    record: options.Record = False,
    batch_size: options.BatchSize = 8,
    dtype: options.ModelDtype = "auto",
    device: options.Device = "auto",
) -> None:
    """Let a model with an encoder translate or summarize sources, and score its answers by references."""
    starting(f"scoring {model} on {sources}")
    from hf_rfa.evaluation.generation_scores import evaluate_generation
    from hf_rfa.inference import load_model
    from hf_rfa.io.text_io import read_pairs

    folder = _folder_to_record(model, record)
    texts, targets = read_pairs(sources, references)
    loaded, tokenizer = load_model(model, kind="seq2seq", dtype=dtype, device=device)
    with shown_count("answering the sources") as on_batch:
        result = evaluate_generation(
            loaded,
            tokenizer,
            texts,
            targets,
            task=task,
            num_beams=num_beams,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            on_batch=on_batch,
        )
    for name, value in result.scores.items():
        console.print(f"{name} {value:.2f}")
    _finish(folder, task, sources, result.scores, result.protocol)
