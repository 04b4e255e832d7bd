"""Decoders with any feature map: what a checkpoint of one loads first, unless its map is the summary.

That has `hf_rfa.models.modeling_rfa_state` for its entry, and carries no module of other maps.
"""

from .learned_feature_maps import FEATURE_MAPS as FEATURE_MAPS  # all of which it registers
from .modeling_rfa_state import RFAFeatureAttention as RFAFeatureAttention
from .modeling_rfa_state import __getattr__ as __getattr__
from .modeling_rfa_state import rfa_attention_class as rfa_attention_class
