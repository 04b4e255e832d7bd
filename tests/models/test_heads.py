"""What transformers asks of its own models, asked of every head of every family.

docs/serving.md says what does not hold, and why.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import AutoConfig, Cache
from transformers.models.auto import modeling_auto

from tests.families import (
    COMMON,
    FAMILIES,
    HEADS,
    ROWS,
    base_config,
    every_head,
    every_model,
    has_encoder,
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


def storages(model: nn.Module, keys: Any) -> set[int]:
    state = model.state_dict()
    return {state[key].data_ptr() for key in keys}


def assert_tied(model: Any) -> None:
    for target, shared in model.all_tied_weights_keys.items():
        assert len(storages(model, (target, shared))) == 1, target


@pytest.fixture
def model(family: str, head: str) -> Any:
    return make_head(family, head)


# Saving and loading


@every_model
@pytest.mark.parametrize("tied", [True, False])
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
    assert_tied(again)
    assert tied == any("lm_head" in target for target in model.all_tied_weights_keys) or not hasattr(model, "lm_head")
    # Tensors of a file lie anywhere in memory, copies where new ones do: sums over others are rounded otherwise.
    assert_same(run(copy.deepcopy(again).eval()), run(model))


AUTO_CLASSES = [each for name, each in vars(modeling_auto).items() if name.startswith("AutoModel")]
AUTO_HEADS = [
    (family, auto, softmax_class.__name__)
    for family in COMMON
    for auto in AUTO_CLASSES
    if (softmax_class := auto._model_mapping.get(FAMILIES[family].base_config, None))
]


@pytest.mark.parametrize(("family", "auto", "head"), AUTO_HEADS)
def test_auto_classes_load_the_heads_that_they_load_of_softmax_models(family, auto, head, model, tmp_path):
    model.save_pretrained(tmp_path)
    again = auto.from_pretrained(tmp_path).eval()
    assert type(again) is type(model)
    assert type(AutoConfig.from_pretrained(tmp_path)) is FAMILIES[family].rfa_config
    assert_same(run(again), run(model), 1e-6)


@every_head
def test_copies(family, head, tmp_path):
    """deepcopy, and a state dict on disk read without running pickled code; no dropout acts in evaluation."""
    names = {"gpt2": ("attn_pdrop",), "llama": ("attention_dropout",)}.get(family, ("attention_dropout", "dropout"))
    dropout = dict.fromkeys(names, 0.5)
    model = make_head(family, head, **dropout)
    expected, again = run(model), copy.deepcopy(model)
    assert_same(run(model), expected)
    assert_same(run(again), expected)
    assert storages(again, again.state_dict()).isdisjoint(storages(model, model.state_dict()))
    assert_tied(again)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    other = make_head(family, head, feature_seed=5)
    assert not all(torch.equal(one, two) for one, two in zip(run(other), expected, strict=True))
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert_same(run(other), expected)


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


# Embeddings


@every_head
def test_resizing_the_vocabulary_and_back(head, model, tmp_path):
    expected, weights = run(model), model.get_input_embeddings().weight.detach().clone()
    for size in (70, 61):
        model.resize_token_embeddings(size, mean_resizing=False)
        embeddings, output = model.get_input_embeddings(), model.get_output_embeddings()
        assert model.config.vocab_size == embeddings.weight.shape[0] == size
        assert torch.equal(embeddings.weight[:61], weights)
        if output is not None:
            assert output.weight.shape[0] == size
            tied = output.weight.data_ptr() == embeddings.weight.data_ptr()
            assert tied == model.config.tie_word_embeddings
        if size == 70:
            inputs = inputs_for(model)
            inputs["input_ids"].view(-1)[0] = 69
            assert all(torch.isfinite(tensor).all() for tensor in tensors_of(model(**inputs)))
            model.save_pretrained(tmp_path)
            if head != "MarianForCausalLM":  # nor does the softmax one: its configuration keeps decoder_vocab_size
                assert_same(run(type(model).from_pretrained(tmp_path).eval()), run(model), 1e-6)
    assert_same(run(model), expected, 1e-6)


@pytest.mark.parametrize(("family", "head"), [each for each in HEADS if each[1] != "GPT2DoubleHeadsModel"])
def test_embeddings_as_inputs(head, model):
    """`inputs_embeds` in place of token ids, for the encoder and the decoder; GPT-2 takes no embeddings of choices."""
    inputs, embed = inputs_for(model), model.get_input_embeddings()
    if head in ("GPT2ForSequenceClassification", "LlamaForSequenceClassification"):  # find the last token by its id
        inputs["attention_mask"][:] = 1
        inputs["input_ids"].clamp_(min=3)
    given = {key: value for key, value in inputs.items() if key not in ("input_ids", "decoder_input_ids")}
    given["inputs_embeds"] = embed(inputs["input_ids"]).detach()
    if "decoder_input_ids" in inputs:
        given["decoder_inputs_embeds"] = embed(inputs["decoder_input_ids"]).detach()
    elif model.config.is_encoder_decoder:
        # BART makes the decoder's input from token ids, so that the softmax classifiers refuse embeddings too
        with pytest.raises((NotImplementedError, ValueError)):
            model(**given)
        return
    with torch.no_grad():
        found, expected = (tensors_of(model(**each, use_cache=False)) for each in (given, inputs))
    assert_same(found, expected, 1e-5)


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


@every_head
@torch.no_grad()
def test_a_row_of_a_batch_is_the_row_alone(model):
    inputs, whole = inputs_for(model), run(model)
    for row in range(ROWS):
        alone = tensors_of(model(**{key: value[row : row + 1] for key, value in inputs.items()}, use_cache=False))
        assert_same(alone, [each[row : row + 1] for each in whole], 1e-5)


# What a model says of itself


@every_head
def test_no_layer_may_be_split_over_devices(model):
    blocks = [module for module in model.modules() if type(module).__name__ in set(model._no_split_modules)]
    assert blocks
    inside = {layer for block in blocks for layer in rfa_modules(block).values()}
    assert inside == set(rfa_modules(model).values())


@every_head
def test_attention_implementations(family, head):
    """Both of torch's act on softmax layers and change nothing; others are refused, by transformers, before anything runs."""
    hybrid = (
        {"softmax_layers": [0]} if not has_encoder(family) else {"softmax_layers": [0], "softmax_cross_layers": [1]}
    )
    expected = None
    for implementation in ("eager", "sdpa"):
        model = make_head(family, head, attn_implementation=implementation, **hybrid)
        assert model.config._attn_implementation == implementation
        expected = expected or run(model)
        assert_same(run(model), expected, 1e-4)
    model.set_attn_implementation("eager")
    assert_same(run(model), expected, 1e-4)
    with pytest.raises(ImportError, match="FlashAttention2"):
        make_head(family, head, attn_implementation="flash_attention_2")
    with pytest.raises(ValueError, match="no_such"):
        make_head(family, head, attn_implementation="no_such")
