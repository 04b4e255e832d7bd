"""Evaluation, distillation and fine-tuning of RFA models.

Distillation (`hf_rfa.finetune.distill`) is imported by itself: it needs transformers' Trainer, which takes a while to load.
"""

from hf_rfa.convert.calibration_data import tokenize

from .evaluation import GenerationScores, Perplexity, evaluate_generation, perplexity

__all__ = ["GenerationScores", "Perplexity", "evaluate_generation", "perplexity", "tokenize"]
