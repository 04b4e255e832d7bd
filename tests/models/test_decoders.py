"""Every decoder that `hf_rfa.families.DECODERS` names, tiny, against the softmax model with its random weights."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from hf_rfa import FAMILIES, RFALayer
from hf_rfa.families import has_rotary_positions
from hf_rfa.inference import cache_num_bytes
from hf_rfa.models.cache_names import CACHE_NAME, cache_argument
from hf_rfa.models.configuration_rfa import FULL_ATTENTION
from tests.decoders import LENGTH, NAMES, WINDOWED, case, converted, every_decoder, pair, parent, rfa_indices
from tests.families import logits, logits_by_steps, relative_error, rfa_modules, state_of, tokens

FULL = 40
#: A text that is seen whole, with features that nothing reaches and without.
WHOLE = [{"feature_map": "none", "window_size": FULL}, {"window_size": FULL, "num_features": 8}]
DTYPES = (torch.bfloat16, torch.float32)


def padded(side: str) -> Tensor:
    """Return a padding mask of three rows of 29, 20 and 6 tokens."""
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    for row, count in enumerate((LENGTH, 20, 6)):
        mask[row, : LENGTH - count] = 0
    return mask if side == "left" else mask.flip(1)


def positions_of(model: Any, mask: Tensor | None) -> dict[str, Tensor]:
    """Return the argument for the positions of padded rows, counted as `generate` does, if a model takes one."""
    if mask is None or "position_ids" not in inspect.signature(model.forward).parameters:
        return {}
    return {"position_ids": (mask.cumsum(1) - 1).clamp_min(0)}


def error_of(found: Tensor, expected: Tensor) -> float:
    """Return the relative error, infinite if something is not finite."""
    return relative_error(found, expected) if bool(torch.isfinite(found).all()) else math.inf


def is_exact(softmax: Any, model: Any, compare: Callable[[Any], tuple[Tensor, Tensor]]) -> bool:
    """Return whether what ``compare`` computes in two ways is equal, or no more different than with the softmax model.

    Norms and routers round to float32 whatever the dtype, and recurrent layers of some families read no more than one token
    after those in their cache.
    """
    return error_of(*compare(model)) < max(1e-5, 10 * error_of(*compare(softmax)))


def assert_is_softmax(model: Any, softmax: Any) -> None:
    """Compare the logits of a text and of padded ones."""
    ids = tokens(3, LENGTH)
    assert relative_error(logits(model, ids), logits(softmax, ids)) < 1e-5
    for mask in (padded("left"), padded("right")):
        at = positions_of(softmax, mask)
        found, expected = (logits(each, ids, mask=mask, **at)[mask > 0] for each in (model, softmax))
        assert relative_error(found, expected) < 1e-5


# The whole text in the window: the softmax model


@torch.no_grad()
@every_decoder
@pytest.mark.parametrize("options", WHOLE, ids=["none", "features"])
def test_a_window_of_the_texts_length_is_the_softmax_model(name, options):
    softmax, model = pair(name, options)
    assert rfa_indices(model)
    assert len(rfa_modules(model)) == len(rfa_indices(model))
    assert_is_softmax(model, softmax)
    ids = tokens(3, LENGTH)
    plain = converted(softmax, num_features=4, window_size=2)
    assert relative_error(logits(plain, ids), logits(softmax, ids)) > 1e-3, "attention has to matter"


@torch.no_grad()
@every_decoder
def test_a_layer_that_stays_softmax_is_the_softmax_models(name):
    softmax = parent(name)
    whole = converted(softmax, window_size=FULL, num_features=8)
    first, *others = rfa_indices(whole)
    if not others:
        pytest.skip("one layer attends to all tokens, and a conversion leaves none")
    model = converted(softmax, window_size=FULL, num_features=8, softmax_layers=[first])
    assert rfa_indices(model) == others
    assert_is_softmax(model, softmax)
    ids = tokens(3, LENGTH)
    steps, cache = logits_by_steps(model, ids, range(10, LENGTH))
    assert relative_error(steps, logits(softmax, ids)) < 1e-5
    assert cache.layers[first].keys.shape[-2] == LENGTH


# Features: one state, read in any way


@torch.no_grad()
@every_decoder
def test_steps_equal_the_whole_pass(name):
    softmax, model = pair(name, dtype=torch.float64)
    ids = tokens(2, LENGTH)
    for cuts in ([1], [28], [7, 8, 9, 20], range(1, LENGTH)):
        assert is_exact(
            softmax, model, lambda each, cuts=cuts: (logits_by_steps(each, ids, cuts)[0], logits(each, ids))
        ), cuts


@torch.no_grad()
@every_decoder
def test_a_row_of_a_batch_is_the_row_alone_and_padding_is_not_seen(name):
    """Rotary positions are counted without padding where none are given; elsewhere they are given."""
    softmax, model = pair(name, dtype=torch.float64)
    ids = tokens(3, LENGTH)
    for side in ("left", "right"):
        mask = padded(side)
        for row, kept in enumerate(mask > 0):
            at = {} if has_rotary_positions(model.config) else positions_of(model, mask)
            assert is_exact(
                softmax,
                model,
                lambda each, mask=mask, row=row, kept=kept, at=at: (
                    logits(each, ids, mask=mask, **at)[row, kept],
                    logits(each, ids[row : row + 1, kept])[0],
                ),
            ), (side, row)


@torch.no_grad()
@every_decoder
def test_generation_uses_the_state_as_the_whole_pass_does(name):
    """Greedy, in beams, and in a batch with padding on the left, whose rows are those of the prompts alone."""
    _, model = pair(name, dtype=torch.float64)
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}
    for beams in (1, 3):
        found, expected = (
            model.generate(ids, attention_mask=mask, num_beams=beams, use_cache=use, **options) for use in (True, False)
        )
        assert torch.equal(found, expected)
        alone = model.generate(ids[1:, 4:], attention_mask=mask[1:, 4:], num_beams=beams, **options)
        assert torch.equal(found[1:, 4:], alone)


# The cache


@torch.no_grad()
@every_decoder
def test_the_cache_has_one_size_and_a_state_per_key_value_head(name):
    _, model = pair(name)
    config, sizes = model.config, {}
    cache = DynamicCache(config=config)
    for count in (20, 1, 39):
        cache = model(tokens(2, count), **cache_argument(cache)).past_key_values
        sizes[int(cache.get_seq_length())] = cache_num_bytes(cache)
    assert sizes.keys() == {20, 21, 60}
    assert len(set(sizes.values())) == 1
    types = config.base_layer_types()
    for index, layer in enumerate(cache.layers):
        if index not in rfa_indices(model):
            assert types[index] not in FULL_ATTENTION
            assert isinstance(layer, DynamicSlidingWindowLayer) == (types[index] == "sliding_attention")
            continue
        assert isinstance(layer, RFALayer)
        heads, width = config.num_heads_for("causal"), config.head_dim_for("causal")
        (memory,) = layer.memories
        assert memory.state.nbytes == 2 * heads * 16 * (width + 1) * 4
        assert memory.places.keys_values.shape[:3] == (2, heads, 5)


@torch.no_grad()
@every_decoder
def test_operations_on_the_cache(name):
    """Rows that are repeated, reordered and chosen go on as if those had been read."""
    _, model = pair(name, dtype=torch.float64)
    ids = tokens(2, 20)
    cache, order = model(ids[:, :9], use_cache=True).past_key_values, torch.tensor([1, 0, 0, 1])
    if not all(hasattr(layer, "batch_repeat_interleave") for layer in cache.layers):
        pytest.skip("transformers' layers for recurrences and convolutions cannot repeat their rows")
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([2, 0, 1, 3]))
    assert relative_error(model(ids[order, 9:], **cache_argument(cache)).logits, logits(model, ids)[order, 9:]) < 1e-5
    cache.batch_select_indices(torch.tensor([2]))
    assert state_of(cache.layers[rfa_indices(model)[0]]).shape[0] == 1


@torch.no_grad()
@every_decoder
def test_a_static_cache_holds_the_state(name):
    _, model = pair(name, dtype=torch.float64)
    ids, cache = tokens(2, 20), StaticCache(config=model.config, max_cache_len=32)
    assert all(isinstance(cache.layers[index], RFALayer) for index in rfa_indices(model))
    options = {"do_sample": False, "max_new_tokens": 9, "eos_token_id": None, "disable_compile": True}
    found, expected = (model.generate(ids, cache_implementation=each, **options) for each in ("static", None))
    assert torch.equal(found, expected)


# Files


def is_own(key: str) -> bool:
    """Return whether a tensor of an attention module is none of the softmax model's."""
    return key.startswith(("feature_map.", "gate."))


