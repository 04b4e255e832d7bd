"""Decoders and encoder-decoder models of transformers with a memory of fixed size.

Importing this package registers the RFA models with transformers' Auto classes, so that
``AutoModelForCausalLM.from_pretrained`` loads a converted checkpoint.
"""

from typing import Any

from transformers import PreTrainedModel

from . import integrations  # noqa: F401  # registers with PEFT
from .errors import InputError
from .families import FAMILIES, Family, register_family
from .models.cache_rfa import RFALayer
from .models.cache_rfa_seq2seq import RFASourceLayer
from .models.configuration_rfa import RFAConfigMixin
from .models.configuration_rfa_seq2seq import RFASeq2SeqConfigMixin
from .models.feature_maps import FeatureMap, register_feature_map
from .models.importance import IMPORTANCES, Importance, register_importance
from .models.learned_feature_maps import FEATURE_MAPS
from .models.rfa_classes import base_class
from .version import __version__, warn_of_untested_transformers

__all__ = [
    "FAMILIES",
    "FEATURE_MAPS",
    "IMPORTANCES",
    "Family",
    "FeatureMap",
    "Importance",
    "InputError",
    "RFAConfigMixin",
    "RFALayer",
    "RFASeq2SeqConfigMixin",
    "RFASourceLayer",
    "__version__",
    "register_family",
    "register_feature_map",
    "register_importance",
]

warn_of_untested_transformers()


def __getattr__(name: str) -> Any:
    """Return a class of any family by its name: ``RFALlamaForCausalLM`` for transformers' ``LlamaForCausalLM``.

    Raises:
        AttributeError: if there is no such model or configuration class, or if its family is not supported.
    """
    for family in FAMILIES.values():
        if family.rfa_config.__name__ == name:
            return family.rfa_config
    base = base_class(__name__, name, PreTrainedModel)
    family_of_base = FAMILIES.get(base.config_class.model_type) if base.config_class else None
    if family_of_base is None or base.__name__ not in family_of_base.architectures:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {base.__name__} is not supported")
    return family_of_base.architectures[base.__name__][1]
