"""GGUF files as softmax checkpoints: the same model as its folder, and clear refusals."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel

from hf_rfa import gguf_files
from hf_rfa.convert import InputError, convert
from hf_rfa.inference import load_model
from tests.conftest import DEMO_MODEL, DEMO_TEXT, leftovers, tiny_parent_config
from tests.gguf_models import write_gguf

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def gguf():
    return pytest.importorskip("gguf", reason="the package gguf is not installed (pip install hf-rfa[gguf])")


@pytest.fixture
def tiny_file(gguf, tiny_parent, tmp_path):
    """The tiny GPT-2 as a GGUF file, without a tokenizer, and with 96 positions, which is not GPT-2's default."""
    (tmp_path / "models").mkdir()
    write_gguf(tiny_parent, tmp_path / "models" / "tiny.gguf", with_tokenizer=False)
    return tmp_path / "models" / "tiny.gguf"


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_file_converts_as_its_folder_does(dtype, tiny_file, tiny_parent, tmp_path):
    report = convert(tiny_file, tmp_path / "a", dtype=dtype)
    convert(tiny_parent, tmp_path / "b", dtype=dtype)
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    a, b = (AutoConfig.from_pretrained(tmp_path / name) for name in "ab")
    for name in ("n_positions", "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "dtype"):
        assert getattr(a, name) == getattr(b, name), name
    precision = "float32" if dtype == "auto" else dtype
    assert report.notes[0] == f"Made from the GGUF file tiny.gguf, whose weights (F32) were read as {precision}."
    assert any("The result has no tokenizer" in note for note in report.notes)


def test_a_head_of_its_own_is_kept(gguf, tiny_parent, tmp_path):
    """The configuration of the folder says that there is none."""
    parent = GPT2LMHeadModel.from_pretrained(tiny_parent)
    head = 0.5 * parent.lm_head.weight.detach()
    write_gguf(tiny_parent, tmp_path / "tiny.gguf", changed={"lm_head.weight": head.numpy()}, with_tokenizer=False)
    convert(tmp_path / "tiny.gguf", tmp_path / "out", keep_softmax=1)
    result = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(result.lm_head.weight, head)
    assert torch.equal(result.transformer.wte.weight, parent.transformer.wte.weight)


def test_tokenizer_template_license_and_digest_are_kept(gguf, tmp_path):
    file = tmp_path / "demo.gguf"
    (tmp_path / "README.md").write_text("---\nlicense: gpl\n---\nof something else")
    write_gguf(DEMO_MODEL, file, chat_template=TEMPLATE, fields={"tokenizer.ggml.eot_token_id": 5})
    report = convert(file, tmp_path / "out", num_features=16, calibrate_on=DEMO_TEXT)
    tokenizer, expected = (AutoTokenizer.from_pretrained(path) for path in (tmp_path / "out", DEMO_MODEL))
    for text in ("Call me Ishmael.", " It was<|endoftext|>\n\nthe whale’s "):
        assert tokenizer(text)["input_ids"] == expected(text)["input_ids"]
    assert tokenizer.chat_template == TEMPLATE
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert json.loads((tmp_path / "out" / "conversion.json").read_text())["source_revision"] == f"sha256:{digest}"
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert digest in card.content
    assert "[demo.gguf](#how-it-was-made)" in card.content
    assert (card.data.license, card.data.language, card.data.base_model) == ("mit", ["en"], None)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id == [0, 5], "the end of the text, and that of a turn"
    assert report.perplexities.calibrated < report.perplexities.swapped


def test_quantised_weights_are_dequantised(gguf, tmp_path):
    write_gguf(DEMO_MODEL, tmp_path / "demo.gguf", quantization="Q8_0")
    report = convert(tmp_path / "demo.gguf", tmp_path / "out", num_features=16)
    assert "(F32, Q8_0) were dequantised to float32" in report.notes[0]
    found, expected = (load_file(path / "model.safetensors") for path in (tmp_path / "out", DEMO_MODEL))
    for key, tensor in expected.items():
        assert found[key].dtype == torch.float32
        torch.testing.assert_close(found[key], tensor, atol=0.01 * float(tensor.abs().max()), rtol=0)


def test_a_file_is_a_model_to_measure_and_a_teacher(gguf, tmp_path):
    write_gguf(DEMO_MODEL, tmp_path / "demo.gguf")
    model, tokenizer = load_model(str(tmp_path / "demo.gguf"))
    ids = tokenizer("Call me Ishmael", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = GPT2LMHeadModel.from_pretrained(DEMO_MODEL).eval()
        torch.testing.assert_close(model(ids).logits, expected(ids).logits, rtol=1e-5, atol=1e-5)
    read = model.state_dict()
    assert all(torch.equal(read[name], tensor) for name, tensor in expected.state_dict().items())
    assert model.to(torch.bfloat16).dtype == torch.bfloat16, "nothing in it counts as quantised"


def test_transfer_learns_from_a_file(gguf, run_cli, tmp_path):
    write_gguf(DEMO_MODEL, tmp_path / "demo.gguf")
    options = ("--data", DEMO_TEXT, "--transfer-steps", 1, "--num-features", 8)
    assert run_cli("convert", tmp_path / "demo.gguf", tmp_path / "out", *options) == 0
    assert (tmp_path / "out" / "distillation.json").is_file()


# Refusals


def refused(match: str, file, tmp_path, **options) -> None:
    before = leftovers(tmp_path)
    with pytest.raises(InputError, match=match):
        convert(file, tmp_path / "never", **options)
    assert leftovers(tmp_path) == before


def test_what_is_no_gguf_file(tmp_path):
    refused(r"there is no file .*model\.gguf", "model.gguf", tmp_path)
    for content in (b"", b"GG", b"version https://git-lfs.github.com/spec/v1"):
        (tmp_path / "model.gguf").write_bytes(content)
        refused("is not a GGUF file.*Download it again", tmp_path / "model.gguf", tmp_path)
    (tmp_path / "model.bin").write_bytes(b"x")
    refused("is a file, and no GGUF file", tmp_path / "model.bin", tmp_path)


def test_broken_files(tiny_file, tmp_path):
    whole = tiny_file.read_bytes()
    for length in (5, 30, 200, len(whole) // 2, len(whole) - 100):
        tiny_file.write_bytes(whole[:length])
        refused("broken or cut short.*Download it again", tiny_file, tmp_path)


def test_the_ending_is_not_needed(tiny_file, tmp_path):
    convert(tiny_file.rename(tmp_path / "blob"), tmp_path / "out", num_features=8)


def test_architectures_that_are_not_supported(gguf, tiny_parent, tmp_path):
    for architecture in ("bloom", "no-such"):
        write_gguf(tiny_parent, tmp_path / "tiny.gguf", architecture=architecture, with_tokenizer=False)
        refused(f"architecture '{architecture}'.*Supported: .*gpt2", tmp_path / "tiny.gguf", tmp_path)
    with pytest.raises(InputError) as error:
        convert(tmp_path / "tiny.gguf", tmp_path / "never")
    assert "bart" not in str(error.value), "no GGUF file holds one"


def test_one_part_of_several(gguf, tiny_parent, tmp_path):
    write_gguf(tiny_parent, tmp_path / "tiny.gguf", with_tokenizer=False, fields={"split.count": 3})
    refused("one part of 3.*llama-gguf-split --merge", tmp_path / "tiny.gguf", tmp_path)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"transformer.h.1.mlp.c_fc.weight": None}, r"lack 1 tensors.*h\.1\.mlp\.c_fc\.weight"),
        ({"transformer.ln_f.bias": np.zeros(23, np.float32)}, r"ln_f\.bias has shape \(23,\).*\(24,\)"),
        ({"transformer.ln_f.bias": np.full(24, np.nan, np.float32)}, r"ln_f\.bias holds 24 values that are NaN"),
    ],
)
def test_tensors_that_cannot_be_used(changed, match, gguf, tiny_parent, tmp_path):
    file = tmp_path / "tiny.gguf"
    write_gguf(tiny_parent, file, with_tokenizer=False, changed=changed)
    refused(match, file, tmp_path)
    if "NaN" not in match:
        with pytest.raises(
            InputError, match=r"1 tensors that the configuration asks for are missing, or of another shape"
        ):
            load_model(str(file), need_tokenizer=False)


def test_the_package_is_asked_for(tiny_file, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_files, "is_gguf_available", lambda: False)
    refused(r"pip install hf-rfa\[gguf\]", tiny_file, tmp_path)


def test_places_and_options_that_cannot_be(tiny_file, tiny_parent, tmp_path):
    refused("there is no tokenizer in it. Leave the text out", tiny_file, tmp_path, calibrate_on=DEMO_TEXT)
    refused("revision=main is of a model on the hub", tiny_file, tmp_path, revision="main")
    refused(r"no config\.json.*holds GGUF files \(tiny\.gguf\)", tiny_file.parent, tmp_path)
    with pytest.raises(InputError, match=r"the source, .*tiny\.gguf, is inside"):
        convert(tiny_file, tiny_file.parent, overwrite=True)


def test_other_numbers_of_positions_and_tokens_are_read(gguf, tmp_path):
    GPT2LMHeadModel(tiny_parent_config(n_positions=40, vocab_size=77)).save_pretrained(tmp_path / "parent")
    write_gguf(tmp_path / "parent", tmp_path / "tiny.gguf", with_tokenizer=False)
    config = gguf_files.open_gguf(tmp_path / "tiny.gguf").config
    assert (config.n_positions, config.vocab_size) == (40, 77)
