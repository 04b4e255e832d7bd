"""GGUF files, the format of llama.cpp, as softmax checkpoints: their configuration, tokenizer and dequantised weights.

transformers reads the format (its ``gguf_file``); this module checks a file, and fills in what transformers leaves out.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Collection, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES
from transformers.utils import is_gguf_available, logging

from .errors import InputError

#: The first bytes of every GGUF file.
MAGIC = b"GGUF"
#: Ends of the names of long fields, which the tokenizer alone needs.
VOCABULARY = (".tokens", ".merges", ".scores", ".token_type")
#: What reading a broken file, or one that transformers cannot take, raises.
READ_ERRORS = (OSError, ValueError, KeyError, IndexError, TypeError, OverflowError, NotImplementedError)


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file that has been opened and checked; its weights are still on the disk.

    Attributes:
        path: the file.
        architecture: llama.cpp's name of its architecture.
        config: the configuration of the softmax model that it holds.
        num_values: numbers in its tensors.
        precisions: the types that its tensors are stored in, such as Q4_K and F32.
        license: its license, if it states one.
        languages: its languages, if it states them.
        has_tokenizer: whether it holds a vocabulary.
    """

    path: Path
    architecture: str
    config: PreTrainedConfig
    num_values: int
    precisions: tuple[str, ...]
    license: str | None
    languages: tuple[str, ...]
    has_tokenizer: bool

    @property
    def is_quantized(self) -> bool:
        """Whether some of its tensors hold fewer bits than 16."""
        return not {"F64", "F32", "F16", "BF16"}.issuperset(self.precisions)

    def digest(self) -> str:
        """Return the SHA-256 of the file."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def is_gguf(path: Path) -> bool:
    """Whether a path is a file that is a GGUF file, or is named as one."""
    if not path.is_file():
        return False
    return path.suffix == ".gguf" or _first_bytes(path) == MAGIC


def open_gguf(path: Path, supported: Collection[str] = ()) -> GGUFFile:
    """Read what a GGUF file says of itself, and check that its tensors are all there.

    Args:
        path: the file.
        supported: the ``model_type`` that it may have; empty for any that transformers reads.

    Raises:
        InputError: if it is no GGUF file, broken, one part of several, or of an architecture that is not supported, or if
            the package gguf is not installed.
    """
    path = path.expanduser().resolve()
    if _first_bytes(path) != MAGIC:
        raise InputError(f"{path} is not a GGUF file: it does not begin with the letters GGUF. Download it again.")
    if not is_gguf_available():
        raise InputError(
            f"{path} is a GGUF file, and the package gguf, which reads it, is missing: pip install hf-rfa[gguf]"
        )
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items() if not name.endswith(VOCABULARY)}
        shapes = {tensor.name: tuple(map(int, reversed(tensor.shape))) for tensor in reader.tensors}
        num_values = sum(int(tensor.n_elements) for tensor in reader.tensors)
        precisions = tuple(sorted({tensor.tensor_type.name for tensor in reader.tensors}))
        architecture = str(fields["general.architecture"])
    except READ_ERRORS as error:
        raise InputError(
            f"{path} is broken or cut short ({type(error).__name__}: {error}). Download it again."
        ) from error
    if fields.get("split.count", 1) > 1:
        raise InputError(
            f"{path} is one part of {fields['split.count']}. Join them first, with llama-gguf-split --merge of llama.cpp."
        )
    config = _read_config(path, architecture, supported)
    _complete(config, fields, shapes, architecture)
    return GGUFFile(
        path=path,
        architecture=architecture,
        config=config,
        num_values=num_values,
        precisions=precisions,
        license=fields.get("general.license"),
        languages=tuple(fields.get("general.languages") or ()),
        has_tokenizer="tokenizer.ggml.tokens" in reader.fields,
    )


@contextmanager
def _silence() -> Iterator[None]:
    """Keep transformers quiet: its progress bar here cannot be turned off, and its warnings are of what is checked after."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error}") from error


