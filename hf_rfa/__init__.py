"""Random Feature Attention models for transformers.

Importing this package registers the RFA models with transformers' Auto classes, so that
``AutoModelForCausalLM.from_pretrained`` loads a converted checkpoint.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .cache import RFALayer, cache_num_bytes
from .configuration_rfa import RFAConfigMixin, RFAGPT2Config
from .errors import InputError
from .feature_maps import FEATURE_MAPS, FeatureMap, register_feature_map
from .modeling_rfa_gpt2 import (
    RFAGPT2DoubleHeadsModel,
    RFAGPT2ForQuestionAnswering,
    RFAGPT2ForSequenceClassification,
    RFAGPT2ForTokenClassification,
    RFAGPT2LMHeadModel,
    RFAGPT2Model,
    RFAGPT2PreTrainedModel,
)
from .version import __version__

AutoConfig.register(RFAGPT2Config.model_type, RFAGPT2Config)
for _auto_class, _model_class in (
    (AutoModel, RFAGPT2Model),
    (AutoModelForCausalLM, RFAGPT2LMHeadModel),
    (AutoModelForPreTraining, RFAGPT2LMHeadModel),
    (AutoModelForSequenceClassification, RFAGPT2ForSequenceClassification),
    (AutoModelForTokenClassification, RFAGPT2ForTokenClassification),
    (AutoModelForQuestionAnswering, RFAGPT2ForQuestionAnswering),
):
    _auto_class.register(RFAGPT2Config, _model_class)

__all__ = [
    "FEATURE_MAPS",
    "FeatureMap",
    "InputError",
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
    "__version__",
    "cache_num_bytes",
    "register_feature_map",
]
