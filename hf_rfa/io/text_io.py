"""Reading texts, plain or JSON lines, gzipped or not, and their tokens."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from ..errors import InputError

#: The encoding of every text: UTF-8, without the mark that some editors put before it.
UTF_8 = "utf-8-sig"
#: Most tokens of a block of text or of a source, unless the model has fewer positions.
BLOCK_LENGTH = 1024
#: Most bytes of a streamed text that are read at once.
STREAMED_BYTES = 2**16


def read_documents(path: str | Path) -> Iterator[str]:
    """Yield the documents of a text file.

    Args:
        path: a ``.jsonl`` file, whose lines are objects with a ``text`` field, one document each; or any other text
            file, which is one document. Either may be gzipped (``.gz``). UTF-8.

    Raises:
        InputError: naming the file, and the line where there is one, if it cannot be read or has no text.
    """
    path = Path(path)
    has_text = False
    with open_text(path) as file:
        records = read_json_lines(file, path, "text") if is_json_lines(path) else [{"text": file.read()}]
        for record in records:
            if record["text"].strip():
                has_text = True
                yield record["text"]
    if not has_text:
        raise InputError(f"{path} has no text in it.")


def read_pairs(path: str | Path, references: str | Path | None = None) -> tuple[list[str], list[str]]:
    """Return sources and references.

    Args:
        path: a text file with one source a line, or, without ``references``, a ``.jsonl`` file of objects with a ``source``
            and a ``target``. Either may be gzipped. UTF-8.
        references: a text file with one reference a line.

    Raises:
        InputError: if a file cannot be read or has no pairs, if two files differ in their number of lines, or if a source is
            empty.
    """
    path = Path(path)
    if references is None:
        if not is_json_lines(path):
            raise InputError(
                f"{path} holds no references. Pass --references with one a line, or a .jsonl file with both in each object."
            )
        with open_text(path) as file:
            records = list(read_json_lines(file, path, "source", "target"))
        sources, targets = ([record[name] for record in records] for name in ("source", "target"))
    else:
        sources, targets = (read_lines(Path(file)) for file in (path, references))
        if len(sources) != len(targets):
            raise InputError(
                f"{path} has {len(sources)} lines, but {references} has {len(targets)}: line N of one belongs to line N "
                "of the other."
            )
    if not sources:
        raise InputError(f"{path} has no text in it.")
    for number, source in enumerate(sources, start=1):
        if not source.strip():
            raise InputError(f"{path}, line {number}: the source is empty. Remove it and its reference.")
    return sources, targets


@contextmanager
def open_text(path: Path) -> Iterator[IO[str]]:
    """Open a text file, plain or gzipped; whatever is wrong with it becomes an `InputError` that names it."""
    if not path.is_file():
        raise InputError(f"there is no text file {path}. Pass a .txt or .jsonl file, plain or .gz.")
    try:
        with gzip.open(path, "rt", encoding=UTF_8) if path.suffix == ".gz" else path.open(encoding=UTF_8) as file:
            yield cast(IO[str], file)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path} as UTF-8 text: {error}") from error


def stream_text(
    path: Path | None, *, skip: int = 0, on_bytes: Callable[[int, int | None], object] = lambda done, total: None
) -> Iterator[str]:
    """Yield a text in pieces as they come, so that it may be of any length, or have no end at all.

    Args:
        path: a text file, plain or gzipped (UTF-8); None for stdin.
        skip: characters at its beginning to leave out.
        on_bytes: called with (bytes read, bytes of the file or None) before each piece.

    Raises:
        InputError: if it cannot be read.
    """
    what = "stdin" if path is None else str(path)
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder(UTF_8)(), translate=True)
    try:
        with nullcontext(sys.stdin.buffer) if path is None else path.open("rb") as raw:
            size = None if path is None else path.stat().st_size
            file: Any = gzip.GzipFile(fileobj=raw) if path is not None and path.suffix == ".gz" else raw
            data = b"."
            while data:
                data = file.read1(STREAMED_BYTES)  # what there is, so that an interrupt while it waits loses nothing
                text = decoder.decode(data, final=not data)
                on_bytes(0 if size is None else raw.tell(), size)
                if text[skip:]:
                    yield text[skip:]
                skip = max(0, skip - len(text))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {what} as UTF-8 text: {error}") from error


def is_json_lines(path: Path) -> bool:
    """Return whether a file is named as one of JSON lines."""
    return path.name.removesuffix(".gz").endswith(".jsonl")


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file, plain or gzipped (UTF-8)."""
    # Not str.splitlines, which also splits at characters that are part of a line, such as U+2028.
    with open_text(path) as file:
        return [line.rstrip("\n") for line in file]


def read_json_lines(lines: Iterable[str], path: Path, *names: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON lines file, each of which has to have some fields of text."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}, line {number}: not a JSON object ({error}).") from error
        for name in names:
            if not isinstance(record, dict) or name not in record:
                keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
                raise InputError(f"{path}, line {number}: no string field {name!r} (found: {keys}).")
            if not isinstance(record[name], str):
                content = "null" if record[name] is None else f"of type {type(record[name]).__name__}"
                raise InputError(
                    f"{path}, line {number}: field {name!r} is {content}, not text. Fill it in, or remove the line."
                )
            if not is_text(record[name]):
                raise InputError(
                    f"{path}, line {number}: field {name!r} has half of a character (\\ud800 to \\udfff alone), as a text "
                    "that was cut has. Remove it, or the line."
                )
        yield record


def is_text(text: str) -> bool:
    """Return whether a string can be written as UTF-8: halves of a character (lone surrogates) cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def start_tokens(tokenizer: Any) -> list[int]:
    """Return the tokens that a tokenizer puts before every text by itself, such as Llama's <s>."""
    plain, whole = (tokenizer("a", add_special_tokens=special, verbose=False)["input_ids"] for special in (False, True))
    places = range(len(whole) - len(plain) + 1)
    return whole[: next((place for place in places if whole[place : place + len(plain)] == plain), 0)]


def text_ids(tokenizer: Any, texts: Iterable[str]) -> Iterator[list[int]]:
    """Yield the token ids of texts as a decoder reads them: with the tokens that begin a text, and none that ends it.

    Some tokenizers end texts by themselves. Nothing could follow there: a model would go on with another text.
    """
    start = start_tokens(tokenizer)
    for text in texts:
        yield [*start, *tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]


def tokenize(tokenizer: Any, documents: Iterable[str], *, most: int | None = None, end: str | None = None) -> Tensor:
    """Return the token ids of some documents, joined, each followed by one end-of-text token, [N].

    Args:
        tokenizer: the model's tokenizer.
        documents: texts.
        most: the largest number of tokens; None takes all.
        end: the token after each document; None takes the tokenizer's end of text, where it has one.

    Raises:
        InputError: if the tokenizer has no token ``end``.
    """
    ids: list[int] = []
    end_id = tokenizer.eos_token_id if end is None else tokenizer.get_vocab().get(end)
    if end is not None and end_id is None:
        raise InputError(f"the tokenizer has no token {end!r} to put after each document.")
    for document in text_ids(tokenizer, documents):
        ids += document
        if end_id is not None and document[-1:] != [end_id]:
            ids.append(end_id)
        if most is not None and len(ids) >= most:
            break
    return torch.tensor(ids[:most], dtype=torch.long)