OUTPUTS = {"SequenceClassification": (2, 3), "TokenClassification": (2, 9, 3), "QuestionAnswering": (2, 9)}
HEADS = [case(name, auto) for name in NAMES for auto in FAMILIES[name].auto_models]


@torch.no_grad()
@pytest.mark.parametrize(("name", "auto"), HEADS)
def test_every_head_runs_and_keeps_the_weights_of_the_softmax_head(name, auto, tmp_path):
    softmax = parent(name)
    softmax.config.num_labels = 3
    softmax.save_pretrained(tmp_path / "softmax")
    converted(softmax, **WINDOWED).save_pretrained(tmp_path / "rfa")
    (head, expected), (model, found) = (
        auto.from_pretrained(tmp_path / each, output_loading_info=True) for each in ("softmax", "rfa")
    )
    assert type(model) is FAMILIES[name].auto_models[auto]
    assert type(model).__name__ == f"RFA{type(head).__name__}"
    own = {f"{place}.{key}" for place, each in rfa_modules(model).items() for key in each.state_dict() if is_own(key)}
    assert set(found["missing_keys"]) - own == set(expected["missing_keys"])
    kept, state = model.state_dict(), head.state_dict()
    assert all(torch.equal(kept[key], state[key]) for key in set(state) - set(expected["missing_keys"]))
    model.save_pretrained(tmp_path / "head")
    again = auto.from_pretrained(tmp_path / "head").eval()
    ids = tokens(2, 9)
    outputs, expected = (each(ids, use_cache=False) for each in (again, head.eval()))
    assert [key for key in outputs if key != CACHE_NAME] == [key for key in expected if key != CACHE_NAME]
    shapes = [shape for ending, shape in OUTPUTS.items() if type(model).__name__.endswith(ending)]
    assert tuple(outputs[0].shape) == (shapes[0] if shapes else tuple(expected[0].shape))
    assert torch.isfinite(outputs[0]).all()
    assert torch.equal(outputs[0], model.eval()(ids, use_cache=False)[0])


