"""The models that are compared: SmolLM2's shape with random weights, softmax and RFA."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM, CompileConfig, LlamaConfig

from hf_rfa.families import FAMILIES
from hf_rfa.inference.generation import compiled_steps
from hf_rfa.models.attention import RFAAttentionMixin

from .trial import Setting

#: The contestants, by name: RFA's options, which take the memory of 64 tokens.
SOFTMAX, RFA, FEATURES = "softmax", "RFA", "RFA, 64 features"
OPTIONS: dict[str, dict[str, Any]] = {
    RFA: {"feature_map": "none", "window_size": 31, "num_sinks": 4, "num_slots": 28},
    FEATURES: {
        "feature_map": "exponential",
        "num_features": 64,
        "window_size": 14,
        "num_sinks": 4,
        "num_slots": 14,
    },
}
#: Tokens of the longest text, with those that are generated.
POSITIONS = 32_768 + 128
#: A tiny one, whose weights are so large that what it generates does not repeat itself.
TINY = LlamaConfig(
    vocab_size=64,
    hidden_size=144,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=512,
    initializer_range=0.3,
)
#: SmolLM2-135M's shape.
SMOLLM2 = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=POSITIONS,
    tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
)
#: The shapes by name: those, and the tiny one with SmolLM2's heads.
SHAPES = {
    "tiny": TINY,
    "SmolLM2": SMOLLM2,
    "heads": LlamaConfig(**{**TINY.to_diff_dict(), "hidden_size": 576, "head_dim": 64}),
}


@cache
def _built(shape: str, name: str, dtype: torch.dtype) -> Any:
    config = SHAPES[shape]
    if name != SOFTMAX:
        config = FAMILIES["llama"].rfa_config.from_base(config, **OPTIONS[name])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for module in model.modules():
        if isinstance(module, RFAAttentionMixin):
            choose_by_content(module)
    return model


def build(shape: str, name: str, dtype: torch.dtype) -> Any:
    """Return a model on the CPU: softmax, or RFA with some `OPTIONS`."""
    return copy.deepcopy(_built(shape, name, dtype))


def attention_layer(setting: Setting, name: str) -> RFAAttentionMixin:
    """Return RFA attention of 9 query heads on 3, of width 64 and in a dry run 16, on the device."""
    modules = _built("tiny" if setting.dry else "heads", name, torch.float32).modules()
    return copy.deepcopy(next(each for each in modules if isinstance(each, RFAAttentionMixin))).to(setting.device)


def choose_by_content(layer: Any) -> None:
    """Have slots go to tokens by what is in them.

    Weights are whole numbers: with hidden states that are too, scores are the same in any precision.
    """
    with torch.no_grad():
        layer.importance.weight.copy_(torch.randint(-2, 3, layer.importance.weight.shape))
        layer.importance.recency.fill_(1 / 32)


def compiled(setting: Setting) -> dict[str, Any]:
    """Return the arguments of `generate` by which steps are compiled; in a dry run they are traced alone."""
    if not setting.dry:
        return {"cache_implementation": "static"}
    arguments = compiled_steps()
    config: CompileConfig = arguments["compile_config"]
    config.backend = "eager"
    return arguments
