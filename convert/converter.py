"""The conversion: softmax checkpoint in, RFA checkpoint out."""

from __future__ import annotations

import gc
import math
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_rfa.configuration_rfa import RFAConfigMixin
from hf_rfa.errors import InputError
from hf_rfa.feature_maps import FeatureMap
from hf_rfa.inference import load_tokenizer

from .calibration import LayerGain, calibrate, random_blocks, text_blocks
from .families import extend_positions, rfa_layers, softmax_twin
from .report import (
    CACHE_LENGTHS,
    ConversionReport,
    Perplexities,
    cache_bytes_per_sequence,
    model_card,
    state_bytes_per_sequence,
)
from .source import Source, check_finite, open_source
from .texts import read_documents
from .writer import check_destination, check_space, new_folder

DTYPES = ("auto", "float32", "bfloat16", "float16")
#: Shards of the result; one shard at a time is held in memory twice while it is written.
MAX_SHARD_SIZE = "2GB"

#: Told of the steps: (name of the step, its number of parts) at its start, None when a part is done.
Progress = Callable[[str | None, int], None]


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    feature_map: str = "positive",
    num_features: int | None = None,
    unit_norm: bool = False,
    orthogonal: bool = True,
    trainable_projection: bool = False,
    redraw_pool: int = 0,
    gate: bool = False,
    seed: int = 0,
    layers: list[int] | None = None,
    max_positions: int | None = None,
    calibrate_on: str | Path | None = None,
    dtype: str = "auto",
    overwrite: bool = False,
    allow_pickle: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert a softmax checkpoint into an RFA checkpoint.

    The parent's weights are reused untouched. Feature maps (and gates) are added and calibrated, layer by layer, on the
    softmax model's own queries and keys (`hf_rfa.convert.calibration`). The result is reloaded and compared before it is
    moved to ``destination``; on any error nothing is left there.

    Args:
        source: folder of the softmax checkpoint, or its name on the hub.
        destination: folder to write.
        feature_map: name of the feature map (`hf_rfa.FEATURE_MAPS`).
        num_features: D per head; None takes the map's default.
        unit_norm: ℓ2-normalise queries and keys, as in Peng et al. 2021.
        orthogonal: draw random matrices in orthogonal blocks.
        trainable_projection: make random matrices parameters, for training.
        redraw_pool: draw a fresh matrix from a pool of this size at every step of training; 0 keeps them fixed.
        gate: add a recency gate per head.
        seed: of the random matrices.
        layers: indices of the layers to convert; None converts all. The others stay softmax, and their cache grows.
        max_positions: extend the learned positions to this number; None keeps them.
        calibrate_on: text file to calibrate on (.txt or .jsonl, plain or .gz); None calibrates on random tokens.
        dtype: of the result's weights, "auto" for the source's; feature maps and gates are float32.
        overwrite: replace a checkpoint that is at ``destination``.
        allow_pickle: load weights that are only there as a pickle.
        progress: called as the work goes on.

    Returns:
        The figures of the conversion.

    Raises:
        InputError: if the source, the destination or an option cannot be used; nothing has been written then.
    """
    destination = Path(destination)
    report_progress = progress or (lambda step, total: None)
    command = _command(locals())

    report_progress("checking the source", 1)
    found = open_source(source, allow_pickle=allow_pickle)
    check_destination(destination, overwrite=overwrite, sources=(found.folder,))
    if dtype not in DTYPES:
        raise InputError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    check_space(destination, found.num_bytes if dtype in ("auto", "float32") else found.num_bytes // 2)
    config = _rfa_config(
        found,
        layers=layers,
        max_positions=max_positions,
        feature_map=feature_map,
        num_features=num_features,
        unit_norm=unit_norm,
        orthogonal=orthogonal,
        trainable_projection=trainable_projection,
        redraw_pool=redraw_pool,
        gate=gate,
        feature_seed=seed,
    )
    documents = None if calibrate_on is None else list(read_documents(calibrate_on))
    tokenizer, no_tokenizer = load_tokenizer(found.folder)
    if documents is not None and tokenizer is None:
        raise InputError(f"cannot calibrate on {calibrate_on} with {source}: {no_tokenizer}. Leave the text out.")
    if documents is None:
        blocks = random_blocks(found.config.vocab_size, found.config.max_position_embeddings, seed=seed)
    else:
        blocks = text_blocks(tokenizer, iter(documents), found.config.max_position_embeddings)

    report_progress("loading the weights", 1)
    model = _load(found, config, dtype)
    gains, perplexities = _calibrate(model, found, blocks, documents is not None, report_progress)
    if max_positions is not None:
        extend_positions(found.family, model, max_positions)

    report_progress("writing", 1)
    probe = blocks[:1, :64]
    with new_folder(destination) as folder:
        expected = _logits(model, probe)
        figures = _figures(model, found)
        with _quiet():
            model.save_pretrained(folder, max_shard_size=MAX_SHARD_SIZE)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        model_class = type(model)
        del model
        gc.collect()
        report_progress("checking the result", 1)
        difference = _reload_difference(model_class, folder, probe, expected)
        report = ConversionReport(
            source=str(source),
            destination=str(destination),
            command=command,
            gains=tuple(gains),
            perplexities=perplexities,
            max_logit_difference=difference,
            notes=_notes(config, no_tokenizer, max_positions, calibrate_on),
            **figures,
        )
        hub_name = None if Path(source).expanduser().is_dir() else str(source)
        card = model_card(report, architecture=found.architecture, hub_name=hub_name, licence=_licence(found.folder))
        card.save(folder / "README.md")
    return report


def _command(options: dict[str, Any]) -> str:
    """Return the command line that stands for the arguments of `convert`."""
    flags = {
        "feature_map": "positive",
        "num_features": None,
        "unit_norm": False,
        "orthogonal": True,
        "trainable_projection": False,
        "redraw_pool": 0,
        "gate": False,
        "seed": 0,
        "layers": None,
        "max_positions": None,
        "calibrate_on": None,
        "dtype": "auto",
        "allow_pickle": False,
    }
    words = ["hf-rfa", "convert", str(options["source"]), str(options["destination"])]
    for name, default in flags.items():
        value = options[name]
        if value == default:
            continue
        flag = {"calibrate_on": "--calibrate", "orthogonal": "--iid"}.get(name, "--" + name.replace("_", "-"))
        words.append(flag)
        if not isinstance(value, bool):
            words.append(",".join(map(str, value)) if isinstance(value, list) else str(value))
    return shlex.join(words)


def _rfa_config(
    source: Source, *, layers: list[int] | None, max_positions: int | None, **options: Any
) -> RFAConfigMixin:
    """Return the RFA configuration, still with the parent's number of positions."""
    count = source.config.num_hidden_layers
    softmax_layers: list[int] = []
    if layers is not None:
        wrong = [index for index in layers if not 0 <= index < count]
        if wrong or not layers:
            raise InputError(f"layers to convert must be indices from 0 to {count - 1}, got {layers}.")
        softmax_layers = [index for index in range(count) if index not in layers]
    positions = source.config.max_position_embeddings
    if max_positions is not None and max_positions <= positions:
        raise InputError(
            f"max_positions={max_positions} does not extend the {positions} positions that {source.name} has."
        )
    try:
        return source.family.rfa_config.from_parent(source.config, softmax_layers=softmax_layers, **options)
    except (ValueError, StrictDataclassError) as error:
        raise InputError(str(error.__cause__ or error)) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from reporting, as a problem, that φ and the gates are not in a softmax checkpoint."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _load(source: Source, config: Any, dtype: str) -> PreTrainedModel:
    """Load the softmax weights into the RFA model, and check that nothing but φ and gates is missing."""
    model_class: Any = source.family.architectures[source.architecture][1]
    with _quiet():
        model, info = model_class.from_pretrained(
            source.folder,
            config=config,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            use_safetensors=not source.uses_pickle,
            weights_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    if info["mismatched_keys"]:
        key, found, expected = sorted(info["mismatched_keys"])[0]
        raise InputError(
            f"{source.name}: tensor {key} has shape {tuple(found)}, but config.json asks for {tuple(expected)} "
            f"({len(info['mismatched_keys'])} tensors of the wrong shape). The weights and the configuration do not belong "
            "together."
        )
    missing = sorted(set(info["missing_keys"]) - set(_new_keys(model)))
    if missing:
        raise InputError(
            f"{source.name}: the weights lack {len(missing)} tensors that its config.json asks for: "
            f"{', '.join(missing[:3])}{' …' if len(missing) > 3 else ''}."
        )
    _reset_in_float32(model)
    if source.uses_pickle:
        for key, tensor in model.state_dict().items():
            check_finite(key, tensor, source.weight_files[0])
    return model.eval()


def _reset_in_float32(model: PreTrainedModel) -> None:
    """Start feature maps and gates in float32: as tensors missing from a 16-bit checkpoint they were started in 16 bits."""
    for layer in rfa_layers(model).values():
        for module in (layer.feature_map, layer.gate):
            if module is not None:
                module.float()
                for tensor in module.state_dict(keep_vars=True).values():
                    tensor._is_hf_initialized = False
                module.reset_parameters()


def _new_keys(model: PreTrainedModel) -> list[str]:
    """Return the state dict's keys that a softmax parent does not have."""
    keys = []
    for name, layer in rfa_layers(model).items():
        for child in ("feature_map", "gate"):
            module = getattr(layer, child)
            if module is not None:
                keys += [f"{name}.{child}.{key}" for key in module.state_dict()]
    return keys


def _calibrate(
    model: PreTrainedModel, source: Source, blocks: Tensor, on_text: bool, progress: Progress
) -> tuple[list[LayerGain], Perplexities | None]:
    """Calibrate a model, and measure what it gained."""
    twin = softmax_twin(model, source.architecture, source.config)
    scored = on_text and hasattr(model, "lm_head")
    swapped = _perplexity(model, blocks) if scored else math.nan
    progress("calibrating", len(rfa_layers(model)))
    gains = calibrate(model, twin, blocks, on_layer=lambda name: progress(None, 1))
    if not scored:
        return gains, None
    progress("measuring", 1)
    return gains, Perplexities(
        softmax=_perplexity(twin, blocks),
        swapped=swapped,
        calibrated=_perplexity(model, blocks),
        tokens=blocks.shape[0] * (blocks.shape[1] - 1),
    )


@torch.no_grad()
def _perplexity(model: PreTrainedModel, blocks: Tensor) -> float:
    losses = [float(model(block, labels=block, use_cache=False).loss) for block in blocks[:, None].to(model.device)]
    return math.exp(min(700.0, sum(losses) / len(losses)))


@torch.no_grad()
def _logits(model: PreTrainedModel, probe: Tensor) -> Tensor:
    """Return the model's first output on some tokens: logits, or hidden states for a model without a head."""
    return model(probe.to(model.device), use_cache=False)[0].float().cpu()


def _reload_difference(model_class: Any, folder: Path, probe: Tensor, expected: Tensor) -> float:
    """Load the written checkpoint, and return how far its logits are from those of the model it was written from."""
    with _quiet():
        model, info = model_class.from_pretrained(folder, dtype="auto", use_safetensors=True, output_loading_info=True)
    problems = {
        name: sorted(info[name]) for name in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[name]
    }
    if problems:
        raise InputError(f"the written checkpoint does not load as it should: {problems}")
    found = _logits(model.eval(), probe)
    difference = float((found - expected).abs().max())
    if not torch.isfinite(found).all() or difference > 1e-5 * float(expected.abs().max()):
        raise InputError(
            f"the written checkpoint gives other logits than the model it was written from (largest difference "
            f"{difference:.2e}); it is not kept."
        )
    return difference


def _figures(model: PreTrainedModel, source: Source) -> dict[str, Any]:
    """Return the figures of a report that can be read off the model."""
    layers = [layer for layer in rfa_layers(model).values() if layer.rfa_causal]
    feature_map: FeatureMap = layers[0].feature_map
    parameters = {name for name, _ in model.named_parameters()}
    sizes = {key: tensor.numel() for key, tensor in model.state_dict().items()}
    new_keys = _new_keys(model)
    positions = source.family.position_embedding(model)
    extended = (positions.num_embeddings - source.config.max_position_embeddings) * positions.embedding_dim
    return {
        "num_layers": source.config.num_hidden_layers,
        "num_rfa_layers": len(layers),
        "feature_map": feature_map.name,
        "feature_dim": feature_map.feature_dim,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "added_parameters": extended + sum(sizes[key] for key in new_keys if key in parameters),
        "added_buffers": sum(sizes[key] for key in new_keys if key not in parameters),
        "state_bytes": state_bytes_per_sequence(model),
        "cache_bytes": {
            length: cache_bytes_per_sequence(source.config, model.dtype, length) for length in CACHE_LENGTHS
        },
    }


def _notes(config: Any, no_tokenizer: str | None, max_positions: int | None, text: Any) -> tuple[str, ...]:
    notes = []
    if no_tokenizer is not None:
        notes.append(f"The result has no tokenizer, since of the source it holds that {no_tokenizer}.")
    if config.softmax_layers:
        kept = ", ".join(map(str, config.softmax_layers))
        notes.append(f"Layers {kept} are softmax attention: their cache grows with the text.")
    if max_positions is not None:
        notes.append(
            f"The learned positions were stretched to {max_positions} by interpolation, which short texts see too."
        )
    if text is None:
        notes.append("Calibrated on random tokens; a text like the one it will see (--calibrate) does better.")
    return tuple(notes)


def _licence(folder: Path) -> str | None:
    """Return the licence that a checkpoint's model card states."""
    path = folder / "README.md"
    return ModelCard.load(path).data.license if path.is_file() else None
