"""Error of random features on a trained model's own queries and keys, against the number of features.

    python -m benchmarks.kernel_error MODEL TEXT

For every causal layer of MODEL (a softmax GPT-2) and D = 64 … 4096 features: the relative error of φ(q)·φ(k) as an estimate
of exp(q·k·s), as the median over pairs of a query and a key it sees, and the error of the attention weights that follow from
it (half the sum of absolute differences, the mean over queries). Means over seeds and heads. The last column is the slope of
log error against log D, −0.5 for an error that falls as 1/√D.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from hf_rfa import RFAGPT2Config, RFAGPT2LMHeadModel
from hf_rfa.convert.activations import capture_inputs, layer_activations, padding_masks
from hf_rfa.convert.base_model import rfa_layers, softmax_base_model
from hf_rfa.convert.calibration import calibrate_layer
from hf_rfa.convert.calibration_data import text_blocks
from hf_rfa.inference import load_model
from hf_rfa.io.text_io import read_documents
from hf_rfa.models.attention import RFAAttentionMixin
from hf_rfa.models.feature_maps import FeatureMap
from hf_rfa.models.learned_feature_maps import ExponentialMap
from hf_rfa.models.linear_attention import Tokens, linear_attention
from hf_rfa.models.projected_feature_maps import GaussianMap, PositiveMap, exponentiate_queries

COUNTS = (64, 256, 1024, 4096)
VARIANTS = (("positive", False), ("positive", True), ("gaussian", False))


def log_normalizer(feature_map: FeatureMap, query: Tensor) -> Tensor:
    """Return the logarithm of the factor that φ(q)·φ(k) leaves out because it cancels, for q [B, H, T, d], as [B, H, T, 1].

    exp(log_normalizer(q)) φ(q)·φ(k) is an unbiased estimate of exp(q·k·s) (of exp(−‖q̂ − k̂‖²/2) for ``gaussian`` with unit
    norms).

    Raises:
        NotImplementedError: for maps that estimate no softmax kernel, or do so no more once they are trained.
    """
    if not isinstance(feature_map, (GaussianMap, PositiveMap)) or isinstance(feature_map, ExponentialMap):
        raise NotImplementedError(f"feature_map={feature_map.name!r} does not estimate the softmax kernel.")
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


def errors(layer: RFAAttentionMixin, query: Tensor, key: Tensor) -> tuple[float, float]:
    """Return (median relative error of the kernel, mean error of the weights) of one layer, for [N, H, T, d]."""
    feature_map = layer.feature_map.double()
    query, key = query.double(), key.double()
    visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    exact = (query @ key.transpose(-1, -2)) * layer.scaling
    features = feature_map(query, key)
    estimate = log_normalizer(feature_map, query).exp() * (features[0] @ features[1].transpose(-1, -2))
    kernel = float((estimate / exact.exp() - 1).abs()[..., visible].median())
    softmax = exact.masked_fill(~visible, -math.inf).softmax(-1)
    one_hot = torch.eye(key.shape[2]).expand(*key.shape[:2], -1, -1)  # whose outputs are the weights
    weights, *_ = linear_attention(
        features.query, Tokens(features.key, one_hot), denominator_floor=feature_map.denominator_floor
    )
    return kernel, float((softmax - weights).abs().sum(-1).mean() / 2)


@torch.no_grad()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    parent, tokenizer = load_model(args.model, kind="causal", dtype="float32")
    inputs = text_blocks(tokenizer, read_documents(args.text), 256, tokens=1024)

    shown = Table(title=f"{args.model}: error against D")
    for column in ("features", "error of", *(f"D = {count}" for count in COUNTS), "slope"):
        shown.add_column(column, justify="right")
    for name, calibrated in VARIANTS:
        found: dict[int, list[tuple[float, float]]] = {count: [] for count in COUNTS}
        for count in track(COUNTS, description=name):
            for seed in range(args.seeds):
                config = RFAGPT2Config.from_base(parent.config, feature_map=name, num_features=count, feature_seed=seed)
                model = RFAGPT2LMHeadModel(config).eval()
                model.load_state_dict(parent.state_dict(), strict=False)
                twin = softmax_base_model(model, "GPT2LMHeadModel", parent.config)
                layers = rfa_layers(model)
                recorded = capture_inputs(twin, layers, inputs)
                for key, layer in layers.items():
                    sample = layer_activations(layer, recorded[key], padding_masks(inputs))
                    if calibrated:
                        calibrate_layer(layer, sample)
                        layer.feature_map.sigma.fill_(1.0)  # the estimate is unbiased for exp(q·k·s) at σ = 1
                    found[count].append(errors(layer, sample.query, sample.key))
        for index, what in enumerate(("kernel", "weights")):
            means = [sum(pair[index] for pair in found[count]) / len(found[count]) for count in COUNTS]
            slope = math.log(means[-1] / means[0]) / math.log(COUNTS[-1] / COUNTS[0])
            label = f"{name}, calibrated" if calibrated else name
            shown.add_row(label, what, *(f"{value:.3g}" for value in means), f"{slope:.2f}")
    Console().print(shown)


if __name__ == "__main__":
    main()
