"""What transformers asks of its own models, asked of every head of every family.

Padding, caches, generation, packed documents and 16 bits in depth are in the files of the families; docs/compatibility.md
says what does not hold, and why.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Cache

from hf_rfa.convert.base_model import rfa_layers
from hf_rfa.families import FAMILIES

from .conftest import tiny_parent_config, tiny_seq2seq_config

ARCHITECTURES = [(family, name) for family in FAMILIES for name in FAMILIES[family].architectures]
GENERATING = [
    each for each in ARCHITECTURES if each[1].endswith(("LMHeadModel", "ForCausalLM", "MTModel", "Generation"))
]
CLASSIFIERS = [each for each in ARCHITECTURES if each[1].endswith("ForSequenceClassification")]
ROWS, LENGTH, SOURCE_LENGTH, WIDTH = 3, 9, 7, 24
every_head = pytest.mark.parametrize(("family", "name"), ARCHITECTURES)
every_generating_head = pytest.mark.parametrize(("family", "name"), GENERATING)


def config_for(family: str, **options: Any) -> Any:
    """A configuration with attention of every kind RFA, gates, and three labels."""
    options = {"num_features": 8, "gate": True, "num_labels": 3, **options}
    own = FAMILIES[family].rfa_config
    if family == "gpt2":
        return own.from_parent(tiny_parent_config(pad_token_id=0), **options)
    options = {"num_cross_features": 8, "softmax_encoder_layers": [], **options}
    return own.from_parent(tiny_seq2seq_config(family), **options)


def make(family: str, name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return FAMILIES[family].architectures[name][1](config_for(family, **options)).eval()


def inputs_for(model: Any) -> dict[str, Tensor]:
    """Inputs of a head, the second row padded."""
    name, length = type(model).__name__, SOURCE_LENGTH if model.config.is_encoder_decoder else LENGTH
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 61, (ROWS, length), generator=generator)
    mask = torch.ones_like(ids)
    if name.startswith("RFABartForSequenceClassification"):  # reads the end-of-text token, one per row
        ids[:, -1] = 2
        mask[1, :2] = 0
    else:
        mask[1, 5:] = 0
        ids[1, 5:] = model.config.pad_token_id
    if name == "RFAGPT2DoubleHeadsModel":
        ids, mask = torch.stack([ids, ids.flip(0)], dim=1), torch.stack([mask, mask.flip(0)], dim=1)
        return {"input_ids": ids, "attention_mask": mask, "mc_token_ids": torch.full((ROWS, 2), 3)}
    inputs = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder and "Classification" not in name and "Answering" not in name:
        inputs["decoder_input_ids"] = torch.randint(3, 61, (ROWS, LENGTH), generator=generator)
    return inputs


def labels_for(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Labels of a head; none for a body."""
    name, classes = type(model).__name__, torch.arange(ROWS)
    if name.endswith("ForSequenceClassification"):
        return {"labels": classes}
    if name.endswith("ForTokenClassification"):
        return {"labels": inputs["input_ids"] % 3}
    if name.endswith("ForQuestionAnswering"):
        return {"start_positions": classes, "end_positions": classes + 2}
    if name.endswith("DoubleHeadsModel"):
        return {"labels": inputs["input_ids"], "mc_labels": classes % 2}
    if name.endswith("Model") and "LMHead" not in name and "MT" not in name:
        return {}
    return {"labels": inputs.get("decoder_input_ids", inputs["input_ids"])}


def loss_of(model: Any) -> Tensor:
    """Return the loss of a head, or something like one of a body."""
    inputs = inputs_for(model)
    outputs = model(**inputs, **labels_for(model, inputs), use_cache=False)
    if model.__class__.__name__.endswith("DoubleHeadsModel"):
        return outputs.loss + outputs.mc_loss
    return outputs.loss if "loss" in outputs else outputs[0].square().mean()


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


def assert_same(found: list[Tensor], expected: list[Tensor], **tolerance: float) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **(tolerance or {"rtol": 0, "atol": 0}))


def storages(model: nn.Module, keys: Any) -> set[int]:
    state = model.state_dict()
    return {state[key].data_ptr() for key in keys}


# Saving and loading


