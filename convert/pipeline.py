"""The conversion: softmax checkpoint in, RFA checkpoint out."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch
from huggingface_hub import ModelCard, ModelCardData
from torch import Tensor
from transformers import PreTrainedModel

from hf_rfa.errors import InputError
from hf_rfa.inference import DTYPES, check_vocabulary, load_tokenizer
from hf_rfa.memory import give_back_memory
from hf_rfa.models.configuration_rfa import AttentionKind

from .atomic_io import check_destination, check_space, new_folder, remove_leftovers
from .calibration import calibrate
from .calibration_data import Inputs, add_outputs, batches, random_inputs, text_blocks, text_sources
from .loading import load_result, load_source, new_keys, quiet
from .options import Layers, command_of, outside_module, rfa_config
from .perplexity import score_labels
from .pictures import compare_attention, draw_attention
from .report import (
    ConversionReport,
    Perplexities,
    cache_bytes,
    cache_lengths,
    model_card,
)
from .sensitivity import Damage, leave_softmax, measure_damage, num_parts
from .source import Source, open_source
from .text_io import read_documents
from .twin import extend_positions, rfa_layers, softmax_twin

#: Most bytes of a shard of the result, which is held in memory while it is written.
MAX_SHARD_SIZE = 2_000_000_000


#: Told of the steps: (name of the step, its number of parts) at its start, None when a part is done.
Progress = Callable[[str | None, int], None]


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    feature_map: str = "positive",
    num_features: int | None = None,
    num_cross_features: int | None = None,
    num_encoder_features: int | None = None,
    unit_norm: bool = False,
    orthogonal: bool = True,
    trainable_projection: bool = False,
    redraw_pool: int = 0,
    gate: bool = False,
    window: int = 0,
    seed: int = 0,
    layers: Layers = "all",
    cross_layers: Layers | None = None,
    encoder_layers: Layers | None = None,
    keep_softmax: int = 0,
    max_positions: int | None = None,
    calibrate_on: str | Path | None = None,
    dtype: str = "auto",
    overwrite: bool = False,
    allow_pickle: bool = False,
    command: str | None = None,
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert a softmax checkpoint into an RFA checkpoint.

    The parent's weights are reused untouched. Feature maps (and gates) are added and calibrated, layer by layer, on the
    softmax model's own queries and keys (`hf_rfa.convert.calibration`). The result is reloaded and compared before it is
    moved to ``destination``; on any error nothing is left there.

    Of a checkpoint over 1 GB the blocks stay in their files, and a matrix is read when it is needed
    (`hf_rfa.convert.offload`); smaller ones, and pickles, are loaded whole.

    Args:
        source: folder of the softmax checkpoint, or its name on the hub.
        destination: folder to write.
        feature_map: name of the feature map (`hf_rfa.FEATURE_MAPS`).
        num_features: D per head of causal attention; None takes the map's default.
        num_cross_features: D of cross attention, likewise.
        num_encoder_features: D of an encoder's attention, likewise.
        unit_norm: ℓ2-normalise queries and keys, as in Peng et al. 2021.
        orthogonal: draw random matrices in orthogonal blocks.
        trainable_projection: make random matrices parameters, for training.
        redraw_pool: draw a fresh matrix from a pool of this size at every step of training; 0 keeps them fixed.
        gate: add a recency gate per head.
        window: number of last tokens that causal attention sees exactly, beside the features; 0 for none.
        seed: of the random matrices.
        layers: the layers whose causal attention is converted. The others stay softmax, and their cache grows.
        cross_layers: the decoder layers whose cross attention is converted; None converts all.
        encoder_layers: the encoder layers that are converted; None converts none.
        keep_softmax: leave so many of the layers named above softmax after all: those whose conversion does most damage to
            the outputs, each measured alone after calibration (`hf_rfa.convert.sensitivity`).
        max_positions: extend the positions to this number; None keeps them.
        calibrate_on: text file to calibrate on (.txt or .jsonl, plain or .gz); None calibrates on random tokens. For a model
            with an encoder each line is one source, and the softmax model answers it.
        dtype: of the result's weights, "auto" for the source's; feature maps and gates are float32.
        overwrite: replace a checkpoint that is at ``destination``.
        allow_pickle: load weights that are only there as a pickle.
        command: what the model card says made it; None stands for these arguments.
        progress: called as the work goes on.

    Returns:
        The figures of the conversion.

    Raises:
        InputError: if the source, the destination or an option cannot be used; nothing has been written then.
    """
    destination = Path(destination)
    report_progress = progress or (lambda step, total: None)
    command = command or command_of(locals())

    report_progress("checking the source", 1)
    found = open_source(source, allow_pickle=allow_pickle)
    check_destination(destination, overwrite=overwrite, sources=(found.folder,))
    if dtype not in DTYPES:
        raise InputError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    remove_leftovers(destination.resolve())  # which may be what fills the disk
    check_space(destination, found.num_bytes if dtype in ("auto", "float32") else found.num_bytes // 2)
    config = rfa_config(
        found,
        layers={"causal": layers, "cross": cross_layers, "encoder": encoder_layers},
        counts={"causal": num_features, "cross": num_cross_features, "encoder": num_encoder_features},
        max_positions=max_positions,
        feature_map=feature_map,
        unit_norm=unit_norm,
        orthogonal=orthogonal,
        trainable_projection=trainable_projection,
        redraw_pool=redraw_pool,
        gate=gate,
        window=window,
        feature_seed=seed,
    )
    documents = None if calibrate_on is None else list(read_documents(calibrate_on))
    tokenizer, no_tokenizer = load_tokenizer(found.folder)
    if documents is not None and tokenizer is None:
        raise InputError(f"cannot calibrate on {calibrate_on} with {source}: {no_tokenizer}. Leave the text out.")
    if tokenizer is not None:
        check_vocabulary(tokenizer, found.config, str(source))
    if documents is None:
        inputs = random_inputs(found.config, seed=seed)
    else:
        prepare = text_sources if found.config.is_encoder_decoder else text_blocks
        inputs = prepare(tokenizer, documents, found.config.max_position_embeddings)

    report_progress("loading the weights", 1)
    model = load_source(found, config, dtype)
    count = len(rfa_layers(model))
    if not 0 <= keep_softmax < count:
        raise InputError(f"keep_softmax={keep_softmax} must leave at least one of the {count} layers to convert.")
    twin = softmax_twin(model, found.architecture, found.config)
    if documents is not None and found.config.is_encoder_decoder:
        report_progress("answering the text", 1)
        inputs = add_outputs(twin, inputs)
    elif documents is not None and hasattr(model, "lm_head"):
        inputs = inputs | {"labels": inputs["input_ids"]}
    swapped = score_labels(model, batches(inputs)).perplexity if "labels" in inputs else math.nan
    report_progress("calibrating", count)
    gains = calibrate(model, twin, inputs, on_layer=lambda name: report_progress(None, 1))
    damages: list[Damage] = []
    if keep_softmax:
        report_progress("measuring layers", num_parts(model, inputs))
        damages = measure_damage(model, twin, inputs, on_part=lambda: report_progress(None, 1))
        model = leave_softmax(model, damages, keep_softmax)
        config = model.config
    perplexities = None
    if "labels" in inputs:
        report_progress("measuring", 1)
        calibrated = score_labels(model, batches(inputs))
        perplexities = Perplexities(
            softmax=score_labels(twin, batches(inputs)).perplexity,
            swapped=swapped,
            calibrated=calibrated.perplexity,
            tokens=calibrated.tokens,
            own_outputs=found.config.is_encoder_decoder,
        )
    comparison = compare_attention(model, twin, inputs)
    del twin
    gc.collect()
    give_back_memory()
    if max_positions is not None:
        extend_positions(found.family, model, max_positions)

    report_progress("writing", 1)
    probe = random_inputs(config, seed=seed, tokens=1)
    with new_folder(destination) as folder:
        expected = _logits(model, probe)
        figures = _figures(model, found)
        with quiet():
            model.save_pretrained(folder, max_shard_size=min(MAX_SHARD_SIZE, found.shard_size or MAX_SHARD_SIZE))
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        model_class = type(model)
        del model
        gc.collect()
        report_progress("checking the result", 1)
        difference = _reload_difference(model_class, folder, probe, expected, config)
        report = ConversionReport(
            source=str(source),
            destination=str(destination),
            command=command,
            gains=tuple(gains),
            damages=tuple(damages),
            perplexities=perplexities,
            max_logit_difference=difference,
            notes=_notes(found, config, no_tokenizer, max_positions, calibrate_on),
            **figures,
        )
        hub_name = None if Path(source).expanduser().is_dir() else str(source)
        card = model_card(report, architecture=found.architecture, hub_name=hub_name, parent=_parent_card(found.folder))
        card.save(folder / "README.md")
        (folder / "conversion.json").write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
        if gains:
            stages = {"swap": {gain.name: gain.before for gain in gains}}
            stages["calibration"] = {gain.name: gain.after for gain in gains}
            draw_attention(folder / "attention.png", stages, comparison)
    return report


@torch.no_grad()
def _logits(model: PreTrainedModel, probe: Inputs) -> Tensor:
    """Return the model's first output on some tokens: logits, or hidden states for a model without a head."""
    inputs = {name: tensor[:1, -64:].to(model.device) for name, tensor in probe.items()}
    return model(**inputs, use_cache=False)[0].float().cpu()


def _reload_difference(model_class: Any, folder: Path, probe: Inputs, expected: Tensor, config: Any) -> float:
    """Load the written checkpoint, and return how far its logits are from those of the model it was written from."""
    model = load_result(model_class, folder, config)
    found = _logits(model, probe)
    difference = float((found - expected).abs().max())
    if not torch.isfinite(found).all() or difference > 1e-5 * float(expected.abs().max()):
        raise InputError(
            f"the written checkpoint gives other logits than the model it was written from (largest difference "
            f"{difference:.2e}); it is not kept."
        )
    return difference


def _figures(model: PreTrainedModel, source: Source) -> dict[str, Any]:
    """Return the figures of a report that can be read off the model."""
    config: Any = model.config
    layers: dict[str, tuple[int, int]] = {}
    feature_dims: dict[str, int] = {}
    for kind in get_args(AttentionKind):
        found = [layer for layer in rfa_layers(model).values() if layer.rfa_kind == kind]
        if found or kind == "causal" or config.is_encoder_decoder:
            layers[kind] = (len(found), config.num_layers_for(kind))
        if found:
            feature_dims[kind] = found[0].feature_map.feature_dim
    parameters = {name for name, _ in model.named_parameters()}
    sizes = {key: tensor.numel() for key, tensor in model.state_dict().items()}
    added = new_keys(model)
    lengths = cache_lengths(config.max_position_embeddings)
    more_positions = config.max_position_embeddings - source.config.max_position_embeddings
    extended = sum(
        more_positions * embedding.embedding_dim
        for embedding in source.family.position_embeddings(model)
        if embedding.weight.requires_grad
    )
    return {
        "layers": layers,
        "feature_map": config.feature_map,
        "feature_dims": feature_dims,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "added_parameters": extended + sum(sizes[key] for key in added if key in parameters),
        "added_buffers": sum(sizes[key] for key in added if key not in parameters),
        "state_bytes": cache_bytes(model, 0),
        "own_cache_bytes": {length: cache_bytes(model, length) for length in lengths},
        "cache_bytes": {length: cache_bytes(model, length, softmax=True) for length in lengths},
    }


def _notes(
    source: Source, config: Any, no_tokenizer: str | None, max_positions: int | None, text: Any
) -> tuple[str, ...]:
    notes = []
    module = outside_module(config.feature_map)
    if module is not None:
        notes.append(
            f"The feature map {config.feature_map} is not hf-rfa's own, and the checkpoint does not hold its code. "
            + (
                "It was defined in a script or a session. Put its class into a module, and import that before the checkpoint "
                "is loaded."
                if module == "__main__"
                else f"Import its module {module} before the checkpoint is loaded: in Python, or with --import on the "
                "command line."
            )
        )
    if no_tokenizer is not None:
        notes.append(f"The result has no tokenizer, since of the source it holds that {no_tokenizer}.")
    for field, kind in config.SOFTMAX_LAYERS.items():
        if kind != "encoder" and getattr(config, field):
            indices = getattr(config, field)
            kept = ("layer " if len(indices) == 1 else "layers ") + ", ".join(map(str, indices))
            length = "text" if kind == "causal" else "source"
            notes.append(f"The {kind} attention of {kept} is softmax: its cache grows with the {length}.")
    if max_positions is not None:
        notes.append(source.family.more_positions_note.format(max_positions))
    if text is None:
        notes.append("Calibrated on random tokens; a text like the one it will see (--calibrate) does better.")
    return tuple(notes)


def _parent_card(folder: Path) -> ModelCardData | None:
    """Return what a checkpoint's model card states, if it has one."""
    path = folder / "README.md"
    return ModelCard.load(path).data if path.is_file() else None
