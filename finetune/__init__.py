"""Evaluation, distillation and fine-tuning of RFA models."""

from .evaluation import Perplexity, perplexity, tokenize

__all__ = ["Perplexity", "perplexity", "tokenize"]
