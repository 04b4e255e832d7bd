"""``hf-rfa evaluate``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from .console import console, shown_count, starting, warn
from .options import BatchSize, Device, Model, ModelDtype, Record, UsageError, data_path, refuse, text_file

#: Two samples of 1,000 tokens of one text differ by a seventh in perplexity (the demo's model on its text).
FEW_TOKENS = 1000
Task = Literal["perplexity", "transcription", "translation", "summarization"]
Part = Literal["both", "linear", "window"]
#: Panels of the help, and those whose options have an effect with a task.
TEXT, SPEECH = "Perplexity of a text", "Transcripts of speech, with --task transcription"
ANSWERS, GENERATED = "Answers to sources, with --task translation or summarization", "Transcripts and answers"
PANELS = {
    "perplexity": (TEXT,),
    "transcription": (SPEECH, GENERATED),
    "translation": (ANSWERS, GENERATED),
    "summarization": (ANSWERS, GENERATED),
}
#: Scores by metric, and their protocol.
Scores = tuple[dict[str, float], str]
of_text = partial(Option, rich_help_panel=TEXT)
of_speech = partial(Option, rich_help_panel=SPEECH)
of_answers = partial(Option, rich_help_panel=ANSWERS)


def evaluate_command(
    context: typer.Context,
    model: Model,
    data: Annotated[
        Path,
        Argument(
            callback=data_path,
            help="Text: .txt, or .jsonl with a 'text'. Speech: a folder of .wav or .flac files, or .jsonl with a 'path' and "
            "maybe a 'text'. Sources: one per line, or .jsonl with 'source' and 'target'.",
        ),
    ],
    task: Annotated[Task, Option(help="Perplexity, word error rate, BLEU or ROUGE.")] = "perplexity",
    context_length: Annotated[int | None, of_text(min=2, help="Tokens of a window. Default: at most 1024.")] = None,
    stride: Annotated[int | None, of_text(min=1, help="Tokens from window to window. Default: their length.")] = None,
    carry_state: Annotated[bool, of_text("--carry-state", help="Read past the last position; keep the state.")] = False,
    max_tokens: Annotated[int | None, of_text(min=2, help="Number of tokens to read, at most.")] = None,
    attention_component: Annotated[Part, of_text(help="Measure one part of attention alone.")] = "both",
    teacher: Annotated[str | None, of_speech(help="The base model, to compare transcripts with.")] = None,
    limit: Annotated[int | None, of_speech(min=1, help="Number of files to read, at most.")] = None,
    references: Annotated[Path | None, of_answers(callback=text_file, help="Outputs, one per line.")] = None,
    max_new_tokens: Annotated[int | None, of_answers(min=1, help="Number of tokens per answer, at most.")] = None,
    num_beams: Annotated[int, Option(min=1, rich_help_panel=GENERATED, help="Beams of generation; 1 for none.")] = 1,
    record: Record = False,
    batch_size: BatchSize = 8,
    dtype: ModelDtype = "auto",
    device: Device = "auto",
) -> None:
    """Measure the perplexity of a text, the transcripts of speech, or the answers of a model with an encoder.

    Of a converted model it also says how much of its attention goes to what is kept.

    Below 1,000 tokens a perplexity says little, and a warning says so.
    """
    others = {TEXT, SPEECH, ANSWERS, GENERATED}.difference(PANELS[task])
    refuse(context, f"has no effect with --task {task}. Leave it out.", *others)
    starting(f"evaluating {model} on {data}")
    from hf_rfa.evaluation.cards import check_recordable, record_result
    from hf_rfa.inference import load_model

    folder = check_recordable(model) if record else None
    load = partial(load_model, dtype=dtype, device=device)
    if task == "perplexity":
        score = partial(_score_text, context_length=context_length, stride=stride, carry_state=carry_state)
        scores, protocol = score(load, model, data, max_tokens, attention_component, batch_size=batch_size)
    elif task == "transcription":
        score = partial(_score_speech, num_beams=num_beams, batch_size=batch_size)
        scores, protocol = score(load, model, data, teacher, limit)
    else:
        score = partial(_score_answers, num_beams=num_beams, batch_size=batch_size, max_new_tokens=max_new_tokens)
        scores, protocol = score(load, model, data, references, task=task)
    console.print(f"protocol: {protocol}", soft_wrap=True)
    if folder is not None:
        record_result(folder, task=task, data=data.name, scores=scores, protocol=protocol)


def _score_text(load: Any, model: str, data: Path, max_tokens: int | None, component: Any, **windows: Any) -> Scores:
    """Print the perplexity of a text, and what attention goes to."""
    from hf_rfa.convert.calibrate.attention_shares import attention_shares
    from hf_rfa.evaluation import perplexity
    from hf_rfa.evaluation.perplexity import shown
    from hf_rfa.inference import use_attention_component
    from hf_rfa.io.text_io import read_documents, tokenize

    documents = list(read_documents(data))
    loaded, tokenizer = load(model, kind="causal")
    use_attention_component(loaded, component)
    ids = tokenize(tokenizer, documents)[:max_tokens]
    with shown_count("scoring the text") as on_batch:
        result = perplexity(loaded, ids, on_batch=on_batch, **windows)
    console.print(f"perplexity {shown(result.perplexity)} ({result.nats:.4f} nats per token)")
    if result.tokens < FEW_TOKENS:
        warn(
            f"{result.tokens} tokens were scored; below {FEW_TOKENS:,} a perplexity is a matter of chance, by a "
            "seventh and more. Pass a longer text."
        )
    scores = {"perplexity": result.perplexity}
    if component != "both":
        return scores, f"{result.protocol}; {component} component alone"
    if (shares := attention_shares(loaded, ids)) is not None:
        console.print(f"attention on the first {shares.tokens:,} tokens: {shares}", soft_wrap=True)
    return scores, result.protocol


def _score_speech(
    load: Any, model: str, data: Path, teacher: str | None, limit: int | None, **generation: Any
) -> Scores:
    """Print word error rates of a model, and of its base model where there is one, with speed and bytes of the cache."""
    from rich.table import Table

    from hf_rfa.evaluation.transcription import evaluate_transcription
    from hf_rfa.inference.transcription import load_feature_extractor
    from hf_rfa.io.audio_io import read_utterances

    utterances = read_utterances(data, limit=limit)
    if teacher is None and all(utterance.text is None for utterance in utterances):
        raise UsageError(
            f"{data} has no texts to score by. Pass a .jsonl file with path and text, or the base model (--teacher)."
        )
    results, base_texts = {}, None
    for name in filter(None, (teacher, model)):
        parts: tuple[Any, Any, Any] = (*load(name, kind="speech"), load_feature_extractor(name))
        with shown_count(f"transcribing with {name}") as on_batch:
            result = evaluate_transcription(*parts, utterances, base_texts=base_texts, on_batch=on_batch, **generation)
        results[name], base_texts = result, result.transcripts.texts
    table = Table("", *result.scores, "tokens/s", "cache, bytes")
    for name, each in results.items():
        scores = [f"{each.scores[measure]:.2f} %" if measure in each.scores else "" for measure in result.scores]
        table.add_row(name, *scores, f"{each.tokens_per_second:.1f}", f"{each.cache_bytes:,}")
    console.print(table)
    return result.scores, result.protocol


def _score_answers(load: Any, model: str, data: Path, references: Path | None, **generation: Any) -> Scores:
    """Print the scores of a model's translations or summaries."""
    from hf_rfa.evaluation.generation_scores import evaluate_generation
    from hf_rfa.io.text_io import read_pairs

    sources, targets = read_pairs(data, references)
    loaded, tokenizer = load(model, kind="seq2seq")
    with shown_count("answering the sources") as on_batch:
        result = evaluate_generation(loaded, tokenizer, sources, targets, on_batch=on_batch, **generation)
    for name, value in result.scores.items():
        console.print(f"{name} {value:.2f}")
    return result.scores, result.protocol
