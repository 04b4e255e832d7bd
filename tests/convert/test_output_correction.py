"""Corrections of output projections, against least squares by the definition in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hf_rfa.convert import InputError, convert, output_correction
from hf_rfa.convert.calibration import calibrate
from hf_rfa.convert.output_correction import OutputCorrection, apply_corrections
from tests.convert.conftest import tensors
from tests.families import draw_importance, make, softmax_model

LENGTHS = torch.tensor([40, 12, 25, 40, 33, 40, 18, 40, 7, 40])
HELD_OUT = 2  # an eighth of the rows, rounded up

#: The first layer of every kind of attention by family, and the fields of a model: what is kept is less than the text.
CASES = [
    ("gpt2", "transformer.h.0.attn", "c_proj", {"feature_map": "elu", "window_size": 2, "num_slots": 1}),
    ("gpt2", "transformer.h.0.attn", "c_proj", {"window_size": 4, "feature_map": "none"}),
    ("llama", "model.layers.0.self_attn", "o_proj", {"window_size": 4, "num_slots": 2, "feature_map": "none"}),
    ("bart", "model.decoder.layers.0.self_attn", "out_proj", {"feature_map": "elu", "window_size": 2}),
    ("bart", "model.encoder.layers.0.self_attn", "out_proj", {"num_features": 8}),
]


def models(family: str, fields: dict) -> tuple:
    """Return an RFA model, its softmax model, and padded inputs of both."""
    torch.manual_seed(0)
    model = make(family, {**fields, **({"softmax_encoder_layers": []} if family == "bart" else {})})
    draw_importance(model)
    ids = torch.randint(4, 61, (len(LENGTHS), 40))
    mask = (torch.arange(40) < LENGTHS[:, None]).long()
    inputs = {"input_ids": ids, "attention_mask": mask}
    if family == "bart":
        inputs |= {"decoder_input_ids": ids.flip(1), "decoder_attention_mask": mask.flip(0)}
    return model, softmax_model(model, family), inputs


def passed_through(model: torch.nn.Module, linear: str, inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and outputs of a linear layer in a forward pass, in float64."""
    passed: list[torch.Tensor] = []
    with (
        torch.no_grad(),
        model.get_submodule(linear).register_forward_hook(lambda _, args, output: passed.extend((args[0], output))),
    ):
        model(**inputs)
    return passed[0].double(), passed[1].double()


@pytest.mark.parametrize(("family", "layer", "linear", "fields"), CASES)
def test_a_correction_is_the_least_squares_of_the_rows_that_are_fitted(family, layer, linear, fields, monkeypatch):
    """In the first layers both models have the same inputs."""
    monkeypatch.setattr(output_correction, "RIDGES", (3.0,))
    model, base_model, inputs = models(family, fields)
    corrections = calibrate(model, base_model, inputs, on_layer=lambda: None, correct_outputs=True).corrections
    correction = next(each for each in corrections if each.projection == f"{layer}.{linear}")
    heads, output = passed_through(model, correction.projection, inputs)
    errors = passed_through(base_model, correction.projection, inputs)[1] - output
    mask = inputs["decoder_attention_mask" if "decoder" in layer else "attention_mask"].bool()
    fitted, held_out = mask.clone(), mask.clone()
    fitted[-HELD_OUT:] = held_out[:-HELD_OUT] = False

    width = heads.shape[-1]
    design = F.pad(heads[fitted], (0, 1), value=1.0)
    penalty = (3.0 * heads[fitted].square().sum() / width).sqrt() * torch.eye(width, width + 1, dtype=torch.float64)
    if correction.bias is None:
        design[:, -1] = 0.0
    solution = torch.linalg.lstsq(
        torch.cat([design, penalty]), F.pad(errors[fitted], (0, 0, 0, width)), driver="gelsd"
    ).solution
    torch.testing.assert_close(correction.weight.T.double(), solution[:-1], rtol=1e-3, atol=1e-5)
    if correction.bias is not None:
        torch.testing.assert_close(correction.bias.double(), solution[-1], rtol=1e-3, atol=1e-5)
    left = errors[held_out] - F.pad(heads[held_out], (0, 1), value=1.0) @ solution
    ratio = left.square().sum() / errors[held_out].square().sum()
    assert correction.error_ratio == pytest.approx(float(ratio), rel=1e-3)
    assert ratio < 1

    before = base_model.get_submodule(correction.projection).weight.clone()
    apply_corrections(model, [correction])
    corrected = passed_through(model, correction.projection, inputs)[1]
    torch.testing.assert_close((output + errors - corrected)[held_out], left, rtol=1e-3, atol=1e-4)
    assert torch.equal(base_model.get_submodule(correction.projection).weight, before)


