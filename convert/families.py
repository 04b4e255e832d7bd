"""What makes a family of models convertible: one declaration each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.gpt2 import modeling_gpt2

import hf_rfa
from hf_rfa.attention import RFAAttentionMixin
from hf_rfa.configuration_rfa import RFAGPT2Config


@dataclass(frozen=True, kw_only=True)
class Family:
    """How the checkpoints of one softmax family become RFA checkpoints.

    Attributes:
        rfa_config: configuration class of the RFA models, a `RFAConfigMixin`.
        architectures: the softmax model class and the RFA model class, by the name that checkpoints have in
            ``config.architectures``.
        default_architecture: the one meant where a checkpoint names none.
        positions_field: the configuration's field with the number of positions.
        position_embedding: finds the module of learned positions in a model.
    """

    rfa_config: Any
    architectures: dict[str, tuple[type[PreTrainedModel], type[PreTrainedModel]]]
    default_architecture: str
    positions_field: str
    position_embedding: Callable[[Any], nn.Embedding]

    @property
    def rfa_model_type(self) -> str:
        """The RFA configuration's ``model_type``."""
        return self.rfa_config.model_type


def _pairs(module: Any, *names: str) -> dict[str, tuple[type[PreTrainedModel], type[PreTrainedModel]]]:
    return {name: (getattr(module, name), getattr(hf_rfa, f"RFA{name}")) for name in names}


FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        rfa_config=RFAGPT2Config,
        architectures=_pairs(
            modeling_gpt2,
            "GPT2LMHeadModel",
            "GPT2Model",
            "GPT2DoubleHeadsModel",
            "GPT2ForSequenceClassification",
            "GPT2ForTokenClassification",
            "GPT2ForQuestionAnswering",
        ),
        default_architecture="GPT2LMHeadModel",
        positions_field="n_positions",
        position_embedding=lambda model: model.base_model.wpe,
    ),
}


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
    parent_class = FAMILIES[config.model_type].architectures[architecture][0]
    with torch.device("meta"):
        twin = parent_class(config)
    shared = twin.state_dict().keys()
    twin.load_state_dict({key: value for key, value in model.state_dict().items() if key in shared}, assign=True)
    twin.tie_weights()
    twin.loss_type = model.loss_type
    return twin.eval()


def extend_positions(family: Family, model: PreTrainedModel, count: int) -> None:
    """Extend a model's learned positions to ``count``, in place, by linear interpolation.

    Position p of the new table lies at p (n − 1) / (count − 1) of the old one of n rows (position interpolation, Chen et
    al. 2023). Texts that fitted before see other positions too. Of six ways tried without training it gave the best
    perplexity on long texts, and none gave a better one within the old range (docs/conversion.md).
    """
    embedding = family.position_embedding(model)
    learned = embedding.weight.data.float()
    place = torch.linspace(0, learned.shape[0] - 1, count, dtype=torch.float64)
    below = place.floor().long().clamp(max=learned.shape[0] - 2)
    share = (place - below).float()[:, None]
    table = torch.lerp(learned[below], learned[below + 1], share).to(embedding.weight.dtype)
    embedding.weight = nn.Parameter(table, requires_grad=embedding.weight.requires_grad)
    embedding.num_embeddings = count
    setattr(model.config, family.positions_field, count)
