"""Converted decoders in vLLM: its Transformers backend runs the model, and attention reads and writes vLLM's cache.

The backend builds the RFA model that transformers would, puts vLLM's parallel linear layers, norms and embeddings in place
of its own, and loads the checkpoint. Left to do here: attention layers take the batch apart into sequences, and feature
maps, gates and importance are loaded in float32, those of this rank's heads alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFunc, get_temporal_copy_spec
from vllm.model_executor.models.interfaces import HasInnerState, IsAttentionFree, SupportsMambaPrefixCaching
from vllm.model_executor.models.transformers import TransformersForCausalLM
from vllm.model_executor.models.utils import maybe_prefix
from vllm.model_executor.utils import set_weight_attrs

from hf_rfa.models.attention import RFAAttentionMixin
from hf_rfa.models.rfa_classes import OWN_PARTS

from .batches import ServedAttention, serve
from .states import StateLayout, state_layout
from .support import check_support
from .vllm_states import RFAStates


class RFAForCausalLM(TransformersForCausalLM, HasInnerState, IsAttentionFree, SupportsMambaPrefixCaching):
    """A decoder all of whose layers have a memory of fixed size."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        check_support(vllm_config)
        config = vllm_config.model_config.hf_config
        # The models of a family are registered when its first configuration is made: this one may come from another process.
        config.ON_FIRST_USE.pop(type(config), lambda: None)()
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[MambaStateCopyFunc, ...]:
        """Return how vLLM copies a block, from a snapshot or to go on beside one: whole."""
        return (get_temporal_copy_spec,)

    def _decorate_for_torch_compile(self) -> None:
        """Leave the model as it is: attention takes batches apart in Python, which a compiled step does not do."""

    def _create_hf_to_vllm_mapper(self) -> None:
        """Map the names of a checkpoint's tensors, all of which the model has.

        Names that a family lets transformers ignore where the model lacks them would be dropped here in any case: those of
        GPT-2's projections, for one.
        """
        self.model._keys_to_ignore_on_load_unexpected = None
        super()._create_hf_to_vllm_mapper()

    def _create_attention_instances(self, prefix: str = "") -> None:
        """Let RFA layers read and write vLLM's cache, in place of the layers for keys and values of other models."""
        layers = [module for module in self.model.modules() if isinstance(module, RFAAttentionMixin)]
        layouts: list[StateLayout] = []
        for layer in layers:
            self._prepare_own_parts(layer)
            offset = layouts[-1].end if layouts else 0
            layouts.append(state_layout(layer, self.model_config.dtype, offset=offset))
        # vLLM finds a layer's number in its name.
        self.rfa_states = RFAStates(layouts, maybe_prefix(prefix, "rfa_states.0"), self.vllm_config)
        for index, layer in enumerate(layers):
            serve(layer, self.rfa_states, index)

    def _prepare_own_parts(self, attention: RFAAttentionMixin) -> None:
        """Make room for feature map, gate and importance, in float32, of those heads whose keys this rank projects."""
        ranks = get_tensor_model_parallel_world_size()
        if not any(isinstance(each, ColumnParallelLinear) and not each.gather_output for each in attention.children()):
            ranks = 1  # every rank projects all keys, or gets them from the others
        for part in filter(None, (getattr(attention, name) for name in OWN_PARTS)):
            for name, tensor in part.state_dict(keep_vars=True).items():
                shape = tensor.shape[0] // ranks, *tensor.shape[1:]
                dtype = torch.promote_types(tensor.dtype, torch.float32)
                own = torch.empty(shape, dtype=dtype, device=self.device_config.device)
                holder = part.get_submodule(name.rpartition(".")[0])
                own = nn.Parameter(own, requires_grad=False) if isinstance(tensor, nn.Parameter) else own
                setattr(holder, name.rpartition(".")[2], own)
                set_weight_attrs(own, {"weight_loader": load_heads})
            if hasattr(part, "num_heads"):
                part.num_heads //= ranks

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load a checkpoint.

        Raises:
            ValueError: if it lacks a tensor of a feature map, a gate or importance.
        """
        loaded = super().load_weights(weights)
        served = [(name, each) for name, each in self.named_modules() if isinstance(each, ServedAttention)]
        names = {f"{prefix}.{name}" for prefix, each in served for name in each.state_dict()}
        own = {name for name in names if any(f".{part}." in name for part in OWN_PARTS)}
        if missing := sorted(own - loaded):
            raise ValueError(
                f"the checkpoint lacks {len(missing)} tensors of its memory, {missing[0]} for one. Convert "
                "the base model again with this version of hf-rfa."
            )
        return loaded


def load_heads(tensor: Tensor, loaded: Tensor) -> None:
    """Copy the rows of this rank's heads, of a tensor of a checkpoint that has the heads as its first dimension."""
    count = tensor.shape[0]
    first = get_tensor_model_parallel_rank() * count if count < loaded.shape[0] else 0
    tensor.data.copy_(loaded[first : first + count])
