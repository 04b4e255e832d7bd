"""Decoders out of torch: one graph or program with a cache of fixed size, and a step for exporters."""

from .exporting import export
from .figures import ExportReport
from .step import DecodingStep

__all__ = ["DecodingStep", "ExportReport", "export"]
