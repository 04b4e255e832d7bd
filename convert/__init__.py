"""Conversion of softmax checkpoints into RFA checkpoints."""

from hf_rfa.errors import InputError

from .converter import convert
from .families import FAMILIES, Family
from .report import ConversionReport

__all__ = ["FAMILIES", "ConversionReport", "Family", "InputError", "convert"]
