"""Conversion, generation, gradients and measurement on a second device: all results are those of the CPU.

`tests/inference/test_devices.py` runs these tests, in a process of its own.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from accelerate.utils import offload
from safetensors import safe_open
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import TrainingArguments

from hf_rfa.convert import convert
from hf_rfa.convert.calibrate import calibration
from hf_rfa.convert.checkpoint import loading
from hf_rfa.evaluation import perplexity
from hf_rfa.finetune import trainers
from hf_rfa.finetune.recipe import Stage
from hf_rfa.finetune.trainers import LogitDistillationTrainer
from hf_rfa.inference import generate_text, load_model
from hf_rfa.models import linear_attention
from tests.conftest import save_tiny_tokenizer, words
from tests.families import ONE_LAYER, make, save_softmax_model, tokens
from tests.other_device import CROSSING, DEVICE, NAME, ElsewhereTensor, SecondDevice

#: Operations whose result is a number, or has a shape that depends on one.
WAITING = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::is_nonzero")


@pytest.fixture(autouse=True)
def _second_device():
    with SecondDevice():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Softmax models of three families with a tokenizer, and a text."""
    folder = tmp_path_factory.mktemp("models")
    for family, sizes in ONE_LAYER.items():
        save_softmax_model(family, folder / family, **sizes)
    (folder / "text.txt").write_text("\n".join(words(30, 3 * start) for start in range(20)))
    return folder


class Questions(TorchDispatchMode):
    """Notes what makes the host wait for the device.

    Attributes:
        asked: names of the operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name
        there = any(isinstance(leaf, ElsewhereTensor) for leaf in tree_leaves((args, kwargs)))
        indices = args[1] if name == "aten::index" else ()
        if there and (name in WAITING or any(index is not None and index.dtype == torch.bool for index in indices)):
            self.asked.append(name)
        result = function(*args, **(kwargs or {}))
        if there and name in CROSSING and isinstance(result, torch.Tensor) and result.device.type == "cpu":
            self.asked.append(name)
        return result


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for path in folder.glob("*.safetensors") for key, tensor in load_file(path).items()}


def figures_of(report: Any) -> tuple[list[float], list[Any]]:
    """Return the numbers with fractions that a report holds at any depth, and all else."""
    leaves = tree_leaves(report)
    return [x for x in leaves if isinstance(x, float)], [x for x in leaves if not isinstance(x, float)]


def open_for_the_device(file: str, framework: str, device: Any) -> Any:
    """Open a file of tensors as safetensors does, which knows torch's own devices by name."""

    class File:
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *raised: object) -> None:
            pass

        def get_tensor(self, name: str) -> torch.Tensor:
            with safe_open(file, framework=framework, device="cpu") as tensors_of_file:
                return tensors_of_file.get_tensor(name).to(device)

    return File()


def test_the_device_refuses_what_a_gpu_refuses():
    there = torch.arange(6.0, device=NAME).view(2, 3)
    assert there.device == torch.zeros(1).to(NAME).device == torch.tensor(2.0, device=NAME).device == DEVICE
    assert torch.equal((there * 2 + 1).cpu(), torch.arange(6.0).view(2, 3) * 2 + 1)
    with pytest.raises(RuntimeError, match=r"add: expected all tensors to be on the same device, got .* on cpu"):
        there + torch.ones(3)
    with pytest.raises(RuntimeError, match="numpy"):
        there.numpy()


GREEDY: dict[str, Any] = {}
BEAMS: dict[str, Any] = {"num_beams": 3}
SAMPLES: dict[str, Any] = {"do_sample": True, "seed": 4}


@pytest.mark.parametrize(
    ("family", "variant", "given"),
    [
        ("llama", "slots-features", {}),
        ("llama", "slots-features", {"position_ids": torch.arange(70).repeat(2, 1) % 35}),
        ("gpt2", "slots-gate", {"attention_mask": torch.ones(2, 70, dtype=torch.long)}),
        ("gpt2", "gaussian-gate", {"position_ids": torch.arange(70).repeat(2, 1)}),
    ],
)
def test_a_training_step_never_waits_for_the_device(family, variant, given, tmp_path, monkeypatch):
    """Nothing is asked of it between the first operation and the last one.

    The teacher is left out, and layers whose masks transformers makes: these ask on their own.
    """
    # In backward threads of a device in Python nothing can be computed again.
    monkeypatch.setattr(trainers, "checkpoint", lambda function, *args, **options: function(*args))
    model, ids = make(family, variant), tokens(2, 70)
    teacher = Mock(return_value=Mock(logits=torch.randn(2, 70, model.config.vocab_size).to(DEVICE)))
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[])
    trainer = LogitDistillationTrainer(model=model, args=arguments, teacher=teacher, stage=Stage(kl_weight=0.5))
    model.train().to(DEVICE)  # from where the Trainer has put it
    inputs = {"input_ids": ids, "labels": ids, **given}
    inputs = {name: tensor.to(DEVICE) for name, tensor in inputs.items()}
    with Questions() as questions:
        trainer.compute_loss(model, inputs).backward()
    assert not questions.asked


