"""The vLLM plugin: serves converted decoders with one block of fixed size a sequence in vLLM's own cache.

vLLM finds `register` by the entry point ``vllm.general_plugins`` and calls it in each of its processes. Only the modules
``vllm_*`` import vLLM.
"""

from __future__ import annotations

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_rfa.families import FAMILIES
from hf_rfa.models.configuration_rfa_seq2seq import RFASeq2SeqConfigMixin


def served_architectures() -> list[str]:
    """Return the names of the language models that vLLM is told about, ``RFALlamaForCausalLM`` say: all decoders'."""
    decoders = [name for name, each in FAMILIES.items() if not issubclass(each.rfa_config, RFASeq2SeqConfigMixin)]
    return [f"RFA{MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]}" for name in decoders]


def register() -> None:
    """Register converted decoders with vLLM; importing hf_rfa has registered their configurations with transformers."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from .vllm_config import RFAModelConfig

    for name in served_architectures():
        ModelRegistry.register_model(name, "hf_rfa_vllm.vllm_model:RFAForCausalLM")
        MODELS_CONFIG_MAP[name] = RFAModelConfig
