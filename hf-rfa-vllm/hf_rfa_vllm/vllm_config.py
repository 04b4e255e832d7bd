"""Sizes of blocks, which vLLM sets before it makes the model."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.model_executor.models.config import MambaModelConfig

from .support import check_block_sizes


class RFAModelConfig(MambaModelConfig):
    """Sizes as of Mamba's models, after a check of those that were given."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Check, then set the sizes that were not given."""
        check_block_sizes(vllm_config.cache_config)
        super().verify_and_update_config(vllm_config)
