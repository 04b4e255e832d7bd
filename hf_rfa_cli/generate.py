"""``hf-rfa generate``."""

from __future__ import annotations

import sys
import time
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import typer

from .console import errors, shown_stream, starting
from .options import (
    BatchSize,
    Beams,
    Device,
    Model,
    ModelDtype,
    Seed,
    UsageError,
    existing_file,
    in_a_folder,
    positive,
    text_file,
)

STDIN = Path("-")
#: Exit status after Ctrl-C.
INTERRUPTED = 130


def generate_command(
    model: Model,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Text to continue; for a model with an encoder, the source. May be repeated."),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            callback=lambda path: path if path == STDIN else text_file(path),
            help="More of them, one a line; - for stdin.",
        ),
    ] = None,
    audio: Annotated[
        list[Path] | None,
        typer.Option(help="Speech to transcribe instead, a .wav or .flac file of any length. May be repeated."),
    ] = None,
    stream_from: Annotated[
        Path | None,
        typer.Option(
            callback=lambda path: path if path == STDIN else text_file(path),
            help="A text of any length, to continue or to read before the prompt, plain or .gz; - for stdin.",
        ),
    ] = None,
    save_cache: Annotated[
        Path | None,
        typer.Option(callback=in_a_folder, help="Write what it takes to go on to this file, after Ctrl-C too."),
    ] = None,
    load_cache: Annotated[
        Path | None, typer.Option(callback=existing_file, help="Go on from a file of --save-cache.")
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Take each prompt as a message, by the tokenizer's chat template, and show the answer alone.",
        ),
    ] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: a system message, before the prompt.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=0, help="Most tokens to generate for each. Default: 100.")
    ] = None,
    num_beams: Beams = 1,
    sample: Annotated[bool, typer.Option("--sample/--greedy", help="Sample, or take the likeliest token.")] = False,
    temperature: Annotated[float, typer.Option(callback=positive, help="Of the sampling.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the likeliest tokens, this many; 0 for all.")] = 50,
    top_p: Annotated[
        float,
        typer.Option(max=1, callback=positive, help="Sample from the likeliest tokens of this total probability."),
    ] = 1.0,
    seed: Seed = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at the end-of-text token.")] = False,
    batch_size: BatchSize = 8,
    dtype: ModelDtype = "auto",
    device: Device = "auto",
    compiled: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            help="Compile decoding steps, which takes up to minutes and makes each faster: for thousands of tokens.",
            show_default="on a GPU, but for beams and models with an encoder",
        ),
    ] = None,
) -> None:
    """Continue prompts, translate or summarise sources, or transcribe speech, and report speed and memory.

    A decoder without an encoder shows each prompt and its continuation, a model with an encoder its answers. With --chat
    the answers alone are shown.

    A single prompt is streamed, except with beams, which are chosen at the end.
    """
    if not sample and (temperature, top_k, top_p, seed) != (1.0, 50, 1.0, 0):
        raise UsageError("--temperature, --top-k, --top-p and --seed act on sampling: pass --sample with them.")
    if max_new_tokens == 0 and save_cache is None:
        raise UsageError("--max-new-tokens 0 reads, and generates nothing: pass --save-cache FILE with it.")
    streams = {"--stream-from": stream_from, "--save-cache": save_cache, "--load-cache": load_cache}
    if audio:
        of_text = {
            "--prompt": prompt,
            "--prompt-file": prompt_file,
            **streams,
            "--chat": chat,
            "--system": system,
            "--max-new-tokens": max_new_tokens,
            "--sample": sample,
            "--ignore-eos": ignore_eos,
            "--compile": compiled,
        }
        for flag in (flag for flag, value in of_text.items() if value):
            raise UsageError(f"{flag} has no effect with --audio. Leave it out.")
        _transcribe(model, audio, num_beams=num_beams, batch_size=batch_size, dtype=dtype, device=device)
        return
    prompts = [*(prompt or []), *(_lines(prompt_file) if prompt_file else [])]
    if "" in prompts:
        raise UsageError(f"prompt {prompts.index('') + 1} of {len(prompts)} is empty: there is nothing to start from.")
    for number, text in enumerate((*prompts, system or ""), start=1):
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            which = "--system" if number > len(prompts) else f"prompt {number} of {len(prompts)}"
            raise UsageError(f"{which} is not UTF-8 text. Pass it in a file (--prompt-file), or convert it.")
    if system is not None and not chat:
        raise UsageError("--system is of a chat template: pass --chat with it.")
    if not (prompts or stream_from or load_cache):
        raise UsageError("there is nothing to start from: pass --prompt, --prompt-file or --audio, or --stream-from.")
    if compiled and num_beams > 1:
        raise UsageError(
            "--compile is not for beams, whose steps transformers does not compile: leave out one of the two."
        )

    max_new_tokens = 100 if max_new_tokens is None else max_new_tokens
    sampling: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p} if sample else {}
    if any(streams.values()):
        name = next(flag for flag, value in streams.items() if value)
        others = {"--prompt-file": prompt_file, "--chat": chat, "--num-beams": num_beams > 1, "--compile": compiled}
        for flag in (flag for flag, value in others.items() if value):
            raise UsageError(f"{flag} does not go with {name}. Leave out one of the two.")
        if len(prompts) > 1:
            raise UsageError(f"{name} is for one text: pass one prompt, not {len(prompts)}.")
        if stream_from is not None and stream_from.name.removesuffix(".gz").endswith(".jsonl"):
            raise UsageError(f"--stream-from reads plain text, and {stream_from} is JSON. Write its texts to stdin.")
        sampling |= {"do_sample": sample, "seed": seed, "ignore_eos": ignore_eos, "max_new_tokens": max_new_tokens}
        _stream(model, stream_from, "".join(prompts), save_cache, load_cache, dtype=dtype, device=device, **sampling)
        return

    starting(f"loading {model}")
    from transformers import TextStreamer

    from hf_rfa.inference import generate_text, load_model

    loaded, tokenizer = load_model(model, dtype=dtype, device=device)
    streamer = None
    if num_beams == 1 and len(prompts) == 1:
        streamer = TextStreamer(tokenizer, skip_prompt=chat, skip_special_tokens=True)
    generations = []
    for start in range(0, len(prompts), batch_size):
        generation = generate_text(
            loaded,
            tokenizer,
            prompts[start : start + batch_size],
            max_new_tokens=max_new_tokens,
            streamer=streamer,
            seed=(seed + start) % 2**32,
            ignore_eos=ignore_eos,
            chat=chat,
            system=system,
            compiled=compiled,
            do_sample=sample,
            num_beams=num_beams,
            **sampling,
        )
        generations.append(generation)
        for text in () if streamer else generation.texts if chat else generation.whole_texts:
            typer.echo(text, color=True)  # as it is
    tokens, seconds = sum(one.new_tokens for one in generations), sum(one.seconds for one in generations)
    cached = f"after {tokens + generations[0].prompt_tokens} tokens"
    if len(prompts) > 1:
        cached = f"for {min(batch_size, len(prompts))} texts at a time"
    num_bytes = max(one.cache_bytes for one in generations)
    speed = f"{tokens} tokens in {seconds:.2f} s ({tokens / seconds:.1f} tokens/s)"
    errors.print(f"{speed}, cache {num_bytes:,} bytes {cached}")