@every_head
@pytest.mark.parametrize("tied", [True, False])
def test_saving_and_loading(family, name, tied, tmp_path):
    """Every tensor comes back, none is missing or unexpected, nothing is started anew, and what is tied stays tied."""
    model = make(family, name, tie_word_embeddings=tied)
    with torch.no_grad():  # values that no start has
        for key, tensor in model.state_dict().items():
            if key not in model._keys_to_ignore_on_save:  # Marian's positions, a formula
                tensor.add_(0.25 + torch.rand_like(tensor) / 100)
    model.save_pretrained(tmp_path)
    again, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    expected = model.state_dict()
    assert again.state_dict().keys() == expected.keys()
    for key, tensor in again.state_dict().items():
        assert torch.equal(tensor, expected[key]), key
    groups = model.all_tied_weights_keys
    written = load_file(tmp_path / "model.safetensors")
    for target, source in groups.items():
        assert (target in written) + (source in written) == 1, "tied tensors are written once"
        assert len(storages(again, (target, source))) == 1
    if not tied:
        assert not any("lm_head" in target for target in groups)
    assert_same(run(again.eval()), run(model), rtol=1e-6, atol=1e-6)


@every_head
def test_copies(family, name, tmp_path):
    """deepcopy, and a state dict on disk read without running pickled code."""
    model = make(family, name)
    expected = run(model)
    again = copy.deepcopy(model)
    assert_same(run(again), expected)
    assert storages(again, again.state_dict()).isdisjoint(storages(model, model.state_dict()))
    for target, source in again.all_tied_weights_keys.items():
        assert len(storages(again, (target, source))) == 1
    torch.save(model.state_dict(), tmp_path / "state.pt")
    other = make(family, name, feature_seed=5)
    assert not all(torch.equal(one, two) for one, two in zip(run(other), expected, strict=True))
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert_same(run(other), expected)


@every_head
def test_a_head_starts_where_a_checkpoint_has_none(family, name, tmp_path):
    """A body's checkpoint loads into every head: the body's tensors are kept, the head's are started in the model's range.

    What is missing is what the softmax head misses of a softmax body (a decoder alone: the embeddings, which BART's body
    calls otherwise).
    """
    body_name = next(
        each for each in FAMILIES[family].architectures if each in ("GPT2Model", "BartModel", "MarianModel")
    )
    body = make(family, body_name)
    with torch.no_grad():
        for tensor in body.state_dict().values():
            tensor.add_(0.25)
    body.save_pretrained(tmp_path / "rfa")
    softmax_body, softmax_head = FAMILIES[family].architectures[body_name][0], FAMILIES[family].architectures[name][0]
    softmax_body(tiny_parent_config() if family == "gpt2" else tiny_seq2seq_config(family)).save_pretrained(
        tmp_path / "softmax"
    )
    expected_missing = softmax_head.from_pretrained(tmp_path / "softmax", output_loading_info=True)[1]["missing_keys"]
    cls = FAMILIES[family].architectures[name][1]
    torch.manual_seed(3)
    model, info = cls.from_pretrained(tmp_path / "rfa", num_labels=3, output_loading_info=True)
    prefix = model.base_model_prefix
    assert set(info["missing_keys"]) == set(expected_missing)
    expected = {
        (key if type(model) is type(body) else f"{prefix}.{key}"): value for key, value in body.state_dict().items()
    }
    for key, tensor in model.state_dict().items():
        assert torch.isfinite(tensor).all(), key
        if key in expected and key not in info["missing_keys"] and key not in model._keys_to_ignore_on_save:
            assert torch.equal(tensor, expected[key]), key
        elif key in info["missing_keys"] and key.endswith("weight"):
            assert 0.15 < float(tensor.std()) < 0.45, key  # the range is 0.3
        elif key in info["missing_keys"]:
            assert not tensor.any(), key


