"""The losses of distillation: against loops over heads and tokens, and what has a gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, TrainingArguments

from hf_rfa.convert.calibrate import activations
from hf_rfa.convert.calibrate.activations import LayerActivations
from hf_rfa.convert.checkpoint.base_model import rfa_layers
from hf_rfa.finetune import trainers
from hf_rfa.finetune.data import PairCollator
from hf_rfa.finetune.recipe import Stage
from hf_rfa.finetune.trainers import (
    AttentionTransferTrainer,
    LogitDistillationTrainer,
    layer_divergence,
    training_arguments,
    transfer_losses,
)
from hf_rfa.inference import load_model
from hf_rfa.models.masking import group_queries
from tests.families import has_encoder, make, softmax_model
from tests.grouped_layers import HIDDEN, WIDTH, Layer
from tests.training import assert_same

FIELDS = {"gate": True}, {"feature_map": "elu", "window_size": 1}, {"window_size": 3, "num_sinks": 2, "num_slots": 2}


@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize("block", [128, 7])
def test_divergence_is_the_kl_of_the_weights(fields, block, monkeypatch):
    """In float64, of grouped queries, which are compared a few at a time; `test_window.py` has the weights by a loop."""
    monkeypatch.setattr(activations, "QUERY_BLOCK", block)
    layer = Layer(2, 3, **fields).double()
    query, key, value = (torch.randn(2, heads, 13, WIDTH, dtype=torch.float64) for heads in (6, 2, 2))
    hidden, mask = torch.randn(2, 13, HIDDEN, dtype=torch.float64), torch.arange(13) >= torch.tensor([[4], [0]])
    found = layer_divergence(layer, LayerActivations(group_queries(query, 2), key, value, mask, mask), hidden)
    options = {"hidden_states": hidden, "padding_mask": mask.long(), "output_attentions": True}
    _, weights = layer.attend(query, key, value, **options)
    seen = torch.ones(13, 13, dtype=torch.bool).tril() & mask[:, None, None]
    logits = query @ key.repeat_interleave(3, dim=1).mT * layer.scaling
    softmax = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    kl = torch.where(seen, softmax * (softmax.log() - weights.log()), 0.0).sum(-1)
    expected = kl.transpose(0, 1)[:, mask].mean(-1)
    torch.testing.assert_close(found, expected.view(2, 3).mean(1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "bart"])
def test_logit_loss_is_the_kl_and_the_loss_on_the_text(family, material, tmp_path):
    model = make(family, {"num_features": 4})
    teacher = softmax_model(model, family)
    for parameter in teacher.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    if not has_encoder(family):
        ids = torch.randint(1, 61, (3, 8))
        inputs = {"input_ids": ids, "labels": ids}
    else:
        pairs = [{"input_ids": [5, 6, 2], "labels": [7, 2]}, {"input_ids": [5, 2], "labels": [8, 9, 10, 2]}]
        inputs = PairCollator(AutoTokenizer.from_pretrained(material / "bart"), model=model)(pairs)
    with torch.no_grad():
        known = {name: tensor for name, tensor in inputs.items() if name != "labels"}
        ours, theirs = (each(**known).logits.log_softmax(-1) for each in (model, teacher))
    labels = inputs["labels"]
    if not has_encoder(family):
        ours, theirs, labels = ours[:, :-1], theirs[:, :-1], labels[:, 1:]
    kl = [(theirs[r, t].exp() * (theirs[r, t] - ours[r, t])).sum() for r, t in (labels != -100).nonzero().tolist()]
    nll = [-ours[r, t, labels[r, t]] for r, t in (labels != -100).nonzero().tolist()]
    assert torch.stack(kl).mean() > 0.1
    for share in (0.0, 0.3, 1.0):
        arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[])
        trainer = LogitDistillationTrainer(model=model, args=arguments, teacher=teacher, stage=Stage(kl_weight=share))
        expected = share * torch.stack(kl).mean() + (1 - share) * torch.stack(nll).mean()
        torch.testing.assert_close(trainer.compute_loss(model, inputs).detach(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_divergence_of_logits_and_its_gradient_are_the_plain_ones(dtype, monkeypatch):
    monkeypatch.setattr(trainers, "CHUNK_LOGITS", 4 * 300)  # 37 rows: the last piece is short
    logits, expected = (4 * torch.randn(37, 300).to(dtype) for _ in range(2))
    logits[0, 0], expected[1, 0] = 500.0, -500.0
    learned = torch.arange(37) % 5 != 2
    logits.requires_grad_()
    truth = logits.detach().double().requires_grad_()
    rows = truth[learned].log_softmax(-1), expected[learned].double().log_softmax(-1)
    wanted = F.kl_div(*rows, log_target=True, reduction="batchmean")
    divergence = trainers.logit_divergence(logits, expected, learned)
    torch.testing.assert_close(divergence.double(), wanted, rtol=1e-5, atol=0)
    assert divergence.dtype == torch.float32
    (0.3 * divergence).backward()
    (0.3 * wanted).backward()
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(
        logits.grad.double(), truth.grad, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-7
    )


def test_all_layers_learn_alone(pair):
    """The loss of one layer has no gradient in another's feature map."""
    losses = dict(transfer_losses(*pair, {"input_ids": torch.randint(4, 61, (2, 12))}))
    losses["transformer.h.1.attn"].sum().backward()
    layers = rfa_layers(pair[0])
    assert all(p.grad is None for p in layers["transformer.h.0.attn"].feature_map.parameters())
    assert layers["transformer.h.1.attn"].feature_map.projection.grad.abs().sum() > 0


