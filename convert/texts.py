"""Reading texts: plain or JSON lines, gzipped or not."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

from hf_rfa.errors import InputError


def read_documents(path: str | Path) -> Iterator[str]:
    """Yield the documents of a text file.

    Args:
        path: a ``.jsonl`` file, whose lines are objects with a ``text`` field, one document each; or any other text
            file, which is one document. Either may be gzipped (``.gz``). UTF-8.

    Raises:
        InputError: naming the file, and the line where there is one, if it cannot be read or has no text.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"there is no text file {path}. Pass a .txt or .jsonl file, plain or .gz.")
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    found = False
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            if suffixes[-1:] != [".jsonl"]:
                documents: Iterator[str] = iter([file.read()])
            else:
                documents = _read_json_lines(file, path)
            for document in documents:
                if document.strip():
                    found = True
                    yield document
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path} as UTF-8 text: {error}") from error
    if not found:
        raise InputError(f"{path} has no text in it.")


def _read_json_lines(lines: Iterator[str], path: Path) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}, line {number}: not a JSON object ({error}).") from error
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
            raise InputError(f"{path}, line {number}: no string field 'text' (found: {keys}).")
        yield record["text"]