@every_head
def test_weights_start_in_the_models_range(family, name):
    model = make(family, name)
    for path, module in model.named_modules():
        if isinstance(module, nn.LayerNorm):
            assert bool((module.weight == 1).all()), path
        if (
            "feature_map" in path
            or path.endswith("gate")
            or not getattr(module, "weight", torch.ones(())).requires_grad
        ):
            continue  # φ and gates have starts of their own; Marian's positions are a formula
        if isinstance(module, (nn.Linear, nn.Embedding)) or type(module).__name__ == "Conv1D":
            expected = 0.3 / (2 * model.config.n_layer) ** 0.5 if path.endswith("c_proj") else 0.3  # GPT-2's paper
            assert abs(float(module.weight.detach().std()) / expected - 1) < 0.35, path
            assert abs(float(module.weight.detach().mean())) < 0.15, path
            if getattr(module, "bias", None) is not None:
                assert not module.bias.any(), path
    assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())


@every_head
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loading_in_16_bits(family, name, dtype, tmp_path):
    """φ and gates stay float32, all else is rounded, and the model runs."""
    model = make(family, name)
    model.save_pretrained(tmp_path)
    small = type(model).from_pretrained(tmp_path, dtype=dtype).eval()
    for key, tensor in small.state_dict().items():
        kept = "feature_map" in key or ".gate." in key
        assert tensor.dtype == (torch.float32 if kept else dtype), key
        if kept:
            assert torch.equal(tensor, model.state_dict()[key]), key
    for found, expected in zip(run(small), run(model), strict=True):
        assert found.dtype == dtype
        assert torch.isfinite(found).all()
        assert float((found.float() - expected).norm() / expected.norm()) < 0.3


@pytest.mark.parametrize(("family", "name"), CLASSIFIERS)
def test_another_number_of_labels_has_to_be_asked_for(family, name, tmp_path):
    model = make(family, name)
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        type(model).from_pretrained(tmp_path, num_labels=7)
    other = type(model).from_pretrained(tmp_path, num_labels=7, ignore_mismatched_sizes=True).eval()
    assert run(other)[0].shape == (ROWS, 7)


# Embeddings


@every_head
def test_resizing_the_vocabulary_and_back(family, name, tmp_path):
    model = make(family, name)
    expected, weights = run(model), model.get_input_embeddings().weight.detach().clone()
    reloads = name != "MarianForCausalLM"  # nor does the parent: its configuration keeps the old decoder_vocab_size
    for size in (70, 61):
        model.resize_token_embeddings(size, mean_resizing=False)
        assert model.config.vocab_size == model.get_input_embeddings().weight.shape[0] == size
        assert torch.equal(model.get_input_embeddings().weight[:61], weights)
        if model.get_output_embeddings() is not None:
            assert model.get_output_embeddings().weight.shape[0] == size
            assert model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
        if size == 70:
            inputs = inputs_for(model)
            inputs["input_ids"].view(-1)[0] = 69
            assert all(torch.isfinite(tensor).all() for tensor in tensors_of(model(**inputs)))
            model.save_pretrained(tmp_path)
            if reloads:
                assert_same(run(type(model).from_pretrained(tmp_path).eval()), run(model), rtol=1e-6, atol=1e-6)
    assert_same(run(model), expected, rtol=1e-6, atol=1e-6)


@every_head
def test_input_embeddings_are_got_and_set(family, name):
    model = make(family, name)
    assert isinstance(model.get_input_embeddings(), nn.Embedding)
    before = run(model)
    other = nn.Embedding(61, WIDTH)
    model.set_input_embeddings(other)
    assert model.get_input_embeddings() is other
    assert not torch.allclose(run(model)[0], before[0])


@every_head
def test_embeddings_as_inputs(family, name):
    """`inputs_embeds` in place of token ids, for the encoder and the decoder."""
    if name == "GPT2DoubleHeadsModel":
        pytest.skip("GPT-2 takes no embeddings of choices")
    model = make(family, name)
    inputs, embed = inputs_for(model), model.get_input_embeddings()
    if name == "GPT2ForSequenceClassification":  # finds the last token by its id, or else takes the last place
        inputs["attention_mask"][:] = 1
        inputs["input_ids"].clamp_(min=3)
    with torch.no_grad():
        expected = tensors_of(model(**inputs, use_cache=False))
    given = {key: value for key, value in inputs.items() if key not in ("input_ids", "decoder_input_ids")}
    given["inputs_embeds"] = embed(inputs["input_ids"]).detach()
    if "decoder_input_ids" in inputs:
        given["decoder_inputs_embeds"] = embed(inputs["decoder_input_ids"]).detach()
    if model.config.is_encoder_decoder and "decoder_input_ids" not in inputs:
        # BART makes the decoder's input from token ids, so that the parent's classifiers refuse embeddings too
        with pytest.raises((NotImplementedError, ValueError)):
            model(**given)
        return
    with torch.no_grad():
        found = tensors_of(model(**given, use_cache=False))
    assert_same(found, expected, rtol=1e-5, atol=1e-5)


