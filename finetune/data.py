"""Training data through `datasets`: local files or a hub data set in, model inputs out."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from numpy.typing import NDArray
from transformers import DataCollatorForSeq2Seq, PreTrainedModel
from transformers.utils import logging

from hf_rfa.convert.inputs import AUDIO, UTTERANCES_AT_ONCE, Inputs, transcript_inputs
from hf_rfa.errors import InputError
from hf_rfa.evaluation.perplexity import IGNORED_LABEL
from hf_rfa.inference.transcription import load_features, write_tokens
from hf_rfa.io.audio_io import Utterance
from hf_rfa.io.text_io import UTF_8, is_text, open_text, read_json_lines, read_pairs, start_tokens, text_ids
from hf_rfa.models.configuration_rfa import RFAConfigMixin

#: The `datasets` builder of a file, by its ending without ``.gz``.
BUILDERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
#: Documents that are packed at a time; the tokens at their end that fill no block are dropped.
DOCUMENTS_PER_PACKING = 1000
#: Least and most tokens of a passage in a block that repeats itself; the most is a quarter of a short block.
PASSAGE_TOKENS = (16, 128)
#: Tokens of each of the two documents that show whether a model keeps them apart.
TRIED_TOKENS = 8
#: Largest relative difference of logits that is rounding; what a document before it changes is a hundred times as much.
ROUNDING = 1e-3

logger = logging.get_logger(__name__)

#: A `datasets.Dataset`, or an `IterableDataset` if it is streamed.
Data = Any


def load_data(source: str, *, split: str = "train", config: str | None = None, streaming: bool = False) -> Data:
    """Load a file (.txt, one document; .jsonl, .csv or .parquet, with columns; plain or .gz), or a data set on the hub.

    ``split`` and ``config`` are of the latter. With ``streaming`` it is read during the training instead of before it.

    Raises:
        InputError: if it cannot be read, or is empty.
    """
    path = Path(source).expanduser()
    builder = BUILDERS.get(Path(path.name.removesuffix(".gz")).suffix)
    if path.is_file():
        if builder is None:
            raise InputError(f"{source}: its ending is none of {', '.join(BUILDERS)} (plain or .gz).")
        if path.stat().st_size == 0:
            raise InputError(f"{source} is empty.")
        options: dict[str, Any] = {"path": builder, "data_files": str(path.resolve()), "split": "train"}
        options |= {"sample_by": "document", "encoding": UTF_8} if builder == "text" else {}
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
            with open_text(path) as file:
                list(read_json_lines(file, path))  # names the first line that is no JSON object
        raise InputError(f"cannot read {source}: {error.__cause__ or error}") from error
    if not streaming and len(data) == 0:
        raise InputError(f"{source} has no rows in it.")
    return data


def load_pairs(sources: str | Path, references: str | Path | None) -> Dataset:
    """Load pairs of texts as `read_pairs` does, as a data set with the columns ``source`` and ``target``."""
    texts, targets = read_pairs(sources, references)
    return Dataset.from_dict({"source": texts, "target": targets})


def select_columns(data: Data, source: str, columns: Mapping[str, str]) -> Data:
    """Return columns of a data set by new names: texts, and under the name ``label`` labels. Every row has to have them.

    Args:
        data: the data set.
        source: its name, for errors.
        columns: names in the data set by the new ones; ``a.b`` is the field b of a column a.

    Raises:
        InputError: if there is no such column, or a row has nothing there; of streamed rows as they are read.
    """
    first = next(iter(data))
    for column in columns.values():
        outer, _, inner = column.partition(".")
        fields = first.get(outer, ()) if inner else ()
        if column not in first and not (fields is None or (isinstance(fields, dict) and inner in fields)):
            raise InputError(
                f"{source} has no column {column!r}. It has: {', '.join(first)}. Name yours with --text-column, "
                "--prompt-column, --label-column, --source-column or --target-column."
            )

    def select(batch: dict[str, list[Any]], indices: Sequence[int]) -> dict[str, list[Any]]:
        selected = {}
        for name, column in columns.items():
            outer, _, inner = column.partition(".")
            values = batch[column] if column in batch else [row.get(inner) if row else None for row in batch[outer]]
            expected, types = ("a label", (str, int, float)) if name == "label" else ("text", str)
            for index, value in zip(indices, values, strict=True):
                missing = value is None or (isinstance(value, float) and math.isnan(value))
                if missing or not isinstance(value, types):
                    what = "null" if missing else f"of type {type(value).__name__}"
                    raise InputError(
                        f"{source}, row {index + 1}: column {column!r} is {what}, not {expected}. Fill it in, or remove "
                        "the row."
                    )
                if isinstance(value, str) and not is_text(value):
                    raise InputError(
                        f"{source}, row {index + 1}: column {column!r} has half of a character. Remove it, or the row."
                    )
            selected[name] = values
        return selected

    return _map(data, select, with_indices=True)


def _map(data: Data, function: Callable[..., dict[str, list[Any]]], **options: Any) -> Data:
    """Return the rows that a function makes of batches of rows."""
    columns = data.column_names or list(next(iter(data)))
    return data.map(function, batched=True, remove_columns=columns, **options)


def rows_to_learn(rows: Data, source: str, *, ahead: bool = False) -> Data:
    """Return the rows that have tokens and a label to learn; a warning counts the others.

    With ``ahead`` labels are tokens that the tokens before them predict, so that the first one of a row is not learned.

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


