"""``hf-rfa evaluate`` and ``hf-rfa score``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from .console import console, shown_count, starting, warn
from .options import (
    BatchSize,
    Beams,
    Device,
    Model,
    ModelDtype,
    Record,
    References,
    UsageError,
    data_path,
    in_a_folder,
    text_file,
)

#: Two samples of 1,000 tokens of one text differ by a seventh in perplexity (the demo's model on its text).
FEW_TOKENS = 1000

AttentionComponent = Annotated[
    Literal["both", "linear", "window"],
    typer.Option(help="Of attention with a sliding window: both components, or one alone."),
]


def evaluate_command(
    model: Model,
    data: Annotated[
        Path,
        typer.Argument(
            callback=data_path,
            help="Text: .txt, or .jsonl with a 'text' field; plain or .gz. For transcription speech: a folder of .wav or "
            ".flac files, or .jsonl with a 'path', relative to its folder, and maybe a 'text'.",
        ),
    ],
    task: Annotated[
        Literal["perplexity", "transcription"],
        typer.Option(help="Perplexity of a text, or word error rate, speed and cache of transcripts."),
    ] = "perplexity",
    teacher: Annotated[
        str | None,
        typer.Option(help="The base model, a folder or a name on the hub, to compare transcripts with."),
    ] = None,
    num_beams: Beams = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Most files of speech that are read.")] = None,
    context_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens per window. Default: the positions, at most 1024.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens from window to window. Default: disjoint windows.")
    ] = None,
    carry_state: Annotated[
        bool,
        typer.Option(
            "--carry-state",
            help="Windows may be longer than the positions: they are read piece by piece, and the state goes on.",
        ),
    ] = False,
    max_tokens: Annotated[int | None, typer.Option(min=2, help="Most tokens of the text that are read.")] = None,
    attention_component: AttentionComponent = "both",
    record: Record = False,
    batch_size: BatchSize = 8,
    dtype: ModelDtype = "auto",
    device: Device = "auto",
) -> None:
    """Measure the perplexity of a text, or the transcripts of speech.

    Of a converted model it also says how much of its attention goes to what is kept.

    Below 1,000 tokens a perplexity says little, and a warning says so.
    """
    of_text = {
        "--context-length": context_length,
        "--stride": stride,
        "--carry-state": carry_state or None,
        "--max-tokens": max_tokens,
    }
    of_speech = {"--teacher": teacher, "--num-beams": num_beams if num_beams > 1 else None, "--limit": limit}
    for flag, value in (of_speech if task == "perplexity" else of_text).items():
        if value is not None:
            raise UsageError(f"{flag} has no effect with --task {task}. Leave it out.")
    starting(f"evaluating {model} on {data}")
    if task == "transcription":
        _evaluate_transcripts(
            model,
            data,
            teacher=teacher,
            limit=limit,
            component=attention_component,
            record=record,
            dtype=dtype,
            device=device,
            num_beams=num_beams,
            batch_size=batch_size,
        )
        return
    from hf_rfa.convert.calibrate.attention_shares import attention_shares
    from hf_rfa.evaluation import perplexity
    from hf_rfa.evaluation.cards import check_recordable, record_result
    from hf_rfa.evaluation.perplexity import shown
    from hf_rfa.inference import load_model, use_attention_component
    from hf_rfa.io.text_io import read_documents, tokenize

    folder = check_recordable(model) if record else None
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
    protocol = _print_protocol(result.protocol, attention_component)
    shares = attention_shares(loaded, ids) if attention_component == "both" else None
    if shares is not None:
        console.print(f"attention on the first {shares.tokens:,} tokens: {shares}", soft_wrap=True)
    if folder is not None:
        scores = {"perplexity": result.perplexity}
        record_result(folder, task="perplexity", data=data.name, scores=scores, protocol=protocol)


def _evaluate_transcripts(
    model: str,
    data: Path,
    *,
    teacher: str | None,
    limit: int | None,
    component: AttentionComponent,
    record: bool,
    dtype: str,
    device: str,
    **options: int,
) -> None:
    """Print word error rates of a model, and of its base model where there is one, with speed and bytes of the cache."""
    from rich.table import Table

    from hf_rfa.evaluation.cards import check_recordable, record_result
    from hf_rfa.evaluation.transcription import evaluate_transcription
    from hf_rfa.inference import load_model, use_attention_component
    from hf_rfa.inference.transcription import load_feature_extractor
    from hf_rfa.io.audio_io import read_utterances

    folder = check_recordable(model) if record else None
    utterances = read_utterances(data, limit=limit)
    if teacher is None and all(utterance.text is None for utterance in utterances):
        raise UsageError(
            f"{data} has no texts to score by. Pass a .jsonl file with path and text, or the base model (--teacher)."
        )
    results, base_texts = {}, None
    for name in filter(None, (teacher, model)):
        loaded, tokenizer = load_model(name, kind="speech", dtype=dtype, device=device)
        extractor = load_feature_extractor(name)
        if name == model:
            use_attention_component(loaded, component)
        with shown_count(f"transcribing with {name}") as on_batch:
            result = evaluate_transcription(
                loaded, tokenizer, extractor, utterances, base_texts=base_texts, on_batch=on_batch, **options
            )
        results[name], base_texts = result, result.transcripts.texts
    measures = [*result.scores]
    table = Table("", *measures, "tokens/s", "cache, bytes")
    for name, result in results.items():
        scores = [f"{result.scores[measure]:.2f} %" if measure in result.scores else "" for measure in measures]
        table.add_row(name, *scores, f"{result.tokens_per_second:.1f}", f"{result.cache_bytes:,}")
    console.print(table)
    protocol = _print_protocol(result.protocol, component)
    if folder is not None:
        record_result(folder, task="transcription", data=data.name, scores=result.scores, protocol=protocol)


def score_command(
    model: Model,
    sources: Annotated[
        Path,
        typer.Argument(callback=text_file, help="Sources, one a line, or a .jsonl file with the references too."),
    ],
    task: Annotated[
        Literal["translation", "summarization"],
        typer.Option(help="BLEU of translations, or ROUGE of summaries."),
    ] = "translation",
    references: References = None,
    source_field: Annotated[str, typer.Option(help="The sources' name in a .jsonl file.")] = "source",
    target_field: Annotated[str, typer.Option(help="The references' name in it.")] = "target",
    num_beams: Beams = 1,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of an answer. Default: the checkpoint's, or the positions.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most sources that are read.")] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut sources longer than the encoder's positions.")
    ] = False,
    bleu_tokenizer: Annotated[
        str | None, typer.Option(help="sacreBLEU's tokenizer, for translations. Default: 13a.")
    ] = None,
    save_predictions: Annotated[
        Path | None,
        typer.Option(callback=in_a_folder, help="Write sources, references and answers to this .jsonl file."),
    ] = None,
    attention_component: AttentionComponent = "both",
    record: Record = False,
    batch_size: BatchSize = 8,
    dtype: ModelDtype = "auto",
    device: Device = "auto",
) -> None:
    """Let a model with an encoder translate or summarise sources, and score its answers by references."""
    if bleu_tokenizer is not None and task != "translation":
        raise UsageError(f"--bleu-tokenizer has no effect with --task {task}. Leave it out.")
    starting(f"scoring {model} on {sources}")
    from hf_rfa.evaluation.cards import check_recordable, record_result
    from hf_rfa.evaluation.generation_scores import evaluate_generation
    from hf_rfa.inference import load_model, use_attention_component
    from hf_rfa.io.atomic_io import check_file, new_file
    from hf_rfa.io.text_io import read_pairs

    folder = check_recordable(model) if record else None
    source_texts, targets = read_pairs(
        sources, references, source_field=source_field, target_field=target_field, limit=limit
    )
    if save_predictions is not None:
        check_file(save_predictions, replace=False)
    loaded, tokenizer = load_model(model, kind="seq2seq", dtype=dtype, device=device)
    use_attention_component(loaded, attention_component)
    with shown_count("answering the sources") as on_batch:
        result = evaluate_generation(
            loaded,
            tokenizer,
            source_texts,
            targets,
            task=task,
            num_beams=num_beams,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            truncate=truncate,
            bleu_tokenizer=bleu_tokenizer or "13a",
            on_batch=on_batch,
        )
    if save_predictions is not None:
        with new_file(save_predictions) as file:
            for source, target, prediction in zip(source_texts, targets, result.predictions, strict=True):
                row = {"source": source, "target": target, "prediction": prediction}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    for name, value in result.scores.items():
        console.print(f"{name} {value:.2f}")
    protocol = _print_protocol(result.protocol, attention_component)
    if folder is not None:
        record_result(folder, task=task, data=sources.name, scores=result.scores, protocol=protocol)


def _print_protocol(protocol: str, component: str) -> str:
    """Print a protocol, with the component of attention that was used alone, if one was; return this."""
    protocol += "" if component == "both" else f"; {component} component alone"
    console.print(f"protocol: {protocol}", soft_wrap=True)
    return protocol
