"""Speed and memory of an RFA model beside its softmax parent: decoding, reading a prompt, a step of training."""

from .models import pair
from .report import plot, table
from .roofline import Load, Machine, measure_machine
from .tasks import Point, decoding, prefill, training

__all__ = ["Load", "Machine", "Point", "decoding", "measure_machine", "pair", "plot", "prefill", "table", "training"]
