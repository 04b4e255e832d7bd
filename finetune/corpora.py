"""Training data through `datasets`: local files or a hub data set in, model inputs out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError

from hf_rfa.convert.text_io import open_text, read_pairs
from hf_rfa.errors import InputError

#: The `datasets` builder of a file, by its ending without ``.gz``.
BUILDERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
#: Documents that are packed at a time; what is left at their end and fills no block is dropped.
DOCUMENTS_AT_ONCE = 1000

#: A `datasets.Dataset`, or an `IterableDataset` where it is streamed.
Data = Any


def load_data(source: str, *, split: str = "train", config: str | None = None, streaming: bool = False) -> Data:
    """Load a data set.

    Args:
        source: a file (.txt, which is one document; .jsonl, .csv or .parquet with columns; plain or .gz), or the name of a
            data set on the hub.
        split: of a hub data set.
        config: of a hub data set, if it has several.
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
            data = load_dataset(source, config, split=split, streaming=streaming)
    except InputError:
        raise
    except (OSError, ValueError, DatasetGenerationError) as error:
        if builder == "json":
            _check_json_lines(path)
        raise InputError(f"cannot read {source}: {error.__cause__ or error}") from error
    if not streaming and len(data) == 0:
        raise InputError(f"{source} has no rows in it.")
    return data


def load_lines(sources: str, references: str, *, source_column: str, target_column: str) -> Data:
    """Load two files of lines, line N of one belonging to line N of the other, as a data set with two columns.

    Raises:
        InputError: if they cannot be read, are empty, or differ in length.
    """
    lines, targets = read_pairs(sources, references)
    return Dataset.from_dict({source_column: lines, target_column: targets})


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
    columns = _columns(data)
    for name in names:
        outer, _, inner = name.partition(".")
        if name not in columns and not (inner and outer in columns and inner in next(iter(data))[outer]):
            raise InputError(
                f"{source} has no column {name!r}. It has: {', '.join(columns)}. Name yours with --text_column, "
                "--prompt_column, --label_column, --source_column or --target_column."
            )


def _columns(data: Data) -> list[str]:
    return data.column_names or list(next(iter(data)))


def _column(batch: dict[str, list[Any]], name: str) -> list[Any]:
    """Return a column, or the field b of the column a for a name a.b."""
    outer, _, inner = name.partition(".")
    return batch[name] if name in batch else [row[inner] for row in batch[outer]]


def _documents(
    batch: dict[str, list[Any]], tokenizer: Any, text_column: str, prompt_column: str | None
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield documents as (ids, labels): the prompt's labels are -100, and the end-of-text token closes each."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    texts = batch[text_column]
    prompts = batch[prompt_column] if prompt_column is not None else [""] * len(texts)
    for prompt, text in zip(prompts, texts, strict=True):
        if text.strip():
            options = {"verbose": False, "add_special_tokens": prompt_column is None}
            before = tokenizer(prompt, **options)["input_ids"] if prompt else []
            after = tokenizer(text, **options)["input_ids"]
            after += end if after[-1:] != end else []
            yield before + after, [-100] * len(before) + after


def _blocks(documents: Iterable[tuple[list[int], list[int]]], length: int) -> Iterator[dict[str, list[int]]]:
    """Yield full blocks of the documents' tokens, with positions that start anew with every document and block."""
    ids: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    for document, wanted in documents:
        start = 0
        while start < len(document):
            stop = min(len(document), start + length - len(ids))
            ids += document[start:stop]
            labels += [-100, *wanted[start + 1 : stop]]
            positions += range(stop - start)
            start = stop
            if len(ids) == length:
                yield {"input_ids": ids, "position_ids": positions, "labels": labels}
                ids, labels, positions = [], [], []


def packed_blocks(
    data: Data, tokenizer: Any, *, text_column: str, prompt_column: str | None = None, length: int
) -> Data:
    """Return documents as blocks of ``length`` tokens for language modelling.

    Every document ends with the end-of-text token. A block may hold pieces of several: its ``position_ids`` start anew with
    each, which models take as the start of a document that sees nothing before it, and no loss is on a piece's first token,
    nor on a prompt.
    """

    def pack(batch: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
        rows = list(_blocks(_documents(batch, tokenizer, text_column, prompt_column), length))
        return {name: [row[name] for row in rows] for name in ("input_ids", "position_ids", "labels")}

    return data.map(pack, batched=True, batch_size=DOCUMENTS_AT_ONCE, remove_columns=_columns(data))


def single_documents(
    data: Data, tokenizer: Any, *, text_column: str, prompt_column: str | None = None, length: int
) -> Data:
    """Return documents as rows of their own, each cut to ``length`` tokens; no loss is on a prompt."""

    def encode(batch: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
        rows = list(_documents(batch, tokenizer, text_column, prompt_column))
        return {
            "input_ids": [ids[:length] for ids, _ in rows],
            "attention_mask": [[1] * len(ids[:length]) for ids, _ in rows],
            "labels": [labels[:length] for _, labels in rows],
        }

    return data.map(encode, batched=True, remove_columns=_columns(data))


def token_pairs(data: Data, tokenizer: Any, *, source_column: str, target_column: str, length: int) -> Data:
    """Return sources and targets as token ids, each cut to ``length``."""

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        options: dict[str, Any] = {"truncation": True, "max_length": length}
        labels = tokenizer(text_target=_column(batch, target_column), **options)["input_ids"]
        return {**tokenizer(_column(batch, source_column), **options), "labels": labels}

    return data.map(encode, batched=True, remove_columns=_columns(data))


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

    return data.map(encode, batched=True, remove_columns=_columns(data))
