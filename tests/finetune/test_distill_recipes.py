"""Recipes of distillation: what is read from them, what is refused, and what is set for a model and a processor."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hf_rfa.convert import InputError
from hf_rfa.finetune.recipe import Recipe, Stage
from hf_rfa.finetune.trainers import training_arguments
from tests.families import make


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("transfer: {steps: -1}", r"transfer.steps must be a number of at least 0, got -1"),
        ("transfer: {block_length: 1}", r"transfer.block_length must be a number of at least 2, got 1"),
        ("transfer: {stepz: 3}", r"transfer has no setting stepz. Did you mean steps"),
        ("end_to_end: {kl_weight: 2}", r"end_to_end.kl_weight must be from 0 to 1, got 2"),
        ("end_to_end: {learning_rate: fast}", r"end_to_end: learning_rate must be float, got 'fast'"),
        ("transfer: {bf16: 1}", r"transfer: bf16 must be .*bool.*auto.*, got 1"),
        ("transfers: {steps: 3}", r"recipe.yaml has no setting transfers. Did you mean transfer"),
        ("- 1", "holds no settings"),
        ("a: [", "cannot read the recipe"),
    ],
)
def test_recipes_are_checked(text, match, tmp_path):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(InputError, match=match):
        Recipe.load(tmp_path / "recipe.yaml")


@pytest.mark.parametrize(
    ("positions", "pairs", "lengths", "sizes", "shares"),
    [
        (8192, False, (1024, 2048), (2, 1), (0.0, 0.5)),  # two blocks of 1,024 teach less end to end
        (1500, False, (1024, 1500), (2, 1), (0.0, 0.5)),
        (512, False, (512, 512), (4, 4), (0.0, 0.5)),
        (8192, True, (1024, 1024), (8, 8), (0.0, 0.0)),
    ],
)
def test_blocks_are_as_long_as_a_step_end_to_end(positions, pairs, lengths, sizes, shares):
    """And repeat themselves, which pairs cannot."""
    config = SimpleNamespace(is_encoder_decoder=pairs)
    recipe = Recipe(Stage(steps=1), Stage(steps=1, repeating_share=0.5))
    stages = recipe.resolve(config, positions).stages().values()
    assert tuple(stage.block_length for stage in stages) == lengths
    assert tuple(stage.batch_size for stage in stages) == sizes
    assert tuple(stage.repeating_share for stage in stages) == shares


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"amx_bf16": True, "avx512_bf16": True}, True),
        ({"avx512_bf16": True}, False),  # as on a Xeon without AMX: 84 GFLOP/s in bf16, 150 in float32
        ({}, False),
    ],
)
def test_a_recipe_may_leave_bf16_to_the_machine(capabilities, expected, monkeypatch, tmp_path):
    for devices in (torch.cuda, torch.accelerator):
        monkeypatch.setattr(devices, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    stage = Stage(bf16="auto", steps=1)
    assert Recipe(transfer=stage).resolve(make("gpt2").config, 16).transfer.bf16 is expected
    assert training_arguments(replace(stage, batch_size=1), tmp_path, seed=0).bf16 is expected
