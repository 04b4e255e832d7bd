"""Distillation and fine-tuning of RFA models: `hf_rfa.finetune.distill` and `hf_rfa.finetune.tasks`."""
