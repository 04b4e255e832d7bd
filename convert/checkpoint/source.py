"""The softmax checkpoint to convert: finding and checking it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from hf_rfa.errors import InputError
from hf_rfa.families import FAMILIES, Family
from hf_rfa.inference.loading import check_is_checkpoint, read_config

#: Files of a hub checkpoint that are downloaded: weights, configurations, tokenizers and the model card.
HUB_FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.spm", "*.jinja", "README.md")


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
    name: str | Path, *, revision: str | None = None, allow_pickle: bool = False, device: torch.device | None = None
) -> Checkpoint:
    """Find a checkpoint and check it: a folder, or a name on the hub, for which alone the network is used.

    ``revision`` is a branch, a tag or a commit on the hub; ``device`` is what its model will compute on, None for any.

    Raises:
        InputError: if it is missing, unreadable, broken, of a family that is not supported, quantized, RFA already, or a
            pickle without ``allow_pickle``.
    """
    name = str(name)
    path = Path(name).expanduser()
    if revision is not None and path.exists():
        raise InputError(
            f"revision={revision} applies to models on the hub, and {name} is on this machine. Leave it out."
        )
    folder = locate(name, revision=revision, allow_pickle=allow_pickle)
    _check_config(folder, name)
    config = read_config(folder, device)
    family = FAMILIES[config.model_type]
    architecture: str = (config.architectures or [family.default_architecture])[0]
    if architecture not in family.architectures:
        raise InputError(
            f"{name} is a {architecture}, which cannot be converted. Supported: {', '.join(family.architectures)}. If it is "
            "one of these under an earlier name, write the name into its config.json (architectures)."
        )
    files = _weight_files(folder, name, allow_pickle=allow_pickle)
    commit = folder.name if not path.exists() and folder.parent.name == "snapshots" else None
    checkpoint = Checkpoint(name, folder, config, family, architecture, files, commit)
    if not checkpoint.uses_pickle:
        _check_tensors(files)
    return checkpoint


def locate(name: str, *, revision: str | None, allow_pickle: bool) -> Path:
    """Return a checkpoint's folder, downloaded from the hub if need be; an `InputError` if there is none."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        gguf = " transformers makes a folder of a GGUF file: docs/guide.md has the lines."
        advice = gguf if path.suffix == ".gguf" else ""
        raise InputError(f"{name} is a file. Pass the checkpoint's folder, the one with config.json in it.{advice}")
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise InputError(f"there is no folder {name}. Pass a checkpoint's folder, or its name on the hub.")
    patterns = [*HUB_FILES, *(["pytorch_model*.bin"] if allow_pickle else [])]
    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"])
        if Path(folder, "modules.json").is_file():  # of sentence-transformers: 1_Pooling, 2_Normalize
            of_parts = [f"[0-9]_*/{pattern}" for pattern in patterns]
            snapshot_download(name, revision=revision, allow_patterns=of_parts)
        return Path(folder)
    except RepositoryNotFoundError as error:
        raise InputError(
            f"there is no folder {name}, and no model of that name on the hub that you may read. Check the name, or log "
            "in with `hf auth login` if it is private."
        ) from error
    except RevisionNotFoundError as error:
        raise InputError(
            f"the model {name} on the hub has no revision {revision}. Pass a branch, a tag or a commit that it has, or "
            "leave the revision out."
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
            f"{name} is quantized (quantization_config, in its config.json), and conversion needs full-precision weights. "
            "Pass the checkpoint that it was made from."
        )


def _read_json(path: Path) -> dict[str, Any]:
    """Return the fields of a JSON file; raise an `InputError` if there are none."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error


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
                "--config allow_pickle=true if you trust it (it is then loaded with torch's weights_only=True), or get a "
                "safetensors version."
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
                    check_finite(key, file.get_tensor(key), path)
        except SafetensorError as error:
            raise InputError(f"{path} is broken or cut short ({error}). Download it again.") from error


def check_finite(name: str, tensor: torch.Tensor, where: str | Path) -> None:
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
