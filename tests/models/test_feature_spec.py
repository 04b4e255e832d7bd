"""Without gradients: folded matrices and blocks of tokens give what the plain forms give."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch

import hf_rfa.models.attention
from hf_rfa.models.attention import SEGMENT_LENGTH
from hf_rfa.models.feature_maps import FEATURE_MAPS
from hf_rfa.models.projected_feature_maps import ProjectedFeatureMap
from tests.families import make_gpt2

SMALL = {"n_embd": 16, "n_head": 2, "num_features": 8, "initializer_range": 0.1}
PROJECTED = [name for name, cls in FEATURE_MAPS.items() if issubclass(cls, ProjectedFeatureMap)]


def random_map(name, dtype=torch.float64, **options):
    torch.manual_seed(0)
    made = FEATURE_MAPS[name](
        num_heads=3, head_dim=5, num_features=None if name == "hedgehog" else 7, scaling=0.4, windowed=True, **options
    )
    with torch.no_grad():
        for tensor in made.state_dict().values():
            tensor.copy_(0.5 + torch.rand_like(tensor) if tensor.numel() < 16 else 0.7 * torch.randn_like(tensor))
        if hasattr(made, "balance"):
            made.balance.copy_(0.5 + torch.rand_like(made.balance))
    return made.to(dtype).eval()


@pytest.mark.parametrize("shape", [(1, 3, 1, 5), (4, 3, 1, 5), (2, 3, 9, 5)])
@pytest.mark.parametrize("name", PROJECTED)
def test_features_of_a_kept_specification_are_the_features(name, shape):
    feature_map = random_map(name)
    query, key = torch.randn(2, *shape, dtype=torch.float64) * 2
    expected = feature_map(query, key, offset=True)  # with gradients nothing is folded
    assert feature_map._cached_spec is None
    with torch.no_grad():
        found = feature_map(query, key, offset=True)
        assert feature_map._cached_spec is not None
        alone = feature_map(query)
    for one, other in zip(found[:3], expected[:3], strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-10, atol=0)
    torch.testing.assert_close(alone[0], found[0])
    assert alone[1].numel() == 0


@pytest.mark.parametrize("name", PROJECTED)
def test_a_kept_specification_follows_every_change(name):
    feature_map = random_map(name, torch.float32)
    query, key = torch.randn(2, 2, 3, 4, 5)

    def check():
        expected = [each.detach() for each in feature_map(query, key)[:2]]
        with torch.no_grad():
            found = feature_map(query, key)
        for one, other in zip(found[:2], expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=0 if feature_map.has_exponent else 1e-6)
        return found[0]

    seen = [check()]
    with torch.no_grad():
        feature_map.projection.mul_(1.5)
    seen.append(check())
    feature_map.load_state_dict({name: value + 0.25 for name, value in feature_map.state_dict().items()})
    seen.append(check())
    feature_map.load_state_dict({k: v * 0.5 for k, v in feature_map.state_dict().items()}, assign=True)
    seen.append(check())
    feature_map.train()
    for tensor in feature_map.state_dict().values():
        tensor.data.mul_(1.1)
    feature_map.eval()
    seen.append(check())
    feature_map.double().float()
    check()
    copied = copy.deepcopy(feature_map)
    if feature_map.has_exponent:
        with torch.no_grad():
            copied.log_scale.add_(1.0)
            torch.testing.assert_close(copied(query, key)[1], feature_map(query, key)[1] * torch.tensor(-1.0).exp())
    for before, after in pairwise(seen):
        assert not torch.allclose(before, after)


def test_nothing_is_folded_where_it_cannot_be_told_whether_it_changed():
    feature_map = random_map("exponential", torch.float32)
    query, key = torch.randn(2, 2, 3, 4, 5)
    with torch.inference_mode():
        made_there = random_map("exponential", torch.float32)
        found = made_there(query, key)
        assert made_there._cached_spec is None
        torch.testing.assert_close(found[0], feature_map(query, key)[0], rtol=1e-4, atol=0)
        assert feature_map._cached_spec is not None
    feature_map.train()
    with torch.no_grad():
        feature_map(query, key)
    assert feature_map._cached_spec is None


@pytest.mark.parametrize("options", [{"feature_map": "exponential", "gate": True}, {"window_size": 5}])
def test_long_texts_in_blocks_are_what_they_are_whole(options, monkeypatch):
    """Values and gradients, with padding on both sides, against a model that computes everything at once."""
    length = 2 * SEGMENT_LENGTH + 37
    model = make_gpt2({"chunk_size": 48, **SMALL, **options}, n_positions=length)
    ids = torch.randint(0, 50, (2, length))
    mask = torch.ones_like(ids)
    mask[0, :9], mask[1, -600:] = 0, 0
    assert 2 * SEGMENT_LENGTH < length <= 3 * SEGMENT_LENGTH
    losses, gradients = [], []
    for limit in (length, SEGMENT_LENGTH):
        with monkeypatch.context() as patch:
            patch.setattr(hf_rfa.models.attention, "MAX_LENGTH_WITHOUT_SEGMENTS", limit)
            model.zero_grad()
            outputs = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False)
            outputs.loss.backward()
            losses.append((outputs.loss.detach(), outputs.logits.detach()[mask == 1]))
            gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    with torch.no_grad():
        found = model(ids, attention_mask=mask, use_cache=True).logits[mask == 1]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found, losses[0][1], rtol=1e-4, atol=1e-5)
    for name, expected in gradients[0].items():
        scale = expected.abs().max().clamp_min(1e-6)
        assert float((gradients[1][name] - expected).abs().max() / scale) < 2e-3, name


def test_nan_does_not_pass_in_silence():
    model = make_gpt2(SMALL)
    embeddings = torch.randn(1, 6, 16)
    embeddings[0, 2] = float("nan")
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            logits = model(inputs_embeds=embeddings).logits
        assert logits[0, 2:].isnan().any(-1).all()
