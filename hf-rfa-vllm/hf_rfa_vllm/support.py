"""Which checkpoints and settings of vLLM can be served, and what to do about the others."""

from __future__ import annotations

from typing import Any

from hf_rfa.models.cache_rfa import RFA_LAYER_TYPE


def check_support(vllm_config: Any) -> None:
    """Check that a checkpoint's states have a fixed size, and that the settings apply to them.

    Args:
        vllm_config: vLLM's configuration.

    Raises:
        ValueError: naming what is not supported.
    """
    config = vllm_config.model_config.hf_text_config
    for problem in (*checkpoint_problems(config), *setting_problems(vllm_config, config)):
        raise ValueError(f"hf-rfa cannot serve {vllm_config.model_config.model} with vLLM: {problem}")


def checkpoint_problems(config: Any) -> list[str]:
    """Return what keeps a checkpoint's states from having a fixed size."""
    problems = []
    types = config.cache_layer_types()
    others = {each: index for index, each in enumerate(types) if each != RFA_LAYER_TYPE}
    for kind, index in others.items():
        problems.append(
            f"layer {index} is of type {kind!r}, and all layers have to be RFA. Convert all of them (--layers all)."
        )
    return problems


def setting_problems(vllm_config: Any, config: Any) -> list[str]:
    """Return which settings of vLLM do not apply to these states, each with what to do."""
    problems, parallel = [], vllm_config.parallel_config
    if vllm_config.speculative_config is not None:
        problems.append("speculative decoding takes tokens back, and states keep no past. Leave it out.")
    if parallel.pipeline_parallel_size > 1:
        problems.append("one block holds the states of all layers. Leave --pipeline-parallel-size out.")
    ranks, heads = parallel.tensor_parallel_size, config.num_heads_for("causal")
    if ranks > 1 and heads % ranks:
        problems.append(f"{heads} key-value heads cannot be shared evenly among {ranks} ranks of tensor parallelism.")
    if ranks > 1 and config.retrieval_heads:
        problems.append("retrieval heads cannot be shared evenly among ranks. Leave --tensor-parallel-size out.")
    if vllm_config.model_config.is_moe:
        problems.append("models with experts are not supported. Whatever runs transformers models serves them.")
    return problems


def check_block_sizes(cache_config: Any) -> None:
    """Check that vLLM's settings name one size of blocks: snapshots lie where blocks of tokens end.

    Raises:
        ValueError: saying what was given and what to pass.
    """
    given, blocks = cache_config.mamba_block_size, cache_config.block_size
    follows = cache_config.user_specified_block_size and given == blocks
    if cache_config.enable_prefix_caching and given is not None and not follows:
        raise ValueError(
            f"--mamba-block-size {given} has no effect on hf-rfa's models, whose snapshots are --block-size tokens apart. "
            f"Pass --block-size {given} instead."
        )
