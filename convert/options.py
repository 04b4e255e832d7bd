"""The options of a conversion, declared once: for the function, the command line and the command on a model card.

Imports nothing but the standard library: the command line loads this file by its path, without hf_rfa and so without torch.
"""

import json
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

#: What causal attention keeps: exact tokens alone, these and features, or random features alone.
Preset = Literal["exact", "mixed", "rfa"]
#: Precisions of the weights.
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
#: Indices of the layers to convert, or all of them.
Layers = list[int] | Literal["all"]
#: A number of retrieval heads, or [layer, key-value head] of each.
HeadsOrCount = int | list[list[int]]


def option(default: Any, help: str, *, flag: str | None = None, least: int | None = None) -> Any:
    """Return a field of `ConversionOptions`, with what it says, its flag, and a number's least value.

    Without a flag it is set by ``--config FIELD=VALUE``.
    """
    return field(default=default, metadata={"help": help, "flag": flag, "least": least})


@dataclass(frozen=True, kw_only=True)
class ConversionOptions:
    """The options of a conversion.

    What a field says is in its metadata, which ``hf-rfa convert --help`` shows and docs/api.md lists.

    Raises:
        ValueError: for a number out of range, or a value that is not one of a field's choices.
    """

    preset: Preset | None = option(
        None,
        "What causal attention keeps: exact (first, last and most important tokens), mixed (the same, and features) or rfa "
        "(random features alone). Default: mixed for decoders with a text, else the family's.",
        flag="--preset",
    )
    memory: int | None = option(
        None,
        "Cache budget, in tokens of the base model's KV cache; with a text, a third goes to retrieval heads. Default: the "
        "preset's own sizes, about 64.",
        flag="--memory",
        least=8,
    )
    window_size: int | None = option(None, "Last tokens to keep; 0 for features alone.", flag="--window-size", least=0)
    num_slots: int | None = option(None, "Important tokens to keep from before the window.", flag="--slots", least=0)
    num_sinks: int | None = option(None, "First tokens to keep.", least=0)
    retrieval_heads: HeadsOrCount | None = option(
        None,
        "Key-value heads with more tokens: how many, chosen by what they tell, or which, as layer.head (18.2,7.2). "
        "Default: by rule with a memory and a text, else none.",
        flag="--retrieval-heads",
        least=0,
    )
    retrieval_window: int | None = option(
        None,
        "Window of retrieval heads, in tokens. Default: that of the others with a memory, else 1,024, or a smaller model's "
        "positions.",
        least=1,
    )
    retrieval_slots: int | None = option(
        None, "Important tokens of retrieval heads. Default: by rule with a memory, else none.", least=0
    )
    feature_map: str | None = option(
        None,
        "Name of the feature map. Default: positive; exponential if it is trained; summary for decoders other than GPT-2 "
        "with preset mixed.",
        flag="--feature-map",
    )
    num_features: int | None = option(None, "D, rows of W per causal head.", flag="--num-features", least=1)
    num_cross_features: int | None = option(None, "D of cross attention. Default: the map's own.", least=1)
    num_encoder_features: int | None = option(None, "D of an encoder's attention. Default: the map's own.", least=1)
    merged_source_length: int | None = option(
        None, "Audio positions that softmax cross attention keeps, by merging neighbors. Default: all.", least=1
    )
    gate: bool | None = option(None, "Whether heads have a recency gate. Default: only if preset rfa is trained.")
    config: dict[str, Any] | None = option(
        None,
        "Set a field without an option of its own; may be repeated. docs/guide.md lists the fields.",
        flag="--config",
    )
    layers: Layers = option(
        "all", "Layers to convert: all, none, or indices (0,2,4-7). The cache of other layers grows.", flag="--layers"
    )
    cross_layers: Layers | None = option(
        None, "Decoder layers whose cross attention to convert. Default: none; all if features are trained."
    )
    encoder_layers: Layers | None = option(None, "Encoder layers to convert. Default: none.")
    calibrate_on: str | Path | None = option(
        None,
        "Text to calibrate on (.txt or .jsonl, plain or .gz; with an encoder, one source per line), or speech (a folder, or "
        "a .jsonl file with paths). Default: random tokens.",
        flag="--calibrate",
    )
    calibration_tokens: int | None = option(
        None,
        "Tokens to read of that text, 128 per utterance; from 16,384 on, gradient descent fits the slots. Default: 4,096; "
        "8,192 with slots; 32,768 with a summary.",
        least=2,
    )
    seed: int = option(0, "Seed of W, of random tokens, and of the queries for fitting scores and features.", least=0)
    max_positions: int | None = option(
        None, "Extend the positions to this number. Default: keep them.", flag="--max-positions", least=1
    )
    dtype: Dtype = option("auto", "Precision of the weights: float32, bfloat16 or float16; auto for the checkpoint's.")
    force: bool = option(False, "Write the model even if its perplexity on the text is ruined.")
    device: str = option("auto", "Device: cpu, cuda, cuda:1, …; auto for an accelerator if there is one.")
    revision: str | None = option(None, "Branch, tag or commit of a checkpoint on the hub. Default: main.")
    allow_pickle: bool = option(False, "Load weights that exist only as a pickle. Only if you trust them.")

    def __post_init__(self) -> None:
        for one in fields(self):
            value, least = getattr(self, one.name), one.metadata["least"]
            if isinstance(value, int) and least is not None and value < least:
                raise ValueError(f"{one.name} must be at least {least}, got {value}.")
        for name, choices in (("preset", (None, *get_args(Preset))), ("dtype", get_args(Dtype))):
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(filter(None, choices))}, got {value!r}.")

    def words(self) -> list[str]:
        """Return the words of a command line that set the options other than their defaults."""
        words = []
        for one in fields(self):
            value, flag = getattr(self, one.name), one.metadata["flag"]
            if value == one.default:
                continue
            if one.name == "config":
                for name, item in value.items():
                    words += [flag, f"{name}={item if isinstance(item, str) else json.dumps(item)}"]
            else:
                words += ["--config", f"{one.name}={_text(value)}"] if flag is None else [flag, _text(value)]
        return words


