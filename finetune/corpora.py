"""Training data through `datasets`: local files or a hub data set in, model inputs out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from datasets import load_dataset
from datasets.exceptions import DatasetGenerationError
from hf_rfa.convert.texts import open_text

from hf_rfa.errors import InputError

#: The `datasets` builder of a file, by its ending without ``.gz``.
BUILDERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
#: Documents that are packed at a time; what is left at their end and fills no block is dropped.
DOCUMENTS_AT_ONCE = 1000

#: A `datasets.Dataset`, or an `IterableDataset` where it is streamed.
Data = Any


def load_data(source: str, *, split: str = "train", streaming: bool = False) -> Data:
    """Load a data set.

    Args:
        source: a file (.txt, which is one document; .jsonl, .csv or .parquet with columns; plain or .gz), or the name of a
            data set on the hub.
        split: of a hub data set.
        streaming: read as the training goes on, instead of first.

    Raises:
        InputError: if it cannot be read, or is empty.
    """
    path = Path(source).expanduser()
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    builder = BUILDERS.get(suffixes[-1]) if suffixes else None
    try:
        if path.is_file():
            if builder is None:
                raise InputError(f"{source}: its ending is none of {', '.join(BUILDERS)} (plain or .gz).")
            if path.stat().st_size == 0:
                raise InputError(f"{source} is empty.")
            options: dict[str, Any] = {"sample_by": "document"} if builder == "text" else {}
            data = load_dataset(builder, data_files=str(path.resolve()), split="train", streaming=streaming, **options)
        elif builder is not None or path.exists() or source.startswith((".", "/", "~")):
            raise InputError(f"there is no file {source}.")
        else:
            data = load_dataset(source, split=split, streaming=streaming)
    except InputError:
        raise
    except (OSError, ValueError, DatasetGenerationError) as error:
        if builder == "json":
            _check_json_lines(path)
        raise InputError(f"cannot read {source}: {error.__cause__ or error}") from error
    if not streaming and len(data) == 0:
        raise InputError(f"{source} has no rows in it.")
    return data


def _check_json_lines(path: Path) -> None:
    """Raise an `InputError` that names the first line which is no JSON object."""
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                found = json.loads(line) if line.strip() else {}
            except json.JSONDecodeError as error:
                raise InputError(f"{path}, line {number}: not a JSON object ({error}).") from error
            if not isinstance(found, dict):
                raise InputError(f"{path}, line {number}: a {type(found).__name__} instead of a JSON object.")


def check_columns(data: Data, source: str, *names: str) -> None:
    """Raise an `InputError` that lists the columns there are, if one is missing."""
    columns = data.column_names or list(next(iter(data)))
    for name in names:
        if name not in columns:
            raise InputError(
                f"{source} has no column {name!r}. It has: {', '.join(columns)}. Name yours with --text_column, "
                "--label_column, --source_column or --target_column."
            )


def _blocks(documents: Sequence[Sequence[int]], length: int) -> Iterator[dict[str, list[int]]]:
    """Yield full blocks of the documents' tokens, with positions that start anew with every document and block."""
    ids: list[int] = []
    positions: list[int] = []
    for document in documents:
        start = 0
        while start < len(document):
            piece = document[start : start + length - len(ids)]
            ids += piece
            positions += range(len(piece))
            start += len(piece)
            if len(ids) == length:
                labels = [-100 if position == 0 else token for token, position in zip(ids, positions, strict=True)]
                yield {"input_ids": ids, "position_ids": positions, "labels": labels}
                ids, positions = [], []


def packed_blocks(data: Data, tokenizer: Any, *, text_column: str, length: int) -> Data:
    """Return documents as blocks of ``length`` tokens for language modelling.

    Every document ends with the end-of-text token. A block may hold pieces of several: its ``position_ids`` start anew with
    each, which models take as the start of a document that sees nothing before it, and no loss is on a piece's first token.
    """

    def pack(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        documents = [
            [*tokenizer(text, verbose=False)["input_ids"], *end] for text in batch[text_column] if text.strip()
        ]
        rows = list(_blocks(documents, length))
        return {name: [row[name] for row in rows] for name in ("input_ids", "position_ids", "labels")}

    columns = data.column_names or list(next(iter(data)))
    return data.map(pack, batched=True, batch_size=DOCUMENTS_AT_ONCE, remove_columns=columns)


def token_pairs(data: Data, tokenizer: Any, *, source_column: str, target_column: str, length: int) -> Data:
    """Return sources and targets as token ids, each cut to ``length``."""

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        options: dict[str, Any] = {"truncation": True, "max_length": length}
        labels = tokenizer(text_target=batch[target_column], **options)["input_ids"]
        return {**tokenizer(batch[source_column], **options), "labels": labels}

    columns = data.column_names or list(next(iter(data)))
    return data.map(encode, batched=True, remove_columns=columns)


def labelled_texts(
    data: Data, tokenizer: Any, *, text_column: str, label_column: str, labels: Sequence[str], length: int, source: str
) -> Data:
    """Return texts as token ids cut to ``length``, with the index of their label.

    Raises:
        InputError: for a label that is not among ``labels``.
    """
    index = {name: number for number, name in enumerate(labels)}

    def encode(batch: dict[str, list[Any]]) -> dict[str, Any]:
        for label in batch[label_column]:
            if str(label) not in index:
                raise InputError(
                    f"{source}: label {label!r} is not among those of the training data: {', '.join(labels)}."
                )
        encoded = tokenizer(batch[text_column], truncation=True, max_length=length)
        return {**encoded, "labels": [index[str(label)] for label in batch[label_column]]}

    columns = data.column_names or list(next(iter(data)))
    return data.map(encode, batched=True, remove_columns=columns)
