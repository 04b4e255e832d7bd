"""Weights packed for a CPU: what a layer computes, which layers have them, and that models stay what they are."""

from __future__ import annotations

import json
import platform

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_rfa import InputError
from hf_rfa.inference import generate_text, load_model
from hf_rfa.packed_weights import PROCESSORS, PackedLinear, PackedPart, PackedParts, pack_weights, why_not_packed
from tests.conftest import DEMO_MODEL
from tests.families import every_head, inputs_for, make, make_head

pytestmark = pytest.mark.skipif(
    platform.machine().lower() not in PROCESSORS, reason=f"weights are not packed on {platform.machine()}"
)


@given(
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 70),
    shape=st.sampled_from([(), (1,), (8,), (33,), (3, 5), (0,), (2, 0)]),
    bias=st.booleans(),
    transposed=st.booleans(),
)
def test_a_layer_is_its_matrix_however_its_weights_lie(inputs, outputs, shape, bias, transposed):
    torch.manual_seed(inputs + outputs)
    weight = torch.randn(inputs, outputs).mT if transposed else torch.randn(outputs, inputs)
    offset, x = torch.randn(outputs) if bias else None, torch.randn(*shape, inputs)
    result = PackedLinear(weight, offset)(x)
    expected = x.double() @ weight.double().mT + (0.0 if offset is None else offset.double())
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), expected, atol=1e-4, rtol=1e-4)


class CountedLinear(PackedLinear):
    """A packed layer that counts its products."""

    count = 0

    def forward(self, x):
        self.count += 1
        return super().forward(x)


def make_parts(biases=(False, False, False)):
    torch.manual_seed(0)
    layers = [nn.Linear(12, size, bias=bias) for size, bias in zip((7, 3, 5), biases, strict=True)]
    parts = PackedParts(layers)
    parts.linear.__class__ = CountedLinear
    return layers, parts, [PackedPart(parts, index) for index in range(3)]


@given(
    asked=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), max_size=12), biases=st.tuples(*[st.booleans()] * 3)
)
def test_parts_are_their_layers_whoever_asks_for_them_and_when(asked, biases):
    layers, _, parts = make_parts(biases)
    inputs = torch.randn(2, 2, 4, 12).unbind()
    with torch.no_grad():
        for index, place in asked:
            result = parts[index](inputs[place])
            assert result.is_contiguous()
            torch.testing.assert_close(result, layers[index](inputs[place]))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_parts_of_one_input_are_one_product_and_then_nothing_is_kept(order):
    _, joined, parts = make_parts()
    for count in (1, 2):
        x = torch.randn(2, 4, 12)
        for index in order:
            parts[index](x)
        assert joined.linear.count == count
        assert joined._found is None


def test_parts_of_an_input_that_was_changed_in_place_are_new():
    layers, _, parts = make_parts()
    x = torch.randn(2, 4, 12)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close([part(x) for part in parts], [layer(x) for layer in layers])
            x.mul_(2.0)


def test_compiled_parts_are_one_graph_and_one_product():
    layers, _, parts = make_parts((True, False, True))
    products = []

    def count(graph, _):
        products.append(sum("packed_linear" in str(node.target) for node in graph.graph.nodes))
        return graph

    compiled = torch.compile(lambda x: [part(x) for part in parts], fullgraph=True, backend=count)
    with torch.no_grad():
        for batch in (2, 3, 3):
            x = torch.randn(batch, 1, 12)
            torch.testing.assert_close(compiled(x), [layer(x) for layer in layers])
    assert set(products) == {1}