def text_blocks(ids: torch.Tensor, length: int, *, repeating_share: float = 0.0, seed: int = 0) -> Dataset:
    """Return the tokens of a text as rows for language modeling; those at its end that fill no block are left out.

    Args:
        ids: the tokens, [N].
        length: tokens of a block.
        repeating_share: share of the blocks that repeat themselves (`add_repeats`).
        seed: what these and their passages are drawn with.

    Raises:
        InputError: if there is not a single full block.
    """
    count = len(ids) // length
    if count == 0:
        raise InputError(f"the text has {len(ids)} tokens; at least one block of {length} is needed.")
    blocks = ids[: count * length].view(count, length).numpy().copy()
    add_repeats(blocks, repeating_share, seed=seed)
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


def _documents(batch: dict[str, list[str]], tokenizer: Any) -> Iterator[tuple[list[int], list[int]]]:
    """Yield documents as (ids, labels): labels of what begins them are -100, and the end-of-text token closes each."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    start, texts = start_tokens(tokenizer), batch["text"]
    prompts = text_ids(tokenizer, batch["prompt"]) if "prompt" in batch else [start] * len(texts)
    for prompt, text, ids in zip(prompts, texts, text_ids(tokenizer, texts), strict=True):
        if text.strip():
            after = ids[len(start) :]
            after += end if after[-1:] != end else []
            yield prompt + after, [IGNORED_LABEL] * len(prompt) + after


def packed_blocks(data: Data, tokenizer: Any, *, length: int) -> Data:
    """Return documents as blocks of ``length`` tokens for language modeling.

    Every document ends with the end-of-text token. A block may hold pieces of several documents: its ``position_ids`` restart
    at each, which models take as the start of a document that sees nothing before it. The first token of a piece and the
    tokens of a prompt have no loss.
    """

    def pack(batch: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
        ids: list[int] = []
        positions: list[int] = []
        labels: list[int] = []
        for document, document_labels in _documents(batch, tokenizer):
            begin = len(ids)
            ids += document
            positions += [index - max(begin, index - index % length) for index in range(begin, len(ids))]
            labels += document_labels
        labels = [label if position else IGNORED_LABEL for label, position in zip(labels, positions, strict=True)]
        starts = range(0, len(ids) - length + 1, length)
        columns = {"input_ids": ids, "position_ids": positions, "labels": labels}
        return {name: [column[start : start + length] for start in starts] for name, column in columns.items()}

    return _map(data, pack, batch_size=DOCUMENTS_PER_PACKING)


@torch.no_grad()
def keeps_documents_apart(model: PreTrainedModel) -> bool:
    """Return whether each document of a row, whose ``position_ids`` restart there, sees nothing of those before it.

    RFA models say so by their layers. Softmax models are tried on two documents: some take no positions, some read them for
    embeddings alone, and convolutions and recurrences do not read them.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    config = model.config
    if isinstance(config, RFAConfigMixin):
        return not config.types_that_read_on()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.get_text_config().vocab_size, (1, 2 * TRIED_TOKENS), generator=generator)
    ids = ids.to(model.device)
    positions = torch.arange(TRIED_TOKENS, device=model.device).repeat(1, 2)
    was_training = model.training
    model.eval()
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, TRIED_TOKENS:]
    alone = model(input_ids=ids[:, TRIED_TOKENS:], use_cache=False).logits
    model.train(was_training)
    return bool((packed - alone).norm() < ROUNDING * alone.norm())


