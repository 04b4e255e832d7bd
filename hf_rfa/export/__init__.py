"""Decoders out of torch: one graph with a cache of fixed size for other runtimes, and a step for exporters."""

from .exporting import export_onnx
from .figures import ExportReport
from .step import DecodingStep

__all__ = ["DecodingStep", "ExportReport", "export_onnx"]
