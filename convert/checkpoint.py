"""The softmax checkpoint to convert, and the RFA checkpoint it becomes: finding, checking and loading them."""

from __future__ import annotations

import copy
import json
import logging as standard_logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME, logging

from hf_rfa.errors import InputError
from hf_rfa.families import FAMILIES, Family
from hf_rfa.inference.devices import find_device
from hf_rfa.inference.loading import check_is_checkpoint, read_config, warn_once

from .base_model import rfa_layers, softmax_base_model
from .calibration_data import cut, random_inputs
from .offload import blocks_on_disk, give_back_after_blocks, offloaded_shapes
from .options import ConversionOptions

#: Files of a hub checkpoint that are downloaded: weights, configurations, tokenizers and the model card.
HUB_FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.spm", "*.jinja", "README.md")
#: What to do with a GGUF file.
GGUF_ADVICE = "transformers makes a folder of a GGUF file: docs/guide.md has the lines."
#: Bytes of the largest checkpoint that is loaded whole: blocks that stay on disk are read for every token generated.
MAX_BYTES_IN_MEMORY = 1_000_000_000
#: Tokens that a model is tried on.
PROBE_TOKENS = 64


@dataclass(frozen=True)
class Checkpoint:
    """A softmax checkpoint that can be converted."""

    name: str  # its folder or its name on the hub, as the user gave it
    folder: Path
    config: PreTrainedConfig
    family: Family
    architecture: str  # name of its model class
    weight_files: tuple[Path, ...]
    revision: str | None = None  # commit of a hub name

    @property
    def hub_name(self) -> str | None:
        """Its name on the hub, or None for a folder."""
        return None if Path(self.name).expanduser().exists() else self.name

    @property
    def uses_pickle(self) -> bool:
        """Whether the weights are pickled instead of safetensors."""
        return self.weight_files[0].suffix == ".bin"

    @property
    def predicts_tokens(self) -> bool:
        """Whether its model is a decoder with a language-model head."""
        return self.architecture.endswith(("LMHeadModel", "ForCausalLM"))

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight files."""
        return sum(path.stat().st_size for path in self.weight_files)


def open_checkpoint(
    name: str | Path,
    *,
    revision: str | None = None,
    allow_pickle: bool = False,
    device: torch.device | None = None,
) -> Checkpoint:
    """Find a checkpoint and check it: a folder, or a name on the hub, for which alone the network is used.

    ``revision`` is a branch, a tag or a commit on the hub; ``device`` is what its model will compute on, None for any.

    Raises:
        InputError: if it is missing, unreadable, broken, of a family that is not supported, quantised, RFA already, or a
            pickle without ``allow_pickle``.
    """
    name = str(name)
    path = Path(name).expanduser()
    if revision is not None and path.exists():
        raise InputError(f"revision={revision} is of a model on the hub, and {name} is on this machine. Leave it out.")
    folder = locate(name, revision=revision, allow_pickle=allow_pickle)
    _check_config(folder, name)
    config = read_config(folder, device)
    family = FAMILIES[config.model_type]
    architecture = _architecture(config, family, name)
    files = _weight_files(folder, name, allow_pickle=allow_pickle)
    commit = folder.name if not path.exists() and folder.parent.name == "snapshots" else None
    checkpoint = Checkpoint(name, folder, config, family, architecture, files, commit)
    if not checkpoint.uses_pickle:
        _check_tensors(files)
    return checkpoint


#: What the name of a model class ends in.
HEAD = re.compile(r"(LMHeadModel|DoubleHeadsModel|MTModel|For[A-Z]\w*|Model)$")


def _architecture(config: Any, family: Family, name: str) -> str:
    """Return the name of a checkpoint's model class; an `InputError` if it cannot be converted.

    Of a class that transformers does not have, an earlier name for instance, it is the family's class with the same head:
    transformers goes by the ``model_type`` too.
    """
    stated = (config.architectures or [family.default_architecture])[0]
    if stated in family.architectures:
        return stated
    head = HEAD.search(stated)
    same = [name for name in family.architectures if head and HEAD.search(name)[0] == head[0]]  # type: ignore[index]
    if head and head[0] in ("LMHeadModel", "ForCausalLM"):
        same.append(family.default_architecture)
    if hasattr(transformers, stated) or not same:
        raise InputError(
            f"{name} is a {stated}, which cannot be converted. Supported: {', '.join(family.architectures)}."
        )
    warn_once(f"{name} is a {stated}, which transformers does not have: it is taken for a {same[0]}.")
    return same[0]


def locate(name: str, *, revision: str | None, allow_pickle: bool) -> Path:
    """Return a checkpoint's folder, downloaded from the hub if need be; an `InputError` if there is none."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        advice = f" {GGUF_ADVICE}" if path.suffix == ".gguf" else ""
        raise InputError(f"{name} is a file. Pass the checkpoint's folder, the one with config.json in it.{advice}")
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise InputError(f"there is no folder {name}. Pass a checkpoint's folder, or its name on the hub.")
    patterns = [*HUB_FILES, *(["pytorch_model*.bin"] if allow_pickle else [])]
    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"])
        if Path(folder, "modules.json").is_file():  # of sentence-transformers: 1_Pooling, 2_Normalize
            snapshot_download(name, revision=revision, allow_patterns=["[0-9]_*/*"])
        return Path(folder)
    except RepositoryNotFoundError as error:
        raise InputError(
            f"there is no folder {name}, and no model of that name on the hub that you may read. Check the name, or log "
            "in with `hf auth login` if it is private."
        ) from error
    except RevisionNotFoundError as error:
        raise InputError(
            f"the model {name} on the hub has no revision {revision}. Pass a branch, a tag or a commit that it has, or "
            "leave --revision out."
        ) from error
    except HFValidationError as error:
        raise InputError(f"{name!r} is neither a folder nor a possible hub name: {error}") from error
    except (LocalEntryNotFoundError, OSError) as error:
        wanted = "" if revision is None else f" in the revision {revision}"
        download = f"hf download {name}" + ("" if revision is None else f" --revision {revision}")
        raise InputError(
            f"there is no folder {name}, the hub could not be reached, and its cache on this machine does not hold the "
            f"model{wanted} ({type(error).__name__}). Connect to the network, unset HF_HUB_OFFLINE if it is set, or "
            f"download the model elsewhere ({download}) and pass the folder."
        ) from error