def _text(value: Any) -> str:
    """Return a value as the command line reads it."""
    if isinstance(value, list | tuple):
        return ",".join(str(item) if isinstance(item, int) else f"{item[0]}.{item[1]}" for item in value) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read_number(text: str) -> int:
    if not text.removeprefix("-").isdigit():
        raise ValueError("a whole number")
    return int(text)


def _read_switch(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("true or false")
    return text == "true"


def _read_layers(text: str) -> Layers:
    """Read "0,2,4-7", "all" or "none"."""
    if text == "all":
        return "all"
    indices: list[int] = []
    for part in [] if text == "none" else text.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise ValueError("all, none, or indices and ranges such as 0,2,4-7")
        indices += range(int(first), int(last or first) + 1)
    return indices


def _read_heads(text: str) -> HeadsOrCount:
    """Read the number of heads, or "18.2,7.2"."""
    if text.isdigit():
        return int(text)
    pairs = [part.strip().partition(".") for part in text.split(",")]
    if not all(layer.isdigit() and head.isdigit() for layer, _, head in pairs):
        raise ValueError("a number of heads, or layer.head of each such as 18.2,7.2")
    return [[int(layer), int(head)] for layer, _, head in pairs]


#: How a field is read from a command line, by its type; other types are read as they are.
READERS: dict[Any, Callable[[str], Any]] = {
    int: _read_number,
    bool: _read_switch,
    Layers: _read_layers,
    HeadsOrCount: _read_heads,
}


def read(one: Field, text: str) -> Any:
    """Return the value of a field that a command line gives; a `ValueError` says what the field takes."""
    reader = next((reader for kind, reader in READERS.items() if one.type in (kind, kind | None)), str)
    try:
        return reader(text)
    except ValueError as error:
        raise ValueError(f"it must be {error}, got {text!r}.") from error
