"""What a model keeps of the tokens that it has read: bytes, as its cache says them, and their worth in tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from hf_rfa.families import reads_audio
from hf_rfa.inference.cache_files import attention_num_bytes, recurrent_num_bytes
from hf_rfa.models.cache_names import cache_argument, returned_cache


@dataclass(frozen=True)
class CacheMemory:
    """Bytes of a model's cache for one sequence, in the precision that it runs in."""

    fixed: int = 0  # states, and tokens that are kept, of RFA layers
    per_token: int = 0  # keys and values that softmax layers add with every token
    per_source_token: int = 0  # those that softmax cross attention adds with every token of a source of text
    audio: int = 0  # those of softmax cross attention to audio, which has all of its positions at any length
    # (bytes a token, most tokens) of every layer of the base model that has a sliding window
    sliding: tuple[tuple[int, int], ...] = ()
    recurrent: int = 0  # states of its recurrent layers

    def sliding_after(self, tokens: int) -> int:
        """Return the bytes of layers with a sliding window after some tokens."""
        return sum(size * min(tokens, most) for size, most in self.sliding)

    def after(self, tokens: int) -> int:
        """Return the bytes after some tokens, and as many of a source where that is text."""
        growing = (self.per_token + self.per_source_token) * tokens
        return self.fixed + growing + self.audio + self.sliding_after(tokens) + self.recurrent

    def worth(self, other: CacheMemory, tokens: int) -> float:
        """Return how many tokens of another model's growing cache the bytes after some tokens would hold.

        Sliding and recurrent layers, which conversion leaves as they are, are not counted.
        """
        return (self.fixed + self.per_token * tokens) / other.per_token


@torch.no_grad()
def cache_memory(model: PreTrainedModel) -> CacheMemory:
    """Return the memory of a model's cache, by reading one token with it; an encoder's attention keeps none."""
    config: Any = model.config
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    cache = DynamicCache(config=config)
    cache.layer_class_to_replicate = DynamicLayer  # of BART's decoder alone transformers counts the encoder's layers
    inputs: dict[str, Any] = {"input_ids": token, **cache_argument(cache)}
    if config.is_encoder_decoder:
        source = torch.zeros(1, config.max_source_positions if reads_audio(config) else 1, config.d_model)
        encoder_outputs = BaseModelOutput(source.to(model.device, model.dtype))
        inputs = {"encoder_outputs": encoder_outputs, "decoder_input_ids": token}
    cache = returned_cache(model.base_model(**inputs, use_cache=True))
    caches = {"per_token": cache}
    if isinstance(cache, EncoderDecoderCache):
        source_bytes = "audio" if reads_audio(config) else "per_source_token"
        caches = {"per_token": cache.self_attention_cache, source_bytes: cache.cross_attention_cache}
    sizes: Counter[str] = Counter()
    sliding = []
    for growth, layer in ((growth, layer) for growth, part in caches.items() for layer in part.layers):
        size = attention_num_bytes(layer)
        sizes["recurrent"] += recurrent_num_bytes(layer)
        if hasattr(layer, "holds"):  # an RFA layer
            sizes["fixed"] += size
        elif size and layer.is_sliding and layer.sliding_window < config.max_position_embeddings:
            sliding.append((size, layer.sliding_window - 1))
        else:
            sizes[growth] += size
    return CacheMemory(**sizes, sliding=tuple(sliding))
