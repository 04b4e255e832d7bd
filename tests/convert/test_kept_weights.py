"""A conversion keeps the weights that transformers loads from its source, whatever the configuration says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hf_rfa.convert import calibration_data, checkpoint, convert, pipeline
from hf_rfa.evaluation.perplexity import score_labels
from hf_rfa.inference.loading import load_tokenizer
from hf_rfa.io.text_io import read_documents
from tests.conftest import refused
from tests.convert.conftest import load, tensors
from tests.families import save_softmax_model

#: The embedding, which the configuration says is the head too, by family.
TIED = {"gpt2": "transformer.wte.weight", "llama": "model.embed_tokens.weight", "bart": "model.shared.weight"}


def save_with_head(name: str, folder: Path) -> Path:
    """Save a model whose file has a head of its own, which its configuration does not say."""
    save_softmax_model(name, folder, tie_word_embeddings=True)
    weights = tensors(folder)
    weights["lm_head.weight"] = 0.5 * weights[TIED[name]]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("on_disk", "keep_softmax"), [(False, 1), (True, 0)])
@pytest.mark.parametrize("name", TIED)
def test_a_head_that_the_configuration_does_not_tell_of_is_kept(
    name, on_disk, keep_softmax, text, tmp_path, monkeypatch
):
    if on_disk:
        monkeypatch.setattr(checkpoint, "MAX_BYTES_IN_MEMORY", 0)
    source = save_with_head(name, tmp_path / "source")
    report = convert(source, tmp_path / "out", calibrate_on=text, keep_softmax=keep_softmax)
    parent, result = load(source), load(tmp_path / "out")
    assert not torch.equal(parent.lm_head.weight, parent.get_input_embeddings().weight)
    theirs = result.state_dict()
    for key, tensor in parent.state_dict().items():
        assert torch.equal(theirs[key], tensor), key
    assert result.config.tie_word_embeddings == (name == "bart")  # whose other embeddings are tied
    assert report.perplexities.softmax == pytest.approx(perplexity_of(parent, source, text), rel=1e-4)


def perplexity_of(parent: Any, source: Path, text: Path) -> float:
    """Return a softmax model's own perplexity on the text that a conversion is calibrated on."""
    tokenizer, _ = load_tokenizer(source)
    inputs = calibration_data.calibration_inputs(parent.config, tokenizer, list(read_documents(text)), seed=0)
    inputs = pipeline._add_labels(parent, inputs, lambda step, total: None)
    return score_labels(parent, calibration_data.batches(inputs)).perplexity


def test_a_head_that_is_the_embedding_stays_one(tmp_path):
    """In the file twice, as pickles have it."""
    source = save_with_head("gpt2", tmp_path / "source")
    weights = tensors(source)
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
    load_rfa_model = pipeline.load_rfa_model

    def load_wrongly(*args: Any) -> Any:
        model = load_rfa_model(*args)
        model.get_parameter(key).data[0, 0] += 1e-3
        return model

    monkeypatch.setattr(pipeline, "load_rfa_model", load_wrongly)
    refused(f"tensor {key} of the result is not that of {source}", source, tmp_path)
