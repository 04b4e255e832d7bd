"""Feature maps: unbiased kernels, error falling as 1/√D, seeds, pools, and registration."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_rfa.convert.calibrate.attention_weights import log_attention_weights
from hf_rfa.convert.calibrate.calibration import _set_log_scale, fit_projection
from hf_rfa.models.feature_maps import FEATURE_MAPS, FeatureMap
from hf_rfa.models.masking import group_queries, ungroup
from hf_rfa.models.projected_feature_maps import GaussianMap, ProjectedFeatureMap, draw_projection, exponentiate_queries
from tests.families import attend_with_features

H, D_HEAD = 2, 8
#: Maps whose features of queries depend on nothing else.
BY_THEMSELVES = [name for name, cls in sorted(FEATURE_MAPS.items()) if not cls.reads_means]
KERNEL_MAPS = [("positive", False), ("gaussian", False), ("gaussian", True), ("positive", True)]


def build(name: str, **options):
    return FEATURE_MAPS[name](**{"num_heads": H, "head_dim": D_HEAD, "scaling": D_HEAD**-0.5, **options}).double()


def moderate_queries_and_keys(tokens: int = 6):
    generator = torch.Generator().manual_seed(5)
    return (0.5 * torch.randn(1, H, tokens, D_HEAD, generator=generator, dtype=torch.float64) for _ in range(2))


def log_normalizer(feature_map: FeatureMap, query: Tensor) -> Tensor:
    """Return the logarithm of the factor that φ(q)·φ(k) leaves out because it cancels, for q [B, H, T, d], as [B, H, T, 1].

    exp(log_normalizer(q)) φ(q)·φ(k) is an unbiased estimate of exp(q·k·s) (of exp(−‖q̂ − k̂‖²/2) for ``gaussian`` with unit
    norms).
    """
    prepared = feature_map.query_input(query)
    half_norm = prepared.square().sum(-1, keepdim=True) / 2
    constant = feature_map.log_scale[:, None, None] - math.log(feature_map.num_features)
    if isinstance(feature_map, GaussianMap):
        return (
            torch.zeros_like(half_norm) - math.log(feature_map.num_features)
            if feature_map.unit_norm
            else half_norm + constant
        )
    exponent = torch.einsum("bhtd,hfd->bhtf", prepared, feature_map.projection) + feature_map.feature_bias[:, None, :]
    _, log_scale = exponentiate_queries(exponent)
    log_factor = log_scale - half_norm + constant
    if feature_map.reparametrizable:  # shifted keys change the kernel by exp(q·μ·s)
        log_factor = log_factor + feature_map.scaling * (query * feature_map.key_shift[:, None, :]).sum(
            -1, keepdim=True
        )
    return log_factor


@torch.no_grad()
def kernel(feature_map, query, key):
    features = feature_map(query, key)
    return log_normalizer(feature_map, query).exp() * (features[0] @ features[1].transpose(-1, -2))


def exact_kernel(feature_map, query, key):
    if feature_map.unit_norm:
        query, key = (torch.nn.functional.normalize(x, dim=-1) for x in (query, key))
        if feature_map.name == "positive":
            return (query @ key.transpose(-1, -2)).exp()
        return (-torch.cdist(query, key).square() / 2).exp()
    return (query @ key.transpose(-1, -2) * feature_map.scaling).exp()


def assert_unbiased(draws: torch.Tensor, exact: torch.Tensor) -> None:
    """Compare the mean over seeds with exp(q·k·s): they are no further apart than chance allows."""
    standard_error = draws.std(0) / math.sqrt(len(draws))
    assert float(((draws.mean(0) - exact).abs() / standard_error).max()) < 5.5


@pytest.mark.parametrize(("name", "unit_norm"), KERNEL_MAPS)
def test_kernel_is_unbiased_and_its_error_falls_as_one_over_root_d(name, unit_norm):
    query, key = moderate_queries_and_keys()
    errors = {}
    for num_features in (32, 128, 512):
        options = {"num_features": num_features, "unit_norm": unit_norm}
        draws = torch.stack([kernel(build(name, **options, seed=seed), query, key) for seed in range(200)])
        exact = exact_kernel(build(name, **options), query, key)
        assert_unbiased(draws, exact)
        errors[num_features] = float(((draws - exact) / exact).square().mean().sqrt())
    assert errors[32] / errors[128] == pytest.approx(2.0, rel=0.25)
    assert errors[128] / errors[512] == pytest.approx(2.0, rel=0.25)


@pytest.mark.parametrize(("name", "unit_norm"), [("positive", False), ("gaussian", False)])
def test_kernel_stays_unbiased_with_calibrated_constants(name, unit_norm):
    query, key = moderate_queries_and_keys()
    draws = []
    for seed in range(400):
        feature_map = build(name, num_features=64, unit_norm=unit_norm, seed=seed)
        feature_map.log_scale.fill_(1.7)
        if feature_map.reparametrizable:
            feature_map.key_shift.copy_(torch.linspace(-0.4, 0.4, H * D_HEAD).view(H, D_HEAD))
            feature_map.balance.copy_(torch.linspace(0.8, 1.2, H * D_HEAD).view(H, D_HEAD))
        draws.append(kernel(feature_map, query, key))
    assert_unbiased(torch.stack(draws), exact_kernel(feature_map, query, key))


def test_a_shaped_projection_leaves_the_kernel_unbiased_and_lowers_its_variance():
    """On queries and keys that are large and correlated, where independent rows are noisiest."""
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(H, D_HEAD, D_HEAD, generator=generator, dtype=torch.float64) / 2
    query, key = (torch.randn(1, H, 40, D_HEAD, generator=generator, dtype=torch.float64) @ mix for _ in range(2))
    draws: dict[bool, list] = {False: [], True: []}
    for seed in range(400):
        for shaped in draws:
            feature_map = build("positive", num_features=64, seed=seed)
            sums = (feature_map.query_input(query)[0, :, :, None] + feature_map.key_input(key)[0, :, None]).flatten(
                1, 2
            )
            if shaped:
                fit_projection(feature_map, sums.transpose(-1, -2) @ sums / sums.shape[1])
            draws[shaped].append(kernel(feature_map, query, key))
    exact = exact_kernel(feature_map, query, key)
    found = {shaped: torch.stack(kernels) for shaped, kernels in draws.items()}
    assert_unbiased(found[True], exact)
    variances = {shaped: float((kernels / exact).log().var(0).mean()) for shaped, kernels in found.items()}
    assert variances[True] < 0.7 * variances[False]


def test_rows_of_the_projection_are_standard_normal():
    drawn = torch.stack([draw_projection((4, 256, 16), seed=seed, layer_idx=3) for seed in range(20)])
    assert abs(float(drawn.mean())) < 0.02
    assert float(drawn.var()) == pytest.approx(1.0, abs=0.02)
    block = drawn[0, 0, :16].double()
    gram = block @ block.T
    torch.testing.assert_close(gram, torch.diag(gram.diagonal()), atol=1e-4, rtol=0)


def test_draws_differ_by_seed_layer_and_head_and_repeat():
    options = {"shape": (2, 8, 4)}
    first, again = (draw_projection(seed=0, layer_idx=0, **options) for _ in range(2))
    assert torch.equal(first, again)
    settings = [("seed", 1), ("layer_idx", 1), ("layer_idx", 47)]  # GPT-2 XL has 48 layers
    others = [draw_projection(**{"seed": 0, "layer_idx": 0, **options, name: value}) for name, value in settings]
    assert all(not torch.equal(first, other) for other in (*others, first.flip(0)))


def test_trainable_projection_is_a_parameter_and_learns():
    frozen, trained = build("positive", num_features=4), build("positive", num_features=4, trainable=True)
    assert "projection" in dict(frozen.named_buffers())
    assert "projection" in dict(trained.named_parameters())
    assert frozen.state_dict().keys() == trained.state_dict().keys()
    query, key = moderate_queries_and_keys()
    sum(features.sum() for features in trained(query, key)[:2]).backward()
    assert trained.projection.grad.abs().sum() > 0
    assert trained.sigma.grad.abs().sum() > 0


@pytest.mark.parametrize("name", BY_THEMSELVES)
@given(scale=st.floats(0.0, 60.0), seed=st.integers(0, 100))
@settings(max_examples=15)
def test_features_and_gradients_are_finite_for_any_input(name, scale, seed):
    feature_map = FEATURE_MAPS[name](num_heads=H, head_dim=D_HEAD, scaling=1.0)
    generator = torch.Generator().manual_seed(seed)
    query, key = (scale * torch.randn(1, H, 3, D_HEAD, generator=generator) for _ in range(2))
    query.requires_grad_()
    key.requires_grad_()
    features = feature_map(query, key)[:2]
    assert all(x.shape == (1, H, 3, feature_map.feature_dim) for x in features)
    assert all(torch.isfinite(x).all() for x in features)
    sum(x.sum() for x in features).backward()
    assert torch.isfinite(query.grad).all()
    assert torch.isfinite(key.grad).all()
    if not feature_map.signed:
        assert all((x >= 0).all() for x in features)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", BY_THEMSELVES)
def test_sixteen_bit_inputs_give_float32_features(name, dtype):
    feature_map = FEATURE_MAPS[name](num_heads=H, head_dim=D_HEAD)
    query, key = (x.to(dtype) for x in moderate_queries_and_keys())
    found, expected = feature_map(query, key), feature_map(query.float(), key.float())
    for a, b in zip(found[:2], expected[:2], strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b)


def test_published_formulas():
    """Each map against its paper's formula, written out."""
    x = torch.randn(1, H, 5, D_HEAD, dtype=torch.float64)
    elu = build("elu")  # no scaling, as published
    torch.testing.assert_close(elu.query(x), torch.nn.functional.elu(x) + 1)
    exponential = build("exponential", num_features=5, scaling=1.0)
    for parameter in exponential.parameters():
        parameter.data.uniform_(0.5, 2)
    keys = torch.einsum("bhtd,hfd->bhtf", x, exponential.key_projection * exponential.sigma[:, None])
    squares = (exponential.norm_weight * exponential.sigma.square())[:, None] * x.square()
    keys = keys + exponential.key_bias[:, None] - squares.sum(-1, keepdim=True) / 2
    torch.testing.assert_close(exponential.key(x), keys.exp())
    queries = torch.einsum("bhtd,hfd->bhtf", x, exponential.projection * exponential.sigma[:, None])
    ratio = exponential.query(x) / (queries + exponential.query_bias[:, None]).exp()
    torch.testing.assert_close(ratio, ratio[..., :1].expand_as(ratio))  # a factor per query, which cancels
    arccos = build("arccos", num_features=5, unit_norm=True)
    unit = x / x.norm(dim=-1, keepdim=True)
    expected = torch.relu(torch.einsum("bhtd,hfd->bhtf", unit, arccos.projection)) / 5**0.5
    torch.testing.assert_close(arccos.key(x), expected)
    gaussian = build("gaussian", num_features=5, unit_norm=True)
    gaussian.sigma.data.uniform_(0.5, 2)
    phase = torch.einsum("bhtd,hfd->bhtf", unit, gaussian.projection * gaussian.sigma[:, None])  # W = σ∘W̃
    torch.testing.assert_close(gaussian.query(x), torch.cat([phase.sin(), phase.cos()], -1))


