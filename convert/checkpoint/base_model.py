"""The RFA layers of a model, and its softmax base model, which shares its weights."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_rfa.families import FAMILIES, Family
from hf_rfa.models.attention import RFAAttentionMixin

from .offload import share_offloaded


def rfa_layers(model: nn.Module) -> dict[str, RFAAttentionMixin]:
    """Return a model's RFA attention modules by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, RFAAttentionMixin)}


def softmax_base_model(model: PreTrainedModel, architecture: str, config: PreTrainedConfig) -> PreTrainedModel:
    """Return the softmax model of class ``architecture`` that shares every weight with an RFA model, and is tied as that one.

    ``config`` is the softmax configuration, whose number of positions has to fit ``model``. Checkpoints may hold a head of
    their own although the configuration says that it is the embedding.
    """
    with torch.device("meta"):
        other = FAMILIES[config.model_type].architectures[architecture][0](config)
    needed = other.state_dict().keys()
    other.load_state_dict({key: value for key, value in model.state_dict().items() if key in needed}, assign=True)
    other.all_tied_weights_keys = dict(model.all_tied_weights_keys)
    other.tie_weights(recompute_mapping=False)
    buffers = dict(model.named_buffers())
    for name, buffer in other.named_buffers():
        if buffer.is_meta and name in buffers:  # rotary frequencies and the like are in no state dict
            owner, _, attribute = name.rpartition(".")
            setattr(other.get_submodule(owner), attribute, buffers[name])
    share_offloaded(model, other)
    other.loss_type = model.loss_type
    if model.can_generate():
        other.generation_config = model.generation_config
    return other.eval()


def extend_positions(family: Family, model: PreTrainedModel, count: int) -> None:
    """Extend a model's table of positions to ``count``, in place; rotary positions are scaled in its configuration."""
    for embedding in family.position_embeddings(model):
        table = family.more_positions(embedding, count)
        embedding.weight = nn.Parameter(table, requires_grad=embedding.weight.requires_grad)
        embedding.num_embeddings = table.shape[0]
    setattr(model.config, family.positions_field, count)
