"""Evaluation, distillation and fine-tuning of RFA models."""

from .evaluation import Perplexity, perplexity, tokenize
from .generation import GenerationScores, evaluate_generation

__all__ = ["GenerationScores", "Perplexity", "evaluate_generation", "perplexity", "tokenize"]
