"""The states of vLLM's sequences, in its cache for recurrent layers: one block a sequence holds those of all layers.

With prefix caching a block that a sequence leaves at a boundary stays as a snapshot: vLLM copies it, before a step, to the
block in which the sequence goes on, or another one that begins with the same tokens.

vLLM gives every sequence a block when it is scheduled, and the block to another one when it ends, is aborted or preempted.
A block holds whatever its last sequence left. A sequence's first tokens therefore never read it (`TokenGroup.past`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
from vllm.v1.kv_cache_interface import KVCacheSpec

from .batches import TokenGroup, group_tokens
from .states import StateLayout


class TokenGroupsBuilder(AttentionMetadataBuilder[list[TokenGroup]]):
    """Turns vLLM's description of a batch into groups of tokens, once a step."""

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> list[TokenGroup]:
        """Return the groups; a sequence's past is what vLLM has computed of its tokens."""
        batch = common_attn_metadata
        # the bound is exact: only speculative decoding, which is refused, makes it one
        starts, lengths = batch.query_start_loc_cpu, batch.seq_lens_cpu_upper_bound
        past = lengths[: batch.num_reqs] - (starts[1 : batch.num_reqs + 1] - starts[: batch.num_reqs])
        table, lengths_there = batch.block_table_tensor[: batch.num_reqs], batch.seq_lens[: batch.num_reqs]
        mode = self.vllm_config.cache_config.mamba_cache_mode
        blocks = mamba_get_block_table_tensor(table, lengths_there, self.kv_cache_spec, mode)[:, 0].long()
        return group_tokens(starts.tolist(), past.tolist(), blocks)


class RFAStatesBackend(AttentionBackend):
    """Names the builder of the metadata that `RFAStates` reads."""

    @staticmethod
    def get_name() -> str:
        """Return the name that vLLM logs."""
        return "RFA_STATES"

    @staticmethod
    def get_impl_cls() -> type:
        """Raise: attention is the model's own, and vLLM asks for none of recurrent layers."""
        raise NotImplementedError("converted layers compute their attention themselves.")

    @staticmethod
    def get_builder_cls() -> type[TokenGroupsBuilder]:
        """Return the metadata builder."""
        return TokenGroupsBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        """Return True: the size of what is kept does not follow the text."""
        return True


class RFAStates(nn.Module, MambaBase):
    """One recurrent layer in vLLM's eyes, whose cache holds the states of all of a model's attention layers.

    A single layer, since vLLM's pages have one size: layers with retrieval heads hold more than others, which would all be
    padded to theirs.

    Args:
        layouts: where the tensors of every attention layer lie in a block (`hf_rfa_vllm.states.state_layout`).
        prefix: the layer's name.
        vllm_config: vLLM's configuration.
    """

    def __init__(self, layouts: list[StateLayout], prefix: str, vllm_config: VllmConfig) -> None:
        super().__init__()
        self.layouts, self.prefix = layouts, prefix
        self.block_bytes = max(layout.end for layout in layouts)
        cache = vllm_config.cache_config
        if cache.enable_prefix_caching:
            cache.mamba_block_size = cache.block_size  # a platform may have changed it
        self.kv_cache: Any = (torch.tensor([]),)
        self._views: list[dict[str, Tensor]] = []
        vllm_config.compilation_config.static_forward_context[prefix] = self

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        """Return the kind of recurrent layer that comes closest; vLLM groups layers by it."""
        return MambaAttentionBackendEnum.LINEAR

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Return the shape of what a block holds: its bytes."""
        return ((self.block_bytes,),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Return int8."""
        return (torch.int8,)

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Return the backend whose metadata this layer reads."""
        return RFAStatesBackend

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Take the memory of all blocks, as vLLM hands it over."""
        super().bind_kv_cache(kv_cache)
        self._views = [layout.views(self.kv_cache[0]) for layout in self.layouts]

    def views(self, index: int) -> dict[str, Tensor]:
        """Return the tensors of one attention layer in all blocks."""
        return self._views[index]

    def groups(self) -> list[TokenGroup] | None:
        """Return the groups of the batch that is being computed, or None where vLLM measures time and memory."""
        metadata = get_forward_context().attn_metadata
        return None if metadata is None else metadata.get(self.prefix)