# Outputs


@every_head
def test_hidden_states_and_attentions(family, name):
    """One per layer, of the shapes that a softmax model's have, with gradients that can be looked at."""
    model = make(family, name)
    inputs = inputs_for(model)
    outputs = model(**inputs, output_hidden_states=True, output_attentions=True, use_cache=False)
    config = model.config
    rows = ROWS * (2 if name == "GPT2DoubleHeadsModel" else 1)

    def check(states: Any, weights: Any, layers: int, heads: int, length: int, source: int) -> None:
        assert len(states) == layers + 1
        assert {tuple(each.shape[-3:] if each.ndim == 3 else each.flatten(0, 1).shape) for each in states} == {
            (rows, length, WIDTH)
        }
        assert len(weights) == layers
        assert {tuple(each.shape) for each in weights} == {(rows, heads, length, source)}
        for each in weights:
            assert bool((each >= 0).all())
            torch.testing.assert_close(each.sum(-1), torch.ones(each.shape[:-1]))

    if config.is_encoder_decoder:
        length = outputs.decoder_hidden_states[0].shape[1]
        check(outputs.decoder_hidden_states, outputs.decoder_attentions, 3, 3, length, length)
        check(outputs.decoder_hidden_states, outputs.cross_attentions, 3, 3, length, SOURCE_LENGTH)
        check(outputs.encoder_hidden_states, outputs.encoder_attentions, 2, 2, SOURCE_LENGTH, SOURCE_LENGTH)
        looked_at = [outputs.encoder_hidden_states[0], outputs.encoder_attentions[0], outputs.cross_attentions[0]]
        looked_at += [outputs.decoder_hidden_states[0], outputs.decoder_attentions[0]]
    else:
        layers = config.num_layers_for("causal")
        check(outputs.hidden_states, outputs.attentions, layers, 3, LENGTH, LENGTH)
        looked_at = [outputs.hidden_states[0], outputs.attentions[0]]
    for each in looked_at:
        each.retain_grad()
    (outputs[0].flatten()[0] + sum(each.sum() for each in looked_at if each.shape[1] in (2, 3))).backward()
    assert all(each.grad is not None for each in looked_at)


@every_head
def test_tuples_and_dictionaries_hold_the_same(family, name):
    model = make(family, name)
    options = {"output_hidden_states": True, "output_attentions": True, "use_cache": True}
    inputs = inputs_for(model)
    with torch.no_grad():
        found = model(**inputs, **options, return_dict=False)
        expected = model(**inputs, **options)
    assert isinstance(found, tuple)
    assert_same(tensors_of(found), tensors_of(expected))
    assert [type(each) for each in found] == [type(each) for each in expected.to_tuple()]


@every_head
def test_a_row_of_a_batch_is_the_row_alone(family, name):
    model = make(family, name)
    inputs = inputs_for(model)
    whole = run(model)
    with torch.no_grad():
        for row in range(ROWS):
            alone = tensors_of(model(**{key: value[row : row + 1] for key, value in inputs.items()}, use_cache=False))
            assert_same(alone, [each[row : row + 1] for each in whole], rtol=1e-5, atol=1e-5)


@every_head
def test_evaluation_is_deterministic(family, name):
    dropout = {"attn_pdrop": 0.5} if family == "gpt2" else {"attention_dropout": 0.5, "dropout": 0.5}
    model = make(family, name, **dropout)
    assert_same(run(model), run(model))


@every_head
def test_the_parents_arguments_in_the_parents_order(family, name):
    parents, ours = FAMILIES[family].architectures[name]
    found, expected = (list(inspect.signature(cls.forward).parameters) for cls in (ours, parents))
    assert found == expected
    assert ours.main_input_name == parents.main_input_name