@every_head
def test_models_compute_what_they_did(family, head):
    model = make_head(family, head)
    inputs = inputs_for(model)
    with torch.no_grad():
        expected = model(**inputs)
        pack_weights(model)
        packed = model(**inputs)
    modules = list(model.modules())
    assert not any(isinstance(module, (nn.Linear, Conv1D)) for module in modules)
    assert any(isinstance(module, PackedLinear) for module in modules)
    assert all(module._found is None for module in modules if isinstance(module, PackedParts))
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(packed[name], value, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "bart", "whisper"])
def test_self_attention_has_one_product_for_queries_keys_and_values(family):
    model = make(family)
    pack_weights(model)
    causal = [each for each in model.modules() if getattr(each, "rfa_kind", None) == "causal"]
    assert causal
    for each in causal:
        assert each.q_proj.parts is each.k_proj.parts is each.v_proj.parts
    cross = [each for each in model.modules() if getattr(each, "rfa_kind", None) == "cross"]
    assert all(isinstance(each.q_proj, PackedLinear) for each in cross)


@pytest.mark.parametrize("kind", ["softmax", "RFA"])
@pytest.mark.parametrize("num_beams", [1, 2])
def test_texts_are_the_same(kind, num_beams, converted_demo):
    folder = str(DEMO_MODEL if kind == "softmax" else converted_demo)
    prompts = ["It was a bright cold day", "The old man", "She"]
    texts, embeddings = [], []
    for packed in (False, True):
        model, tokenizer = load_model(folder, packed=packed)
        assert isinstance(model.get_output_embeddings(), PackedLinear) == packed
        texts.append(generate_text(model, tokenizer, prompts, max_new_tokens=20, num_beams=num_beams).texts)
        embeddings.append(model.get_input_embeddings().weight)
    assert texts[0] == texts[1]
    assert torch.equal(*embeddings), "tied to weights that are packed"


def test_commands_pack(converted_demo, tmp_path, run_cli, capsys, monkeypatch):
    asked = []
    for module in ("inference.loading", "packed_weights"):  # as `generate` and as `bench` find it
        monkeypatch.setattr(f"hf_rfa.{module}.pack_weights", lambda model: asked.append(model) or pack_weights(model))
    assert run_cli("generate", converted_demo, "--prompt", "It was", "--max-new-tokens", 4) == 0
    assert len(asked) == 1
    assert run_cli("generate", converted_demo, "--prompt", "It was", "--max-new-tokens", 4, "--dtype", "bfloat16") == 0
    assert len(asked) == 1
    short = ("--model", converted_demo, "--lengths", 16, "--batches", 2, "--steps", 1, "--packed")
    assert run_cli("bench", *short, "--output", tmp_path / "speed") == 0
    assert len(asked) == 3  # both models of the bench
    assert all(isinstance(each.get_output_embeddings(), PackedLinear) for each in asked)
    assert json.loads((tmp_path / "speed.json").read_text())["packed"] is True
    assert "float32, packed, cpu" in " ".join(capsys.readouterr().out.split())  # wherever lines break
    for wrong in (("--task", "training"), ("--dtype", "bfloat16"), ("--device", "cuda")):
        assert run_cli("bench", "--model", converted_demo, "--packed", *wrong) == 1
        assert "--packed is for inference in float32 on a CPU" in capsys.readouterr().err


def test_what_packed_weights_cannot_do_is_refused(tmp_path):
    model = make("llama")
    ids = torch.arange(6)[None]
    pack_weights(model)
    with pytest.raises(InputError, match="cannot be saved"):
        model.save_pretrained(tmp_path / "model")
    embedded = model.get_input_embeddings()(ids).requires_grad_()
    with pytest.raises(InputError, match="without gradients"):
        model(inputs_embeds=embedded)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match="without autocast"):
        model(ids)
    with pytest.raises(InputError, match=r"got torch\.bfloat16"):
        PackedLinear(torch.randn(3, 4), None)(torch.randn(2, 4).bfloat16())


def test_models_that_cannot_be_packed_are_refused(monkeypatch):
    with pytest.raises(InputError, match=r"float32 on a CPU, and this model is in torch\.bfloat16 on cpu\. Leave"):
        pack_weights(make("llama").bfloat16())
    model = make("llama")
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    assert why_not_packed(model) == "the weights of this checkpoint are quantized"
    del model.config.quantization_config
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert "and this is arm64" in str(why_not_packed(model))
