"""The quality benchmark, on the demo's checkpoint."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import quality
from hf_rfa.finetune.recipe import Recipe
from tests.conftest import DEMO_MODEL, DEMO_TEXT

RECIPE = """
transfer: {steps: 4, batch_size: 2, block_length: 32}
end_to_end: {steps: 3, batch_size: 2, block_length: 32}
"""


def test_the_grid_measures_every_row_after_every_stage_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    words = ["quality", str(DEMO_MODEL), "--train", str(DEMO_TEXT), "--test", f"demo={DEMO_TEXT}", "--context", "32"]
    words += ["--max-tokens", "300", "--recipe", str(tmp_path / "recipe.yaml"), "--work", str(tmp_path / "work")]
    words += ["--output", str(tmp_path / "quality.json"), "--row", "elu", "--row", "exponential, W = 16"]
    monkeypatch.setattr(sys, "argv", words)
    quality.main()
    results = json.loads((tmp_path / "quality.json").read_text())["results"]
    perplexity = {(row["row"], row["stage"]): row["perplexities"]["demo, context 32"] for row in results}
    windowed = [f"exponential, W = 16{part}" for part in ("", ": linear alone", ": window alone")]
    expected = {("softmax", "start"), ("softmax", "end to end"), ("elu", "start"), ("elu", "end to end")}
    assert set(perplexity) == expected | {(row, stage) for row in windowed for stage in quality.STAGES}
    assert perplexity[windowed[0], "start"] == pytest.approx(perplexity["softmax", "start"], rel=0.05)
    assert perplexity["softmax", "end to end"] != perplexity["softmax", "start"]
    assert (tmp_path / "quality.png").is_file()

    monkeypatch.setattr(quality, "convert", pytest.fail)
    monkeypatch.setattr(quality, "distill", pytest.fail)
    monkeypatch.setattr(quality, "perplexity", pytest.fail)
    quality.main()
    assert json.loads((tmp_path / "quality.json").read_text())["results"] == results


@pytest.mark.parametrize("name", ["short", "long"])
def test_its_recipes_have_both_stages(name):
    stages = Recipe.load(Path(quality.__file__).parent / "recipes" / f"{name}.yaml").stages().values()
    assert all(stage.steps > 0 for stage in stages)