def _read_config(path: Path, architecture: str, supported: Collection[str]) -> PreTrainedConfig:
    """Return the configuration that transformers makes of a GGUF file; an `InputError` if it cannot, or is not supported."""
    readable = sorted(each for each in supported if each.removesuffix("_text") in GGUF_SUPPORTED_ARCHITECTURES)
    advice = f" Supported: {', '.join(readable)}." if supported else ""
    try:
        with _silence():
            config = AutoConfig.from_pretrained(path.parent, gguf_file=str(path))
    except READ_ERRORS as error:
        raise InputError(
            f"{path} holds a model of the architecture {architecture!r}, which cannot be read ({error}).{advice}"
        ) from error
    if supported and config.model_type not in supported:
        raise InputError(
            f"{path} holds a model of the architecture {architecture!r} (model_type {config.model_type!r}), which cannot "
            f"be converted.{advice}"
        )
    return config


def _complete(config: Any, fields: dict[str, Any], shapes: dict[str, tuple[int, ...]], architecture: str) -> None:
    """Set what transformers leaves at a configuration's defaults for some architectures, GPT-2 among them."""
    if f"{architecture}.context_length" in fields:
        config.max_position_embeddings = int(fields[f"{architecture}.context_length"])
    if "token_embd.weight" in shapes:
        config.vocab_size = shapes["token_embd.weight"][0]
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    for name, key in names.items():
        setattr(config, name, fields.get(f"tokenizer.ggml.{key}"))
    end_of_turn = fields.get("tokenizer.ggml.eot_token_id")
    if end_of_turn not in (None, config.eos_token_id):
        config.eos_token_id = [end for end in (config.eos_token_id, end_of_turn) if end is not None]
    vars(config).pop("_model_name_or_path", None)


def read_model(file: GGUFFile, model_class: Any, dtype: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return the softmax model of a GGUF file as transformers loads it, and the names of its unfit tensors.

    Args:
        file: the file.
        model_class: the class of the softmax model.
        dtype: the precision of its weights; "auto" stands for float32.

    Raises:
        InputError: if transformers cannot read the weights.
    """
    config = type(file.config).from_dict(file.config.to_dict())  # transformers writes into it
    precision = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    try:
        with _silence():
            return model_class.from_pretrained(
                file.path.parent,
                gguf_file=str(file.path),
                config=config,
                dtype=precision,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except (*READ_ERRORS, RuntimeError) as error:
        raise InputError(f"cannot read the weights in {file.path}: {error}") from error


def read_tensors(file: GGUFFile, model_class: Any, dtype: str) -> tuple[dict[str, Tensor], list[tuple[str, Any, Any]]]:
    """Return the dequantised weights of a GGUF file, by their names in a softmax model.

    Arguments and errors are those of `read_model`.

    Returns:
        The tensors, and (name, shape, expected shape) of those that do not fit the configuration. A tensor that the file
        lacks is in neither.
    """
    model, info = read_model(file, model_class, dtype)
    mismatched = sorted(info["mismatched_keys"])
    absent = {*info["missing_keys"], *(key for key, *_ in mismatched)}
    return {key: tensor for key, tensor in model.state_dict().items() if key not in absent}, mismatched


def load_gguf(file: GGUFFile, auto_class: Any, dtype: str) -> PreTrainedModel:
    """Load the softmax model of a GGUF file; an `InputError` if the weights and the configuration do not belong together."""
    model_class = auto_class._model_mapping.get(type(file.config), None)
    if model_class is None:
        raise InputError(f"{file.path} holds a {file.config.model_type}, which generates no text.")
    state, mismatched = read_tensors(file, model_class, dtype)
    precision = "float32" if dtype == "auto" else dtype
    with _silence():
        model, info = model_class.from_pretrained(
            None,
            config=file.config,
            state_dict=state,
            dtype=precision,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    mismatched += info["mismatched_keys"]
    unfit = sorted({*info["missing_keys"], *(key for key, *_ in mismatched)})
    if unfit:
        raise InputError(
            f"{file.path}: {len(unfit)} tensors that the configuration asks for are missing, or of another shape: "
            f"{', '.join(unfit[:3])}{' …' if len(unfit) > 3 else ''}."
        )
    return model


def load_gguf_tokenizer(file: GGUFFile) -> tuple[Any, str | None]:
    """Return (the tokenizer of a GGUF file, None), or (None, why there is none)."""
    if not file.has_tokenizer:
        return None, "there is no tokenizer in it"
    try:
        with _silence():
            return AutoTokenizer.from_pretrained(file.path.parent, gguf_file=str(file.path)), None
    except (*READ_ERRORS, ImportError) as error:
        return None, f"its tokenizer cannot be loaded ({error})"