def _stream(
    model: str,
    text: Path | None,
    prompt: str,
    save_cache: Path | None,
    load_cache: Path | None,
    *,
    dtype: str,
    device: str,
    max_new_tokens: int,
    **options: Any,
) -> None:
    """Let a model read a text of any length and go on with it. Ctrl-C ends both, and what was read and written is kept."""
    starting(f"loading {model}")
    from transformers import TextStreamer

    from hf_rfa.errors import InputError
    from hf_rfa.inference import Reading, cache_num_bytes, continue_stream, load_model, read_stream
    from hf_rfa.inference.cache_files import check_can_be_saved
    from hf_rfa.inference.loading import position_limit
    from hf_rfa.io.atomic_io import check_file
    from hf_rfa.io.text_io import stream_text
    from hf_rfa.process_memory import process_bytes

    loaded, tokenizer = load_model(model, kind="causal", dtype=dtype, device=device)
    if save_cache is not None:
        check_file(save_cache)
        check_can_be_saved(loaded)
    reading = Reading() if load_cache is None else Reading.load(load_cache, loaded)
    path = None if text == STDIN else text
    source = "" if path is None else str(path.resolve())
    skip = reading.characters if source and source == reading.source else 0
    if (limit := position_limit(loaded)) is not None:
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
            read_stream(loaded, tokenizer, (), reading)
        if text is not None:
            reading.source = source
            with shown_stream(f"reading {path.name if path else 'stdin'}", begin) as (show_bytes, show_tokens):
                texts = stream_text(path, skip=skip, on_bytes=show_bytes)
                read_stream(loaded, tokenizer, texts, reading, on_tokens=show_tokens)
            _print_speed("read", reading.tokens - begin, time.perf_counter() - start)
        streamer = TextStreamer(tokenizer, skip_prompt=not prompt, skip_special_tokens=True)
        written = continue_stream(
            loaded, tokenizer, reading, prompt=prompt, max_new_tokens=max_new_tokens, streamer=streamer, **options
        )
        _print_speed("written", written.new_tokens, written.seconds)
    except (KeyboardInterrupt, InputError) as error:
        stopped = error
    if reading.cache is not None:
        memory = f", process {process_bytes():,} bytes" if sys.platform == "linux" else ""
        errors.print(f"cache {cache_num_bytes(reading.cache):,} bytes after {reading.tokens:,} tokens{memory}")
    if save_cache is not None and (reading.cache is not None or isinstance(stopped, KeyboardInterrupt)):
        reading.save(save_cache, loaded)
        rest = f" --stream-from {reading.source}" if reading.source else ""
        errors.print(f"kept in {save_cache}: go on with --load-cache {save_cache}{rest}", soft_wrap=True)
    if isinstance(stopped, InputError):
        raise stopped
    if stopped is not None:
        kept = "" if save_cache else ", which are lost: --save-cache FILE keeps them"
        errors.print(f"interrupted after {reading.tokens:,} tokens{kept}")
        raise typer.Exit(INTERRUPTED)


