"""Models without features against the softmax model under the mask that a loop over tokens makes, for every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from hf_rfa.models.importance import LearnedImportance
from tests.families import logits_by_steps, make, rfa_modules, softmax_model
from tests.memory_by_loop import memory_by_loop

SIZES = {"window_size": 4, "num_sinks": 2}
#: Family and fields by name: two of GPT-2's three heads in a layer retrieve, and one of Llama's two key-value heads.
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one token": ("gpt2", {"window_size": 1}),
    "more sinks than window": ("gpt2", {"window_size": 1, "num_sinks": 7}),
    "more places than tokens": ("gpt2", {"window_size": 60, "num_sinks": 4}),
    "slots": ("gpt2", {**SIZES, "num_slots": 5}),
    "grouped slots": ("llama", {**SIZES, "num_slots": 5}),
    "key norm": ("llama", {**SIZES, "num_slots": 5, "importance": "key_norm"}),
    "retrieval": (
        "gpt2",
        {**SIZES, "retrieval_heads": [[0, 2], [0, 0], [1, 1]], "retrieval_window": 9, "retrieval_slots": 7},
    ),
    "grouped retrieval": ("llama", {**SIZES, "num_slots": 3, "retrieval_heads": [[1, 1]], "retrieval_window": 96}),
}


def model_of(name: str, **fields: Any) -> Any:
    family, sizes = LAYOUTS[name]
    return make(family, {"feature_map": "none", **sizes, **fields})


@pytest.fixture(params=LAYOUTS)
def pair(request) -> tuple[Any, Any]:
    """A model of one layout, and the softmax model with its weights under its mask."""
    model = model_of(request.param)
    config, layers = model.config, list(rfa_modules(model).values())
    teacher = softmax_model(model, LAYOUTS[request.param][0])
    inputs: dict[int, Tensor] = {}

    def keep_input(module: Any, args: Any, kwargs: Any) -> None:
        inputs[module.layer_idx] = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

    for name in rfa_modules(model):
        teacher.get_submodule(name).register_forward_pre_hook(keep_input, with_kwargs=True)

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        layer, (batch, _, length, _) = layers[module.layer_idx], query.shape
        heads = config.num_heads_for("causal")
        others = [head for head in range(heads) if head not in layer.retrieval_heads]
        seen = torch.empty(batch, heads, length, length, dtype=torch.bool)
        sizes = [
            {"window": config.window_size, "sinks": config.num_sinks, "slots": config.num_slots},
            {"window": config.retrieval_window, "sinks": config.num_sinks, "slots": config.retrieval_slots},
        ]
        for chosen, rule, kept in zip((others, layer.retrieval_heads), layer.importances(), sizes, strict=False):
            importance, recency = torch.zeros(batch, len(chosen), length), [0.0] * len(chosen)
            if isinstance(rule, LearnedImportance):
                importance = torch.einsum("btn,hn->bht", inputs[module.layer_idx].detach(), rule.weight)
                recency = rule.recency.tolist()
            elif rule is not None:
                norm = key[:, :: key.shape[1] // heads][:, chosen].detach().norm(dim=-1)
                importance = -(norm.log() * 4096).round()
            seen[:, chosen] = memory_by_loop(importance, recency, **kept)[0]
        seen = seen.repeat_interleave(query.shape[1] // heads, dim=1)
        return sdpa_attention_forward(module, query, key, value, seen, **kwargs)

    AttentionInterface.register("under_a_mask", attention)
    AttentionMaskInterface.register("under_a_mask", lambda *args, **kwargs: None)
    teacher.set_attn_implementation("under_a_mask")
    return model, teacher


@torch.no_grad()
def test_logits_are_those_of_softmax_with_that_mask(pair):
    """Of whole texts, in pieces, token by token, and with padding on either side."""
    model, teacher = pair
    ids, tolerance = torch.randint(1, 61, (2, 50)), {"rtol": 1e-5, "atol": 1e-5}
    expected = teacher(ids, use_cache=False).logits
    assert_close(model(ids).logits, expected, **tolerance)
    for cuts in ([2, 3, 4, 24, 25], range(1, 50)):
        assert_close(logits_by_steps(model, ids, cuts)[0], expected, **tolerance)
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[0, :10], mask[1, :3], mask[1, 53:] = 0, 0, 0
    padded = torch.zeros_like(mask).masked_scatter(mask.bool(), ids)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    for cuts in ([], [4, 5, 30]):
        found, _ = logits_by_steps(model, padded, cuts, mask=mask, position_ids=positions)
        assert_close(found[mask.bool()].view(expected.shape), expected, **tolerance)


def test_gradients_are_those_of_softmax_with_that_mask(pair):
    ids, gradients = torch.randint(1, 61, (2, 40)), []
    for model in pair:
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert_close(*gradients, rtol=1e-3, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("beams", [1, 3])
def test_it_generates_what_softmax_with_that_mask_would(pair, beams):
    """In a padded batch every greedy token is the teacher's choice, and beams score as the whole text does."""
    model, teacher = pair
    ids = torch.randint(1, 61, (2, 12))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "num_beams": beams}
    options |= {"output_scores": True, "return_dict_in_generate": True}
    answer = model.generate(ids, attention_mask=mask, **options)
    for row, first in ((0, 5), (1, 0)):  # the teacher's sinks would be padding
        text = answer.sequences[row : row + 1, first:]
        scores = teacher(text, use_cache=False).logits[:, -31:-1].log_softmax(-1)
        if beams == 1:
            assert torch.equal(scores.argmax(-1), text[:, -30:])
        else:
            mean = scores.gather(-1, text[:, -30:, None]).mean()
            assert_close(mean, answer.sequences_scores[row], rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("features", [0, 16])
def test_in_16_bits_keys_and_values_are_kept_as_they_came(features, dtype):
    """In pieces or at once, what is seen is the same; and so after some tokens are taken back."""
    fields = {"num_features": features, "feature_map": "positive"} if features else {}
    model = model_of("grouped retrieval", **fields, retrieval_window=9).to(dtype)
    attention = model.model.layers[1].self_attn
    query, key, value = (torch.randn(2, heads, 40, 6, dtype=dtype) for heads in (4, 2, 2))
    hidden = torch.randn(2, 40, 24, dtype=dtype)
    whole, _ = attention.attend(query, key, value, hidden_states=hidden)
    cache, pieces = DynamicCache(config=model.config), []
    for start, stop in ((0, 1), (1, 2), (2, 17), (17, 30), (25, 40)):
        if start == 17:
            cache.layers[1].activate_past_recording()
        if start == 25:
            cache.layers[1].crop(-5)
        piece = (tensor[:, :, start:stop] for tensor in (query, key, value))
        output, _ = attention.attend(*piece, hidden_states=hidden[:, start:stop], cache=cache)
        pieces.append(output[:, :, : 8 if start == 17 else None])
    assert_close(torch.cat(pieces, dim=2), whole, rtol=1e-2, atol=1e-2)
    assert torch.isfinite(whole).all()
    others, retrieval = (memory.places.in_order().keys_values for memory in cache.layers[1].memories)
    assert others.dtype == retrieval.dtype == dtype
    assert torch.equal(retrieval[:, 0, -9:, :6], key[:, 1, -9:])
    is_held = (others[:, 0, :, None, :6] == key[:, 0, None]).all(-1).any(-1)
    assert is_held.all(), "sinks, slots and window are full, and hold keys that came"
