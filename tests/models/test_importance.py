"""A rule of importance from outside, as CONTRIBUTING.md shows it; `test_layouts.py` has this package's own against a loop."""

from __future__ import annotations

import re

import torch
from transformers import AutoModelForCausalLM

from hf_rfa import IMPORTANCES
from hf_rfa.models.cache_names import returned_cache
from tests.conftest import DEMO_MODEL, ROOT


def test_the_example_of_a_rule_converts_a_model_that_keeps_what_it_says(tmp_path, monkeypatch, run_cli):
    page = (ROOT / "CONTRIBUTING.md").read_text()
    (example,) = re.findall(r"```python\n(import torch\nfrom hf_rfa import Importance.*?)```", page, re.S)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "input_norm.py").write_text(example)
    words = ["--import", "input_norm.py", "--config", "importance=input_norm"]
    words += ["--preset", "exact", "--slots", 4, "--window-size", 8]
    assert run_cli("convert", DEMO_MODEL, "out", *words) == 0
    model = AutoModelForCausalLM.from_pretrained("out")
    inputs = []
    model.transformer.h[0].attn.register_forward_pre_hook(
        lambda module, args, kwargs: inputs.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    places = returned_cache(model(torch.arange(3, 63)[None], use_cache=True)).layers[0].memories[0].places
    norms, sinks = inputs[0][0].norm(dim=-1), model.config.num_sinks
    best = norms[sinks:-8].topk(4).indices + sinks
    assert set(places.arrival[0, 0].tolist()) == {*range(sinks), *best.tolist(), *range(52, 60)}
    del IMPORTANCES["input_norm"]
