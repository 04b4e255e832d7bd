"""Whether attention and generation on the device are right.

An error is the largest difference to the truth, relative to the truth's largest entry; a case fails if one is over `LIMITS`.
The truth of exact attention is softmax attention in float64 with a mask of T × T, made token after token, and that of
features their quadratic form in float64. Exact attention with features joined is compared with itself in float64, which no
FlexAttention computes, and greedy tokens with those of a CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_rfa.models.attention import RFAAttentionMixin
from hf_rfa.models.feature_maps import FEATURE_MAPS, FeatureMap
from hf_rfa.models.importance import LearnedImportance
from hf_rfa.models.linear_attention import DEFAULT_CHUNK_SIZE, Tokens, linear_attention
from tests.memory_by_loop import memory_by_loop

from .models import FEATURES, OPTIONS, RFA, attention_layer, build, compiled
from .trial import FAILED, Case, Setting

#: Largest errors that pass, by precision.
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
PART = "parity"
Attend = Callable[..., Tensor]


def cases(setting: Setting) -> Iterator[Case]:
    """Yield exact attention, also at a second length, for which it is compiled anew; greedy tokens; every feature map."""
    for dtype in LIMITS:
        for name in OPTIONS:
            yield _exact_case(setting, name, dtype, 137 if setting.dry else 1000)
    yield _exact_case(setting, RFA, torch.float32, 63)
    yield _exact_case(setting, FEATURES, torch.bfloat16, 63)
    for name, is_compiled in ((RFA, False), (RFA, True), (FEATURES, False)):
        yield _greedy_case(setting, name, is_compiled)
    for dtype in LIMITS:
        for name in [name for name, cls in FEATURE_MAPS.items() if not cls.reads_means]:
            for gated in (False, True) if name == "exponential" else (False,):
                contestant = f"{name}, gate" if gated else name
                check = partial(features, setting, name, dtype, gated)
                yield Case(PART, f"features, {_plain(dtype)}", contestant, check)
    yield _greedy_case(setting, FEATURES, True)


def _exact_case(setting: Setting, name: str, dtype: torch.dtype, length: int) -> Case:
    return Case(PART, f"{length:,} tokens, {_plain(dtype)}", name, partial(exact, setting, name, dtype, length))


def _greedy_case(setting: Setting, name: str, is_compiled: bool) -> Case:
    contestant = f"{name}, {'compiled' if is_compiled else 'eager'} steps"
    return Case(PART, "greedy tokens, float32", contestant, partial(greedy, setting, name, is_compiled))


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def exact(setting: Setting, name: str, dtype: torch.dtype, length: int) -> dict[str, Any]:
    """Compare a layer's outputs and gradients: two texts, one of three documents and one with padding at its left."""
    layer = attention_layer(setting, name)
    heads, width = layer.rfa_heads, layer.rfa_width
    torch.manual_seed(length)
    hidden = torch.randint(-2, 3, (2, length, cast(LearnedImportance, layer.importance).weight.shape[1]))
    padding = torch.ones(2, length, dtype=torch.long)
    padding[1, : length // 3] = 0
    starts = torch.zeros(2, length, dtype=torch.bool)
    starts[0, [length // 4, length // 2]] = True
    starts[1, length // 2] = True
    inputs = [torch.randn(2, n * heads, length, width).to(setting.device, dtype) for n in (3, 1, 1)]

    def attend(layer: RFAAttentionMixin, *tensors: Tensor) -> Tensor:
        masks = {"padding_mask": padding.to(setting.device), "document_starts": starts.to(setting.device)}
        states = hidden.to(tensors[0])
        return layer.attend(*tensors, hidden_states=states, **masks)[0]

    def attend_by_mask(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        importance = torch.einsum("btn,hn->bht", hidden.float(), layer.importance.weight.cpu())  # type: ignore[union-attr]
        sizes = {"window": layer.window_size, "sinks": layer.num_sinks, "slots": layer.num_slots}
        seen, _ = memory_by_loop(importance, [1 / 32] * heads, **sizes, padding=padding, starts=starts)
        mask = (seen | (padding == 0)[:, None, :, None]).to(setting.device).repeat_interleave(3, dim=1)
        return F.scaled_dot_product_attention(query, key, value, mask, scale=layer.scaling, enable_gqa=True)

    truth = attend_by_mask if name == RFA else partial(attend, copy.deepcopy(layer).double())
    read = padding[:, None, :, None].to(setting.device)  # nobody reads what padding's queries see
    return judged(partial(attend, layer), truth, inputs, read)


def features(setting: Setting, name: str, dtype: torch.dtype, gated: bool) -> dict[str, Any]:
    """Compare attention to features, in chunks, with its quadratic form."""
    length, chunk_size = (37, 16) if setting.dry else (1001, DEFAULT_CHUNK_SIZE)
    feature_map = make(name).to(setting.device)
    shape = (2, feature_map.num_heads, length, feature_map.head_dim)
    torch.manual_seed(length)
    inputs = [torch.randn(shape).to(setting.device, dtype) for _ in range(3)]
    decay = -torch.rand(shape[:3], device=setting.device) if gated else None

    def attend(feature_map: FeatureMap, chunk_size: int, *tensors: Tensor) -> Tensor:
        query, key, *_ = feature_map(*tensors[:2], least_shift=feature_map.least_shift(None))
        tokens = Tokens(key, tensors[2], None if decay is None else decay.to(query.dtype))
        floor = feature_map.denominator_floor
        return linear_attention(query, tokens, denominator_floor=floor, chunk_size=chunk_size)[0]

    truth = partial(attend, copy.deepcopy(feature_map).double(), length)
    return judged(partial(attend, feature_map, chunk_size), truth, inputs)


def make(name: str) -> FeatureMap:
    """Return a map with weights that are not its initial ones."""
    cls = FEATURE_MAPS[name]
    torch.manual_seed(0)
    count = None if cls.default_num_features is None else 64
    made = cls(num_heads=2, head_dim=64, num_features=count, scaling=1 / 8, trainable=True)
    with torch.no_grad():
        for tensor in made.state_dict().values():
            tensor.add_(0.1 * torch.rand_like(tensor))
    return made


def judged(attend: Attend, truth: Attend, inputs: list[Tensor], read: Tensor | None = None) -> dict[str, Any]:
    """Return the errors of outputs and gradients by what they are of, and what failed, if anything did.

    Args:
        attend: takes the inputs.
        truth: takes them in float64.
        inputs: query, key and value.
        read: 0 for outputs that do not count, or None.
    """
    names = ("output", "query's gradient", "key's gradient", "value's gradient")
    exact = _outputs_and_gradients(truth, [each.double() for each in inputs], read)
    errors = dict(zip(names, map(error, _outputs_and_gradients(attend, inputs, read), exact), strict=True))
    limit = LIMITS[inputs[0].dtype]
    wrong = [f"{name} {size:.1e}" for name, size in errors.items() if size > limit]
    return errors | ({FAILED: f"over {limit:.0e}: " + "; ".join(wrong)} if wrong else {})


def _outputs_and_gradients(attend: Attend, inputs: list[Tensor], read: Tensor | None) -> list[Tensor]:
    leaves = [each.detach().requires_grad_() for each in inputs]
    output = attend(*leaves) if read is None else attend(*leaves) * read
    torch.manual_seed(1)
    weights = torch.randn(output.shape, dtype=torch.float64).to(output)
    return [output, *torch.autograd.grad(output, leaves, weights)]


def error(result: Tensor, truth: Tensor) -> float:
    """Return the largest difference to the truth, relative to its largest entry; infinite for NaN."""
    largest = ((result.double() - truth).abs().max() / truth.abs().max().clamp_min(1e-30)).item()
    return largest if largest == largest else float("inf")


def greedy(setting: Setting, name: str, is_compiled: bool) -> dict[str, Any]:
    """Compare the tokens of a tiny model with a CPU's: two prompts, one of them padded at its left."""
    torch.compiler.reset()
    length = 20 if setting.dry else 200
    torch.manual_seed(0)
    ids, mask = torch.randint(3, 64, (2, 100)), torch.ones(2, 100, dtype=torch.long)
    mask[1, :7] = 0
    lengths = {"min_new_tokens": length, "max_new_tokens": length, "do_sample": False, "pad_token_id": 0}
    model = build("tiny", name, torch.float32)
    expected = model.generate(ids, attention_mask=mask, disable_compile=True, **lengths)
    model = model.to(setting.device)
    options = compiled(setting) if is_compiled else {"disable_compile": True}
    tokens = model.generate(ids.to(setting.device), attention_mask=mask.to(setting.device), **lengths, **options)
    equal = int((tokens.cpu() == expected).all(0).cumprod(0).sum()) - ids.shape[1]
    figures: dict[str, Any] = {"equal tokens": equal, "distinct tokens": len(expected[0, 100:].unique())}
    if is_compiled != hasattr(model, "_compiled_call"):
        figures |= {FAILED: f"steps were {'not ' * is_compiled}compiled"}
    return figures | ({FAILED: f"token {equal} of {length} is another one"} if equal < length else {})
