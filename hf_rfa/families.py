"""The model families: one declaration each, from which registration, conversion and benchmarks derive what they need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from .models.configuration_rfa import RFABartConfig, RFAConfigMixin, RFAGPT2Config, RFAMarianConfig
from .models.modeling_rfa_bart import (
    RFABartForCausalLM,
    RFABartForConditionalGeneration,
    RFABartForQuestionAnswering,
    RFABartForSequenceClassification,
    RFABartModel,
)
from .models.modeling_rfa_gpt2 import (
    RFAGPT2DoubleHeadsModel,
    RFAGPT2ForQuestionAnswering,
    RFAGPT2ForSequenceClassification,
    RFAGPT2ForTokenClassification,
    RFAGPT2LMHeadModel,
    RFAGPT2Model,
)
from .models.modeling_rfa_marian import RFAMarianForCausalLM, RFAMarianModel, RFAMarianMTModel


def interpolate_positions(embedding: nn.Embedding, count: int) -> Tensor:
    """Return learned positions stretched to ``count`` by linear interpolation (position interpolation, Chen et al. 2023).

    Position p of the new table lies at p (n − 1) / (count − 1) of the old one of n rows. Sequences that fitted before see
    other positions too. Of six ways tried without training it gave the best perplexity on long sequences, and none gave a
    better one within the old range (docs/conversion.md). Rows before position 0, which BART's tables have, are kept.
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
    """One family of softmax models and its RFA models.

    Attributes:
        rfa_config: configuration class of the RFA models: `RFAConfigMixin` mixed into the family's own.
        models: the RFA model classes by Auto class. Each subclasses the softmax class whose name it has, ``RFA`` before it.
        other_models: RFA model classes that no Auto class loads.
        position_embedding: name of the modules that hold positions.
        more_positions: makes a longer table of them.
        more_positions_note: what the user should know of that.
    """

    rfa_config: Any
    models: dict[Any, type[PreTrainedModel]]
    other_models: tuple[type[PreTrainedModel], ...] = ()
    position_embedding: str = "embed_positions"
    more_positions: Callable[[Any, int], Tensor] = interpolate_positions
    more_positions_note: str = "The learned positions were stretched to {} by interpolation, which short texts see too."

    @property
    def base_config(self) -> Any:
        """Configuration class of the softmax models."""
        return next(cls for cls in self.rfa_config.__mro__ if "model_type" in vars(cls) and cls is not self.rfa_config)

    @property
    def architectures(self) -> dict[str, tuple[type[PreTrainedModel], type[PreTrainedModel]]]:
        """The softmax class and the RFA class, by the name that checkpoints have in ``config.architectures``."""
        pairs = {}
        for rfa_class in dict.fromkeys([*self.models.values(), *self.other_models]):
            name = rfa_class.__name__.removeprefix("RFA")
            pairs[name] = (next(cls for cls in rfa_class.__mro__ if cls.__name__ == name), rfa_class)
        return pairs

    @property
    def default_architecture(self) -> str:
        """The softmax class meant where a checkpoint names none: its language model."""
        rfa_class = self.models.get(AutoModelForSeq2SeqLM) or self.models[AutoModelForCausalLM]
        return rfa_class.__name__.removeprefix("RFA")

    @property
    def positions_field(self) -> str:
        """The configuration's field with the number of positions."""
        return self.rfa_config.attribute_map.get("max_position_embeddings", "max_position_embeddings")

    def position_embeddings(self, model: nn.Module) -> list[nn.Embedding]:
        """Return the modules that hold a model's positions."""
        return [
            module
            for name, module in model.named_modules()
            if isinstance(module, nn.Embedding) and name.rsplit(".", 1)[-1] == self.position_embedding
        ]


#: The families by the ``model_type`` of their softmax models.
FAMILIES: dict[str, Family] = {}


def register_family(family: Family) -> None:
    """Let Auto classes load a family's RFA models, their checkpoints carry their code, and `hf_rfa.convert` convert to them.

    Raises:
        ValueError: if the configuration has no `RFAConfigMixin`, or if its ``model_type`` is registered already.
    """
    config = family.rfa_config
    if not issubclass(config, RFAConfigMixin):
        raise ValueError(f"{config.__name__} has no RFA fields. Mix RFAConfigMixin or RFASeq2SeqConfigMixin into it.")
    AutoConfig.register(config.model_type, config)
    # `save_pretrained` then puts these classes' modules beside the weights, for machines without this package.
    config.register_for_auto_class()
    config.AUTO_MAP = {"AutoConfig": _place(config)}
    for auto_class, model in family.models.items():
        auto_class.register(config, model)
        model.register_for_auto_class(auto_class)
        config.AUTO_MAP[auto_class.__name__] = _place(model)
    FAMILIES[family.base_config.model_type] = family


def _place(cls: type) -> str:
    """Return a class as transformers names it in ``auto_map``: module.Class."""
    return f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}"


for _family in (
    Family(
        rfa_config=RFAGPT2Config,
        models={
            AutoModelForCausalLM: RFAGPT2LMHeadModel,
            AutoModel: RFAGPT2Model,
            AutoModelForPreTraining: RFAGPT2LMHeadModel,
            AutoModelForSequenceClassification: RFAGPT2ForSequenceClassification,
            AutoModelForTokenClassification: RFAGPT2ForTokenClassification,
            AutoModelForQuestionAnswering: RFAGPT2ForQuestionAnswering,
        },
        other_models=(RFAGPT2DoubleHeadsModel,),
        position_embedding="wpe",
    ),
    Family(
        rfa_config=RFABartConfig,
        models={
            AutoModelForSeq2SeqLM: RFABartForConditionalGeneration,
            AutoModel: RFABartModel,
            AutoModelForPreTraining: RFABartForConditionalGeneration,
            AutoModelForCausalLM: RFABartForCausalLM,
            AutoModelForSequenceClassification: RFABartForSequenceClassification,
            AutoModelForQuestionAnswering: RFABartForQuestionAnswering,
        },
    ),
    Family(
        rfa_config=RFAMarianConfig,
        models={
            AutoModelForSeq2SeqLM: RFAMarianMTModel,
            AutoModel: RFAMarianModel,
            AutoModelForCausalLM: RFAMarianForCausalLM,
        },
        more_positions=continue_sinusoids,
        more_positions_note="The sinusoidal positions were continued to {}; short texts see no change.",
    ),
):
    register_family(_family)
