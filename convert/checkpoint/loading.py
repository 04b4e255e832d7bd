"""Loading: the RFA model of a softmax checkpoint and its base model, which share their weights; and comparing weights."""

from __future__ import annotations

import copy
import hashlib
import logging as standard_logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_rfa.errors import InputError
from hf_rfa.inference.loading import find_device
from hf_rfa.models.rfa_classes import OWN_PARTS

from ..inputs import cut, random_inputs
from ..options import ConversionOptions
from .base_model import rfa_layers, softmax_base_model
from .offload import blocks_on_disk, give_back_after_blocks, offloaded_shapes, tensor_of
from .source import Checkpoint, check_finite

#: Bytes of the largest checkpoint that is loaded whole: blocks that stay on disk are read for every token generated.
MAX_BYTES_IN_MEMORY = 1_000_000_000
#: Tokens that a model is tried on.
PROBE_TOKENS = 64


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers and accelerate, which report new feature maps and blocks on disk as problems."""
    disabled, bars = standard_logging.root.manager.disable, logging.is_progress_bar_enabled()
    standard_logging.disable(standard_logging.WARNING)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            # accelerate does not expect buffers of the model itself in a device map.
            warnings.filterwarnings("ignore", "The following device_map keys do not match any submodules")
            warnings.filterwarnings("ignore", "Attempting to save a model with offloaded modules")
            yield
    finally:
        standard_logging.disable(disabled)
        if bars:
            logging.enable_progress_bar()


def load_models(
    checkpoint: Checkpoint, config: Any, options: ConversionOptions
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return the RFA model of a configuration, not yet calibrated, and the base model, which share their weights.

    The blocks of a checkpoint over `MAX_BYTES_IN_MEMORY` stay in its files, unless those are pickles.

    Raises:
        InputError: if a tensor of the softmax model is missing, or has the wrong shape; if the RFA model cannot read a text.
    """
    model_class = checkpoint.family.architectures[checkpoint.architecture][1]
    model, info = _from_pretrained(model_class, checkpoint, config, options.dtype, find_device(options.device))
    mismatched = sorted(info["mismatched_keys"])
    missing = sorted(set(info["missing_keys"]) - set(new_keys(model)) - {key for key, *_ in mismatched})
    if missing:
        raise InputError(
            f"{checkpoint.name}: the weights lack {len(missing)} tensors that the configuration asks for: "
            f"{', '.join(missing[:3])}{' …' if len(missing) > 3 else ''}."
        )
    if mismatched:
        key, stored, expected = mismatched[0]
        raise InputError(
            f"{checkpoint.name}: tensor {key} has shape {tuple(stored)}, but the configuration asks for {tuple(expected)} "
            f"({len(mismatched)} tensors of the wrong shape). The weights and the configuration do not belong together."
        )
    if not model.all_tied_weights_keys and model.get_expanded_tied_weights_keys(all_submodels=True):
        model.config.tie_word_embeddings = False  # the files hold a head of their own: other programs go by this field
    if checkpoint.uses_pickle:
        for key, tensor in model.state_dict().items():
            check_finite(key, tensor, checkpoint.weight_files[0])
    give_back_after_blocks(model)
    try:
        probe_logits(model, options.seed)
    except ValueError as error:  # a family of one's own, or a field that its attention does not go by
        raise InputError(f"{checkpoint.name} cannot be converted: {error}") from error
    return model, softmax_base_model(model, checkpoint.architecture, checkpoint.config)


@torch.no_grad()
def probe_logits(model: PreTrainedModel, seed: int) -> torch.Tensor:
    """Return the model's first output on `PROBE_TOKENS` random tokens: logits, or hidden states of one without a head."""
    inputs = random_inputs(model.config, seed=seed, tokens=1)
    inputs = {name: tensor[:1].to(model.device) for name, tensor in inputs.items()}
    return model(**cut(inputs, slice(-PROBE_TOKENS, None)), use_cache=False)[0].float().cpu()


def load_base_model(checkpoint: Checkpoint, options: ConversionOptions) -> PreTrainedModel:
    """Return the softmax model of a checkpoint as transformers loads it."""
    base_class = checkpoint.family.architectures[checkpoint.architecture][0]
    config = copy.deepcopy(checkpoint.config)  # transformers writes into it
    return _from_pretrained(base_class, checkpoint, config, options.dtype, find_device(options.device))[0]


def load_converted(checkpoint: Checkpoint, model_class: Any, folder: Path, device: torch.device) -> PreTrainedModel:
    """Return the model that a checkpoint has become, from the folder that has just been written.

    Raises:
        InputError: if the tensors there are not the model's.
    """
    written = replace(checkpoint, folder=folder, weight_files=tuple(folder.glob("*.safetensors")))
    config = model_class.config_class.from_pretrained(folder)
    model, info = _from_pretrained(model_class, written, config, "auto", device)
    problems = [f"{kind} {key}" for kind in ("missing", "unexpected", "mismatched") for key in info[f"{kind}_keys"]]
    if problems:
        raise InputError(f"the written checkpoint does not load as it should: {', '.join(problems)}")
    return model


def _from_pretrained(
    model_class: Any, checkpoint: Checkpoint, config: Any, dtype: str, device: torch.device
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return the model of a checkpoint's weight files, in evaluation mode, and the names of unfit tensors."""
    device_map = None
    if not checkpoint.uses_pickle and checkpoint.num_bytes > MAX_BYTES_IN_MEMORY:
        device_map = blocks_on_disk(model_class, config, device)
    with quiet():
        model, info = model_class.from_pretrained(
            checkpoint.folder,
            config=config,
            dtype=dtype,
            device_map=device_map,
            use_safetensors=not checkpoint.uses_pickle,
            weights_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    on_disk = [shapes for shapes in offloaded_shapes(model) if shapes[1] != shapes[2]]
    info["mismatched_keys"] = [*info["mismatched_keys"], *on_disk]
    return (model.eval() if device_map else model.eval().to(device)), info


def new_keys(model: PreTrainedModel) -> list[str]:
    """Return the keys of an RFA model's state dict that its base model does not have."""
    new = tuple(f"{part}." for part in OWN_PARTS)
    layers = rfa_layers(model).items()
    return [f"{name}.{key}" for name, layer in layers for key in layer.state_dict() if key.startswith(new)]


def digests(model: PreTrainedModel) -> dict[str, str]:
    """Return the SHA-256 of every tensor of a model's files by its names, those that stay on disk among them.

    Two models are compared by it without holding both. A buffer that is in no file follows from the configuration by a
    formula, which may be rounded otherwise every time (M2M100's positions).
    """
    found: dict[str, str] = {}
    for name in model.state_dict():  # a tied parameter has a second name too
        owner, _, key = name.rpartition(".")
        values = tensor_of(model.get_submodule(owner), key).detach().cpu().contiguous()
        content: Any = values.flatten().view(torch.uint8).numpy()
        digest = hashlib.sha256(f"{values.dtype} {tuple(values.shape)}".encode())
        digest.update(content)
        found[name] = digest.hexdigest()
    return found


def check_kept(result: dict[str, str], source: dict[str, str], name: str) -> None:
    """Raise an `InputError` if a result lacks a tensor of its source, a softmax model by its name."""
    for key, digest in source.items():
        if result.get(key) != digest:
            raise InputError(
                f"tensor {key} of the result is not that of {name} as transformers loads it; the result is not kept. "
                "Please report it."
            )
