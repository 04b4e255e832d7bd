"""Conversion of softmax checkpoints into RFA checkpoints."""

from hf_rfa.errors import InputError
from hf_rfa.families import FAMILIES, Family

from .options import ConversionOptions
from .pipeline import convert
from .report import ConversionReport

__all__ = ["FAMILIES", "ConversionOptions", "ConversionReport", "Family", "InputError", "convert"]