def test_the_stacks_take_the_parents_arguments():
    for family, name in (("bart", "BartModel"), ("marian", "MarianModel")):
        model = make(family, name)
        for stack in (model.encoder, model.decoder):
            parent = next(cls for cls in type(stack).__mro__ if cls.__module__.startswith("transformers.models"))
            found, expected = (list(inspect.signature(cls.forward).parameters) for cls in (type(stack), parent))
            positional = [each for each in found if each != "kwargs"]
            assert positional == expected[: len(positional)]


@every_generating_head
def test_logits_of_the_last_tokens_only(family, name):
    model = make(family, name)
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        pytest.skip("the parent has none")
    assert_same([run(model, logits_to_keep=1)[0]], [run(model)[0][:, -1:]], rtol=1e-5, atol=1e-5)


# Training


#: Parts that a loss does not reach: a decoder that stands alone has cross attention, and nothing to attend to.
WITHOUT_GRADIENT = {"BartForCausalLM": "encoder_attn", "MarianForCausalLM": "encoder_attn"}


@every_head
@pytest.mark.parametrize("checkpointing", [False, True])
def test_training(family, name, checkpointing):
    """The loss is finite and reaches every trainable parameter; checkpointed activations give the same gradients."""
    model = make(family, name).train()
    loss = loss_of(model)
    assert torch.isfinite(loss)
    loss.backward()
    for key, parameter in model.named_parameters():
        reached = parameter.requires_grad and WITHOUT_GRADIENT.get(name, "-") not in key
        assert (parameter.grad is not None) == reached, key
        assert parameter.grad is None or torch.isfinite(parameter.grad).all(), key
    if checkpointing:
        other = make(family, name).train()
        # the later of the names that transformers 5 has had for it
        getattr(other, "activation_checkpointing_enable", other.gradient_checkpointing_enable)({"use_reentrant": False})
        assert any(getattr(module, "gradient_checkpointing", False) for module in other.modules())
        loss_of(other).backward()
        for (key, one), (_, two) in zip(model.named_parameters(), other.named_parameters(), strict=True):
            torch.testing.assert_close(two.grad, one.grad, msg=key)
        getattr(other, "activation_checkpointing_disable", other.gradient_checkpointing_disable)()
        assert not any(getattr(module, "gradient_checkpointing", False) for module in other.modules())


@pytest.mark.parametrize(("family", "name"), CLASSIFIERS)
@pytest.mark.parametrize(
    ("problem", "count", "labels"),
    [
        ("single_label_classification", 3, torch.tensor([0, 1, 2])),
        ("multi_label_classification", 3, torch.tensor([[1.0, 0, 1], [0, 0, 1], [1, 1, 1]])),
        ("regression", 1, torch.tensor([0.5, -1.0, 2.0])),
    ],
)
def test_kinds_of_classification(family, name, problem, count, labels):
    """Asked for or found out from the labels, the loss is torch's own."""
    for asked in (problem, None):
        model = make(family, name, num_labels=count, problem_type=asked)
        outputs = model(**inputs_for(model), labels=labels, use_cache=False)
        expected = {
            "single_label_classification": lambda logits: nn.functional.cross_entropy(logits, labels),
            "multi_label_classification": lambda logits: nn.functional.binary_cross_entropy_with_logits(logits, labels),
            "regression": lambda logits: (logits[:, 0] - labels).square().mean(),
        }[problem](outputs.logits)
        torch.testing.assert_close(outputs.loss, expected)
        outputs.loss.backward()


# What a model says of itself


@every_head
def test_numbers_and_names(family, name):
    model = make(family, name)
    parameters = dict(model.named_parameters())
    assert model.num_parameters() == sum(each.numel() for each in parameters.values())
    assert model.num_parameters(only_trainable=True) == sum(
        each.numel() for each in parameters.values() if each.requires_grad
    )
    classes = {type(module).__name__ for module in model.modules()}
    assert model._no_split_modules
    named = set(model._no_split_modules)
    assert classes & named, (classes, named)
    blocks = [module for module in model.modules() if type(module).__name__ in named]
    inside = {id(layer) for block in blocks for layer in rfa_layers(block).values()}
    assert inside == {id(layer) for layer in rfa_layers(model).values()}, "a layer must not be split over devices"
    assert all(module.config is model.config for module in model.modules() if hasattr(module, "config"))
    assert model.supports_gradient_checkpointing
    assert not hasattr(model, "prune_heads") or "PreTrainedModel" in type(model).prune_heads.__qualname__


