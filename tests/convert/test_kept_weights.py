"""A conversion keeps the weights that transformers loads from its source, whatever the configuration says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartForConditionalGeneration,
    GPT2LMHeadModel,
    LlamaForCausalLM,
)

from hf_rfa.convert import calibration_data, checkpoint, convert, pipeline
from hf_rfa.convert.base_model import share_weights
from hf_rfa.evaluation.perplexity import score_labels
from hf_rfa.inference.loading import load_tokenizer
from hf_rfa.io.text_io import read_documents
from tests.conftest import refused, save_tiny_tokenizer, tiny_parent_config, tiny_seq2seq_config, words
from tests.families import base_config

#: By family: a softmax model whose configuration says that its head is the embedding, and the name of that.
TIED = {
    "gpt2": (lambda: GPT2LMHeadModel(tiny_parent_config(eos_token_id=2)), "transformer.wte.weight"),
    "llama": (lambda: LlamaForCausalLM(base_config("llama", tie_word_embeddings=True)), "model.embed_tokens.weight"),
    "bart": (lambda: BartForConditionalGeneration(tiny_seq2seq_config("bart")), "model.shared.weight"),
}


def save_with_head(name: str, folder: Path) -> Path:
    """Save a model whose file has a head of its own, which its configuration does not say."""
    torch.manual_seed(1)
    make, embedding = TIED[name]
    make().save_pretrained(folder)
    save_tiny_tokenizer(folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = 0.5 * weights[embedding]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load(folder: Path) -> Any:
    auto_class = AutoModelForSeq2SeqLM if "bart" in (folder / "config.json").read_text() else AutoModelForCausalLM
    return auto_class.from_pretrained(folder).eval()


def text_in(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text("\n".join(words(9, start) for start in range(40)))
    return path


@pytest.mark.parametrize(
    ("name", "on_disk", "keep_softmax"),
    [
        ("gpt2", False, 1),
        ("gpt2", True, 0),
        ("llama", False, 0),
        ("llama", True, 1),
        ("bart", False, 1),
        ("bart", True, 0),
    ],
)
def test_a_head_that_the_configuration_does_not_tell_of_is_kept(name, on_disk, keep_softmax, tmp_path, monkeypatch):
    if on_disk:
        monkeypatch.setattr(checkpoint, "MAX_BYTES_IN_MEMORY", 0)
    source = save_with_head(name, tmp_path / "source")
    report = convert(source, tmp_path / "out", calibrate_on=text_in(tmp_path), keep_softmax=keep_softmax)
    parent, result = load(source), load(tmp_path / "out")
    assert not torch.equal(parent.lm_head.weight, parent.get_input_embeddings().weight)
    theirs = result.state_dict()
    for key, tensor in parent.state_dict().items():
        assert torch.equal(theirs[key], tensor), key
    assert result.config.tie_word_embeddings == (name == "bart")  # whose other embeddings are tied
    assert report.perplexities.softmax == pytest.approx(perplexity_of(parent, source, tmp_path / "text.txt"), rel=1e-4)


def perplexity_of(parent: Any, source: Path, text: Path) -> float:
    """Return a softmax model's own perplexity on the text that a conversion is calibrated on."""
    tokenizer, _ = load_tokenizer(source)
    inputs = calibration_data.calibration_inputs(parent.config, tokenizer, list(read_documents(text)), seed=0)
    inputs = pipeline._add_labels(parent, inputs, lambda step, total: None)
    return score_labels(parent, calibration_data.batches(inputs)).perplexity


def test_a_head_that_is_the_embedding_stays_one(tmp_path):
    """In the file twice, as pickles have it."""
    source = save_with_head("gpt2", tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    weights["lm_head.weight"] = weights["transformer.wte.weight"].clone()
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    convert(source, tmp_path / "out", keep_softmax=1)
    result = load(tmp_path / "out")
    assert result.lm_head.weight is result.transformer.wte.weight
    assert result.config.tie_word_embeddings


@pytest.mark.parametrize("key", ["lm_head.weight", "transformer.wte.weight", "transformer.h.1.mlp.c_fc.weight"])
def test_a_result_with_other_weights_than_its_source_is_not_kept(key, tmp_path, monkeypatch):
    """It is compared with the source, and not with the model in memory, which has lost the same."""
    source = save_with_head("gpt2", tmp_path / "source")
    load_models = pipeline.load_models

    def load_wrongly(*args: Any) -> Any:
        models = load_models(*args)
        models[0].get_parameter(key).data[0, 0] += 1e-3
        return models

    monkeypatch.setattr(pipeline, "load_models", load_wrongly)
    refused(f"tensor {key} of the result is not that of {source}", source, tmp_path)


def test_weights_are_shared_as_they_are_tied(tmp_path):
    parent = load(save_with_head("gpt2", tmp_path / "source"))
    twin = share_weights(parent, GPT2LMHeadModel, parent.config)
    assert twin.lm_head.weight.data_ptr() == parent.lm_head.weight.data_ptr()
    assert twin.all_tied_weights_keys == parent.all_tied_weights_keys == {}
