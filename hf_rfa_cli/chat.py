"""``hf-rfa chat``."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from . import options
from .console import console, errors, starting

COMMANDS = "/save [FILE], /load FILE, /undo, /stats, /exit. Ctrl-C ends an answer."


def chat_command(
    model: options.Model,
    session: Annotated[
        Path | None, Option(callback=options.in_a_folder, help="Go on from this file, and keep every turn in it.")
    ] = None,
    system: Annotated[str | None, Option(help="A system message at the beginning.")] = None,
    max_new_tokens: Annotated[int, Option(min=1, help="Most tokens of an answer.")] = 512,
    sample: Annotated[bool, Option("--sample/--greedy", help="Sample, or take the likeliest token.")] = False,
    temperature: Annotated[float, Option(callback=options.positive, help="Of the sampling.")] = 1.0,
    top_p: Annotated[float, Option(max=1, callback=options.positive, help="Sample from this probability.")] = 1.0,
    seed: options.Seed = 0,
    dtype: options.ModelDtype = "auto",
    device: options.Device = "auto",
) -> None:
    """Talk with a model in the terminal: a turn reads what is new, however long the conversation."""
    starting(f"loading {model}")
    with suppress(ImportError):  # which is not everywhere
        import readline  # noqa: F401  # lines can be edited and recalled

    from transformers import TextStreamer

    from hf_rfa.errors import InputError
    from hf_rfa.inference import cache_num_bytes, load_model
    from hf_rfa.inference.cache_files import check_can_be_saved
    from hf_rfa.serving.conversation import Conversation

    loaded, tokenizer = load_model(model, kind="causal", dtype=dtype, device=device)
    talk, speed = Conversation(loaded, tokenizer, system), ""
    if session is not None:
        check_can_be_saved(loaded)
        if session.exists():
            talk.load(session)
    wanted: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": sample, "seed": seed}
    wanted |= {"temperature": temperature, "top_p": top_p} if sample else {}
    errors.print(COMMANDS)
    while True:
        try:
            line = console.input("> ").strip()
            name, _, argument = line.partition(" ")
            path = Path(argument.strip()) if argument else session
            if name == "/exit":
                break
            elif name == "/stats":
                size = f"{talk.reading.tokens:,} tokens, {cache_num_bytes(talk.reading.cache):,} bytes"
                errors.print(f"turns: {talk.turns}, {size}{speed}")
            elif name == "/save" and path is not None:
                talk.save(path)
                errors.print(f"kept in {path}", soft_wrap=True)
            elif name == "/load" and path is not None:
                talk.load(path)
                errors.print(f"turns: {talk.turns}, of {path}", soft_wrap=True)
            elif name == "/undo":
                errors.print("taken back" if talk.undo() else "there is no turn to take back")
            elif name.startswith("/"):
                errors.print(COMMANDS)
            elif line:
                try:
                    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
                    answer = talk.say(line, streamer=streamer, **wanted)
                    speed = f", {answer.new_tokens / answer.seconds:,.1f} tokens/s"
                except KeyboardInterrupt:
                    errors.print("(interrupted)")
            if session is not None and (name == "/undo" or (line and not name.startswith("/"))):
                talk.save(session)
        except InputError as error:
            errors.print(f"error: {error}", style="red", soft_wrap=True)
        except (EOFError, KeyboardInterrupt):
            break
    if session is not None:
        errors.print(f"kept in {session}: go on with --session {session}", soft_wrap=True)