@pytest.mark.parametrize("family", list(FAMILIES))
def test_configurations(family, tmp_path):
    cls = FAMILIES[family].rfa_config
    config = config_for(family)
    assert cls().model_type == config.model_type  # every field has a default
    assert cls.from_dict(config.to_dict()).to_dict() == config.to_dict()
    config.to_json_file(tmp_path / "config.json")
    assert cls.from_json_file(tmp_path / "config.json").to_dict() == config.to_dict()
    config.num_labels = 5
    assert len(config.id2label) == len(config.label2id) == 5
    assert copy.deepcopy(config).to_dict() == config.to_dict()
    for common, own in cls.attribute_map.items():
        setattr(config, own, getattr(config, common))
        assert getattr(config, common) == getattr(config, own)


# Attention implementations


@every_head
def test_attention_implementations(family, name):
    """Both of torch's act on softmax layers and change nothing; others are refused, by transformers, before anything runs."""
    hybrid = {"softmax_layers": [0]} if family == "gpt2" else {"softmax_layers": [0], "softmax_cross_layers": [1]}
    expected = None
    for implementation in ("eager", "sdpa"):
        model = make(family, name, attn_implementation=implementation, **hybrid)
        assert model.config._attn_implementation == implementation
        expected = expected or run(model)
        assert_same(run(model), expected, rtol=1e-4, atol=1e-4)
    model.set_attn_implementation("eager")
    assert_same(run(model), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ImportError, match="FlashAttention2"):
        make(family, name, attn_implementation="flash_attention_2")
    with pytest.raises(ValueError, match="no_such"):
        make(family, name, attn_implementation="no_such")


# Generation


@every_generating_head
@pytest.mark.parametrize("options", [{}, {"window": 3}, {"softmax_layers": [0]}], ids=str)
def test_generation(family, name, options):
    """With a cache and without one the same tokens, from a prompt or from nothing, with options in a configuration or not."""
    model = make(family, name, **options).double()
    assert model.can_generate()
    shared = {"max_new_tokens": 8, "do_sample": False, "num_beams": 1, "pad_token_id": 1}
    ids = inputs_for(model)["input_ids"][:1]
    expected = model.generate(ids, **shared, use_cache=False)
    assert torch.equal(model.generate(ids, **shared), expected)
    settings = copy.deepcopy(model.generation_config)
    settings.update(**shared)
    assert torch.equal(model.generate(ids, generation_config=settings), expected)
    if not model.config.is_encoder_decoder:
        alone = model.generate(**shared, bos_token_id=0)
        assert alone[0, 0] == 0
        assert torch.equal(alone, model.generate(torch.zeros(1, 1, dtype=torch.long), **shared))


@every_generating_head
def test_past_key_values_of_a_wrong_kind_are_refused(family, name):
    model = make(family, name)
    inputs = inputs_for(model)
    keys = torch.zeros(ROWS, 3, 2, 8)
    for wrong in (((keys, keys),) * 3, [], "a cache", {"keys": keys}):
        with pytest.raises(TypeError, match=r"past_key_values.*DynamicCache\(config=model.config\)"):
            model(**inputs, past_key_values=wrong)


@pytest.mark.parametrize(("family", "name"), [("gpt2", "GPT2LMHeadModel"), ("bart", "BartForConditionalGeneration")])
def test_a_forward_pass_is_exported(family, name):
    """`torch.export` of a whole forward pass, one graph without a cache."""
    model = make(family, name)
    inputs = {**inputs_for(model), "use_cache": False}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, about its own passes
        exported = torch.export.export(model, (), inputs).module()
        torch.testing.assert_close(exported(**inputs).logits, model(**inputs).logits, rtol=1e-5, atol=1e-5)
