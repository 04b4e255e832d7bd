"""Training data through `datasets`: local files or a hub data set in, model inputs out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from numpy.typing import NDArray
from transformers import DataCollatorForSeq2Seq
from transformers.utils import logging

from hf_rfa.convert.calibration_data import Inputs
from hf_rfa.errors import InputError
from hf_rfa.evaluation.perplexity import IGNORED_LABEL
from hf_rfa.io.text_io import open_text, read_pairs, tokenize

#: The `datasets` builder of a file, by its ending without ``.gz``.
BUILDERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
#: Documents that are packed at a time; the tokens at their end that fill no block are dropped.
DOCUMENTS_PER_PACKING = 1000
#: Rows that are checked at a time.
ROWS_PER_CHECK = 1000
#: Least and most tokens of a passage in a block that repeats itself; the most is a quarter of a short block.
PASSAGE_TOKENS = (16, 128)

logger = logging.get_logger(__name__)

#: A `datasets.Dataset`, or an `IterableDataset` if it is streamed.
Data = Any


def load_data(source: str, *, split: str = "train", config: str | None = None, streaming: bool = False) -> Data:
    """Load a data set.

    Args:
        source: a file (.txt, which is one document; .jsonl, .csv or .parquet with columns; plain or .gz), or the name of a
            data set on the hub.
        split: of a hub data set.
        config: of a hub data set, if it has several.
        streaming: read during the training instead of before it.

    Raises:
        InputError: if it cannot be read, or is empty.
    """
    path = Path(source).expanduser()
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    builder = BUILDERS.get(suffixes[-1]) if suffixes else None
    if path.is_file():
        if builder is None:
            raise InputError(f"{source}: its ending is none of {', '.join(BUILDERS)} (plain or .gz).")
        if path.stat().st_size == 0:
            raise InputError(f"{source} is empty.")
        options: dict[str, Any] = {"path": builder, "data_files": str(path.resolve()), "split": "train"}
        options |= {"sample_by": "document"} if builder == "text" else {}
        # Empty cells alone are missing: "NA" and "null" are texts and labels as well.
        options |= {"keep_default_na": False, "na_values": [""]} if builder == "csv" else {}
    elif builder is not None or path.exists() or source.startswith((".", "/", "~")):
        raise InputError(f"there is no file {source}.")
    else:
        options = {"path": source, "name": config, "split": split}
    try:
        data = load_dataset(**options, streaming=streaming)
    except (OSError, ValueError, DatasetGenerationError) as error:
        if builder == "json":
            _check_json_lines(path)
        raise InputError(f"cannot read {source}: {error.__cause__ or error}") from error
    if not streaming and len(data) == 0:
        raise InputError(f"{source} has no rows in it.")
    return data


def load_pairs(
    sources: str | Path, references: str | Path | None, *, source_column: str = "source", target_column: str = "target"
) -> Dataset:
    """Load pairs of texts as `read_pairs` does, as a data set with two columns."""
    texts, targets = read_pairs(sources, references, source_field=source_column, target_field=target_column)
    return Dataset.from_dict({source_column: texts, target_column: targets})


def _check_json_lines(path: Path) -> None:
    """Raise an `InputError` that names the first line which is no JSON object."""
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line) if line.strip() else {}
            except json.JSONDecodeError as error:
                raise InputError(f"{path}, line {number}: not a JSON object ({error}).") from error
            if not isinstance(row, dict):
                raise InputError(f"{path}, line {number}: a {type(row).__name__} instead of a JSON object.")


def check_columns(data: Data, source: str, *names: str) -> None:
    """Raise an `InputError` that lists the columns of a data set, if one is missing; ``a.b`` is the field b of a column a."""
    columns = _columns(data)
    for name in names:
        outer, _, inner = name.partition(".")
        fields = next(iter(data))[outer] if inner and outer in columns else ()
        if name not in columns and not (fields is None or (isinstance(fields, dict) and inner in fields)):
            raise InputError(
                f"{source} has no column {name!r}. It has: {', '.join(columns)}. Name yours with --text-column, "
                "--prompt-column, --label-column, --source-column or --target-column."
            )


def _columns(data: Data) -> list[str]:
    return data.column_names or list(next(iter(data)))


def _column(batch: dict[str, list[Any]], name: str) -> list[Any]:
    outer, _, inner = name.partition(".")
    return batch[name] if name in batch else [None if row is None else row.get(inner) for row in batch[outer]]


def check_rows(data: Data, source: str, *, texts: Sequence[str], label: str | None = None) -> Data:
    """Return a data set whose rows have a text in some columns, and a label in another.

    Streamed rows are checked as they are read.

    Raises:
        InputError: for a row that has none there, naming it by its number.
    """

    def check(batch: dict[str, list[Any]], indices: Sequence[int]) -> dict[str, list[Any]]:
        for name in (*texts, *([label] if label is not None else [])):
            expected, types = ("text", str) if name != label else ("a label", (str, int, float))
            for index, value in zip(indices, _column(batch, name), strict=True):
                missing = value is None or (isinstance(value, float) and math.isnan(value))
                if missing or not isinstance(value, types):
                    what = "null" if missing else f"of type {type(value).__name__}"
                    raise InputError(
                        f"{source}, row {index + 1}: column {name!r} is {what}, not {expected}. Fill it in, or remove the "
                        "row."
                    )
        return batch

    if not hasattr(data, "__len__"):
        return data.map(check, batched=True, with_indices=True)
    for start in range(0, len(data), ROWS_PER_CHECK):
        rows = range(start, min(start + ROWS_PER_CHECK, len(data)))
        check(data[start : rows.stop], rows)
    return data


def rows_to_learn(rows: Data, source: str, *, ahead: bool = False) -> Data:
    """Return the rows that have tokens and a label to learn; a warning counts the others.

    Args:
        rows: what `packed_blocks`, `single_documents`, `token_pairs` or `labelled_texts` returns.
        source: the name of the data, for the warning.
        ahead: labels are tokens that the tokens before them predict, so that the first one of a row is not learned.

    Raises:
        InputError: if there is no such row.
    """
    why = "no label is left in them, since they are empty, or since a prompt fills --block-length"

    def has_label(row: dict[str, Any]) -> bool:
        labels = row["labels"]
        learned = not isinstance(labels, list) or any(label != IGNORED_LABEL for label in labels[int(ahead) :])
        if streamed and not (row["input_ids"] and learned):
            logger.warning_once(f"{source}: rows are left out, as {why}.")
        return bool(row["input_ids"]) and learned

    streamed = not hasattr(rows, "__len__")
    labeled = rows.filter(has_label)
    if next(iter(labeled), None) is None:
        raise InputError(
            f"{source} has nothing to learn in any row: {why}. Pass longer blocks, shorter prompts, or other data."
        )
    if not streamed and len(labeled) < len(rows):
        logger.warning(f"{source}: {len(rows) - len(labeled):,} of {len(rows):,} rows are left out: {why}.")
    return labeled


def joined_blocks(
    tokenizer: Any, documents: Iterable[str], length: int, *, repeating_share: float = 0.0, seed: int = 0, last: int = 0
) -> Dataset:
    """Return documents as blocks of ``length`` tokens, joined, each document followed by the end-of-text token.

    Args:
        tokenizer: the model's tokenizer.
        documents: texts.
        length: tokens of a block.
        repeating_share: share of the blocks that repeat themselves, see `add_repeats`.
        seed: what these and their passages are drawn with.
        last: number of blocks at the end that never repeat themselves.

    Raises:
        InputError: if there is not a single full block.
    """
    ids = tokenize(tokenizer, documents)
    count = len(ids) // length
    if count == 0:
        raise InputError(f"the text has {len(ids)} tokens; at least one block of {length} is needed.")
    blocks = ids[: count * length].view(count, length).numpy()
    add_repeats(blocks[: max(0, count - last)], repeating_share, seed=seed)
    return Dataset.from_dict({"input_ids": blocks, "labels": blocks}).with_format("torch")


def add_repeats(blocks: NDArray[np.int64], share: float, *, seed: int) -> None:
    """Make a share of blocks of text [N, T], drawn at random, repeat themselves, in place: heads that copy learn from these.

    Such a block is cut into passages of `PASSAGE_TOKENS`. Every other one is replaced by as many tokens from before it, at a
    distance whose logarithm is uniform: copies from near and from far are both frequent.
    """
    generator = np.random.default_rng(seed)
    least, most = PASSAGE_TOKENS
    most = min(most, max(least, blocks.shape[1] // 4))
    for row in np.flatnonzero(generator.random(len(blocks)) < share):
        block, start = blocks[row], 0
        while (start := start + int(generator.integers(least, most + 1))) < len(block):
            size = min(int(generator.integers(least, most + 1)), start, len(block) - start)
            distance = max(size, int(np.exp(generator.uniform(np.log(size), np.log(start)))))
            block[start : start + size] = block[start - distance : start - distance + size]
            start += size


def _documents(
    batch: dict[str, list[Any]], tokenizer: Any, text_column: str, prompt_column: str | None
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield documents as (ids, labels): the prompt's labels are -100, and the end-of-text token closes each."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    texts = _column(batch, text_column)
    prompts = _column(batch, prompt_column) if prompt_column is not None else [""] * len(texts)
    for prompt, text in zip(prompts, texts, strict=True):
        if text.strip():
            options = {"verbose": False, "add_special_tokens": prompt_column is None}
            before = tokenizer(prompt, **options)["input_ids"] if prompt else []
            after = tokenizer(text, **options)["input_ids"]
            after += end if after[-1:] != end else []
            yield before + after, [IGNORED_LABEL] * len(before) + after


def packed_blocks(
    data: Data, tokenizer: Any, *, text_column: str, prompt_column: str | None = None, length: int
) -> Data:
    """Return documents as blocks of ``length`` tokens for language modeling.

    Every document ends with the end-of-text token. A block may hold pieces of several documents: its ``position_ids`` restart
    at each, which models take as the start of a document that sees nothing before it. The first token of a piece and the
    tokens of a prompt have no loss.
    """

    def pack(batch: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
        ids: list[int] = []
        positions: list[int] = []
        labels: list[int] = []
        for document, document_labels in _documents(batch, tokenizer, text_column, prompt_column):
            begin = len(ids)
            ids += document
            positions += [index - max(begin, index - index % length) for index in range(begin, len(ids))]
            labels += document_labels
        labels = [label if position else IGNORED_LABEL for label, position in zip(labels, positions, strict=True)]
        starts = range(0, len(ids) - length + 1, length)
        columns = {"input_ids": ids, "position_ids": positions, "labels": labels}
        return {name: [column[start : start + length] for start in starts] for name, column in columns.items()}

    return data.map(pack, batched=True, batch_size=DOCUMENTS_PER_PACKING, remove_columns=_columns(data))


def single_documents(
    data: Data,
    tokenizer: Any,
    *,
    text_column: str,
    prompt_column: str | None = None,
    length: int,
    in_pieces: bool = False,
) -> Data:
    """Return documents as rows of their own, each cut to ``length`` tokens; the tokens of a prompt have no loss.

    With ``in_pieces`` the rest of a longer document makes further rows.
    """

    def encode(batch: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
        rows: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
        for ids, labels in _documents(batch, tokenizer, text_column, prompt_column):
            for start in range(0, len(ids), length) if in_pieces else [0]:
                piece = slice(start, start + length)
                rows["input_ids"].append(ids[piece])
                rows["attention_mask"].append([1] * len(ids[piece]))
                rows["labels"].append(labels[piece])
        return rows

    return data.map(encode, batched=True, remove_columns=_columns(data))


def token_pairs(
    data: Data, tokenizer: Any, *, source_column: str = "source", target_column: str = "target", length: int
) -> Data:
    """Return sources and targets as token ids, each cut to ``length``."""

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        options: dict[str, Any] = {"truncation": True, "max_length": length}
        labels = tokenizer(text_target=_column(batch, target_column), **options)["input_ids"]
        return {"input_ids": tokenizer(_column(batch, source_column), **options)["input_ids"], "labels": labels}

    return data.map(encode, batched=True, remove_columns=_columns(data))


def label_names(data: Data, label_column: str) -> list[str]:
    """Return the labels of a data set as texts, sorted."""
    batches = (data[start : start + ROWS_PER_CHECK] for start in range(0, len(data), ROWS_PER_CHECK))
    return sorted({str(label) for batch in batches for label in _column(batch, label_column)})


class PairCollator(DataCollatorForSeq2Seq):
    """`DataCollatorForSeq2Seq` that also masks the padding of the decoder's inputs: attention transfer has to know it."""

    def __call__(self, features: Any, return_tensors: Any = None) -> Inputs:
        """Return a batch as the model takes it."""
        batch = dict(super().__call__(features, return_tensors))
        return {**batch, "decoder_attention_mask": (batch["labels"] != IGNORED_LABEL).long()}


def labelled_texts(
    data: Data, tokenizer: Any, *, text_column: str, label_column: str, labels: Sequence[str], length: int
) -> Data:
    """Return texts as token ids cut to ``length``, with the index of their label among ``labels``."""

    def encode(batch: dict[str, list[Any]]) -> dict[str, Any]:
        encoded = tokenizer(_column(batch, text_column), truncation=True, max_length=length)
        return {**encoded, "labels": [labels.index(str(label)) for label in _column(batch, label_column)]}

    return data.map(encode, batched=True, remove_columns=_columns(data))