def test_a_layer_without_errors_stays_as_it_is():
    """A window that holds the whole text; padding has no tokens to be wrong about."""
    model, base_model, inputs = models("llama", {"window_size": 64, "feature_map": "none"})
    found = calibrate(model, base_model, inputs, on_layer=lambda: None, correct_outputs=True)
    assert all(correction.error_ratio > 0.1 for correction in found.corrections)  # of rounding errors nothing is linear
    first = {name: tensor[:1] for name, tensor in inputs.items()}  # which leaves no row to hold out
    assert not calibrate(model, base_model, first, on_layer=lambda: None, correct_outputs=True).corrections


def test_what_padding_holds_plays_no_part():
    model, base_model, inputs = models("bart", {"num_features": 8, "window_size": 4})
    mask = inputs["attention_mask"]
    other = {name: torch.where(mask == 0, 60, ids) for name, ids in inputs.items() if name == "input_ids"}
    found = [
        calibrate(model, base_model, each, on_layer=lambda: None, correct_outputs=True).corrections
        for each in (inputs, inputs | other)
    ]
    assert len(found[0]) == len(found[1]) >= 4
    for first, second in zip(*found, strict=True):
        torch.testing.assert_close(first.weight, second.weight, rtol=1e-3, atol=1e-5)


def test_changes_are_of_new_tensors_and_named():
    model, base_model, _ = models("gpt2", {"window_size": 4})
    name = "transformer.h.1.attn.c_proj"
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    change = torch.randn(24, 24)
    changed = apply_corrections(model, [OutputCorrection(name, change, torch.ones(24), 0.5)])
    assert changed == {f"{name}.weight", f"{name}.bias"}
    for key, tensor in model.state_dict().items():
        expected = {f"{name}.weight": change.T, f"{name}.bias": torch.ones(24)}.get(key, 0.0)
        torch.testing.assert_close(tensor, before[key] + expected)
    for key, tensor in base_model.state_dict().items():
        assert torch.equal(tensor, before[key])


def test_a_conversion_corrects_what_stays_converted_and_nothing_else(checkpoints, text, tmp_path):
    options = {"calibrate_on": text, "cross_layers": "all", "feature_map": "elu", "window_size": 2, "force": True}
    report = convert(checkpoints["bart"], tmp_path / "out", keep_softmax=2, correct_outputs=True, **options)
    assert len(report.sensitivities) == 6
    source, result = tensors(checkpoints["bart"]), tensors(tmp_path / "out")
    changed = {key for key, tensor in source.items() if not torch.equal(tensor, result[key])}
    assert {key.rpartition(".")[0] for key in changed} == set(report.output_corrections)
    assert 0 < len(report.output_corrections) <= 4
    assert all(0 < ratio < 1 for ratio in report.output_corrections.values())
    card = (tmp_path / "out" / "README.md").read_text()
    assert "output projections corrected" in card

    report = convert(checkpoints["bart"], tmp_path / "kept", **options)
    assert not report.output_corrections
    result = tensors(tmp_path / "kept")
    assert all(torch.equal(tensor, result[key]) for key, tensor in source.items())


@pytest.mark.parametrize(
    ("options", "trained", "words"),
    [({}, None, "there is no text"), ({"preset": "rfa"}, "features", "attention transfer needs them")],
)
def test_corrections_without_effect_are_refused(options, trained, words, checkpoints, text, tmp_path):
    options |= {"calibrate_on": text} if trained else {}
    with pytest.raises(InputError, match=f"correct_outputs=True .*{words}"):
        convert(checkpoints["gpt2"], tmp_path / "out", correct_outputs=True, trained=trained, **options)
    assert not (tmp_path / "out").exists()
