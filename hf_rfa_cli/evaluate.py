"""``hf-rfa evaluate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .console import console, shown_count, starting, warn
from .options import (
    BatchSize,
    Beams,
    Device,
    Model,
    ModelDtype,
    References,
    Seed,
    UsageError,
    in_a_folder,
    number,
    text_file,
)
from .recall import measure_recall, run_tasks

#: Two samples of 1,000 tokens of one text differ by a seventh in perplexity (the demo's model on its text).
FEW_TOKENS = 1000
#: Options of `evaluate_command` that one kind of task alone has.
PERPLEXITY_OPTIONS = ("context_length", "stride", "carry_state", "max_tokens")
GENERATION_OPTIONS = (
    *("references", "source_field", "target_field", "num_beams", "max_new_tokens", "limit", "truncate"),
    *("bleu_tokenizer", "save_predictions"),
)
RECALL_OPTIONS = ("teacher", "control", "max_length", "quick", "seed", "document_end")
#: The group of the help that the options of the suite, and of lm-eval's tasks, stand in.
SUITE, TASKS = "Recall suite (--suite recall)", "lm-eval"


def evaluate_command(
    context: typer.Context,
    model: Model,
    text: Annotated[
        Path | None,
        typer.Argument(
            callback=text_file,
            help="Text (.txt, or .jsonl with a 'text' field; plain or .gz), or sources, one a line. Only --suite and --tasks "
            "do without.",
        ),
    ] = None,
    task: Annotated[
        Literal["perplexity", "translation", "summarization"],
        typer.Option(help="Perplexity, or BLEU or ROUGE of generated answers."),
    ] = "perplexity",
    context_length: Annotated[
        int | None, number("Perplexity: tokens per window. Default: the positions, at most 1024.", 2)
    ] = None,
    stride: Annotated[
        int | None, number("Perplexity: tokens from window to window. Default: disjoint windows.", 1)
    ] = None,
    carry_state: Annotated[
        bool,
        typer.Option(
            "--carry-state",
            help="Perplexity: windows may be longer than the positions: they are read piece by piece, and the state goes on.",
        ),
    ] = False,
    max_tokens: Annotated[int | None, number("Perplexity: most tokens of the text that are read.", 2)] = None,
    references: References = None,
    source_field: Annotated[str, typer.Option(help="Generation: the sources' name in a .jsonl file.")] = "source",
    target_field: Annotated[str, typer.Option(help="Generation: the references' name in it.")] = "target",
    num_beams: Beams = 1,
    max_new_tokens: Annotated[
        int | None, number("Generation: most tokens of an answer. Default: the checkpoint's, or the positions.", 1)
    ] = None,
    limit: Annotated[int | None, number("Generation: most sources that are read.", 1)] = None,
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
    attention_component: Annotated[
        Literal["both", "linear", "window"],
        typer.Option(help="Of attention with a sliding window: both components, or one alone."),
    ] = "both",
    record: Annotated[
        bool, typer.Option("--record", help="Add the result to evaluation.json and the model card of the checkpoint.")
    ] = False,
    batch_size: BatchSize = 8,
    dtype: ModelDtype = "auto",
    device: Device = "auto",
    suite: Annotated[
        Literal["recall"] | None,
        typer.Option(
            help="Measure what perplexity hides: recall, copying, needles, generation.", rich_help_panel=SUITE
        ),
    ] = None,
    text_option: Annotated[
        Path | None,
        typer.Option("--text", callback=text_file, help="The text, as the argument.", rich_help_panel=SUITE),
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option(help="Softmax model that it was made from, to compare with.", rich_help_panel=SUITE),
    ] = None,
    control: Annotated[
        list[str] | None,
        typer.Option(
            help="Also the teacher, or a softmax model itself, limited to WINDOW+SINKS tokens; repeatable. Default: one of "
            "the same bytes.",
            metavar="WINDOW+SINKS",
            rich_help_panel=SUITE,
        ),
    ] = None,
    max_length: Annotated[
        int | None, number("Recall suite: most tokens of a row. Default: the positions, at most 2048.", 128)
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer rows and lengths: about a fifth of the time.", rich_help_panel=SUITE)
    ] = False,
    seed: Seed = 0,
    document_end: Annotated[
        str | None,
        typer.Option(help="Token after each document. Default: the tokenizer's end of text.", rich_help_panel=SUITE),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(callback=in_a_folder, help="Folder for the table, its JSON and PNG.", rich_help_panel=SUITE),
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Tasks of lm-eval to run, by commas (needs lm-eval).", rich_help_panel=TASKS)
    ] = None,
    tasks_folder: Annotated[
        Path | None, typer.Option(help="Folder with the definitions of more tasks.", rich_help_panel=TASKS)
    ] = None,
) -> None:
    """Measure the perplexity of a text, how well a model translates or summarises, or what it recalls.

    Below 1,000 tokens a perplexity says little, and a warning says so.
    """
    kind = "--suite recall" if suite else "--tasks" if tasks is not None else f"--task {task}"
    own = {"--suite recall": (*RECALL_OPTIONS, "output"), "--tasks": ("tasks_folder", "output")}
    own |= {"--task perplexity": (*PERPLEXITY_OPTIONS, "attention_component")}
    allowed = own.get(kind, (*GENERATION_OPTIONS, "attention_component"))
    every = {*RECALL_OPTIONS, "output", "tasks_folder", *PERPLEXITY_OPTIONS, *GENERATION_OPTIONS, "attention_component"}
    given = context.params | {"control": control or None}  # an empty list, if it is not given
    changed = {each.name for each in context.command.params if given.get(each.name) != each.default}
    if suite and tasks is not None:
        raise UsageError("--suite and --tasks are two evaluations. Run one after the other.")
    for name in sorted(changed & (every - {*allowed} | ({"task"} if suite or tasks is not None else set()))):
        raise UsageError(f"--{name.replace('_', '-')} has no effect with {kind}. Leave it out.")
    if text is not None and text_option is not None:
        raise UsageError("the text is given twice, as an argument and with --text. Leave one out.")
    text = text or text_option
    if suite:
        about: Any = {
            "max_length": max_length,
            "quick": quick,
            "seed": seed,
            "document_end": document_end,
            "dtype": dtype,
            "device": device,
        }
        measure_recall(model, text, teacher=teacher, controls=control, output=output, record=record, **about)
        return
    if tasks is not None:
        if record or text is not None:
            raise UsageError(f"{'--record' if record else 'a text'} has no effect with --tasks. Leave it out.")
        run_tasks(
            model, tasks, tasks_folder=tasks_folder, output=output, batch_size=batch_size, dtype=dtype, device=device
        )
        return
    if text is None:
        raise UsageError("Missing argument 'TEXT': a file to measure on.")
    starting(f"evaluating {model} on {text}")
    from hf_rfa.evaluation import perplexity
    from hf_rfa.evaluation.cards import check_recordable, record_result
    from hf_rfa.evaluation.generation_scores import GenerationScores, evaluate_generation
    from hf_rfa.evaluation.perplexity import shown
    from hf_rfa.inference import load_model, use_attention_component
    from hf_rfa.io.atomic_io import check_file, new_file
    from hf_rfa.io.text_io import read_documents, read_pairs, tokenize

    folder = check_recordable(model) if record else None
    if task == "perplexity":
        documents = list(read_documents(text))
    else:
        sources, targets = read_pairs(
            text, references, source_field=source_field, target_field=target_field, limit=limit
        )
    if save_predictions is not None:
        check_file(save_predictions, replace=False)
    kind_of_model: Any = "causal" if task == "perplexity" else "seq2seq"
    loaded, tokenizer = load_model(model, kind=kind_of_model, dtype=dtype, device=device)
    use_attention_component(loaded, attention_component)
    with shown_count("scoring the text" if task == "perplexity" else "answering the sources") as on_batch:
        shared: Any = {"batch_size": batch_size, "on_batch": on_batch}
        if task == "perplexity":
            ids = tokenize(tokenizer, documents)[:max_tokens]
            shared |= {"context_length": context_length, "stride": stride, "carry_state": carry_state}
            result: Any = perplexity(loaded, ids, **shared)
        else:
            shared |= {"num_beams": num_beams, "max_new_tokens": max_new_tokens, "truncate": truncate}
            result = evaluate_generation(
                loaded, tokenizer, sources, targets, task=task, bleu_tokenizer=bleu_tokenizer, **shared
            )
    if isinstance(result, GenerationScores):
        scores = result.scores
        if save_predictions is not None:
            with new_file(save_predictions) as file:
                for source, target, prediction in zip(sources, targets, result.predictions, strict=True):
                    row = {"source": source, "target": target, "prediction": prediction}
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
        for name, value in scores.items():
            console.print(f"{name} {value:.2f}")
    else:
        scores = {"perplexity": result.perplexity}
        console.print(f"perplexity {shown(result.perplexity)} ({result.nats:.4f} nats per token)")
        if result.tokens_counted < FEW_TOKENS:
            warn(
                f"{result.tokens_counted} tokens were scored; below {FEW_TOKENS:,} a perplexity is a matter of chance, by a "
                "seventh and more. Pass a longer text."
            )
    console.print(f"protocol: {result.protocol}", markup=False, highlight=False, soft_wrap=True)
    if folder is not None:
        alone = "" if attention_component == "both" else f"; {attention_component} component alone"
        record_result(folder, task=task, data=text.name, scores=scores, protocol=result.protocol + alone)
