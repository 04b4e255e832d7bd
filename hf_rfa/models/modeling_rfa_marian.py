"""RFA-Marian: Marian with random feature attention in its decoder, and if asked in its encoder.

Every class subclasses transformers' own; every parameter keeps its name and shape, so that a Marian state dict loads.
"""

from __future__ import annotations

from transformers.models.auto import modeling_auto
from transformers.models.marian.modeling_marian import (
    MarianAttention,
    MarianDecoder,
    MarianDecoderWrapper,
    MarianEncoder,
    MarianForCausalLM,
    MarianModel,
    MarianMTModel,
    MarianPreTrainedModel,
)

from .attention import RFAPreTrainedMixin
from .configuration_rfa import RFAMarianConfig
from .modeling_rfa_seq2seq import (
    RFABodyMixin,
    RFADecoderMixin,
    RFADecoderWrapperMixin,
    RFAEncoderMixin,
    RFAHeadMixin,
    RFASeq2SeqAttention,
)


class RFAMarianAttention(RFASeq2SeqAttention, MarianAttention):
    """Marian's attention with random features."""


class RFAMarianPreTrainedModel(RFAPreTrainedMixin, MarianPreTrainedModel):
    """Base class of the RFA-Marian models."""

    config: RFAMarianConfig
    config_class = RFAMarianConfig
    _no_split_modules = ["MarianEncoderLayer", "MarianDecoderLayer"]  # Marian itself names none


class RFAMarianEncoder(RFAEncoderMixin, RFAMarianPreTrainedModel, MarianEncoder):
    """Marian's encoder."""

    attention_class = RFAMarianAttention


class RFAMarianDecoder(RFADecoderMixin, RFAMarianPreTrainedModel, MarianDecoder):
    """Marian's decoder."""

    attention_class = RFAMarianAttention


class RFAMarianModel(RFABodyMixin, RFAMarianPreTrainedModel, MarianModel):
    """RFA-Marian without a head."""

    encoder_class = RFAMarianEncoder
    decoder_class = RFAMarianDecoder


class RFAMarianDecoderWrapper(RFADecoderWrapperMixin, RFAMarianPreTrainedModel, MarianDecoderWrapper):
    """The body of `RFAMarianForCausalLM`."""

    decoder_class = RFAMarianDecoder


class RFAMarianMTModel(RFAHeadMixin, RFAMarianPreTrainedModel, MarianMTModel):
    """RFA-Marian that generates a text from a text: translation."""

    body_class = RFAMarianModel


class RFAMarianForCausalLM(RFAHeadMixin, RFAMarianPreTrainedModel, MarianForCausalLM):
    """RFA-Marian's decoder as a language model."""

    body_class = RFAMarianDecoderWrapper


# Trainer, transformers serve and lm-eval tell language models by these tables of names.
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["rfa_marian"] = "RFAMarianForCausalLM"
modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES["rfa_marian"] = "RFAMarianMTModel"
