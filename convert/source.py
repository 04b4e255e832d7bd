"""Finding and checking the checkpoint to convert, before any work starts."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    StrictDataclassError,
)
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from hf_rfa.errors import InputError
from hf_rfa.families import FAMILIES, Family

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "source.spm",
    "target.spm",
    "sentencepiece.bpe.model",
    "spiece.model",
)
CONFIG_FILES = ("config.json", "generation_config.json", "README.md")


@dataclass(frozen=True)
class Source:
    """A softmax checkpoint that can be converted.

    Attributes:
        name: what the user asked for, a folder or a hub name.
        folder: where its files are.
        config: its configuration.
        family: how its family is converted.
        architecture: name of its model class.
        weight_files: its weights, in one or more files.
    """

    name: str
    folder: Path
    config: PreTrainedConfig
    family: Family
    architecture: str
    weight_files: tuple[Path, ...]

    @property
    def uses_pickle(self) -> bool:
        """Whether the weights are pickled instead of safetensors."""
        return self.weight_files[0].suffix == ".bin"

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight files."""
        return sum(path.stat().st_size for path in self.weight_files)

    @property
    def shard_size(self) -> int | None:
        """Bytes of the largest weight file, or None if there is one file."""
        return max(path.stat().st_size for path in self.weight_files) if len(self.weight_files) > 1 else None


def open_source(name: str | Path, *, allow_pickle: bool = False) -> Source:
    """Find a checkpoint and check that it can be converted.

    Args:
        name: a folder, or a name on the hub (the only case in which the network may be used).
        allow_pickle: whether weights that are only there as a pickle may be loaded.

    Raises:
        InputError: if it is missing, unreadable, broken, of a family that is not supported, or RFA already.
    """
    folder = _locate(str(name), allow_pickle=allow_pickle)
    config = _read_config(folder, str(name))
    if config.model_type not in FAMILIES:
        if config.model_type in {family.rfa_config.model_type for family in FAMILIES.values()}:
            raise InputError(
                f"{name} is an RFA checkpoint already (model_type {config.model_type!r}). Convert its softmax parent."
            )
        raise InputError(
            f"{name} has model_type {config.model_type!r}, which cannot be converted. "
            f"Supported: {', '.join(sorted(FAMILIES))}."
        )
    family = FAMILIES[config.model_type]
    architecture = (config.architectures or [family.default_architecture])[0]
    if architecture not in family.architectures:
        raise InputError(
            f"{name} is a {architecture}, which cannot be converted. Supported: {', '.join(family.architectures)}."
        )
    files = _weight_files(folder, str(name), allow_pickle=allow_pickle)
    source = Source(str(name), folder, config, family, architecture, files)
    if not source.uses_pickle:
        _check_tensors(source)
    return source


def _locate(name: str, *, allow_pickle: bool) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise InputError(f"{name} is a file. Pass the checkpoint's folder, the one with config.json in it.")
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise InputError(f"there is no folder {name}. Pass a checkpoint's folder, or its name on the hub.")
    patterns = [*CONFIG_FILES, *TOKENIZER_FILES, "*.safetensors", "*.safetensors.index.json"]
    if allow_pickle:
        patterns += ["pytorch_model*.bin", "pytorch_model.bin.index.json"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except RepositoryNotFoundError as error:
        raise InputError(
            f"there is no folder {name}, and no model of that name on the hub that you may read. Check the name, or log "
            "in with `hf auth login` if it is private."
        ) from error
    except HFValidationError as error:
        raise InputError(f"{name!r} is neither a folder nor a possible hub name: {error}") from error
    except (LocalEntryNotFoundError, OSError) as error:
        raise InputError(
            f"there is no folder {name}, the hub could not be reached, and its cache on this machine does not hold the "
            f"model ({type(error).__name__}). Connect to the network, unset HF_HUB_OFFLINE if it is set, or download the "
            f"model elsewhere (hf download {name}) and pass the folder."
        ) from error


def _read_config(folder: Path, name: str) -> PreTrainedConfig:
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(f"{name} has no config.json: it is not a transformers checkpoint.")
    try:
        fields: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    model_type = fields.get("model_type") if isinstance(fields, dict) else None
    if model_type is None:
        raise InputError(f"{path} names no model_type. Supported: {', '.join(sorted(FAMILIES))}.")
    try:
        return AutoConfig.from_pretrained(folder)
    except StrictDataclassError as error:
        raise InputError(f"cannot use {path}: {error.__cause__}") from error
    except (ValueError, OSError, KeyError) as error:
        raise InputError(
            f"{name} has model_type {model_type!r}, which transformers cannot read. Supported: "
            f"{', '.join(sorted(FAMILIES))}."
        ) from error


def _weight_files(folder: Path, name: str, *, allow_pickle: bool) -> tuple[Path, ...]:
    for single, index in ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
        if (folder / single).is_file():
            files: tuple[Path, ...] = (folder / single,)
        elif (folder / index).is_file():
            try:
                shards = json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values()
            except (OSError, json.JSONDecodeError, KeyError, AttributeError) as error:
                raise InputError(f"cannot read {folder / index}: {error}") from error
            files = tuple(folder / shard for shard in sorted(set(shards)))
            missing = [path.name for path in files if not path.is_file()]
            if missing:
                raise InputError(f"{name} lacks {', '.join(missing)}, which {index} names. Download it again.")
        else:
            continue
        if files[0].suffix == ".bin" and not allow_pickle:
            raise InputError(
                f"{name} has its weights only as a pickle ({files[0].name}), which can run code when it is loaded. Pass "
                "--allow-pickle if you trust it (it is then loaded with torch's weights_only=True), or get a safetensors "
                "version."
            )
        return files
    raise InputError(f"{name} has no weights: neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME} is there.")


def _check_tensors(source: Source) -> None:
    """Read every tensor once: broken files and values that are not finite are found here, and named."""
    for path in source.weight_files:
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a dict)
                    check_finite(key, file.get_tensor(key), path)
        except SafetensorError as error:
            raise InputError(f"{path} is broken or cut short ({error}). Download it again.") from error


def check_finite(name: str, tensor: torch.Tensor, where: str | Path) -> None:
    """Raise a `InputError` that names the tensor if it holds NaN or infinity."""
    if tensor.is_floating_point() and tensor.numel() and not all(map(math.isfinite, map(float, tensor.aminmax()))):
        count = int((~torch.isfinite(tensor)).sum())
        raise InputError(
            f"{where}: tensor {name} holds {count} values that are NaN or infinite, of {tensor.numel()}. A model with "
            "them cannot be converted; use a checkpoint from before the training diverged."
        )
