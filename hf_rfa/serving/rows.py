"""Texts as rows of one batch, which come and go: all that a server asks of caches.

A converted decoder keeps tensors of one shape of every text, however long. So texts of any lengths lie beside each other in
a batch; one is put in or taken out by copying.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from ..errors import InputError
from ..models.cache_names import cache_argument
from ..models.cache_rfa import RFALayer


@torch.no_grad()
def read(model: PreTrainedModel, cache: Cache, tokens: list[list[int]], positions: list[list[int]]) -> Tensor:
    """Let a model read tokens of every text of a cache; return the logits after them, [B, vocabulary] in float32."""
    ids, position_ids = (torch.tensor(numbers, device=model.device) for numbers in (tokens, positions))
    inputs: dict[str, Any] = {"input_ids": ids, "position_ids": position_ids, **cache_argument(cache)}
    return model(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1].float()


def copy_row(model: PreTrainedModel, cache: Cache, row: int, length: int, device: torch.device | str) -> Cache:
    """Return a cache, on a device, of one text of a batch alone, of which so many tokens have been read."""
    copied = DynamicCache(config=model.config)
    pairs: Any = zip(cache.layers, copied.layers, strict=True)
    for layer, new in pairs:
        tensors = {name: tensor[row : row + 1].to(device, copy=True) for name, tensor in layer.tensors().items()}
        new.restore(tensors, length)
    return copied


class Rows:
    """Texts that a model goes on with together.

    Raises:
        InputError: if the model has layers that keep anything else than a memory of fixed size, or takes no positions.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._lengths = model, list[int]()  # tokens that have been read of each row
        self._cache = DynamicCache(config=model.config)
        layers: Any = self._cache.layers
        self._layers: list[RFALayer] = layers
        if not layers or any(getattr(layer, "holds", None) != RFALayer.holds for layer in layers):
            raise InputError(
                "this model has layers whose cache grows, and texts of different lengths cannot share a batch then. Convert "
                "all of its layers, or serve it with transformers serve."
            )
        if "position_ids" not in inspect.signature(model.forward).parameters:
            raise InputError(f"a {model.config.model_type} model takes no positions, which rows of a batch differ in.")
        read(model, self._cache, [[0]], [[0]])  # brings the shapes
        self._cache.reset()
        self._unread = [layer.tensors() for layer in self._layers]  # of a text of which nothing has been read
        for layer, tensors in zip(self._layers, self._unread, strict=True):
            layer.restore({name: tensor[:0] for name, tensor in tensors.items()}, 0)

    def __len__(self) -> int:
        return len(self._lengths)

    def insert(self, cache: Cache) -> None:
        """Add a text as the last row; a cache of this text alone holds what has been read of it."""
        self._lengths.append(int(cache.get_seq_length()))
        layers: Any = cache.layers
        for layer, new, unread in zip(self._layers, layers, self._unread, strict=True):
            rows, added = layer.tensors(), new.tensors() or unread
            layer.restore({name: torch.cat([rows[name], added[name]]) for name in rows}, max(self._lengths))

    def remove(self, row: int) -> None:
        """Take a row out; those behind it move up."""
        del self._lengths[row]
        for layer in self._layers:
            rows = {name: torch.cat([rows[:row], rows[row + 1 :]]) for name, rows in layer.tensors().items()}
            layer.restore(rows, max(self._lengths, default=0))

    def copy(self, row: int) -> Cache:
        """Return a cache of one row's text alone, on the CPU."""
        return copy_row(self._model, self._cache, row, self._lengths[row], "cpu")

    def step(self, tokens: list[int]) -> Tensor:
        """Let every row read its next token; return the logits after these, [rows, vocabulary] in float32."""
        logits = read(self._model, self._cache, [[token] for token in tokens], [[length] for length in self._lengths])
        self._lengths = [length + 1 for length in self._lengths]
        return logits
