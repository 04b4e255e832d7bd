"""RFA-mBART: a family added from outside the package, by the declarations that CONTRIBUTING.md names."""

from huggingface_hub.dataclasses import strict
from transformers import MBartConfig
from transformers.models.mbart import modeling_mbart as mbart

from hf_rfa import Family, register_family
from hf_rfa.models import modeling_rfa_seq2seq as rfa
from hf_rfa.models.attention import RFAPreTrainedMixin
from hf_rfa.models.configuration_rfa import RFASeq2SeqConfigMixin


@strict
class RFAMBartConfig(RFASeq2SeqConfigMixin, MBartConfig):
    """Configuration of an RFA-mBART."""

    model_type = "rfa_mbart"


class RFAMBartAttention(rfa.RFASeq2SeqAttention, mbart.MBartAttention):
    """mBART's attention with random features."""


class RFAMBartPreTrainedModel(RFAPreTrainedMixin, mbart.MBartPreTrainedModel):
    """Base class of the RFA-mBART models."""

    config_class = RFAMBartConfig


class RFAMBartEncoder(rfa.RFAEncoderMixin, RFAMBartPreTrainedModel, mbart.MBartEncoder):
    """mBART's encoder."""

    attention_class = RFAMBartAttention


class RFAMBartDecoder(rfa.RFADecoderMixin, RFAMBartPreTrainedModel, mbart.MBartDecoder):
    """mBART's decoder."""

    attention_class = RFAMBartAttention


class RFAMBartModel(rfa.RFABodyMixin, RFAMBartPreTrainedModel, mbart.MBartModel):
    """RFA-mBART without a head."""

    encoder_class = RFAMBartEncoder
    decoder_class = RFAMBartDecoder


class RFAMBartForConditionalGeneration(rfa.RFAHeadMixin, RFAMBartPreTrainedModel, mbart.MBartForConditionalGeneration):
    """RFA-mBART that translates."""

    body_class = RFAMBartModel


register_family(Family(rfa_config=RFAMBartConfig, models=(RFAMBartForConditionalGeneration, RFAMBartModel)))
