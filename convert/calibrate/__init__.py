"""Calibration on the softmax model's own activations, and what else is measured on them."""
