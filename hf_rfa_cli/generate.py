"""``hf-rfa generate``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .console import console, errors, starting
from .options import BatchSize, Beams, Device, Model, ModelDtype, Seed, UsageError, number, text_file

STDIN = Path("-")


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
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Take each prompt as a message, by the tokenizer's chat template, and show the answer alone. Without a "
            "prompt: a conversation, a line of stdin each turn.",
        ),
    ] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: a system message, before the others.")] = None,
    max_new_tokens: Annotated[int, number("Most tokens to generate for each.", 1)] = 100,
    num_beams: Beams = 1,
    sample: Annotated[bool, typer.Option("--sample/--greedy", help="Sample, or take the likeliest token.")] = False,
    temperature: Annotated[float, number("Of the sampling.", above=0)] = 1.0,
    top_k: Annotated[int, number("Sample from the likeliest tokens, this many; 0 for all.", 0)] = 50,
    top_p: Annotated[
        float, number("Sample from the likeliest tokens of this total probability.", most=1, above=0)
    ] = 1.0,
    seed: Seed = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at the end-of-text token.")] = False,
    batch_size: BatchSize = 8,
    dtype: ModelDtype = "auto",
    device: Device = "auto",
    compiled: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Compile decoding steps, which takes up to minutes and makes each faster: for thousands of tokens.",
        ),
    ] = False,
) -> None:
    """Continue prompts, or translate or summarise sources, and report speed and memory.

    A decoder without an encoder shows each prompt and its continuation, a model with an encoder its answers. With --chat
    the answers alone are shown.

    A single prompt is streamed, except with beams, which are chosen at the end.
    """
    options: dict[str, Any] = {"do_sample": sample, "num_beams": num_beams}
    if sample:
        options |= {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    elif (temperature, top_k, top_p) != (1.0, 50, 1.0):
        raise UsageError("--temperature, --top-k and --top-p act on sampling: pass --sample with them.")
    prompts = [*(prompt or []), *(_lines(prompt_file) if prompt_file else [])]
    if "" in prompts:
        raise UsageError(f"prompt {prompts.index('') + 1} of {len(prompts)} is empty: there is nothing to start from.")
    if system is not None and not chat:
        raise UsageError("--system is of a conversation: pass --chat with it.")
    if not prompts and not (chat and prompt_file is None):
        raise UsageError(
            "there is nothing to start from: pass --prompt or --prompt-file, or --chat for a conversation."
        )
    if compiled and not prompts:
        raise UsageError("--compile is not for a conversation, which goes on in one cache: pass --prompt with it.")
    if compiled and num_beams > 1:
        raise UsageError(
            "--compile is not for beams, whose steps transformers does not compile: leave out one of the two."
        )

    starting(f"loading {model}")
    from transformers import TextStreamer

    from hf_rfa.inference import generate_text, load_model

    loaded, tokenizer = load_model(model, dtype=dtype, device=device, packed=True)
    streamer = None
    if num_beams == 1 and len(prompts) <= 1:
        streamer = TextStreamer(tokenizer, skip_prompt=chat, skip_special_tokens=True)
    options |= {"max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos, "streamer": streamer}
    if not prompts:
        _converse(loaded, tokenizer, system, seed, options)
        return
    results = []
    for start in range(0, len(prompts), batch_size):
        results.append(
            generate_text(
                loaded,
                tokenizer,
                prompts[start : start + batch_size],
                seed=(seed + start) % 2**32,
                chat=chat,
                system=system,
                compiled=compiled,
                **options,
            )
        )
        for text in () if streamer else results[-1].texts if chat else results[-1].whole_texts:
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    _report(results, f"for {min(batch_size, len(prompts))} texts at a time" if len(prompts) > 1 else None)


def _converse(model: Any, tokenizer: Any, system: str | None, seed: int, options: dict[str, Any]) -> None:
    """Answer the lines of stdin, one turn each, until it ends."""
    from hf_rfa.chat import Conversation

    conversation, results = Conversation(model, tokenizer, system), list[Any]()
    while line := _next_line():
        if not line.strip():
            continue
        results.append(conversation.reply(line.strip(), seed=(seed + len(results)) % 2**32, **options))
        if options["streamer"] is None:
            console.print(results[-1].text, markup=False, highlight=False, soft_wrap=True)
    if results:
        _report(results)


def _next_line() -> str:
    """Return the next line of stdin, with a mark before it on a terminal; empty at the end."""
    if sys.stdin.isatty():
        errors.print("> ", end="")
    try:
        return sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot read the messages in stdin as UTF-8 text: {error}") from error


def _report(results: list[Any], cached: str | None = None) -> None:
    """Print speed and memory on stderr; ``cached`` says what the largest cache is of, by default of all tokens."""
    tokens, seconds = sum(each.new_tokens for each in results), sum(each.seconds for each in results)
    seen = tokens + sum(each.prompt_tokens for each in results)
    after = cached or f"after {seen} tokens"
    size = max(each.cache_bytes for each in results)
    errors.print(f"{tokens} tokens in {seconds:.2f} s ({tokens / seconds:.1f} tokens/s), cache {size:,} bytes {after}")


def _lines(path: Path) -> list[str]:
    """Return the lines of a file, or of stdin."""
    if path != STDIN:
        from hf_rfa.io.text_io import read_lines

        return read_lines(path)
    try:
        return [line.rstrip("\n") for line in sys.stdin]
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot read the prompts in stdin as UTF-8 text: {error}") from error