# Training


def gradients(model: Any, ids: Tensor, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of some tokens, and the gradients of parameters that have one."""
    model.zero_grad()
    torch.manual_seed(0)  # routers draw in training
    loss = model(ids, labels=ids, use_cache=False, **options).loss
    loss.backward()
    return loss.detach(), {key: each.grad for key, each in model.named_parameters() if each.grad is not None}


@every_decoder
def test_gradient_checkpointing_changes_nothing_and_a_step_is_finite(name):
    _, model = pair(name)
    ids = tokens(2, 17)
    model.train()
    expected, plain = gradients(model, ids)
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    found, checkpointed = gradients(model, ids)
    assert_close(found, expected)
    assert_close(checkpointed, plain)
    learned = {key for key, each in model.named_parameters() if each.requires_grad and "expert" not in key}
    assert learned <= set(plain), "every parameter is reached"
    assert all(torch.isfinite(each).all() for each in plain.values())
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    assert torch.isfinite(gradients(model, ids)[0])


# Compilation and 16 bits


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@every_decoder
def test_a_decoding_step_compiles_to_one_graph(name):
    _, model = pair(name)
    if model._can_set_experts_implementation():  # "eager" loops over what experts get
        model.set_experts_implementation("grouped_mm")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    first, ids = tokens(2, 7), tokens(2, 6)
    caches = [model(first, use_cache=True).past_key_values for _ in range(2)]
    for t in range(6):
        found, expected = (
            each(ids[:, t : t + 1], **cache_argument(cache)).logits
            for each, cache in zip((compiled, model), caches, strict=True)
        )
        assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert not torch._dynamo.utils.counters["graph_break"]


@torch.no_grad()
@every_decoder
def test_sixteen_bits_round_all_but_feature_maps_and_gates_of_attention(name, tmp_path):
    softmax, model = pair(name)
    softmax.save_pretrained(tmp_path / "softmax")
    model.save_pretrained(tmp_path / "rfa")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "softmax", dtype=torch.bfloat16).state_dict()
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "rfa", dtype=torch.bfloat16).eval()
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "rfa", dtype=torch.float32).eval()
    attention = tuple(rfa_modules(small))
    for key, tensor in small.state_dict().items():
        module = next((each for each in attention if key.startswith(f"{each}.")), "")
        own = module and is_own(key.removeprefix(f"{module}."))
        assert tensor.dtype == (torch.float32 if own else expected[key].dtype), key
    ids = tokens(3, LENGTH)
    exact = [AutoModelForCausalLM.from_pretrained(tmp_path / "softmax", dtype=each).eval() for each in DTYPES]
    for read in (logits, lambda each, ids: logits_by_steps(each, ids, [10, *range(20, LENGTH)])[0]):
        found, theirs = read(small, ids), read(exact[0], ids)
        assert found.dtype == theirs.dtype
        assert torch.isfinite(found).all()
        # Routers choose other experts, and some recurrent layers read no more than one token after those in their cache.
        error = relative_error(theirs, logits(exact[1], ids))
        assert relative_error(found, logits(reference, ids)) < max(0.2, 2 * error)


# PEFT


@every_decoder
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_lora_with_the_default_targets_of_the_softmax_model(name):
    """`tests/finetune/test_peft_and_trl.py` trains such adapters."""
    peft = pytest.importorskip("peft")
    constants = pytest.importorskip("peft.utils.constants")
    defaults = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    if name not in defaults:
        pytest.skip(f"PEFT has no default targets for {name}")
    _, model = pair(name)
    ids = tokens(2, 12)
    expected = logits(model, ids)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2))
    trained = {
        key.split(".lora_")[0].rpartition(".")[2] for key, each in adapted.named_parameters() if each.requires_grad
    }
    assert trained == set(defaults[name])
    assert_close(logits(adapted, ids), expected)
