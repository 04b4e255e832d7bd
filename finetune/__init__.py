"""Evaluation, distillation and fine-tuning of RFA models."""
