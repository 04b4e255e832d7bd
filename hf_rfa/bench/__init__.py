"""Speed and memory of an RFA model and of its softmax base model: decoding, reading a prompt, a training step."""

from .models import pair
from .report import table
from .tasks import Point, decoding, whole_sequences

__all__ = ["Point", "decoding", "pair", "table", "whole_sequences"]