@pytest.mark.parametrize(("name", "count"), [("positive", 0), ("gaussian", -3), ("elu", 5)])
def test_impossible_feature_counts_are_refused(name, count):
    with pytest.raises(ValueError, match=f"num_features.*{count}"):
        build(name, num_features=count)


@pytest.mark.parametrize("name", ["exponential", "positive"])
def test_gradients_of_log_weights_are_finite_where_features_are_far_apart(name):
    """What attention transfer and division by the normaliser differentiate, for queries that no key fits."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, H, 40, D_HEAD, generator=generator) * 12 for _ in range(2))
    value = torch.randn(2, H, 40, 3, generator=generator)
    feature_map = build(name, scaling=1.0, trainable=name == "positive").float()
    with torch.no_grad():
        _set_log_scale(feature_map, key.transpose(0, 1).flatten(1, 2))
    least_shift = feature_map.least_shift(None)
    features = feature_map(query.requires_grad_(), key.requires_grad_(), least_shift=least_shift)[:2]
    logs = log_attention_weights(*features, rows=slice(0, 40))
    (logs.clamp_min(-1e9).sum() + attend_with_features(*features, value)[0].sum()).backward()
    for tensor in (query, key, *(each for each in feature_map.parameters() if each.grad is not None)):
        assert torch.isfinite(tensor.grad).all()


@pytest.mark.parametrize("name", sorted(name for name, cls in FEATURE_MAPS.items() if cls.has_exponent))
def test_keys_far_heavier_than_the_calibrated_ones_overflow_nothing(name):
    """All keys are e^200 times as heavy as c expects: sums over them and the gradients of the outputs stay finite."""
    feature_map = build(name, trainable=name in ("positive", "gaussian")).float()
    with torch.no_grad():
        feature_map.log_scale.fill_(-200.0)
    query, key, value = (torch.randn(1, H, 300, D_HEAD, requires_grad=True) for _ in range(3))
    signs = {"denominator_floor": feature_map.denominator_floor}
    output, state = attend_with_features(*feature_map(query, key)[:2], value, **signs)
    output.square().sum().backward()
    with torch.no_grad():
        without_gradients, *_ = attend_with_features(*feature_map.eval()(query, key)[:2], value, **signs)
    for tensor in (output, state, without_gradients, query.grad, key.grad, value.grad):
        assert torch.isfinite(tensor).all()
    torch.testing.assert_close(without_gradients, output, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("unit_norm", [False, True])
def test_the_error_of_signed_features_does_not_explode(unit_norm):
    """Where D features are too few for sharp attention, the outputs are hardly farther from softmax's than nothing at all."""
    shape = (2, H, 128, D_HEAD)
    seen = torch.ones(128, 128, dtype=torch.bool).tril()
    for sharpness in (1, 2, 3, 6):
        feature_map = build("gaussian", unit_norm=unit_norm, scaling=1.0)
        query, key, value = (torch.randn(shape, dtype=torch.float64) for _ in range(3))
        if unit_norm:  # a learned σ, of which the kernel exp(−‖σ(q̂ − k̂)‖²/2) is the sharper the larger it is
            feature_map.sigma.fill_(2.0 * sharpness)
            sharp = [2.0 * sharpness * torch.nn.functional.normalize(x, dim=-1) for x in (query, key)]
            scores = sharp[0] @ sharp[1].mT
        else:
            query *= sharpness
            scores = query @ key.mT
        expected = scores.masked_fill(~seen, -math.inf).softmax(-1) @ value
        features, floor = feature_map(query, key)[:2], feature_map.denominator_floor
        found, *_ = attend_with_features(*features, value, denominator_floor=floor)
        assert (found - expected).square().mean() < 2 * expected.square().mean(), sharpness


