"""What transformers asks of its own models, asked of every head of every family; its own suite asks the rest.

docs/serving.md says what does not hold, and why.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close
from transformers import Cache

from tests.families import (
    CASES,
    FAMILIES,
    HEADS,
    base_config,
    every_head,
    inputs_for,
    make_head,
    make_named,
    rfa_modules,
)


def tensors_of(outputs: Any) -> list[Tensor]:
    """Return all tensors of a model's outputs in their order, caches left out."""
    if isinstance(outputs, Tensor):
        return [outputs]
    if outputs is None or isinstance(outputs, Cache):
        return []
    values = outputs.values() if isinstance(outputs, dict) else outputs
    return [tensor for value in values for tensor in tensors_of(value)]


@torch.no_grad()
def run(model: Any, **options: Any) -> list[Tensor]:
    """Return all tensors that a model returns for its inputs."""
    return tensors_of(model(**{**inputs_for(model), "use_cache": False, **options}))


def assert_same(found: list[Tensor], expected: list[Tensor], tolerance: float = 0.0) -> None:
    assert found
    assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture
def model(family: str, head: str) -> Any:
    return make_head(family, head)


# Saving and loading


@pytest.mark.parametrize(
    ("family", "name", "tied"), [*((*each, True) for each in HEADS + CASES), *((*each, False) for each in HEADS)]
)
def test_saving_and_loading(family, name, tied, tmp_path):
    """Every tensor comes back, none is missing, unexpected or initialized again, and what is tied stays tied."""
    model = make_named(family, name, tie_word_embeddings=tied)
    with torch.no_grad():  # values that no initialization has
        for key, tensor in model.state_dict().items():
            if key not in model._keys_to_ignore_on_save:  # Marian's positions, a formula
                tensor.add_(0.25 + torch.rand_like(tensor) / 100)
    model.save_pretrained(tmp_path / "one")
    again, info = type(model).from_pretrained(tmp_path / "one", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    assert_close(dict(again.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    again.save_pretrained(tmp_path / "two")
    files = [tmp_path / each / "model.safetensors" for each in ("one", "two")]
    assert files[0].read_bytes() == files[1].read_bytes()
    written = load_file(files[0])
    for target, shared in model.all_tied_weights_keys.items():
        assert (target in written) + (shared in written) == 1, "tied tensors are written once"
        assert again.state_dict()[target].data_ptr() == again.state_dict()[shared].data_ptr()
    assert tied == any("lm_head" in target for target in model.all_tied_weights_keys) or not hasattr(model, "lm_head")
    # Tensors of a file lie anywhere in memory, copies where new ones do: sums over others are rounded otherwise.
    assert_same(run(copy.deepcopy(again).eval()), run(model))


@every_head
def test_a_head_is_initialized_where_a_checkpoint_has_none(family, head, tmp_path):
    """A body's checkpoint loads into every head: the body's tensors are kept, the head's are drawn in the model's range.

    The missing keys are those that the softmax head misses of a softmax body (a decoder alone: the embeddings, which BART's
    body calls otherwise).
    """
    body_name = FAMILIES[family].rfa_config.AUTO_MAP["AutoModel"].rpartition(".")[2].removeprefix("RFA")
    softmax_body, softmax_head = (FAMILIES[family].architectures[each][0] for each in (body_name, head))
    body = make_head(family, body_name)
    with torch.no_grad():
        for tensor in body.state_dict().values():
            tensor.add_(0.25)
    body.save_pretrained(tmp_path / "rfa")
    softmax_body(base_config(family)).save_pretrained(tmp_path / "softmax")
    expected_missing = softmax_head.from_pretrained(tmp_path / "softmax", output_loading_info=True)[1]["missing_keys"]
    cls = FAMILIES[family].architectures[head][1]
    torch.manual_seed(3)
    model, info = cls.from_pretrained(tmp_path / "rfa", num_labels=3, output_loading_info=True)
    assert set(info["missing_keys"]) == set(expected_missing)
    prefix = "" if type(model) is type(body) else f"{model.base_model_prefix}."
    expected = {f"{prefix}{key}": value for key, value in body.state_dict().items()}
    for key, tensor in model.state_dict().items():
        assert torch.isfinite(tensor).all(), key
        if key in expected and key not in info["missing_keys"] and key not in model._keys_to_ignore_on_save:
            assert torch.equal(tensor, expected[key]), key
        elif key in info["missing_keys"] and key.endswith("weight"):
            assert 0.15 < float(tensor.std()) < 0.45, key  # the range is 0.3
        elif key in info["missing_keys"]:
            assert not tensor.any(), key


# Outputs


@every_head
def test_hidden_states_and_attentions(family, head, model):
    """They have the shapes that a softmax model's have, and gradients that can be looked at; a tuple holds the same."""
    options = {"output_hidden_states": True, "output_attentions": True, "use_cache": False, **inputs_for(model)}
    config = base_config(family, num_labels=3, pad_token_id=model.config.pad_token_id, attn_implementation="eager")
    base = FAMILIES[family].architectures[head][0](config).eval()
    outputs, expected = model(**options), base(**options)
    assert outputs.keys() == expected.keys()
    as_tuple = model(**options, return_dict=False)
    assert [type(each) for each in as_tuple] == [type(each) for each in outputs.to_tuple()]
    assert_same(tensors_of(as_tuple), tensors_of(outputs))
    looked_at = []
    for key in outputs:
        found, wanted = tensors_of(outputs[key]), tensors_of(expected[key])
        assert [each.shape for each in found] == [each.shape for each in wanted], key
        if key.endswith("attentions"):
            for each in found:
                assert bool((each >= 0).all())
                assert_close(each.sum(-1), torch.ones(each.shape[:-1]))
        if found and key.endswith(("attentions", "hidden_states")):
            looked_at.append(found[0])
            found[0].retain_grad()
    assert len(looked_at) == (5 if model.config.is_encoder_decoder else 2)
    sum((each.sum() for each in looked_at if each.ndim == 4), outputs[0].flatten()[0]).backward()
    assert all(each.grad is not None for each in looked_at)


# What a model says of itself


@every_head
def test_no_layer_may_be_split_over_devices(model):
    blocks = [module for module in model.modules() if type(module).__name__ in set(model._no_split_modules)]
    assert blocks
    inside = {layer for block in blocks for layer in rfa_modules(block).values()}
    assert inside == set(rfa_modules(model).values())
