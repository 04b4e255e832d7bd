"""Attention of one layer in bfloat16, forward and with gradients, beside causal softmax attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_rfa.models.feature_maps import FEATURE_MAPS, FeatureMap
from hf_rfa.models.importance import LearnedImportance
from hf_rfa.models.linear_attention import Tokens, linear_attention

from .models import RFA, SOFTMAX, attention_layer
from .trial import Case, Setting, milliseconds

PART, HEADS, KEY_VALUE_HEADS = "attention", 9, 3


def cases(setting: Setting) -> Iterator[Case]:
    """Yield exact memory by length, and features alone."""
    for batch, length in ((2, 64), (1, 128)) if setting.dry else ((8, 2048), (1, 32_768), (2, 8192)):
        conditions = f"{batch} × {length:,}"
        yield Case(PART, conditions, RFA, partial(exact, setting, batch, length))
        yield Case(PART, conditions, SOFTMAX, partial(softmax, setting, (batch, HEADS, length), KEY_VALUE_HEADS))
    shape = (2, 2, 64) if setting.dry else (16, 12, 4096)
    conditions = f"{shape[0]} × {shape[2]:,}, {shape[1]} heads, features alone"
    yield Case(PART, conditions, f"{RFA}, 128 features", partial(features, setting, shape))
    yield Case(PART, conditions, SOFTMAX, partial(softmax, setting, shape, shape[1]))


def exact(setting: Setting, batch: int, length: int) -> dict[str, Any]:
    """Time a memory of 31 + 4 tokens and 28 slots."""
    torch.compiler.reset()
    layer = attention_layer(setting, RFA)
    inputs = _inputs(setting, (batch, HEADS, length), KEY_VALUE_HEADS)
    width = cast(LearnedImportance, layer.importance).weight.shape[1]
    hidden = torch.randn(batch, length, width, device=setting.device, dtype=torch.bfloat16)
    return _times(setting, lambda *tensors: layer.attend(*tensors, hidden_states=hidden)[0], inputs)


def features(setting: Setting, shape: tuple[int, int, int]) -> dict[str, Any]:
    """Time attention to 128 exponential features."""
    width = 16 if setting.dry else 64
    feature_map = FEATURE_MAPS["exponential"](
        num_heads=shape[1], head_dim=width, num_features=128, scaling=width**-0.5
    ).to(setting.device)
    return _times(setting, partial(_attend, feature_map), _inputs(setting, shape, shape[1]))


def _attend(feature_map: FeatureMap, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, *_ = feature_map(query, key, least_shift=feature_map.least_shift(None))
    return linear_attention(query, Tokens(key, value), denominator_floor=feature_map.denominator_floor)[0]


def softmax(setting: Setting, shape: tuple[int, int, int], key_value_heads: int) -> dict[str, Any]:
    """Time `scaled_dot_product_attention`."""
    attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=key_value_heads != shape[1])
    return _times(setting, attend, _inputs(setting, shape, key_value_heads))


def _inputs(setting: Setting, shape: tuple[int, int, int], key_value_heads: int) -> list[Tensor]:
    (batch, heads, length), width = shape, 16 if setting.dry else 64
    torch.manual_seed(0)
    return [
        torch.randn(batch, count, length, width, device=setting.device, dtype=torch.bfloat16, requires_grad=True)
        for count in (heads, key_value_heads, key_value_heads)
    ]


def _times(setting: Setting, attend: Callable[..., Tensor], inputs: list[Tensor]) -> dict[str, Any]:
    with torch.no_grad():
        forward = milliseconds(lambda: attend(*inputs), _steps(setting))

    def with_gradients() -> None:
        output = attend(*inputs)
        torch.autograd.grad(output, inputs, torch.ones_like(output))

    return {"forward, ms": forward, "forward and backward, ms": milliseconds(with_gradients, _steps(setting))}


def _steps(setting: Setting) -> int:
    return 1 if setting.dry else 20
