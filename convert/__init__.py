"""Conversion of softmax checkpoints into RFA checkpoints."""
