"""``hf-rfa generate``."""

from __future__ import annotations

import sys
import time
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from . import options
from .console import errors, print_speed, shown_stream, starting

#: What stands for stdin on a command line.
STDIN = Path("-")
#: Exit status after Ctrl-C.
INTERRUPTED = 130
#: Panels of the help. `options.refuse` knows by them which options do not go together.
TEXT, PROMPTS, SAMPLING, STREAMS = "Text", "Prompts and chat", "Sampling, with --sample", "Texts without end"
of_text = partial(Option, rich_help_panel=TEXT)
of_prompts = partial(Option, rich_help_panel=PROMPTS)
of_sampling = partial(Option, rich_help_panel=SAMPLING)
of_streams = partial(Option, rich_help_panel=STREAMS)


def _file(path: Path | None) -> Path | None:
    return path if path == STDIN else options.text_file(path)


def generate_command(
    context: typer.Context,
    model: options.Model,
    prompt: Annotated[list[str] | None, of_text(help="Text to continue, or a source. May be repeated.")] = None,
    max_new_tokens: Annotated[int, of_text(min=0, help="Number of tokens to generate per prompt, at most.")] = 100,
    sample: Annotated[bool, of_text("--sample/--greedy", help="Sample, or take the likeliest token.")] = False,
    ignore_eos: Annotated[bool, of_text("--ignore-eos", help="Do not stop at the end-of-text token.")] = False,
    prompt_file: Annotated[Path | None, of_prompts(callback=_file, help="Prompts, one per line; - for stdin.")] = None,
    chat: Annotated[bool, of_prompts("--chat", help="Apply the chat template, and print only the answers.")] = False,
    system: Annotated[str | None, of_prompts(help="With --chat: a system message, before the prompt.")] = None,
    compiled: Annotated[
        bool | None,
        of_prompts(
            "--compile/--no-compile",
            help="Compile decoding steps: it takes a minute, then each token is faster.",
            show_default="on a GPU, except for beams and models with an encoder",
        ),
    ] = None,
    temperature: Annotated[float, of_sampling(callback=options.positive, help="Temperature of sampling.")] = 1.0,
    top_k: Annotated[int, of_sampling(min=0, help="Sample from the likeliest tokens; 0 for all.")] = 50,
    top_p: Annotated[
        float, of_sampling(max=1, callback=options.positive, help="Likeliest share to sample from.")
    ] = 1.0,
    seed: Annotated[int, of_sampling(min=0, max=options.LARGEST_SEED, help="Random seed.")] = 0,
    stream_from: Annotated[Path | None, of_streams(callback=_file, help="A long text to read; - for stdin.")] = None,
    save_cache: Annotated[Path | None, of_streams(callback=options.in_a_folder, help="Save the reading here.")] = None,
    load_cache: Annotated[Path | None, of_streams(callback=options.existing_file, help="Reading to continue.")] = None,
    audio: Annotated[list[Path] | None, Option(help="Speech to transcribe instead. May be repeated.")] = None,
    num_beams: Annotated[int, Option(min=1, help="Beams of generation; 1 for none.")] = 1,
    batch_size: options.BatchSize = 8,
    dtype: options.ModelDtype = "auto",
    device: options.Device = "auto",
) -> None:
    """Continue prompts, translate or summarize sources, or transcribe speech, and report speed and memory.

    A decoder without an encoder shows each prompt and its continuation, a model with an encoder its answers. A single
    prompt is streamed, except with beams, which are chosen at the end.
    """
    if audio:
        options.refuse(context, "has no effect with --audio. Leave it out.", TEXT, PROMPTS, SAMPLING, STREAMS)
        _transcribe(model, audio, num_beams=num_beams, batch_size=batch_size, dtype=dtype, device=device)
        return
    wanted: dict[str, Any] = {"max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos, "do_sample": sample}
    if sample:
        wanted |= {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    else:
        options.refuse(context, "affects only sampling: pass --sample, too.", SAMPLING)
    if max_new_tokens == 0 and save_cache is None:
        raise options.UsageError("--max-new-tokens 0 generates nothing: pass --save-cache FILE to save what was read.")
    if system is not None and not chat:
        raise options.UsageError("--system needs a chat template: pass --chat, too.")
    if not (prompt or prompt_file or stream_from or load_cache):
        raise options.UsageError(
            "there is nothing to start from: pass --prompt, --prompt-file or --audio, or --stream-from."
        )
    if compiled and num_beams > 1:
        raise options.UsageError(
            "--compile is not for beams, whose steps transformers does not compile: leave out one of the two."
        )
    if streaming := options.given(context, STREAMS):
        options.refuse(context, f"does not go with {streaming[0]}. Leave out one of the two.", PROMPTS)
        if num_beams > 1 or len(prompt or []) > 1:
            raise options.UsageError(f"{streaming[0]} is for one text: pass one prompt, and no beams.")
        if stream_from is not None and stream_from.name.removesuffix(".gz").endswith(".jsonl"):
            raise options.UsageError(
                f"--stream-from reads plain text, and {stream_from} is JSON. Write its texts to stdin."
            )

    starting(f"loading {model}")
    prompts = _prompts(prompt or [], prompt_file, system)
    from transformers import TextStreamer

    from hf_rfa.inference import generate_text, load_model

    loaded, tokenizer = load_model(model, kind="causal" if streaming else None, dtype=dtype, device=device)
    if streaming:
        _stream(loaded, tokenizer, stream_from, "".join(prompts), save_cache, load_cache, seed=seed, **wanted)
        return
    streamer = None
    if num_beams == 1 and len(prompts) == 1:
        streamer = TextStreamer(tokenizer, skip_prompt=chat, skip_special_tokens=True)
    wanted |= {"chat": chat, "system": system, "compiled": compiled, "num_beams": num_beams, "streamer": streamer}
    generations = []
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        generation = generate_text(loaded, tokenizer, batch, seed=(seed + first) % 2**32, **wanted)
        generations.append(generation)
        for text in () if streamer else generation.texts if chat else generation.whole_texts:
            typer.echo(text, color=True)  # as it is
    tokens = sum(each.new_tokens for each in generations)
    cache = f", cache {max(each.cache_bytes for each in generations):,} bytes "
    if len(prompts) > 1:
        cache += f"for {min(batch_size, len(prompts))} texts at a time"
    else:
        cache += f"after {tokens + generations[0].prompt_tokens} tokens"
    print_speed("", tokens, sum(each.seconds for each in generations), cache)


def _prompts(prompts: list[str], file: Path | None, system: str | None) -> list[str]:
    """Return the prompts of the options and of a file or stdin; raise a `options.UsageError` for one that cannot be used."""
    from hf_rfa.io.text_io import is_text, read_lines, stream_text

    if file == STDIN:
        prompts = prompts + [line.rstrip("\n") for line in StringIO("".join(stream_text(None)))]
    elif file is not None:
        prompts = prompts + read_lines(file)
    for number, text in enumerate(prompts, start=1):
        which = f"prompt {number} of {len(prompts)}"
        if not text:
            raise options.UsageError(f"{which} is empty: there is nothing to start from.")
        if not is_text(text):
            raise options.UsageError(f"{which} is not UTF-8 text. Pass it in a file (--prompt-file).")
    if not is_text(system or ""):
        raise options.UsageError("--system is not UTF-8 text. Convert it.")
    return prompts


def _stream(
    model: Any, tokenizer: Any, text: Path | None, prompt: str, save: Path | None, load: Path | None, **wanted: Any
) -> None:
    """Let a model read a text of any length and go on with it. Ctrl-C ends both, and what was read and written is kept."""
    from transformers import TextStreamer

    from hf_rfa.errors import InputError
    from hf_rfa.inference import Reading, cache_num_bytes, continue_stream, read_stream
    from hf_rfa.inference.cache_files import check_can_be_saved
    from hf_rfa.inference.loading import position_limit
    from hf_rfa.io.atomic_io import check_file
    from hf_rfa.io.text_io import stream_text
    from hf_rfa.process_memory import process_bytes

    if save is not None:
        check_file(save)
        check_can_be_saved(model)
    reading = Reading() if load is None else Reading.load(load, model)
    path = None if text == STDIN else text
    source = "" if path is None else str(path.resolve())
    skip = reading.characters if source and source == reading.source else 0
    if (limit := position_limit(model)) is not None:
        errors.print(
            f"note: this model's positions end at {limit}. Wherever they do, it reads its last {limit // 4} tokens again, "
            "and has forgotten what came before.",
            soft_wrap=True,
        )
    begin, start, stopped = reading.tokens, time.perf_counter(), None
    try:
        if skip:
            errors.print(f"going on in {path} after {skip:,} characters", soft_wrap=True)
        else:  # what an interruption left of another text comes first
            read_stream(model, tokenizer, (), reading)
        if text is not None:
            reading.source = source
            with shown_stream(f"reading {path.name if path else 'stdin'}", begin) as (show_bytes, show_tokens):
                texts = stream_text(path, skip=skip, on_bytes=show_bytes)
                read_stream(model, tokenizer, texts, reading, on_tokens=show_tokens)
            print_speed("read ", reading.tokens - begin, time.perf_counter() - start)
        streamer = TextStreamer(tokenizer, skip_prompt=not prompt, skip_special_tokens=True)
        written = continue_stream(model, tokenizer, reading, prompt=prompt, streamer=streamer, **wanted)
        print_speed("written ", written.new_tokens, written.seconds)
    except (KeyboardInterrupt, InputError) as error:
        stopped = error
    if reading.cache is not None:
        memory = f", process {process_bytes():,} bytes" if sys.platform == "linux" else ""
        errors.print(f"cache {cache_num_bytes(reading.cache):,} bytes after {reading.tokens:,} tokens{memory}")
    if save is not None and (reading.cache is not None or isinstance(stopped, KeyboardInterrupt)):
        reading.save(save, model)
        rest = f" --stream-from {reading.source}" if reading.source else ""
        errors.print(f"kept in {save}: go on with --load-cache {save}{rest}", soft_wrap=True)
    if isinstance(stopped, InputError):
        raise stopped
    if stopped is not None:
        kept = "" if save else ", which are lost: --save-cache FILE keeps them"
        errors.print(f"interrupted after {reading.tokens:,} tokens{kept}")
        raise typer.Exit(INTERRUPTED)


def _transcribe(model: str, paths: list[Path], *, num_beams: int, batch_size: int, dtype: str, device: str) -> None:
    """Print what a model writes of files of speech."""
    starting(f"loading {model}")
    from hf_rfa.evaluation.memory import cache_memory
    from hf_rfa.inference import load_model
    from hf_rfa.inference.transcription import Transcripts, load_feature_extractor, transcribe_files
    from hf_rfa.io.audio_io import read_utterances

    extractor = load_feature_extractor(model)
    files = [utterance.path for path in paths for utterance in read_utterances(path)]
    loaded, tokenizer = load_model(model, kind="speech", dtype=dtype, device=device)
    total = Transcripts()
    for part in transcribe_files(loaded, tokenizer, extractor, files, batch_size=batch_size, num_beams=num_beams):
        total += part
        for text in part.texts:
            typer.echo(text, color=True)  # as it is
    cache = f", cache {cache_memory(loaded).after(total.longest):,} bytes after {total.longest} tokens of a file"
    print_speed("", total.tokens, total.seconds, cache)
