"""The softmax model inside an RFA model: which layers differ, and twins that share every weight."""

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


def softmax_twin(model: PreTrainedModel, architecture: str, config: PreTrainedConfig) -> PreTrainedModel:
    """Return the softmax model that shares every weight with an RFA model, at no cost in memory.

    Args:
        model: the RFA model.
        architecture: name of the softmax class, a key of its family's ``architectures``.
        config: the softmax configuration; its number of positions has to fit ``model``.
    """
    return share_weights(model, FAMILIES[config.model_type].architectures[architecture][0], config)


def share_weights(model: PreTrainedModel, cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model of another class or configuration that shares every weight it has in common with ``model``.

    Args:
        model: has every weight that the other needs.
        cls: class of the other model.
        config: its configuration.
    """
    with torch.device("meta"):
        twin = cls(config)
    shared = twin.state_dict().keys()
    twin.load_state_dict({key: value for key, value in model.state_dict().items() if key in shared}, assign=True)
    twin.tie_weights()
    share_offloaded(model, twin)
    twin.loss_type = model.loss_type
    if model.can_generate():
        twin.generation_config = model.generation_config
    return twin.eval()


def extend_positions(family: Family, model: PreTrainedModel, count: int) -> None:
    """Extend a model's positions to ``count``, in place."""
    for embedding in family.position_embeddings(model):
        table = family.more_positions(embedding, count)
        embedding.weight = nn.Parameter(table, requires_grad=embedding.weight.requires_grad)
        embedding.num_embeddings = table.shape[0]
    setattr(model.config, family.positions_field, count)