def _check_config(folder: Path, name: str) -> None:
    """Raise an `InputError` if the configuration is missing, or is of a model that cannot be converted."""
    check_is_checkpoint(folder, name)
    fields = _read_json(folder / "config.json")
    model_type, quantization = fields.get("model_type"), fields.get("quantization_config")
    if model_type in [family.rfa_config.model_type for family in FAMILIES.values()]:
        raise InputError(f"{name} is an RFA checkpoint already (model_type {model_type!r}). Convert its base model.")
    if model_type not in list(FAMILIES):
        raise InputError(
            f"{name} has model_type {model_type!r}, which cannot be converted. docs/models.md lists the types that can, and "
            "why others cannot. A family of your own is registered with --import MODULE (CONTRIBUTING.md)."
        )
    if quantization:
        raise InputError(
            f"{name} is quantised ({_quantization_name(quantization)}, in its config.json), and the conversion needs "
            "full-precision weights. Pass the checkpoint that it was made from."
        )


def _read_json(path: Path) -> dict[str, Any]:
    """Return the fields of a JSON file; raise an `InputError` if there are none."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error


def _quantization_name(quantization: Any) -> str:
    """Return what a configuration's ``quantization_config`` says of the method and its bits."""
    if not isinstance(quantization, dict):
        return str(quantization)
    bits = (
        4 if quantization.get("load_in_4bit") else 8 if quantization.get("load_in_8bit") else quantization.get("bits")
    )
    method = str(quantization.get("quant_method") or "bitsandbytes")
    return f"{method} {bits} bits" if bits else method


def _weight_files(folder: Path, name: str, *, allow_pickle: bool) -> tuple[Path, ...]:
    """Return a checkpoint's weight files, safetensors if there are any; an `InputError` if one is missing or a pickle."""
    for single, index in ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
        if (folder / single).is_file():
            shards = {single}
        elif (folder / index).is_file():
            shards = set(dict(_read_json(folder / index).get("weight_map") or {}).values())
        else:
            continue
        if not shards:
            raise InputError(f"cannot read {folder / index}: it names no weights.")
        files = tuple(folder / shard for shard in sorted(shards))
        if single == WEIGHTS_NAME and not allow_pickle:
            raise InputError(
                f"{name} has its weights only as a pickle ({files[0].name}), which can run code when it is loaded. Pass "
                "--allow-pickle if you trust it (it is then loaded with torch's weights_only=True), or get a safetensors "
                "version."
            )
        missing = [path.name for path in files if not path.is_file()]
        if missing:
            raise InputError(f"{name} lacks {', '.join(missing)}, which {index} names. Download it again.")
        return files
    raise InputError(f"{name} has no weights: neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME} is there.")


def _check_tensors(files: tuple[Path, ...]) -> None:
    """Read every tensor once, so that broken files and values that are not finite are found before any work starts."""
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a dict)
                    _check_finite(key, file.get_tensor(key), path)
        except SafetensorError as error:
            raise InputError(f"{path} is broken or cut short ({error}). Download it again.") from error


def _check_finite(name: str, tensor: torch.Tensor, where: str | Path) -> None:
    """Raise an `InputError` that names the tensor if it holds NaN or infinity."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    smallest, largest = tensor.aminmax()  # which takes no memory, and is NaN if any value is
    if not smallest.isfinite() or not largest.isfinite():
        count = int((~torch.isfinite(tensor)).sum())
        raise InputError(
            f"{where}: tensor {name} holds {count} values that are NaN or infinite, of {tensor.numel()}. A model with "
            "them cannot be converted; use a checkpoint from before the training diverged."
        )


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
            _check_finite(key, tensor, checkpoint.weight_files[0])
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
    new = ("feature_map.", "gate.", "importance.")
    layers = rfa_layers(model).items()
    return [f"{name}.{key}" for name, layer in layers for key in layer.state_dict() if key.startswith(new)]