def test_transfer_holds_the_graph_of_one_layer_at_a_time(pair, tmp_path):
    """With the gradients of the losses' plain mean."""
    model, teacher = pair
    inputs = {"input_ids": torch.randint(4, 61, (2, 12))}
    stage = Stage(steps=1, batch_size=2)
    arguments = training_arguments(stage, tmp_path, seed=0)
    trainer = AttentionTransferTrainer(stage=stage, teacher=teacher, model=model, args=arguments)
    alive: list[int] = []  # sizes of what is saved for backward passes, while it is
    most = 0

    class Saved:
        def __init__(self, tensor):
            nonlocal most
            self.tensor = tensor
            alive.append(tensor.nbytes)
            most = max(most, sum(alive))

        def __del__(self):
            alive.remove(self.tensor.nbytes)

    def gradients(loss):
        loss.backward()
        grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        model.zero_grad()
        return grads

    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        losses = dict(transfer_losses(model, teacher, inputs))
        expected = torch.stack([loss.mean() for loss in losses.values()]).mean()
        all_layers, expected_gradients = most, gradients(expected)
        del losses
        assert not alive
        most = 0
        loss = trainer.compute_loss(model, inputs)
        assert most < 0.6 * all_layers, "of two layers"
        trainer_gradients = gradients(loss)
    torch.testing.assert_close(loss, expected)
    assert any("feature_map" in name for name in trainer_gradients)
    assert_same(trainer_gradients, expected_gradients)


def test_padding_does_not_enter_the_losses(material):
    """A pair in a row by itself, and padded on both sides."""
    model, tokenizer = load_model(str(material / "bart-rfa"))
    teacher, _ = load_model(str(material / "bart"))
    pairs = [{"input_ids": [5, 6, 7, 2], "labels": [8, 9, 2]}, {"input_ids": [9] * 9 + [2], "labels": [5] * 7 + [2]}]
    collate = PairCollator(tokenizer, model=model)
    alone, padded = collate(pairs[:1]), {name: rows[:1] for name, rows in collate(pairs).items()}
    expected, found = (dict(transfer_losses(model, teacher, inputs)) for inputs in (alone, padded))
    for name, expected_losses in expected.items():
        torch.testing.assert_close(found[name], expected_losses, rtol=1e-4, atol=1e-5, msg=name)
