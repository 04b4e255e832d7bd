"""Evaluation under protocols that are stated with the figures.

`hf_rfa.evaluation.generation_scores` is imported by itself: the libraries of its metrics take a while to load. So is
`hf_rfa.evaluation.recall`, what a model still knows of its context.
"""

from .perplexity import Perplexity, perplexity

__all__ = ["Perplexity", "perplexity"]
