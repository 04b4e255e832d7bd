"""Models exported: forward passes and decoding steps as graphs, in ONNX, and with linear layers in 8 bits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hf_rfa import InputError
from hf_rfa.export import DecodingStep, export, exporting
from hf_rfa.models.cache_names import cache_argument
from tests.families import ONE_LAYER, logits, make, make_head, source, tokens

RETRIEVAL = {"window_size": 3, "retrieval_heads": [[0, 1]], "retrieval_window": 5, "retrieval_slots": 2}


def small(family: str = "gpt2", **options: Any) -> Any:
    return make(family, {"num_features": 8, **options})


@torch.no_grad()
def test_a_forward_pass_is_exported():
    """`torch.export` of a whole forward pass, one graph without a cache; those of decoders are exported for all lengths."""
    model, ids = make_head("bart", **ONE_LAYER["bart"]), tokens()
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    given = {**source(), "decoder_input_ids": ids, "decoder_attention_mask": mask}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, about its own passes
        exported = torch.export.export(model, (), {**given, "use_cache": False}).module()
        found, expected = (each(**given, use_cache=False).logits for each in (exported, model))
    assert_close(found, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_forward_pass_is_exported_once_for_all_lengths():
    """Lengths below a window, below a chunk of the recurrence, of one, and of several."""
    options = {**RETRIEVAL, "num_slots": 5, "softmax_layers": [1], "num_hidden_layers": 2}
    model, ids = small("llama", **options, chunk_size=16), tokens(2, 90)
    length = {"input_ids": {1: torch.export.Dim("length", min=2, max=96)}, "use_cache": None}
    given = (ids[:, :20].clone(),), {"use_cache": False}
    exported = torch.export.export(model, *given, dynamic_shapes=length).module()
    for count in (2, 15, 16, 17, 90):
        found = exported(ids[:, :count].clone(), use_cache=False).logits
        assert_close(found, logits(model, ids[:, :count]), atol=1e-4, rtol=1e-3)


STEPS = [
    ("torch", {"window_size": 3, "num_slots": 4, "gate": True, "feature_map": "gaussian"}),
    ("torch", RETRIEVAL),
    ("ONNX by tracing", {"gate": True}),
    ("ONNX", {"window_size": 3, "gate": True}),
]


def exported_step(how: str, step: DecodingStep, arguments: tuple[Any, ...], file: Path) -> Callable[..., Any]:
    """Return what runs an exported step."""
    if how == "torch":
        return torch.export.export(step, arguments).module()
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    torch.onnx.export(step, arguments, file, dynamo=how == "ONNX")
    session = onnxruntime.InferenceSession(file)
    names = [value.name for value in session.get_inputs()]

    def run(token: Tensor, position: Tensor, states: Any) -> Any:
        values = (value.numpy() for value in (token, position, *states))
        logits, *states = map(torch.from_numpy, session.run(None, dict(zip(names, values, strict=True))))
        return logits, states

    return run


@pytest.mark.parametrize(("how", "options"), STEPS, ids=str)
@pytest.mark.filterwarnings("ignore")  # the exporters' own
@torch.no_grad()
def test_a_decoding_step_is_exported_once_for_all_positions(how, options, tmp_path):
    model, ids = small(n_layer=1, **options), tokens(2, 12)
    for name, parameter in model.named_parameters():
        if ".gate.weight" in name:  # its initial values read nothing
            parameter.normal_(0.0, 0.5)
    cache = model(ids[:, :4]).past_key_values
    states = DecodingStep.states(cache)
    before = [state.clone() for state in states]
    step, arguments = DecodingStep(model), (ids[:, 4:5], torch.full((2, 1), 4), states)
    exported = exported_step(how, step, arguments, tmp_path / "step.onnx")
    tolerance = {"atol": 1e-5, "rtol": 1e-4} if how == "torch" else {"atol": 2e-4, "rtol": 1e-3}
    step(*arguments)
    assert all(map(torch.equal, states, before))
    for at in range(4, 12):
        found, states = exported(ids[:, at : at + 1], torch.full((2, 1), at), states)
        expected = model(ids[:, at : at + 1], **cache_argument(cache)).logits
        assert_close(found, expected, **tolerance)


@torch.no_grad()
def test_an_exported_step_goes_on_past_l():
    """Where an epoch begins, states are moved between two steps."""
    model, ids = make("llama", "slots", max_distance=9, distance_step=4, num_hidden_layers=1), tokens(2, 30)
    expected = logits(model, ids)
    states, step = DecodingStep.states(model(ids[:, :4]).past_key_values), DecodingStep(model)
    exported = torch.export.export(step, (ids[:, 4:5], torch.full((2, 1), 4), states)).module()
    for at in range(4, 30):
        found, states = exported(ids[:, at : at + 1], torch.full((2, 1), at), step.moved(states))
        assert_close(found[:, 0], expected[:, at], atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_a_whole_text_is_exported_and_compiled_up_to_l():
    model, ids = make("llama", "slots", max_distance=9, distance_step=4, num_hidden_layers=1), tokens(2, 30)
    length = {"input_ids": {1: torch.export.Dim("length", min=2, max=9)}, "use_cache": None}
    exported = torch.export.export(model, (ids[:, :5],), {"use_cache": False}, dynamic_shapes=length).module()
    assert_close(exported(ids[:, :9], use_cache=False).logits, logits(model, ids[:, :9]), atol=1e-5, rtol=1e-4)
    with pytest.raises(Exception, match="max_distance=9"):
        torch.compile(model, backend="eager")(ids, use_cache=False)


@pytest.mark.parametrize(("family", "variant"), [("gpt2", "hybrid"), ("bart", "both")])
def test_a_step_whose_cache_grows_is_refused(family, variant):
    with pytest.raises(InputError, match="whose layers are all RFA"):
        DecodingStep(make(family, variant))


def test_packages_that_are_missing_are_named_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "find_spec", lambda name: None)
    onnx, executorch = (
        r"onnx, onnxscript, onnxruntime: pip install 'hf-rfa\[export\]'",
        r"executorch: pip install 'hf-rfa\[executorch\]'",
    )
    for to, message in (("onnx", onnx), ("executorch", executorch)):
        with pytest.raises(InputError, match=message):
            export("nowhere", tmp_path / "out", to=to)