def _print_speed(what: str, tokens: int, seconds: float) -> None:
    """Print how many tokens were read or written."""
    errors.print(f"{tokens:,} tokens {what} in {seconds:.2f} s ({tokens / seconds:,.1f} tokens/s)")


def _transcribe(model: str, paths: list[Path], *, num_beams: int, batch_size: int, dtype: str, device: str) -> None:
    """Print what a model writes of files of speech."""
    starting(f"loading {model}")
    from hf_rfa.evaluation.memory import cache_memory
    from hf_rfa.inference import load_model
    from hf_rfa.inference.transcription import load_feature_extractor, transcribe
    from hf_rfa.io.audio_io import load_samples

    extractor = load_feature_extractor(model)
    speech = [load_samples(path, extractor.sampling_rate) for path in paths]
    loaded, tokenizer = load_model(model, kind="speech", dtype=dtype, device=device)
    parts = []
    for start in range(0, len(speech), batch_size):
        part = transcribe(loaded, tokenizer, extractor, speech[start : start + batch_size], num_beams=num_beams)
        parts.append(part)
        for text in part.texts:
            typer.echo(text, color=True)  # as it is
    total = sum(parts[1:], parts[0])
    num_bytes = cache_memory(loaded).after(total.longest)
    speed = f"{total.tokens} tokens in {total.seconds:.2f} s ({total.tokens / total.seconds:.1f} tokens/s)"
    errors.print(f"{speed}, cache {num_bytes:,} bytes after {total.longest} tokens of a file")


def _lines(path: Path) -> list[str]:
    """Return the lines of a file, or of stdin."""
    if path != STDIN:
        from hf_rfa.io.text_io import read_lines

        return read_lines(path)
    from hf_rfa.io.text_io import UTF_8

    try:  # whatever encoding the terminal has, as of a file
        text = sys.stdin.buffer.read().decode(UTF_8)
        return [line.rstrip("\n") for line in StringIO(text, newline=None)]
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot read the prompts in stdin as UTF-8 text: {error}") from error
