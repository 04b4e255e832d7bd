"""What makes a family of models convertible: one declaration each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.bart import modeling_bart
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.marian import modeling_marian

import hf_rfa
from hf_rfa.attention import RFAAttentionMixin
from hf_rfa.configuration_rfa import RFABartConfig, RFAGPT2Config, RFAMarianConfig

from .offload import share_offloaded


def interpolate_positions(embedding: nn.Embedding, count: int) -> Tensor:
    """Return learned positions stretched to ``count`` by linear interpolation (position interpolation, Chen et al. 2023).

    Position p of the new table lies at p (n − 1) / (count − 1) of the old one of n rows. Texts that fitted before see other
    positions too. Of six ways tried without training it gave the best perplexity on long texts, and none gave a better one
    within the old range (docs/conversion.md). Rows before position 0, which BART's tables have, are kept.
    """
    offset = int(getattr(embedding, "offset", 0))
    kept, learned = embedding.weight.data[:offset], embedding.weight.data[offset:].float()
    place = torch.linspace(0, learned.shape[0] - 1, count, dtype=torch.float64)
    below = place.floor().long().clamp(max=learned.shape[0] - 2)
    share = (place - below).float()[:, None]
    table = torch.lerp(learned[below], learned[below + 1], share).to(embedding.weight.dtype)
    return torch.cat([kept, table])


def continue_sinusoids(embedding: Any, count: int) -> Tensor:
    """Return Marian's sinusoidal positions computed up to ``count``; those that were there stay as they are."""
    longer = type(embedding)(count, embedding.embedding_dim)
    return longer.create_weight().to(embedding.weight.dtype)


@dataclass(frozen=True, kw_only=True)
class Family:
    """How the checkpoints of one softmax family become RFA checkpoints; `hf_rfa.convert.FAMILIES` has one by ``model_type``.

    Attributes:
        rfa_config: configuration class of the RFA models, a `RFAConfigMixin`.
        architectures: the softmax model class and the RFA model class, by the name that checkpoints have in
            ``config.architectures``.
        default_architecture: the one meant where a checkpoint names none.
        positions_field: the configuration's field with the number of positions.
        position_embedding: name of the modules that hold positions.
        more_positions: makes a longer table of them.
        more_positions_note: what the user should know of that.
    """

    rfa_config: Any
    architectures: dict[str, tuple[type[PreTrainedModel], type[PreTrainedModel]]]
    default_architecture: str
    positions_field: str = "max_position_embeddings"
    position_embedding: str = "embed_positions"
    more_positions: Callable[[Any, int], Tensor] = interpolate_positions
    more_positions_note: str = "The learned positions were stretched to {} by interpolation, which short texts see too."

    @property
    def rfa_model_type(self) -> str:
        """The RFA configuration's ``model_type``."""
        return self.rfa_config.model_type

    def position_embeddings(self, model: nn.Module) -> list[nn.Embedding]:
        """Return the modules that hold a model's positions."""
        return [
            module
            for name, module in model.named_modules()
            if isinstance(module, nn.Embedding) and name.rsplit(".", 1)[-1] == self.position_embedding
        ]


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
        position_embedding="wpe",
    ),
    "bart": Family(
        rfa_config=RFABartConfig,
        architectures=_pairs(
            modeling_bart,
            "BartForConditionalGeneration",
            "BartModel",
            "BartForSequenceClassification",
            "BartForQuestionAnswering",
            "BartForCausalLM",
        ),
        default_architecture="BartForConditionalGeneration",
    ),
    "marian": Family(
        rfa_config=RFAMarianConfig,
        architectures=_pairs(modeling_marian, "MarianMTModel", "MarianModel", "MarianForCausalLM"),
        default_architecture="MarianMTModel",
        more_positions=continue_sinusoids,
        more_positions_note="The sinusoidal positions were continued to {}; short texts see no change.",
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