# Rows of query heads that share a key-value head


@torch.no_grad()
@pytest.mark.parametrize("name", BY_THEMSELVES)
def test_rows_of_grouped_queries_are_mapped_as_query_heads_alone(name):
    """By a map with a key-value head for each of them, and the same parameters."""
    groups = 3
    sizes = {"head_dim": D_HEAD, "num_features": 6 if issubclass(FEATURE_MAPS[name], ProjectedFeatureMap) else None}
    grouped, single = (FEATURE_MAPS[name](num_heads=H * each, groups=groups // each, **sizes) for each in (1, groups))
    for tensor in grouped.double().eval().state_dict().values():
        tensor.add_(0.2 * torch.randn_like(tensor))
    theirs = grouped.state_dict()
    for key, tensor in single.double().eval().state_dict().items():
        tensor.copy_(theirs[key].repeat_interleave(tensor.shape[0] // theirs[key].shape[0], dim=0))
    query, key = (torch.randn(2, heads, 7, D_HEAD, dtype=torch.float64) for heads in (H * groups, H))
    found = grouped(group_queries(query, H), key, offset=False)
    expected = single(query, key.repeat_interleave(groups, dim=1), offset=False)
    torch.testing.assert_close(ungroup(found.query, H * groups), expected.query)
    torch.testing.assert_close(found.key.repeat_interleave(groups, dim=1), expected.key)


def test_exponential_learns_a_query_map_for_every_query_head():
    sizes, groups = {"num_heads": H, "head_dim": D_HEAD, "num_features": 6}, 3
    grouped = FEATURE_MAPS["exponential"](**sizes, groups=groups)
    shapes = {name: tuple(parameter.shape) for name, parameter in grouped.named_parameters()}
    assert shapes == {
        "sigma": (H, D_HEAD), "projection": (H * groups, 6, D_HEAD), "query_bias": (H * groups, 6),
        "key_projection": (H, 6, D_HEAD), "key_bias": (H, 6), "norm_weight": (H, D_HEAD),
    }  # fmt: skip
    query, key = torch.randn(1, H, 7 * groups, D_HEAD), torch.randn(1, H, 7, D_HEAD)
    expected, found = FEATURE_MAPS["positive"](**sizes)(query, key), grouped(query, key)
    torch.testing.assert_close(found.query, expected.query, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(found.key, expected.key, rtol=1e-4, atol=0.0)
    assert torch.equal(FEATURE_MAPS["exponential"](**sizes).projection, grouped.key_projection)


# Without gradients: what features are computed from is kept


PROJECTED = [name for name, cls in FEATURE_MAPS.items() if issubclass(cls, ProjectedFeatureMap)]


def random_map(name: str, dtype: torch.dtype = torch.float64, **options: bool):
    torch.manual_seed(0)
    made = build(name, num_features=7, windowed=True, **options)
    with torch.no_grad():
        for key, tensor in made.state_dict().items():
            near_one = tensor.numel() < 16 or key == "balance"
            tensor.copy_(0.5 + torch.rand_like(tensor) if near_one else 0.7 * torch.randn_like(tensor))
    return made.to(dtype).eval()


def unscaled(features):
    """Return features, and their offset, with a query's largest one 1."""
    scale = features.query.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    return features.query / scale, features.key, features.offset - scale.log()


@pytest.mark.parametrize("shape", [(1, H, 1, D_HEAD), (4, H, 1, D_HEAD), (2, H, 9, D_HEAD)])
@pytest.mark.parametrize(("name", "unit_norm"), [*((name, False) for name in PROJECTED), ("positive", True)])
def test_features_of_a_kept_specification_are_the_features(name, unit_norm, shape):
    """Apart from a query's scale, which its offset follows."""
    feature_map = random_map(name, unit_norm=unit_norm)
    query, key = torch.randn(2, *shape, dtype=torch.float64) * 2
    expected = feature_map(query, key, offset=True)  # with gradients nothing is folded
    assert feature_map._cached_spec is None
    with torch.no_grad():
        found = feature_map(query, key, offset=True)
        assert feature_map._cached_spec is not None
        alone = feature_map(query)
    for one, other in zip(*map(unscaled, (found, expected)), strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(alone[0], found[0])
    assert alone[1].numel() == 0


@pytest.mark.parametrize("name", PROJECTED)
def test_a_kept_specification_follows_every_change(name):
    feature_map = random_map(name, torch.float32)
    query, key = torch.randn(2, 2, H, 4, D_HEAD)

    def check():
        expected = feature_map(query, key, offset=True)
        with torch.no_grad():
            found = feature_map(query, key, offset=True)
        for one, other in zip(*map(unscaled, (found, expected)), strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-4, atol=2e-5)
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
    query, key = torch.randn(2, 2, H, 4, D_HEAD)
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
