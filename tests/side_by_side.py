"""What two commits compute, side by side: ``python -m tests.side_by_side COMMIT`` compares the working tree with COMMIT.

Logits of whole texts, with padding, of packed documents, in pieces with a cache, after tokens were taken back; tokens of
greedy and beam search; 16 bits; gradients. Weights are those of the other commit. The largest difference of each model is
relative to the largest number.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import EncoderDecoderCache

from hf_rfa.models.cache_names import cache_argument, returned_cache
from tests.families import base_config, has_encoder, make

LENGTH, TOLERANCE, TOLERANCE_IN_16_BITS = 60, 1e-5, 1e-2
EXACT = {"feature_map": "none", "window_size": 5, "num_sinks": 2, "num_slots": 4}
RETRIEVAL = {"retrieval_heads": [[0, 1], [1, 0]], "retrieval_window": 16}
MIXED = {**EXACT, "feature_map": "exponential", "num_features": 8, "gate": True}
PRESETS: dict[str, dict[str, Any]] = {
    "exact": EXACT,
    "exact, retrieval heads": {**EXACT, **RETRIEVAL},
    "mixed": MIXED,
    "mixed, retrieval heads": {**MIXED, **RETRIEVAL},
    "rfa": {"feature_map": "gaussian", "num_features": 8, "unit_norm": True, "gate": True},
}
STREAM = {**EXACT, **RETRIEVAL, "max_distance": 24, "distance_step": 8}


def results(model: Any, weights: dict[str, Tensor] | None) -> dict[str, Any]:
    """Return what a model computes, and its weights."""
    if weights is not None:
        model.load_state_dict(weights)
    config, generator = model.config, torch.Generator().manual_seed(1)
    ids = torch.randint(3, 60, (2, LENGTH), generator=generator)
    source: dict[str, Tensor] = {}
    if config.model_type == "rfa_whisper":
        shape = 2, config.num_mel_bins, 2 * config.max_source_positions
        source = {"input_features": torch.randn(shape, generator=generator)}
    elif config.is_encoder_decoder:
        source = {"input_ids": torch.randint(3, 60, (2, 17), generator=generator)}
    prefix = "decoder_" if source else ""
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :7], mask[1, :3] = 0, 0

    def read(model: Any, start: int, stop: int, **options: Any) -> Any:
        inputs = {
            name: tensor.to(model.dtype) if tensor.is_floating_point() else tensor for name, tensor in source.items()
        }
        return model(**inputs, **{f"{prefix}input_ids": ids[:, start:stop]}, **options)

    def read_on(model: Any, cuts: list[int], cache: Any = None, *, padded: bool = False) -> tuple[Tensor, Any]:
        parts = []
        for start, stop in pairwise(cuts):
            options = {f"{prefix}attention_mask": mask[:, :stop]} if padded else {}
            output = read(model, start, stop, **options, **cache_argument(cache), use_cache=True)
            cache = returned_cache(output)
            parts.append(output.logits)
        return torch.cat(parts, 1), cache

    with torch.no_grad():
        whole = {f"{prefix}attention_mask": mask}
        found: dict[str, Any] = {"weights": {name: tensor.clone() for name, tensor in model.state_dict().items()}}
        found["logits"] = read(model, 0, LENGTH, use_cache=False).logits
        found["padding"] = read(model, 0, LENGTH, use_cache=False, **whole).logits[mask.bool()]
        for cuts in ([0, 1, 2, 3, 4, 5, 30, 31, 32, 50, LENGTH], [0, 40, LENGTH]):
            found[f"cuts {cuts}"] = read_on(model, cuts, padded=True)[0][mask.bool()]
        _, cache = read_on(model, [0, 22])
        layers = cache.self_attention_cache.layers if isinstance(cache, EncoderDecoderCache) else cache.layers
        for layer in layers:
            layer.activate_past_recording()
        drafted, _ = read_on(model, [22, 23, 24, 31, 32], cache)
        for layer in layers:
            layer.crop(-5)
        found["taken back"] = torch.cat([drafted, read_on(model, [40, 41, 47], cache)[0]], 1)
        options = {"max_new_tokens": 25, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        options |= source or {"input_ids": ids[:, :12], "attention_mask": mask[:, :12]}
        for beams in (1, 3):
            found[f"{beams} beams"] = model.generate(**options, num_beams=beams)
        half = copy.deepcopy(model).to(torch.bfloat16)
        found["16 bits"] = read(half, 0, LENGTH, use_cache=False).logits
        found["16 bits, cached"], _ = read_on(half, [0, 33, *range(34, 40)])
        if not source:
            positions = torch.arange(LENGTH).repeat(2, 1)
            positions[0, 20:] -= 20
            positions[1, 33:] -= 33
            found["documents"] = read(model, 0, LENGTH, position_ids=positions, use_cache=False).logits
    model(**(source or {"input_ids": ids}), labels=ids).loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    found["gradients"] = torch.cat([gradient.flatten() for _, gradient in sorted(gradients.items())])
    return found


def differences(found: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Return the largest relative difference of every result; 1 for tokens that differ."""
    largest = {}
    for name in found.keys() - {"weights"}:
        one, two = found[name].double(), other[name].double()
        largest[name] = float((one - two).abs().max() / two.abs().max()) if one.shape == two.shape else 1.0
    return largest


def main(path: Path, reference: Path | None) -> int:
    """Write the results of this tree, or compare them with those of another one."""
    expected = {} if reference is None else torch.load(reference, weights_only=True)
    results_by_model, failed = {}, 0
    cases = [(family, name) for family in ("gpt2", "llama", "bart", "marian", "whisper") for name in PRESETS]
    for family, preset in [*cases, ("llama", "stream")]:
        fields: dict[str, Any] = dict(PRESETS.get(preset, STREAM))
        if has_encoder(family) and fields["feature_map"] == "none":  # cross attention has no window
            sizes = base_config(family)
            fields["softmax_cross_layers"] = list(range(sizes.decoder_layers))
        name = f"{family}, {preset}"
        model = make(family, fields)
        results_by_model[name] = results(model, expected[name]["weights"] if expected else None)
        if expected:
            largest = differences(results_by_model[name], expected[name])
            bad = {key: f"{value:.1e}" for key, value in largest.items() if value > limit_of(key)}
            failed += bool(bad)
            sys.stdout.write(f"{name:34} {max(largest.values()):.1e} {bad or ''}\n")
    torch.save(results_by_model, path)
    return failed


def limit_of(name: str) -> float:
    """Return the largest difference that a result may have."""
    return TOLERANCE_IN_16_BITS if name.startswith("16 bits") else TOLERANCE


def compare(commit: str) -> int:
    """Run this file in a clone of a commit and here."""
    with tempfile.TemporaryDirectory() as folder:
        clone, one, two = Path(folder, "clone"), Path(folder, "one.pt"), Path(folder, "two.pt")
        subprocess.run(["git", "clone", "--quiet", ".", str(clone)], check=True)
        subprocess.run(["git", "checkout", "--quiet", commit], cwd=clone, check=True)
        (clone / "tests" / "side_by_side.py").write_text(Path(__file__).read_text())
        command = [sys.executable, "-m", "tests.side_by_side"]
        subprocess.run([*command, "--write", str(one)], cwd=clone, check=True)
        return subprocess.run([*command, "--write", str(two), str(one)], check=False).returncode


if __name__ == "__main__":
    if sys.argv[1] == "--write":
        sys.exit(main(Path(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None))
    sys.exit(compare(sys.argv[1]))
