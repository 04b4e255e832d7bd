"""RFA-BART: BART with random feature attention in its decoder, and if asked in its encoder.

Every class subclasses transformers' own; every parameter keeps its name and shape, so that a BART state dict loads.
"""

from __future__ import annotations

from transformers.models.auto import modeling_auto
from transformers.models.bart.modeling_bart import (
    BartAttention,
    BartDecoder,
    BartDecoderWrapper,
    BartEncoder,
    BartForCausalLM,
    BartForConditionalGeneration,
    BartForQuestionAnswering,
    BartForSequenceClassification,
    BartModel,
    BartPreTrainedModel,
)

from .attention import RFAPreTrainedMixin
from .configuration_rfa import RFABartConfig
from .modeling_rfa_seq2seq import (
    RFABodyMixin,
    RFADecoderMixin,
    RFADecoderWrapperMixin,
    RFAEncoderMixin,
    RFAHeadMixin,
    RFASeq2SeqAttention,
)


class RFABartAttention(RFASeq2SeqAttention, BartAttention):
    """BART's attention with random features."""


class RFABartPreTrainedModel(RFAPreTrainedMixin, BartPreTrainedModel):
    """Base class of the RFA-BART models."""

    config: RFABartConfig
    config_class = RFABartConfig


class RFABartEncoder(RFAEncoderMixin, RFABartPreTrainedModel, BartEncoder):
    """BART's encoder."""

    attention_class = RFABartAttention


class RFABartDecoder(RFADecoderMixin, RFABartPreTrainedModel, BartDecoder):
    """BART's decoder."""

    attention_class = RFABartAttention


class RFABartModel(RFABodyMixin, RFABartPreTrainedModel, BartModel):
    """RFA-BART without a head."""

    encoder_class = RFABartEncoder
    decoder_class = RFABartDecoder


class RFABartDecoderWrapper(RFADecoderWrapperMixin, RFABartPreTrainedModel, BartDecoderWrapper):
    """The body of `RFABartForCausalLM`."""

    decoder_class = RFABartDecoder


class RFABartForConditionalGeneration(RFAHeadMixin, RFABartPreTrainedModel, BartForConditionalGeneration):
    """RFA-BART that generates a text from a text: translation, summarisation."""

    body_class = RFABartModel


class RFABartForSequenceClassification(RFAHeadMixin, RFABartPreTrainedModel, BartForSequenceClassification):
    """RFA-BART that classifies sequences by their end-of-text token."""

    body_class = RFABartModel


class RFABartForQuestionAnswering(RFAHeadMixin, RFABartPreTrainedModel, BartForQuestionAnswering):
    """RFA-BART that marks the span of an answer."""

    body_class = RFABartModel


class RFABartForCausalLM(RFAHeadMixin, RFABartPreTrainedModel, BartForCausalLM):
    """RFA-BART's decoder as a language model."""

    body_class = RFABartDecoderWrapper


# Trainer, transformers serve and lm-eval tell language models by these tables of names.
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["rfa_bart"] = "RFABartForCausalLM"
modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES["rfa_bart"] = "RFABartForConditionalGeneration"
