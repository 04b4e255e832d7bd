"""Training data for distillation: blocks of a text for a decoder alone, pairs for a model with an encoder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hf_rfa.convert.calibration_data import Inputs, shift_right, tokenize
from hf_rfa.errors import InputError


class Blocks(Dataset):
    """A text cut into blocks of equal length, its documents joined, each followed by the end-of-text token.

    Args:
        tokenizer: the model's tokenizer.
        documents: the text.
        length: tokens per block.

    Raises:
        InputError: if there is not a single full block.
    """

    def __init__(self, tokenizer: Any, documents: Iterable[str], length: int) -> None:
        ids = tokenize(tokenizer, documents)
        count = len(ids) // length
        if count == 0:
            raise InputError(f"the text has {len(ids)} tokens; at least one block of {length} is needed.")
        self.blocks = ids[: count * length].view(count, length)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> Inputs:
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


class Pairs(Dataset):
    """Sources and the outputs that belong to them, as token ids.

    Args:
        tokenizer: the model's tokenizer.
        sources: texts.
        targets: texts, one per source.
        length: most tokens of either; what is longer is cut.
    """

    def __init__(self, tokenizer: Any, sources: Sequence[str], targets: Sequence[str], length: int) -> None:
        options: dict[str, Any] = {"truncation": True, "max_length": length}
        self.sources = tokenizer(list(sources), **options)["input_ids"]
        self.targets = tokenizer(text_target=list(targets), **options)["input_ids"]

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self.sources[index], "labels": self.targets[index]}


def _pad(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    length = max(len(row) for row in rows)
    return torch.tensor([[*row, *[value] * (length - len(row))] for row in rows])


class PairCollator:
    """Pads pairs, and adds masks and decoder inputs.

    Args:
        config: the model's configuration.
    """

    def __init__(self, config: Any) -> None:
        self.config = config

    def __call__(self, pairs: Sequence[dict[str, list[int]]]) -> Inputs:
        """Return a batch as the model takes it."""
        pad = self.config.pad_token_id
        sources, targets = ([pair[name] for pair in pairs] for name in ("input_ids", "labels"))
        labels = _pad(targets, -100)
        return {
            "input_ids": _pad(sources, pad),
            "attention_mask": _pad([[1] * len(row) for row in sources], 0),
            "decoder_input_ids": shift_right(_pad(targets, pad), self.config),
            "decoder_attention_mask": (labels != -100).long(),
            "labels": labels,
        }
