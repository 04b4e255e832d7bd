"""Decoders whose heads have a state: their attention, and what a checkpoint with the summary loads first.

Checkpoints without features carry neither this module nor those of features, state and gate.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .configuration_rfa import decoder_config_class
from .modeling_rfa_decoder import RFADecoderAttention, rfa_model_class
from .rfa_classes import base_class, make_class
from .state_attention import StateAttentionMixin
from .summary_feature_map import SummaryMap as SummaryMap  # which it registers


class RFAFeatureAttention(RFADecoderAttention, StateAttentionMixin):
    """Attention to a memory of fixed size and a state, for a module that calls transformers' attention interface."""


def rfa_attention_class(base: type[nn.Module]) -> type[nn.Module]:
    """Return the RFA class of a family's attention class, of heads with features."""
    text = f"{base.__name__} with a memory and a state of fixed size."
    return make_class(globals(), base, (RFAFeatureAttention,), text)


def __getattr__(name: str) -> Any:
    """Return a class by its name, ``RFALlamaForCausalLM`` say; an AttributeError if transformers has no base class."""
    base = base_class(__name__, name, object)
    if issubclass(base, PreTrainedConfig):
        return decoder_config_class(base)
    return rfa_model_class(base) if issubclass(base, PreTrainedModel) else rfa_attention_class(base)