@pytest.mark.parametrize(
    ("family", "variant", "options"),
    [
        ("gpt2", "slots-gate", SAMPLES),
        ("llama", {"retrieval_heads": [[0, 1]], "retrieval_window": 6, "window_size": 4, "num_features": 16}, GREEDY),
        ("bart", "everything-signed", BEAMS),
    ],
)
def test_generation(family, variant, options, tmp_path):
    make(family, variant, **ONE_LAYER[family]).save_pretrained(tmp_path)
    save_tiny_tokenizer(tmp_path)
    prompts = [words(12), words(5, 20)]
    texts = []
    for device in ("cpu", "auto"):
        model, tokenizer = load_model(str(tmp_path), device=device)
        assert model.device.type == (NAME if device == "auto" else "cpu")
        assert isinstance(next(model.parameters()), ElsewhereTensor) == (device == "auto")
        texts.append(generate_text(model, tokenizer, prompts, max_new_tokens=10, ignore_eos=True, **options).texts)
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 2


@pytest.mark.parametrize(
    ("family", "variant", "packed"),
    [
        ("gpt2", "gaussian-gate", True),
        ("llama", "slots-gate", True),
        ("bart", "both-gate", False),
    ],
)
def test_losses_and_gradients_of_long_texts(family, variant, packed, monkeypatch):
    """In segments of several chunks, which an accelerator takes at once; packed rows hold two documents."""
    monkeypatch.setattr("hf_rfa.models.state_attention.ACCELERATOR_SEGMENT_LENGTH", 24)
    at_once = Mock(wraps=linear_attention._chunked_at_once)
    monkeypatch.setattr(linear_attention, "_chunked_at_once", at_once)
    model, ids = make(family, variant, chunk_size=5, **ONE_LAYER[family]).train(), tokens(2, 60)
    positions = torch.cat([torch.arange(33), torch.arange(27)]).expand(2, -1)
    inputs = {"input_ids": ids, "labels": ids} | ({"position_ids": positions} if packed else {})
    found = []
    for each, is_there in ((copy.deepcopy(model), False), (model.to(NAME), True)):
        loss = each(**{name: tensor.to(each.device) for name, tensor in inputs.items()}, use_cache=False).loss
        loss.backward()
        assert at_once.called == is_there
        gradients = {name: None if x.grad is None else x.grad.cpu() for name, x in each.named_parameters()}
        found.append((loss.detach().cpu(), gradients))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)


#: Two of all the values that calibration tries.
FEW_TRIES = {
    "TEMPERATURES": (1.0, 0.5),
    "GATE_TIME_SCALES": (1.0, 0.25),
    "GOLDEN_SECTION_STEPS": 2,
    "SHIFTS": (0.0, 1.0),
}


@pytest.mark.parametrize(
    ("family", "on_disk", "options"),
    [
        ("gpt2", True, {"feature_map": "elu", "retrieval_heads": 1, "retrieval_window": 8, "window_size": 4}),
        (
            "llama",
            True,
            {"preset": "mixed", "feature_map": "positive", "num_features": 16, "window_size": 3, "num_slots": 4},
        ),
        ("bart", False, {"calibrate_on": None, "encoder_layers": "all", "gate": True}),
    ],
)
def test_conversion(family, on_disk, options, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(offload, "safe_open", open_for_the_device)
    for name, few in FEW_TRIES.items():
        monkeypatch.setattr(calibration, name, few)
    monkeypatch.setattr(loading, "MAX_BYTES_IN_MEMORY", 0 if on_disk else 10**9)
    given: dict[str, Any] = {"calibrate_on": folder / "text.txt", "command": "the command", **options}
    load, places, reports = loading._from_pretrained, [], {}

    def loaded(*args: Any, **options: Any) -> Any:
        model, info = load(*args, **options)
        places.append(model.device)
        return model, info

    monkeypatch.setattr(loading, "_from_pretrained", loaded)
    for device, place in (("cpu", torch.device("cpu")), ("auto", DEVICE)):
        places.clear()
        convert(folder / family, tmp_path / device, device=device, **given)
        reports[device] = json.loads((tmp_path / device / "conversion.json").read_text())
        del reports[device]["destination"]
        assert len(places) >= 2  # the model, and the checkpoint that was written
        assert set(places) == {place}
    figures, others = zip(*(figures_of(each) for each in reports.values()), strict=True)
    assert others[0] == others[1]
    assert figures[0] == pytest.approx(figures[1], rel=1e-3, abs=1e-5)  # nats, of divergences near 0
    torch.testing.assert_close(*(tensors(tmp_path / device) for device in reports), rtol=1e-2, atol=1e-3)


def test_measurement():
    model, ids = make("llama", "slots", **ONE_LAYER["llama"]), torch.randint(3, 61, (300,))
    for options in ({"context_length": 50, "stride": 30}, {"context_length": 150, "carry_state": True}):
        here, there = (perplexity(each, ids, **options) for each in (model, copy.deepcopy(model).to(NAME)))
        assert (there.tokens, there.protocol) == (here.tokens, here.protocol)
        assert there.nats == pytest.approx(here.nats, rel=1e-5)
