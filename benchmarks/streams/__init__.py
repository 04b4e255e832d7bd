"""Streams far past the trained length: a converted model, and what a softmax model can do with as many bytes."""
