"""Every decoder that `hf_rfa.families.DECODERS` names, tiny, against the softmax model with its random weights."""

from __future__ import annotations

import inspect
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from hf_rfa import FAMILIES, InputError, RFALayer, cache_num_bytes
from hf_rfa.convert import convert
from hf_rfa.convert.activations import capture_inputs
from hf_rfa.convert.calibration_data import calibration_inputs
from hf_rfa.families import DECODERS, has_rotary_positions
from hf_rfa.finetune.distill import distill
from hf_rfa.finetune.recipe import Recipe, Stage
from hf_rfa.models.configuration_rfa import FULL_ATTENTION

from .conftest import leftovers, save_tiny_tokenizer, words
from .families import logits, logits_by_steps, relative_error, rfa_modules, tokens
from .tiny_models import tiny_config, tiny_model
from .training import weights

LENGTH, FULL = 29, 40
#: What makes a family's tiny shape one that can be converted.
FIELDS: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": None, "final_logit_softcapping": None},  # which makes large logits equal
    "ministral": {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "mistral": {"sliding_window": None},  # else every layer has one
    "vaultgemma": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
}
#: Attention with learned sinks needs a window.
WITH_SINKS = ("flint", "gpt_oss", "granite_swa", "granitemoe_swa")
#: Attention that rounds to float32, where masks of float64 are infinite: rows of padding are NaN, in softmax models too.
IN_FLOAT32 = ("gemma2", "granite_swa", "granitemoe_swa", "vaultgemma")
#: A text that is seen whole, with features that nothing reaches and without.
WHOLE = [{"feature_map": "none", "window_size": FULL}, {"window_size": FULL, "num_features": 8}]
DTYPES = (torch.bfloat16, torch.float32)
#: A text that is seen through features but for its last tokens.
WINDOWED = {"num_features": 16, "window_size": 5, "gate": True, "chunk_size": 7}

#: The families that differ most; the others, and what compiles, are left to `pytest -m slow`.
QUICK = ("gemma3_text", "gpt_neox", "gpt_oss", "lfm2", "llama", "opt", "qwen3_moe", "stablelm")
NAMES = [name for name in DECODERS if name in FAMILIES]  # an older transformers lacks some


def case(name: str, *more: Any) -> Any:
    """Return a case of a test, a slow one unless the family is among the quick."""
    return pytest.param(name, *more, marks=[] if name in QUICK else [pytest.mark.slow])


every_decoder = pytest.mark.parametrize("name", [case(name) for name in NAMES])


def parent(name: str, **fields: Any) -> Any:
    """Return a tiny softmax model whose attention, norms and biases all matter."""
    model = tiny_model(name, seed=1, **{**FIELDS.get(name, {}), "pad_token_id": 1, "eos_token_id": 2, **fields})
    with torch.no_grad():
        for parameter in model.parameters():
            added = torch.randn_like(parameter)
            parameter.copy_(0.25 * added if parameter.ndim > 1 else parameter + 0.1 * added)
    return with_plain_experts(model)


def with_plain_experts(model: Any) -> Any:
    """Let experts compute in any dtype."""
    if getattr(model.config, "_experts_implementation", None) not in (None, "eager"):
        model.set_experts_implementation("eager")
    return model


def converted(softmax: Any, **options: Any) -> Any:
    """Return an RFA model with the weights of a softmax model."""
    declared = FAMILIES[softmax.config.model_type]
    cls = declared.architectures[type(softmax).__name__][1]
    model = cls(declared.rfa_config.from_parent(softmax.config, **options)).to(softmax.dtype).eval()
    absent, unknown = model.load_state_dict(softmax.state_dict(), strict=False)
    assert not unknown
    assert all(".feature_map." in key or ".gate." in key for key in absent)
    return with_plain_experts(model)