def single_documents(data: Data, tokenizer: Any, *, length: int, in_pieces: bool = False) -> Data:
    """Return documents as rows of their own, each cut to ``length`` tokens; the tokens of a prompt have no loss.

    With ``in_pieces`` the rest of a longer document makes further rows.
    """

    def encode(batch: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
        pieces = [
            (ids[start : start + length], labels[start : start + length])
            for ids, labels in _documents(batch, tokenizer)
            for start in (range(0, len(ids), length) if in_pieces else [0])
        ]
        return {"input_ids": [ids for ids, _ in pieces], "labels": [labels for _, labels in pieces]}

    return _map(data, encode)


def token_pairs(data: Data, tokenizer: Any, *, length: int) -> Data:
    """Return sources and targets as token ids, each cut to ``length``."""

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        options: dict[str, Any] = {"truncation": True, "max_length": length}
        labels = tokenizer(text_target=batch["target"], **options)["input_ids"]
        return {"input_ids": tokenizer(batch["source"], **options)["input_ids"], "labels": labels}

    return _map(data, encode)


def speech_rows(
    teacher: PreTrainedModel, tokenizer: Any, extractor: Any, utterances: Sequence[Utterance], *, length: int
) -> Dataset:
    """Return utterances as paths with decoder inputs and labels, each cut to ``length``.

    What is said is the text of an utterance, or else what the teacher writes. A transcript begins with what the teacher is
    given to begin with, which is the same for all utterances that have a text.
    """
    end: Any = teacher.generation_config.eos_token_id
    with_text = [utterance for utterance in utterances if utterance.text is not None]
    others = [utterance.path for utterance in utterances if utterance.text is None]
    rows: dict[Path, tuple[list[int], list[int]]] = {}
    if with_text:
        first = write_tokens(teacher, load_features(extractor, [with_text[0].path]), max_new_tokens=1)
        prompt = first[0, :-1].tolist()
        for utterance in with_text:
            words = tokenizer(f" {str(utterance.text).strip()}", add_special_tokens=False, verbose=False)["input_ids"]
            answer = [*words, end[0] if isinstance(end, list) else end]
            rows[utterance.path] = (prompt + answer[:-1], [IGNORED_LABEL] * (len(prompt) - 1) + answer)
    for start in range(0, len(others), UTTERANCES_AT_ONCE):
        paths = others[start : start + UTTERANCES_AT_ONCE]
        inputs = transcript_inputs(teacher, load_features(extractor, paths))
        masks = inputs["decoder_attention_mask"].bool()
        for path, ids, labels, mask in zip(paths, inputs["decoder_input_ids"], inputs["labels"], masks, strict=True):
            rows[path] = (ids[mask].tolist(), labels[mask].tolist())
    paths = [utterance.path for utterance in utterances]
    columns = {"decoder_input_ids": [rows[path][0][:length] for path in paths]}
    columns |= {"labels": [rows[path][1][:length] for path in paths]}
    return Dataset.from_dict({"path": list(map(str, paths)), **columns})


def padding_right(tokenizer: Any) -> Any:
    """Return a tokenizer that pads on the right: a model's positions start with a row's first token.

    Of decoders many are saved with padding on the left, which is for prompts that a batch goes on with.
    """
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.padding_side = "right"
    return tokenizer


class PairCollator(DataCollatorForSeq2Seq):
    """`DataCollatorForSeq2Seq` that also masks the padding of the decoder's inputs: attention transfer has to know it."""

    def __call__(self, features: Any, return_tensors: Any = None) -> Inputs:
        """Return a batch as the model takes it."""
        batch = dict(super().__call__(features, return_tensors))
        return {**batch, "decoder_attention_mask": (batch["labels"] != IGNORED_LABEL).long()}


class SpeechCollator(DataCollatorForSeq2Seq):
    """Makes batches of what `speech_rows` returns: an extractor makes mel features, a tokenizer pads the transcripts."""

    def __init__(self, extractor: Any, tokenizer: Any) -> None:
        super().__init__(padding_right(tokenizer))
        self.extractor = extractor

    def __call__(self, features: Any, return_tensors: Any = None) -> Inputs:
        """Return a batch as the model takes it."""
        rows = [{"input_ids": row["decoder_input_ids"], "labels": row["labels"]} for row in features]
        batch = super().__call__(rows, return_tensors)
        return {
            AUDIO: load_features(self.extractor, [Path(row["path"]) for row in features]),
            "decoder_input_ids": batch["input_ids"],
            "decoder_attention_mask": batch["attention_mask"],
            "labels": batch["labels"],
        }


def labelled_texts(data: Data, tokenizer: Any, *, labels: Sequence[str], length: int) -> Data:
    """Return texts as token ids cut to ``length``, with the index of their label among ``labels``."""

    def encode(batch: dict[str, list[Any]]) -> dict[str, Any]:
        encoded = tokenizer(batch["text"], truncation=True, max_length=length)
        return {**encoded, "labels": [labels.index(str(label)) for label in batch["label"]]}

    return _map(data, encode)
