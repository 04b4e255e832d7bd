"""Random Feature Attention models for transformers.

Importing this package registers the RFA models with transformers' Auto classes, so that
``AutoModelForCausalLM.from_pretrained`` loads a converted checkpoint.
"""

from typing import Any

from transformers import PreTrainedModel

from . import integrations  # noqa: F401  # registers with PEFT
from .backends import use_backend
from .cache_files import cache_num_bytes, load_cache, save_cache
from .errors import InputError
from .families import FAMILIES, Family, register_family
from .models.cache_rfa import RFALayer, RFASourceLayer
from .models.configuration_rfa import (
    RFABartConfig,
    RFAConfigMixin,
    RFAGPT2Config,
    RFAMarianConfig,
    RFASeq2SeqConfigMixin,
)
from .models.feature_maps import FEATURE_MAPS, FeatureMap, register_feature_map
from .models.modeling_rfa_decoder import (
    RFAGPT2DoubleHeadsModel,
    RFAGPT2ForQuestionAnswering,
    RFAGPT2ForSequenceClassification,
    RFAGPT2ForTokenClassification,
    RFAGPT2LMHeadModel,
    RFAGPT2Model,
    RFAGPT2PreTrainedModel,
)
from .models.modeling_rfa_seq2seq import (
    RFABartForCausalLM,
    RFABartForConditionalGeneration,
    RFABartForQuestionAnswering,
    RFABartForSequenceClassification,
    RFABartModel,
    RFABartPreTrainedModel,
    RFAMarianForCausalLM,
    RFAMarianModel,
    RFAMarianMTModel,
    RFAMarianPreTrainedModel,
)
from .models.rfa_classes import base_class
from .version import __version__, warn_of_untested_transformers

__all__ = [
    "FAMILIES",
    "FEATURE_MAPS",
    "Family",
    "FeatureMap",
    "InputError",
    "RFABartConfig",
    "RFABartForCausalLM",
    "RFABartForConditionalGeneration",
    "RFABartForQuestionAnswering",
    "RFABartForSequenceClassification",
    "RFABartModel",
    "RFABartPreTrainedModel",
    "RFAConfigMixin",
    "RFAGPT2Config",
    "RFAGPT2DoubleHeadsModel",
    "RFAGPT2ForQuestionAnswering",
    "RFAGPT2ForSequenceClassification",
    "RFAGPT2ForTokenClassification",
    "RFAGPT2LMHeadModel",
    "RFAGPT2Model",
    "RFAGPT2PreTrainedModel",
    "RFALayer",
    "RFAMarianConfig",
    "RFAMarianForCausalLM",
    "RFAMarianMTModel",
    "RFAMarianModel",
    "RFAMarianPreTrainedModel",
    "RFASeq2SeqConfigMixin",
    "RFASourceLayer",
    "__version__",
    "cache_num_bytes",
    "load_cache",
    "register_family",
    "register_feature_map",
    "save_cache",
    "use_backend",
]

warn_of_untested_transformers()


def __getattr__(name: str) -> Any:
    """Return a model class of any family by its name: ``RFALlamaForCausalLM`` for transformers' ``LlamaForCausalLM``.

    Raises:
        AttributeError: if there is no such class, or if its family is not supported.
    """
    base = base_class(__name__, name, PreTrainedModel)
    family = FAMILIES.get(base.config_class.model_type) if base.config_class else None
    if family is None or base.__name__ not in family.architectures:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {base.__name__} is not supported")
    return family.architectures[base.__name__][1]