def pair(name: str, options: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Return a softmax model and an RFA model with its weights, by default with features and a small window."""
    softmax = parent(name).to(torch.float32 if name in IN_FLOAT32 else dtype)
    return softmax, converted(softmax, **(WINDOWED if options is None else options))


def rfa_indices(model: Any) -> list[int]:
    """Return the indices of the RFA layers."""
    return [index for index in range(model.config.num_hidden_layers) if model.config.is_rfa("causal", index)]


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


# The whole text in the window: the softmax model


@torch.no_grad()
@every_decoder
@pytest.mark.parametrize("options", WHOLE, ids=["none", "features"])
def test_a_window_of_the_texts_length_is_the_softmax_model(name, options):
    softmax, model = pair(name, options)
    assert rfa_indices(model)
    assert len(rfa_modules(model)) == len(rfa_indices(model))
    ids = tokens(3, LENGTH)
    assert relative_error(logits(model, ids), logits(softmax, ids)) < 1e-5
    for mask in (padded("left"), padded("right")):
        at = positions_of(softmax, mask)
        found, expected = (logits(each, ids, mask=mask, **at)[mask > 0] for each in (model, softmax))
        assert relative_error(found, expected) < 1e-5
    plain = converted(softmax, num_features=4, window_size=2)
    assert relative_error(logits(plain, ids), logits(softmax, ids)) > 1e-3, "attention has to matter"


@torch.no_grad()
@every_decoder
def test_generation_in_such_a_window_is_the_softmax_models(name):
    softmax, model = pair(name, {"window_size": FULL, "num_features": 8})
    ids, mask = tokens(3, 9), torch.ones(3, 9, dtype=torch.long)
    mask[1, :4], mask[2, :7] = 0, 0
    for prompts, read, beams in ((ids[:1], mask[:1], 1), (ids, mask, 1), (ids, mask, 3)):
        options = {"attention_mask": read, "num_beams": beams, "do_sample": False, "max_new_tokens": 14}
        found, expected = (each.generate(prompts, **options) for each in (model, softmax))
        assert torch.equal(found, expected)


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
    ids, mask = tokens(3, LENGTH), padded("left")
    assert relative_error(logits(model, ids), logits(softmax, ids)) < 1e-5
    at = positions_of(softmax, mask)
    found, expected = (logits(each, ids, mask=mask, **at)[mask > 0] for each in (model, softmax))
    assert relative_error(found, expected) < 1e-5
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

    def by_steps(each: Any) -> tuple[Tensor, Tensor]:
        found, mask, cache = [], padded("left"), None
        at = positions_of(each, mask)
        for start, stop in ((0, 24), (24, 25), (25, 26), (26, LENGTH)):
            given = {name: positions[:, start:stop] for name, positions in at.items()}
            output = each(
                ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache, use_cache=True, **given
            )
            found, cache = [*found, output.logits], output.past_key_values
        return torch.cat(found, dim=1)[2, -6:], logits(each, ids[2:, -6:])[0]

    assert is_exact(softmax, model, by_steps)


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
        cache = model(tokens(2, count), past_key_values=cache).past_key_values
        sizes[cache.get_seq_length()] = cache_num_bytes(cache)
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
        assert layer.state.nbytes == 2 * heads * 16 * (width + 1) * 4
        assert layer.window_cache.shape[:3] == (2, heads, 5)


@torch.no_grad()
@every_decoder
def test_operations_on_the_cache(name):
    """A crop while recording, and rows that are repeated, reordered and chosen, go on as if those had been read."""
    _, model = pair(name, dtype=torch.float64)
    ids = tokens(2, 20)
    cache = model(ids[:, :9], use_cache=True).past_key_values
    if all(isinstance(layer, RFALayer) for layer in cache.layers):
        for layer in cache.layers:
            layer.activate_past_recording()
        model(ids[:, 9:14], past_key_values=cache)
        cache.crop(-3)
        assert cache.get_seq_length() == 11
        assert relative_error(model(ids[:, 11:], past_key_values=cache).logits, logits(model, ids)[:, 11:]) < 1e-5
    cache, order = model(ids[:, :9], use_cache=True).past_key_values, torch.tensor([1, 0, 0, 1])
    if not all(hasattr(layer, "batch_repeat_interleave") for layer in cache.layers):
        pytest.skip("transformers' layers for recurrences and convolutions cannot repeat their rows")
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([2, 0, 1, 3]))
    assert relative_error(model(ids[order, 9:], past_key_values=cache).logits, logits(model, ids)[order, 9:]) < 1e-5
    cache.batch_select_indices(torch.tensor([2]))
    assert cache.layers[rfa_indices(model)[0]].state.shape[0] == 1


@torch.no_grad()
@every_decoder
def test_a_static_cache_holds_the_state(name):
    softmax, model = pair(name, dtype=torch.float64)
    ids = tokens(2, 20)

    def by_steps(each: Any) -> tuple[Tensor, Tensor]:
        cache = StaticCache(config=each.config, max_cache_len=32)
        pieces = (ids[:, :9], ids[:, 9:10], ids[:, 10:11])
        found = [each(piece, past_key_values=cache).logits for piece in pieces]
        if each is model:
            assert isinstance(cache.layers[rfa_indices(model)[0]], RFALayer)
        return torch.cat(found, dim=1), logits(each, ids)[:, :11]

    assert is_exact(softmax, model, by_steps)
    options = {"do_sample": False, "max_new_tokens": 9, "eos_token_id": None, "disable_compile": True}
    found, expected = (model.generate(ids, cache_implementation=each, **options) for each in ("static", None))
    assert torch.equal(found, expected)


# Files


@every_decoder
def test_checkpoints_say_what_they_are_and_come_back_equal(name, tmp_path):
    softmax, model = pair(name)
    model.save_pretrained(tmp_path / "one")
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    assert config["model_type"] == f"rfa_{name}"
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "one", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    assert type(again) is type(model)
    again.save_pretrained(tmp_path / "two")
    files = [sorted(path.name for path in (tmp_path / each).iterdir()) for each in ("one", "two")]
    assert files[0] == files[1]
    for file in files[0]:
        first, second = ((tmp_path / each / file).read_bytes() for each in ("one", "two"))
        assert first == second, file
    ids = tokens(2, 9)
    assert relative_error(logits(again.eval(), ids), logits(model, ids)) < 1e-5
    written = load_file(tmp_path / "one" / "model.safetensors")
    for key, tensor in softmax.state_dict().items():
        assert key not in written or torch.equal(written[key], tensor), key
    assert again.config.to_dict() == AutoConfig.from_pretrained(tmp_path / "two").to_dict() | {
        key: again.config.to_dict()[key] for key in ("_name_or_path",) if key in again.config.to_dict()
    }


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
    assert [key for key in outputs if key != "past_key_values"] == [key for key in expected if key != "past_key_values"]
    shapes = [shape for ending, shape in OUTPUTS.items() if type(model).__name__.endswith(ending)]
    assert tuple(outputs[0].shape) == (shapes[0] if shapes else tuple(expected[0].shape))
    assert torch.isfinite(outputs[0]).all()
    assert torch.equal(outputs[0], model.eval()(ids, use_cache=False)[0])


#: Runs without hf_rfa: loads the language model of every family, and writes what it says.
ELSEWHERE = """
import sys
sys.modules["hf_rfa"] = None  # importing it raises ModuleNotFoundError
import pathlib, torch, transformers
from safetensors.torch import save_file

folder, found = pathlib.Path(sys.argv[1]), {}
ids = torch.tensor([[*range(5, 16), 2]])
for name in sys.argv[2:]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / name, trust_remote_code=True).eval()
    assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
    with torch.no_grad():
        found[f"{name} logits"] = model(ids).logits.contiguous()
    found[f"{name} tokens"] = tokens = model.generate(ids, max_new_tokens=9, do_sample=False)
    model.save_pretrained(folder / f"{name}-again")
    again = transformers.AutoModelForCausalLM.from_pretrained(folder / f"{name}-again", trust_remote_code=True)
    assert torch.equal(again.generate(ids, max_new_tokens=9, do_sample=False), tokens)
