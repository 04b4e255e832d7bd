"""Models in hard use: several threads, pipelines, and weights that are not in memory."""

from __future__ import annotations

import copy
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch
from accelerate import cpu_offload
from transformers import pipeline

from hf_rfa.convert import convert
from tests.families import make, read, save_softmax_model, tokens

OPTIONS = {"do_sample": False, "num_beams": 1, "pad_token_id": 1}


def test_two_threads_generate_on_one_model():
    model, prompts = make("gpt2", "positive-gate"), [tokens(1, 5 + n) for n in range(6)]
    expected = [model.generate(each, max_new_tokens=20, **OPTIONS) for each in prompts]
    model.train().eval()  # so that the threads compute anew, at once, what is computed once
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(lambda ids: model.generate(ids, max_new_tokens=20, **OPTIONS), prompts))
    assert all(map(torch.equal, answers, expected))


def test_pipelines(tmp_path):
    save_softmax_model("gpt2", tmp_path / "gpt2", eos_token_id=2)
    convert(tmp_path / "gpt2", tmp_path / "rfa", num_features=8)
    texts = pipeline("text-generation", str(tmp_path / "rfa"), device="cpu")
    answers = texts(["w5 w6", "w7 w8 w9"], max_new_tokens=5, do_sample=False)
    for (each,), text in zip(answers, ["w5 w6", "w7 w8 w9"], strict=True):
        assert each["generated_text"].startswith(text)


def offloaded(model, folder, how):
    """Return the model with weights on disk, or in memory and brought to where they are used, by accelerate."""
    if how in ("device_map", "auto"):
        model.save_pretrained(folder / "model", max_shard_size="20KB")
        tensors = model.state_dict()
        owners = {key: key.rpartition(".")[0] for key in tensors}
        # All that belongs to a module without modules in it; BART itself has a buffer.
        places = {name: "disk" for name in owners.values() if not any(model.get_submodule(name).children())}
        places |= {key: "cpu" for key, owner in owners.items() if owner not in places}
        size = sum(tensor.nbytes for tensor in tensors.values())
        options = {"device_map": places, "offload_buffers": True}
        if how == "auto":
            options = {"device_map": "auto", "max_memory": {"cpu": size // 2}}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The following device_map keys do not match any submodules")
            return type(model).from_pretrained(folder / "model", offload_folder=folder / "offload", **options)
    return cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"), offload_buffers=True)


HYBRID = {"softmax_layers": [0], "feature_map": "exponential"}
OFFLOADED = [("gpt2", {"gate": True, "window_size": 3}, "device_map"), ("bart", HYBRID, "device_map")]
OFFLOADED += [*product(["gpt2", "bart"], [HYBRID], ["auto", "cpu_offload"])]


@pytest.mark.parametrize(("family", "options", "how"), OFFLOADED, ids=str)
@torch.no_grad()
def test_weights_that_are_not_in_memory(family, options, how, tmp_path):
    """Every weight and buffer, those of feature maps too, comes when its module is called and goes again."""
    model, ids = make(family, {"num_features": 8, **options}), tokens(2, 9)
    for name, tensor in model.state_dict().items():
        if ".feature_map." in name or ".gate." in name:  # not their initial values
            tensor.add_(0.1 * torch.rand_like(tensor))
    moved = offloaded(model, tmp_path, how)
    absent = {name for name, tensor in moved.state_dict().items() if tensor.is_meta}
    assert any(".feature_map." in name for name in absent)
    for _ in range(2):  # the second time from what was computed the first time
        assert torch.equal(read(moved, ids).logits, read(model, ids).logits)
    for beams in (1, 3):
        given = OPTIONS | {"num_beams": beams, "max_new_tokens": 7}
        assert torch.equal(moved.generate(ids, **given), model.generate(ids, **given))
    assert {name for name, tensor in moved.state_dict().items() if tensor.is_meta} == absent
