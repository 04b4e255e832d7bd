"""Readers of one stream of tokens: a model with its own cache, and StreamingLLM's rule on a softmax model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

from hf_rfa.errors import InputError
from hf_rfa.inference.cache_files import load_cache, save_cache
from hf_rfa.models.cache_names import cache_argument
from hf_rfa.models.positions import Rotation

SINKS = 4


class Reader(Protocol):
    """What has read a text up to some token.

    Attributes:
        piece: the number of tokens that it is given at once.
    """

    piece: int

    def read(self, ids: Tensor, keep: int) -> Tensor:
        """Read the tokens that follow, [T], and return the logits of the last ``keep`` of them, [keep, vocabulary]."""

    def save(self, path: Path) -> None:
        """Write to a file what it holds."""

    def load(self, path: Path) -> None:
        """Go on from such a file."""


class CacheReader:
    """Reads with the cache that a model makes: a converted one's, or that of a softmax model, which grows."""

    piece = 1024

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        self.cache: Any = DynamicCache(config=model.config)

    def read(self, ids: Tensor, keep: int) -> Tensor:
        """See `Reader`."""
        return self.model(ids[None], **cache_argument(self.cache), logits_to_keep=keep).logits[0]

    def save(self, path: Path) -> None:
        """See `Reader`."""
        save_cache(self.cache, path)

    def load(self, path: Path) -> None:
        """See `Reader`."""
        self.cache = load_cache(path, self.model)


@dataclass
class Kept:
    """What a layer keeps, [1, H, tokens, d] each: keys and values of the sinks, and of the last W − 1 tokens."""

    sink_keys: Tensor
    sink_values: Tensor
    keys: Tensor
    values: Tensor


class StreamingLLM:
    """Reads as StreamingLLM does (Xiao et al. 2024, arXiv 2309.17453): the last W tokens and S sinks, numbered by the cache.

    Once S + W tokens are there, the query among them, the query is at index S + W − 1, a token of the window as far before it
    as in the text, and sink j at index j. So tokens of the window keep their true distance t − j, and sinks are seen from
    position min(t, S + W − 1).

    Tokens are read in pieces. The model gets positions that begin with the oldest token of the window, and so stay below
    W + `piece`, however far the text: what is kept of the window is turned back by a piece when a piece is done. The model
    has to rotate keys as Llama does.
    """

    piece = 256
    name = "streaming_llm"

    def __init__(self, model: PreTrainedModel, memory: int, sinks: int = SINKS) -> None:
        """Take over a softmax model's attention.

        Args:
            model: the softmax model, in evaluation mode.
            memory: S + W.
            sinks: S.

        Raises:
            InputError: if the window would be no longer than the sinks.
        """
        if memory <= 2 * sinks:
            raise InputError(f"a memory of {memory} tokens has no window longer than its {sinks} sinks. Ask for more.")
        self.model: Any = model
        self.sinks, self.window = sinks, memory - sinks
        stack: Any = model.base_model
        self.rotation = Rotation(stack.rotary_emb.inv_freq)
        self.count = 0
        self.kept: dict[int, Kept] = {}
        AttentionInterface.register(self.name, self.attend)
        model.set_attn_implementation(self.name)

    def origin(self, count: int) -> int:
        """Return the token that is at position 0 while the tokens after the first ``count`` are read."""
        return max(0, count - self.window + 1)

    def read(self, ids: Tensor, keep: int) -> Tensor:
        """See `Reader`."""
        first = self.count - self.origin(self.count)
        positions = torch.arange(first, first + len(ids))
        logits = self.model(ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=keep).logits[0]
        self.count += len(ids)
        return logits

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, scaling: float, **options: Any
    ) -> tuple[Tensor, None]:
        """Return the outputs of a layer's attention, [1, T, H, d], and keep what the next piece sees.

        Args:
            module: the attention module.
            query: [1, H, T, d], rotated.
            key: [1, KV heads, T, d], rotated.
            value: [1, KV heads, T, d].
            mask: that of the model, None.
            scaling: what logits are multiplied by.
            options: what else the model hands on.
        """
        nothing = key[:, :, :0]
        kept = self.kept.get(module.layer_idx, Kept(nothing, nothing, nothing, nothing))
        sink_keys = torch.cat([kept.sink_keys, key], 2)[:, :, : self.sinks].clone()
        sink_values = torch.cat([kept.sink_values, value], 2)[:, :, : self.sinks].clone()
        keys, values = torch.cat([kept.keys, key], 2), torch.cat([kept.values, value], 2)

        end, origin = self.count + key.shape[2], self.origin(self.count)
        number = torch.arange(self.count, end)[:, None]
        seen = torch.arange(end - keys.shape[2], end)
        in_window = (seen <= number) & (seen > number - self.window) & (seen >= self.sinks)
        visible = torch.cat([torch.arange(sink_keys.shape[2]) <= number, in_window], 1)
        index = number[:, 0].clamp_max(self.sinks + self.window - 1)
        to_sinks = self.rotation.turn(query, index - (number[:, 0] - origin))

        def logits(queries: Tensor, of_keys: Tensor) -> Tensor:
            return queries.unflatten(1, (key.shape[1], -1)) @ of_keys[:, :, None].mT * scaling

        both = torch.cat([logits(to_sinks, sink_keys), logits(query, keys)], -1)
        weights = both.masked_fill_(~visible, -torch.inf).softmax(-1)
        output = (weights @ torch.cat([sink_values, values], 2)[:, :, None]).flatten(1, 2)

        last = self.window - 1
        turned = self.rotation.turn(keys[:, :, -last:], torch.tensor(origin - self.origin(end)))
        self.kept[module.layer_idx] = Kept(sink_keys, sink_values, turned, values[:, :, -last:].clone())
        return output.transpose(1, 2), None

    def save(self, path: Path) -> None:
        """See `Reader`."""
        torch.save({"count": self.count, "kept": {layer: vars(kept) for layer, kept in self.kept.items()}}, path)

    def load(self, path: Path) -> None:
        """See `Reader`."""
        saved = torch.load(path)
        self.count, self.kept = saved["count"], {layer: Kept(**kept) for layer, kept in saved["kept"].items()}