save_file(found, folder / "found.safetensors")
"""


@pytest.mark.parametrize("names", [QUICK, pytest.param(NAMES, marks=pytest.mark.slow)], ids=["quick", "all"])
def test_every_language_model_works_without_the_package(names, tmp_path):
    models = {name: pair(name)[1] for name in names}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", ELSEWHERE, str(tmp_path), *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found, ids = load_file(tmp_path / "found.safetensors"), torch.tensor([[*range(5, 16), 2]])
    for name, model in models.items():
        assert_close(found[f"{name} logits"], logits(model, ids))
        assert torch.equal(found[f"{name} tokens"], model.generate(ids, max_new_tokens=9, do_sample=False))


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


@torch.no_grad()
@every_decoder
def test_packed_documents_are_the_documents_in_rows_of_their_own(name):
    lengths, ids = (9, 3, 17), tokens(1, LENGTH)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    softmax, model = pair(name, dtype=torch.float64)
    hybrid = converted(softmax, **WINDOWED, softmax_layers=rfa_indices(model)[1:])
    apart = {}
    for each in (softmax, model, hybrid):
        found = each(ids, position_ids=positions, use_cache=False).logits
        alone = [logits(each, part) for part in ids.split(lengths, dim=1)]
        apart[each] = relative_error(found, torch.cat(alone, dim=1)) < 1e-5
    if apart[softmax]:  # OPT's softmax attention sees the documents before
        assert apart[model]
        assert apart[hybrid]
    else:
        assert apart[model] or len(rfa_indices(model)) < model.config.num_hidden_layers


# Compilation and 16 bits


def compiled_step(name: str, steps: int) -> None:
    _, model = pair(name)
    if model._can_set_experts_implementation():  # "eager" loops over what experts get
        model.set_experts_implementation("grouped_mm")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    first, ids = tokens(2, 7), tokens(2, steps)
    caches = [model(first, use_cache=True).past_key_values for _ in range(2)]
    for t in range(steps):
        found, expected = (
            each(ids[:, t : t + 1], past_key_values=cache).logits
            for each, cache in zip((compiled, model), caches, strict=True)
        )
        assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert not torch._dynamo.utils.counters["graph_break"]


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@every_decoder
def test_a_decoding_step_compiles_to_one_graph(name):
    compiled_step(name, 6)


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
    optimizer = torch.optim.SGD([each for each in adapted.parameters() if each.requires_grad], lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        adapted(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    changed = logits(adapted.eval(), ids)
    assert relative_error(changed, expected) > 1e-4
    assert_close(logits(adapted.merge_and_unload(), ids), changed, atol=1e-4, rtol=1e-3)


# What is refused


def saved(name: str, folder: Path, **fields: Any) -> Path:
    parent(name, **fields).save_pretrained(folder)
    return folder


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("deepseek_v3", {}, {}, "model_type 'deepseek_v3', which cannot be converted. docs/models.md lists"),
    ("gemma2", {"attn_logit_softcapping": 50.0}, {}, "attn_logit_softcapping=50.0"),
    (
        "mistral",
        {"sliding_window": 8},
        {},
        "no layer of .* attends to all tokens.*sliding_attention.*nothing to convert",
    ),
    ("gemma3_text", {}, {"layers": [0]}, r"layers to convert must be indices among .*, got \[0\]"),
    ("gpt_oss", {}, {"feature_map": "positive"}, "learned sinks.*window_size"),
    ("llama", {}, {"layers": [3]}, r"layers to convert must be indices from 0 to 2, got \[3\]"),
    ("llama", {}, {"window_size": 129}, "window_size must be from 0 to 128"),
    ("llama", {}, {"max_positions": 128}, "max_positions=128 does not extend the 128 positions"),
]


@pytest.mark.parametrize(("name", "fields", "options", "message"), REFUSED)
def test_what_cannot_be_converted_is_refused_before_anything_is_written(name, fields, options, message, tmp_path):
    saved(name, tmp_path / "parent", **fields)
    with pytest.raises(InputError, match=message) as error:
        convert(tmp_path / "parent", tmp_path / "out", **options)
    assert "\n" not in str(error.value)
    assert leftovers(tmp_path) == ["parent"]


# Conversion


@every_decoder
def test_conversion(name, tmp_path):
    """On random tokens: every weight is kept, calibration helps, and the report counts what there is."""
    folder = saved(name, tmp_path / "parent")
    options = {"window_size": 4} if name in WITH_SINKS else {}
    report = convert(folder, tmp_path / "out", num_features=16, gate=True, **options)
    softmax, model = (AutoModelForCausalLM.from_pretrained(each).eval() for each in (folder, tmp_path / "out"))
    before, after = softmax.state_dict(), model.state_dict()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    converted_layers = rfa_indices(model)
    assert report.layers == {"causal": (len(converted_layers), model.config.num_hidden_layers)}
    assert report.feature_map == "positive"
    assert report.feature_dims == {"causal": 16}
    assert report.num_parameters == sum(each.numel() for each in model.parameters())
    known = {key for key, _ in softmax.named_parameters()}
    assert report.added_parameters == sum(each.numel() for key, each in model.named_parameters() if key not in known)
    assert report.max_logit_difference == 0
    heads, width = (getattr(model.config, f"{each}_for")("causal") for each in ("num_heads", "head_dim"))
    state = len(converted_layers) * heads * (16 * (width + 1) + (2 * width * 4 if options else 0)) * 4
    if not options:
        assert report.state_bytes == state
    assert len(report.gains) == len(converted_layers)
    assert all(gain.after < gain.before for gain in report.gains)
    for length, found in report.own_cache_bytes.items():
        with torch.no_grad():
            assert found == cache_num_bytes(model(tokens(1, length), use_cache=True).past_key_values)
            assert report.cache_bytes[length] == cache_num_bytes(
                softmax(tokens(1, length), use_cache=True).past_key_values
            )
    ids = tokens(2, LENGTH)
    assert torch.isfinite(logits(model, ids)).all()
    assert leftovers(tmp_path) == ["out", "parent"]


@every_decoder
def test_the_most_sensitive_layer_stays_softmax(name, tmp_path):
    options = {"window_size": 4} if name in WITH_SINKS else {}
    folder = saved(name, tmp_path / "parent")
    whole = FAMILIES[name].rfa_config.from_parent(AutoConfig.from_pretrained(folder), **options)
    possible = [index for index in range(whole.num_hidden_layers) if whole.is_rfa("causal", index)]
    if len(possible) == 1:
        with pytest.raises(InputError, match="keep_softmax=1 must leave at least one"):
            convert(folder, tmp_path / "out", keep_softmax=1, num_features=8, **options)
        return
    report = convert(folder, tmp_path / "out", keep_softmax=1, num_features=8, **options)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    (kept,) = model.config.softmax_layers
    assert kept in possible
    assert len(report.sensitivities) == len(possible)
    assert rfa_indices(model) == [index for index in possible if index != kept]


# Rotary positions


ROTARY = [name for name in NAMES if has_rotary_positions(tiny_config(name))]
#: Rotations or scales that depend on the position or on the length of the text.
SEES_POSITIONS = ("beam", "hunyuan_v1_dense", "hunyuan_v1_moe", "ministral3")
every_rotary_decoder = pytest.mark.parametrize("name", [case(name) for name in ROTARY])


@torch.no_grad()
@every_rotary_decoder
def test_a_shift_of_all_positions_changes_no_more_than_the_features_error(name, tmp_path):
    """The softmax model sees differences of positions alone; random features of rotated queries and keys see more.

    Calibrated at positions from anywhere, they are as near to softmax attention at the last positions as at the first ones: a
    shift by 1,000 changes the logits by 0.85 to 1.3 times what the features change them by, in these models.
    """
    options = {"window_size": 2} if name in WITH_SINKS else {}
    folder = saved(name, tmp_path / "parent", max_position_embeddings=2048)
    convert(folder, tmp_path / "out", num_features=256, **options)
    softmax, model = (AutoModelForCausalLM.from_pretrained(each).eval() for each in (folder, tmp_path / "out"))
    ids, positions = tokens(2, LENGTH), torch.arange(LENGTH)[None]
    (exact, exact_moved), (found, moved) = (
        [each(ids, position_ids=positions + shift, use_cache=False).logits for shift in (0, 1000)]
        for each in (softmax, model)
    )
    if torch.equal(exact_moved, exact):
        assert softmax.config.position_embedding_type != "rope"
        pytest.skip(f"the model of {name} sees no positions")
    if relative_error(exact_moved, exact) > 1e-4:
        assert name in SEES_POSITIONS
        pytest.skip(f"the softmax model of {name} sees more of positions than their differences")
    assert name not in SEES_POSITIONS
    error = relative_error(found, exact)
    assert relative_error(moved, exact) < 1.5 * error
    assert 0 < relative_error(moved, found) < 1.6 * error


@torch.no_grad()
@every_rotary_decoder
def test_more_positions_scale_the_rotations(name, tmp_path):
    options = {"window_size": 2} if name in WITH_SINKS else {}
    folder = saved(name, tmp_path / "parent")
    softmax = AutoConfig.from_pretrained(folder)
    kinds = [softmax.rope_parameters] if "rope_type" in softmax.rope_parameters else softmax.rope_parameters.values()
    if name in ("phi3", "phimoe") or {each["rope_type"] for each in kinds if each} - {"default", "yarn"}:
        with pytest.raises(InputError, match=r"rotations are scaled already|do not take rotations"):
            convert(folder, tmp_path / "out", num_features=8, max_positions=512, **options)
        return
    report = convert(folder, tmp_path / "out", num_features=8, max_positions=512, **options)
    assert any("512 positions by YaRN" in note for note in report.notes)
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.max_position_embeddings == 512
    rotations = config.rope_parameters
    rotations = rotations if "rope_type" in rotations else rotations["full_attention"]
    if rotations is not None:  # else layers that attend to all tokens have no positions
        assert rotations["rope_type"] == "yarn"
        assert rotations["original_max_position_embeddings"] * rotations["factor"] == 512
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.isfinite(logits(model, tokens(1, 500))).all()


@torch.no_grad()
def test_calibration_sees_positions_from_anywhere():
    softmax = parent("llama", max_position_embeddings=4096)
    starts = set()
    for seed in range(4):
        inputs = calibration_inputs(softmax.config, None, None, seed=seed)
        positions = inputs["position_ids"]
        assert positions.shape == inputs["input_ids"].shape == (1, 1024)
        assert torch.equal(positions[0], positions[0, 0] + torch.arange(1024))
        assert int(positions.max()) < 4096
        starts.add(int(positions[0, 0]))
        (seen,) = capture_inputs(softmax, ["model.layers.1.self_attn"], inputs).values()
        rotations = softmax.model.rotary_emb(seen.hidden_states, positions)
        assert_close(seen.options["position_embeddings"], rotations)
    assert len(starts) == 4


def test_llama_is_distilled(tmp_path):
    """Two steps of each stage change the features, and the whole model, and the result generates."""
    folder = saved("llama", tmp_path / "parent")
    save_tiny_tokenizer(folder)
    convert(folder, tmp_path / "rfa", feature_map="exponential", num_features=8, gate=True, window_size=4)
    (tmp_path / "text.txt").write_text(words(700))
    recipe = Recipe(*(Stage(steps=2, batch_size=4, block_length=16) for _ in range(2)))
    distill(tmp_path / "rfa", tmp_path / "out", data=tmp_path / "text.txt", recipe=recipe, teacher=folder)
    before, after = weights(tmp_path / "rfa"), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    assert any(not torch.equal(after[key], each) for key, each in before.items() if ".feature_map." in key)
    assert not torch.equal(after["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert model.generate(tokens(1, 5), max_new_tokens=5, eos_token_id=None).shape == (1, 10)
