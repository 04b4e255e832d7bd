"""The importance of tokens, by which slots choose: its calibration on attention that is known, and where it is kept."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from hf_rfa.convert import convert
from hf_rfa.convert.activations import LayerActivations
from hf_rfa.convert.importance import far_weights, fit_importance
from hf_rfa.finetune.distill import distill
from hf_rfa.finetune.recipe import Recipe, Stage
from tests.conftest import words
from tests.grouped_layers import Layer
from tests.training import weights


@torch.no_grad()
def test_tokens_that_are_asked_for_later_become_important():
    """Queries look at the keys of some tokens, wherever these stand, and hidden states say which: the fit finds them."""
    layer = Layer(2, 3, feature_map="none", window_size=4, num_sinks=1, num_slots=3, hidden_size=5)
    query, hidden = torch.zeros(2, 6, 60, 4), torch.randn(2, 60, 5)
    key, value = torch.zeros(2, 2, 60, 4), torch.randn(2, 2, 60, 4)
    query[..., 0] = 6.0
    marked = torch.rand(2, 60) < 0.1
    key[:, 0, :, 0] = 3.0 * marked
    hidden[..., 0] = marked.float()
    activations = LayerActivations(query.unflatten(1, (2, 3)).transpose(2, 3).flatten(2, 3), key, value)
    fit_importance(layer, activations, hidden)
    importance = layer.importance(hidden)[:, 0]
    assert float(importance[marked].min()) > float(importance[~marked].max())

    target, weight = far_weights(layer, activations)
    softmax = (query @ key.repeat_interleave(3, dim=1).mT * layer.scaling).tril()
    softmax = softmax.masked_fill(~torch.ones(60, 60).tril().bool(), -1e30).softmax(-1).square()
    far = torch.ones(60, 60).tril(-4)
    expected = (softmax.unflatten(1, (2, 3)).sum(2) * far).sum(2) / far.sum(0).clamp_min(1)
    torch.testing.assert_close(target, expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(weight[0, 0], F.pad(far.sum(0)[1:], (1, 0)))


@torch.no_grad()
def test_padding_changes_no_importance():
    layer = Layer(2, 1, feature_map="none", window_size=3, num_sinks=1, num_slots=3, hidden_size=5)
    query, key, value = (torch.randn(1, 2, 30, 4) for _ in range(3))
    hidden = torch.randn(1, 30, 5)
    fit_importance(layer, LayerActivations(query, key, value), hidden)
    expected = layer.importance.weight.clone()
    mask = torch.ones(1, 37, dtype=torch.bool)
    mask[:, :7] = False
    padded = LayerActivations(*(F.pad(each, (0, 0, 7, 0), value=9.0) for each in (query, key, value)), mask, mask)
    fit_importance(layer, padded, F.pad(hidden, (0, 0, 7, 0), value=9.0))
    torch.testing.assert_close(layer.importance.weight, expected, rtol=1e-4, atol=1e-6)
    layer.importance.weight.fill_(7.0)
    fit_importance(layer, LayerActivations(*(each[:, :, :3] for each in (query, key, value))), hidden[:, :3])
    assert (layer.importance.weight == 7.0).all(), "a text shorter than the window says nothing"


def test_the_command_line_calibrates_what_it_keeps(checkpoints, tmp_path, run_cli):
    words = ["--preset", "exact", "--window-size", 5, "--sinks", 2, "--slots", 3]
    assert run_cli("convert", checkpoints["gpt2"], tmp_path / "out", *words) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "--preset exact --window-size 5 --sinks 2 --slots 3" in card
    assert "attention.png" not in card
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.num_slots == 3
    assert all(block.attn.importance.weight.std() > 0 for block in model.transformer.h)


def test_distillation_leaves_importance_as_it_is_in_float32(checkpoints, tmp_path):
    (tmp_path / "text.txt").write_text(words(900))
    options = {"preset": "exact", "window_size": 4, "num_sinks": 0, "num_slots": 3, "dtype": "bfloat16"}
    convert(checkpoints, tmp_path / "rfa", calibrate_on=tmp_path / "text.txt", **options)
    recipe = Recipe(end_to_end=Stage(steps=2, batch_size=2, block_length=32, kl_weight=1.0))
    distill(tmp_path / "rfa", tmp_path / "out", teacher=checkpoints["gpt2"], data=tmp_path / "text.txt", recipe=recipe)
    before, after = (weights(tmp_path / name) for name in ("rfa", "out"))
    found = {name for name in before if name.endswith("importance.weight")}
    assert len(found) == 2
    for name in found:
        assert after[name].dtype == torch.float32
        assert torch.equal(after[name], before[name])
        assert not torch.equal(after[name].bfloat16().float(), after[name])
