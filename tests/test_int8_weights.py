"""Weights of 8 bits: what a layer computes, which layers have them, and what the models make of it."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from hf_rfa import InputError
from hf_rfa.evaluation import perplexity
from hf_rfa.inference import load_model
from hf_rfa.int8_weights import MOST_ROWS, Int8Linear, quantize_weights
from hf_rfa.io.text_io import read_documents, tokenize
from hf_rfa.models.cache_names import cache_argument

from .conftest import DEMO_MODEL, DEMO_TEXT
from .families import every_model, inputs_for, is_own, make, make_named, rfa_modules, state_of


@given(
    inputs=st.one_of(st.integers(1, 70), st.sampled_from([16, 48, 64])),
    outputs=st.integers(1, 70),
    rows=st.sampled_from([1, 3, MOST_ROWS, MOST_ROWS + 1]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    bias=st.booleans(),
)
def test_a_layer_is_its_rounded_matrix(inputs, outputs, rows, dtype, bias):
    torch.manual_seed(inputs + outputs)
    weight = (torch.randn(outputs, inputs) * torch.rand(outputs, 1).exp()).to(dtype)
    weight[0] = 0.0  # an output of a pruned model
    offset = torch.randn(outputs, dtype=dtype) if bias else None
    layer = Int8Linear(weight, offset)
    rounded = layer.weight.double() * layer.scale.double()[:, None]
    step = weight.double().abs().amax(1, keepdim=True) / 127
    assert ((rounded - weight.double()).abs() <= 0.52 * step + 1e-20).all()  # half a step, and the rounded scale
    x = torch.randn(2, rows, inputs).to(dtype)
    expected = x.double() @ rounded.mT + (0.0 if offset is None else offset.double())
    found = layer(x)
    assert found.dtype == dtype
    assert found.shape == (2, rows, outputs)
    scale = (x.double().abs() @ rounded.abs().mT).amax() + 1.0
    assert (found.double() - expected).abs().max() <= scale * (1e-5 if dtype == torch.float32 else 2e-2)


def test_matrices_of_gpt2_lie_the_other_way():
    torch.manual_seed(0)
    conv = Conv1D(6, 4)
    linear = nn.Linear(4, 6)
    linear.weight.data, linear.bias.data = conv.weight.data.mT.contiguous(), conv.bias.data
    x = torch.randn(3, 4)
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    block = model.transformer.h[0].attn.c_attn
    quantize_weights(model)
    assert model.transformer.h[0].attn.c_attn.weight.shape == block.weight.mT.shape
    found = Int8Linear(conv.weight.mT, conv.bias)(x)
    torch.testing.assert_close(found, Int8Linear(linear.weight, linear.bias)(x))
    torch.testing.assert_close(found, conv(x), atol=0.02, rtol=0)


@every_model
def test_linear_layers_alone_are_changed(family, name):
    model = make_named(family, name)
    own = {name: each.clone() for name, each in model.state_dict().items() if is_own(name)}
    logits, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    quantize_weights(model)
    assert model.get_output_embeddings() is logits
    assert model.get_input_embeddings() is embeddings
    linear = [each for each in model.modules() if isinstance(each, (nn.Linear, Conv1D)) and each is not logits]
    assert not linear
    for name, each in own.items():
        assert torch.equal(model.state_dict()[name], each)
    for layer in rfa_modules(model).values():
        assert any(isinstance(each, Int8Linear) for each in layer.modules())
    with torch.no_grad():
        assert all(
            each.isfinite().all() for each in model(**inputs_for(model)).values() if isinstance(each, torch.Tensor)
        )


@pytest.mark.parametrize("kind", ["softmax", "RFA"])
def test_perplexity_is_within_a_hundredth_and_16_bits_within_a_fifth_of_that(kind, converted_demo):
    folder = DEMO_MODEL if kind == "softmax" else converted_demo
    found = {}
    for dtype in ("float32", "bfloat16", "int8"):
        model, tokenizer = load_model(str(folder), dtype=dtype)
        ids = tokenize(tokenizer, read_documents(DEMO_TEXT), most=4096)
        found[dtype] = perplexity(model, ids, batch_size=4).perplexity
    assert found["bfloat16"] == pytest.approx(found["float32"], rel=0.002)
    assert found["int8"] == pytest.approx(found["float32"], rel=0.01)


def test_states_stay_in_float32_and_a_split_text_is_the_whole(converted_demo):
    model, tokenizer = load_model(str(converted_demo), dtype="int8")
    ids = tokenizer("It was a bright cold day in April, and the clocks were striking.", return_tensors="pt").input_ids
    with torch.no_grad():
        whole = model(ids)
        part = model(ids[:, :5], use_cache=True)
        cache = part.past_key_values
        assert {state_of(layer).dtype for layer in cache.layers} == {torch.float32}
        rest = model(ids[:, 5:], **cache_argument(copy.deepcopy(cache))).logits
    torch.testing.assert_close(rest, whole.logits[:, 5:], atol=0.15, rtol=0.05)


def test_commands_take_int8(converted_demo, tmp_path, run_cli, capsys):
    assert run_cli("generate", converted_demo, "--prompt", "It was", "--dtype", "int8", "--max-new-tokens", 4) == 0
    assert run_cli("evaluate", converted_demo, DEMO_TEXT, "--max-tokens", 1200, "--dtype", "int8") == 0
    assert "perplexity" in capsys.readouterr().out
    short = ("--model", converted_demo, "--lengths", 16, "--batches", 1, "--steps", 1, "--dtype", "int8")
    assert run_cli("bench", *short, "--output", tmp_path / "speed") == 0
    assert json.loads((tmp_path / "speed.json").read_text())["dtype"] == "int8"
    assert run_cli("bench", "--model", converted_demo, "--task", "training", "--dtype", "int8") == 1
    assert "--dtype int8 is for inference" in capsys.readouterr().err


def test_what_cannot_be_quantized_is_refused(converted_demo):
    model = make("llama")
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    with pytest.raises(InputError, match=r"quantized already\. Leave int8 out"):
        quantize_weights(model)
    del model.config.quantization_config
    quantize_weights(model)
    with pytest.raises(InputError, match="no linear layers"):
        quantize_weights(model)
    with pytest.raises(InputError, match="dtype must be one of auto, float32, bfloat16, float16, int8, got 'int4'"):
        load_model(str(converted_demo), dtype="int4")
