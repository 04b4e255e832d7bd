"""Recipes of distillation: what is read from them, what is refused, and what is set for a model and a processor."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hf_rfa.convert import InputError
from hf_rfa.finetune import recipe as recipes
from hf_rfa.finetune import trainers
from hf_rfa.finetune.recipe import Recipe, Stage
from tests.families import make


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("transfer: {steps: -1}", r"transfer.steps must be a whole number of at least 0, got -1"),
        ("transfer: {block_length: 1}", r"transfer.block_length must be a whole number of at least 2, got 1"),
        ("transfer: {stepz: 3}", r"transfer has no setting stepz. There are: steps, batch_size"),
        ("end_to_end: {kl_weight: 2}", r"end_to_end.kl_weight must be from 0 to 1, got 2"),
        ("end_to_end: {learning_rate: fast}", r"end_to_end.learning_rate must be a number of at least 0, got 'fast'"),
        ("transfer: {bf16: 1}", r"transfer.bf16 must be true, false or auto, got 1"),
        ("transfers: {steps: 3}", r"transfers is not understood. There are: transfer, end_to_end, seed"),
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


@pytest.mark.parametrize("pays", [True, False])
def test_a_recipe_may_leave_bf16_to_the_machine(pays, monkeypatch, tmp_path):
    monkeypatch.setattr(recipes, "bf16_pays", lambda: pays)
    monkeypatch.setattr(trainers, "bf16_pays", lambda: pays)
    stage = Stage(bf16="auto", steps=1)
    resolved = Recipe(transfer=stage).resolve(make("gpt2").config, 16)
    assert resolved.transfer.bf16 is pays
    given = replace(stage, batch_size=1)
    assert trainers.training_arguments(given, tmp_path, seed=0).bf16 is pays


@pytest.mark.parametrize(
    ("capabilities", "seconds", "expected"),
    [
        ({"avx512_bf16": True}, {torch.float32: 2.0, torch.bfloat16: 1.0}, True),
        ({"amx_bf16": True}, {torch.float32: 2.0, torch.bfloat16: 1.0}, True),
        # As on a Xeon without AMX: 84 GFLOP/s in bf16, 150 in float32.
        ({"avx512_bf16": True}, {torch.float32: 1.0, torch.bfloat16: 1.8}, False),
        # Too near to be told apart every time, and a run that goes on has to find the same.
        ({"avx512_bf16": True}, {torch.float32: 1.1, torch.bfloat16: 1.0}, False),
        ({"avx512_f": True}, {}, False),
        ({}, {}, False),
    ],
)
def test_bf16_is_for_processors_that_are_faster_in_it(capabilities, seconds, expected, monkeypatch):
    for devices in (torch.cuda, torch.accelerator):
        monkeypatch.setattr(devices, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    monkeypatch.setattr(recipes, "product_seconds", seconds.__getitem__)
    recipes.bf16_pays.cache_clear()
    try:
        assert recipes.bf16_pays() is expected
    finally:
        recipes.bf16_pays.cache_clear()


def test_products_are_timed():
    dtypes = (torch.float32, torch.float64)  # of which a register has half as many
    single, double = (min(recipes.product_seconds(dtype) for _ in range(3)) for dtype in dtypes)
    assert 0 < single < double
