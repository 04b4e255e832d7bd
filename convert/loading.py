"""Loading what is converted and what was made of it, the blocks of large ones left on disk."""

from __future__ import annotations

import logging as standard_logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_rfa.errors import InputError

from .offload import blocks_on_disk, give_back_after_blocks, offloaded_shapes
from .source import Source, check_finite
from .twin import rfa_layers

#: Checkpoints of up to so many bytes are loaded whole: blocks that are read from disk for every token make answers slow.
WHOLE_UP_TO = 1_000_000_000


def _devices(model_class: Any, config: Any, num_bytes: int) -> dict[str, str] | None:
    """Return where the parts of a model with checkpoints of so many bytes go; None puts all in memory."""
    return None if num_bytes <= WHOLE_UP_TO else blocks_on_disk(model_class, config)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers and accelerate from reporting, as problems, that φ is new and that blocks are on disk."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    accelerate = standard_logging.getLogger("accelerate")
    level = accelerate.level
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    accelerate.setLevel(standard_logging.ERROR)
    try:
        with warnings.catch_warnings():
            # Buffers of the model itself have a place of their own in the device map, which accelerate takes for a slip.
            warnings.filterwarnings("ignore", "The following device_map keys do not match any submodules")
            warnings.filterwarnings("ignore", "Attempting to save a model with offloaded modules")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
        accelerate.setLevel(level)


def load_source(source: Source, config: Any, dtype: str) -> PreTrainedModel:
    """Load softmax weights into an RFA model, and check that they fit and that nothing but φ and gates is missing.

    The blocks of a source over `WHOLE_UP_TO` stay in its files, unless those are pickles.

    Args:
        source: the softmax checkpoint.
        config: configuration of the RFA model.
        dtype: of the weights, "auto" for the source's.

    Raises:
        InputError: if a tensor is missing or has the wrong shape.
    """
    model_class: Any = source.family.architectures[source.architecture][1]
    with quiet():
        model, info = model_class.from_pretrained(
            source.folder,
            config=config,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            use_safetensors=not source.uses_pickle,
            weights_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            device_map=None if source.uses_pickle else _devices(model_class, config, source.num_bytes),
        )
    mismatched = sorted(info["mismatched_keys"])
    missing = sorted(set(info["missing_keys"]) - set(new_keys(model)) - {key for key, *_ in mismatched})
    if missing:
        raise InputError(
            f"{source.name}: the weights lack {len(missing)} tensors that its config.json asks for: "
            f"{', '.join(missing[:3])}{' …' if len(missing) > 3 else ''}."
        )
    mismatched += [each for each in offloaded_shapes(model) if each[1] != each[2]]
    if mismatched:
        key, found, expected = mismatched[0]
        raise InputError(
            f"{source.name}: tensor {key} has shape {tuple(found)}, but config.json asks for {tuple(expected)} "
            f"({len(mismatched)} tensors of the wrong shape). The weights and the configuration do not belong together."
        )
    _reset_in_float32(model)
    if source.uses_pickle:
        for key, tensor in model.state_dict().items():
            check_finite(key, tensor, source.weight_files[0])
    give_back_after_blocks(model)
    return model.eval()


def load_result(model_class: Any, folder: Path, config: Any) -> PreTrainedModel:
    """Load a converted checkpoint that has just been written.

    Args:
        model_class: class of the RFA model.
        folder: where it was written.
        config: its configuration.

    Raises:
        InputError: if its tensors are not those of the model.
    """
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    with quiet():
        model, info = model_class.from_pretrained(
            folder,
            dtype="auto",
            use_safetensors=True,
            output_loading_info=True,
            device_map=_devices(model_class, config, num_bytes),
        )
    problems = {
        name: sorted(info[name]) for name in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[name]
    }
    wrong = [key for key, found, expected in offloaded_shapes(model) if found != expected]
    if problems or wrong:
        raise InputError(f"the written checkpoint does not load as it should: {problems or wrong}")
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


def new_keys(model: PreTrainedModel) -> list[str]:
    """Return the state dict's keys that a softmax parent does not have."""
    keys = []
    for name, layer in rfa_layers(model).items():
        for child in ("feature_map", "gate"):
            module = getattr(layer, child)
            if module is not None:
                keys += [f"{name}.{child}.{key}" for key in module.state_dict()]
    return keys
