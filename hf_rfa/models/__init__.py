"""The code that checkpoints carry: configurations, models, and all that they are built from.

Checkpoints hold copies of these files, so they import torch, transformers and each other (``from .name import …``) only.
"""
