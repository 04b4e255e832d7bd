"""Texts without end: the part of ``hf-rfa generate`` that reads one, goes on with it, and keeps it in a file."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import typer

from .console import errors, print_speed, shown_stream

#: What stands for stdin on a command line.
STDIN = Path("-")
#: Exit status after Ctrl-C.
INTERRUPTED = 130


def stream(
    model: str,
    text: Path | None,
    prompt: str,
    save_cache: Path | None,
    load_cache: Path | None,
    *,
    dtype: str,
    device: str,
    **wanted: Any,
) -> None:
    """Let a model read a text of any length and go on with it. Ctrl-C ends both, and what was read and written is kept."""
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
            print_speed("read ", reading.tokens - begin, time.perf_counter() - start)
        streamer = TextStreamer(tokenizer, skip_prompt=not prompt, skip_special_tokens=True)
        written = continue_stream(loaded, tokenizer, reading, prompt=prompt, streamer=streamer, **wanted)
        print_speed("written ", written.new_tokens, written.seconds)
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
