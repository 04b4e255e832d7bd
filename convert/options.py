"""The options of a conversion, declared once: for the function, the command line and the command on a model card.

Imports nothing but the standard library: the command line reads this file by its path, without loading torch.
"""

import inspect
import json
import re
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
RetrievalHeads = int | list[list[int]]


@dataclass(frozen=True, kw_only=True)
class ConversionOptions:
    """The options of a conversion.

    Attributes:
        preset: what causal attention keeps: exact (first, last and most important tokens), mixed (the same, and features) or
            rfa (random features alone, with a gate where they are trained). Default: the family's.
        memory: cache of causal attention in tokens of the base model's, which the preset divides by rule, with a text a third
            to retrieval heads. Default: the preset's own sizes, about 64.
        window_size: number of last tokens seen exactly; 0 for features alone.
        num_sinks: number of first tokens seen exactly.
        num_slots: number of most important tokens before the window seen exactly.
        retrieval_heads: number of key-value heads that see more tokens exactly, those that recall the most; or the heads, as
            layer.head (18.2,7.2). Default: by rule with a memory and a text, else none.
        retrieval_window: number of last tokens that these heads see. Default: by rule with a memory, else 1,024, or a smaller
            model's positions.
        feature_map: name of the feature map. Default: positive; exponential where it is trained; with preset mixed mlp in
            decoders other than GPT-2.
        num_features: D, rows of W per head of causal attention.
        num_cross_features: D of cross attention. Default: the map's own.
        num_encoder_features: D of an encoder's attention. Default: the map's own.
        merged_source_length: number of positions of audio that softmax cross attention keeps: similar neighbours are merged.
            Default: all.
        gate: add a recency gate per head. Default: where preset rfa is trained.
        config: other fields of the RFA configuration, as key=value: --config unit_norm=true.
        layers: layers whose causal attention to convert: all, none, or indices (0,2,4-7). The others stay softmax, and
            their cache grows.
        cross_layers: decoder layers whose cross attention to convert. Default: none; all where training follows, if
            there are features.
        encoder_layers: encoder layers to convert. Default: none.
        keep_softmax: keep this number of those layers softmax: the most sensitive ones, as measured after calibration.
        calibrate_on: text to calibrate on (.txt or .jsonl, plain or .gz; for an encoder one source a line), or speech (a
            folder, or a .jsonl file with paths). Default: random tokens.
        calibration_tokens: tokens of that text, or 128 for each utterance; from 16,384 on, slots and learned features are
            fitted by gradient descent. Default: 4,096, with slots 8,192, with mlp 65,536.
        seed: seed of W, of random tokens, and of the queries of a text that scores and features are fitted to.
        max_positions: extend the positions to this number. Default: keep them.
        dtype: precision of the weights; auto for the checkpoint's.
        force: write the model even if its perplexity on the text says that the conversion has ruined it.
        device: what to compute on: cpu, cuda, cuda:1, …; auto for an accelerator where there is one.
        revision: branch, tag or commit of a checkpoint on the hub. Default: main.
        allow_pickle: load weights that exist only as a pickle. Only if you trust them.

    Raises:
        ValueError: for a number out of range, or a value that is not one of a field's choices.
    """

    # In the metadata: the least value of a number, a flag that is not the field's name, and the group of the command line's
    # help that begins with the field.
    preset: Preset | None = field(default=None, metadata={"panel": "What is kept"})
    memory: int | None = field(default=None, metadata={"minimum": 8})
    window_size: int | None = field(
        default=None, metadata={"minimum": 0, "panel": "Exact tokens, in place of the preset's"}
    )
    num_sinks: int | None = field(default=None, metadata={"minimum": 0, "flag": "--sinks"})
    num_slots: int | None = field(default=None, metadata={"minimum": 0, "flag": "--slots"})
    retrieval_heads: RetrievalHeads | None = field(default=None, metadata={"minimum": 0})
    retrieval_window: int | None = field(default=None, metadata={"minimum": 1})
    feature_map: str | None = field(default=None, metadata={"panel": "Features, in place of the preset's"})
    num_features: int | None = field(default=None, metadata={"minimum": 1})
    num_cross_features: int | None = field(default=None, metadata={"minimum": 1})
    num_encoder_features: int | None = field(default=None, metadata={"minimum": 1})
    merged_source_length: int | None = field(default=None, metadata={"minimum": 1})
    gate: bool | None = field(default=None, metadata={"flag": "--gate/--no-gate"})
    config: dict[str, Any] | None = None
    layers: Layers = field(default="all", metadata={"panel": "Which layers"})
    cross_layers: Layers | None = None
    encoder_layers: Layers | None = None
    keep_softmax: int = field(default=0, metadata={"minimum": 0})
    calibrate_on: str | Path | None = field(default=None, metadata={"flag": "--calibrate", "panel": "Calibration"})
    calibration_tokens: int | None = field(default=None, metadata={"minimum": 2})
    seed: int = field(default=0, metadata={"minimum": 0})
    max_positions: int | None = field(default=None, metadata={"minimum": 1, "panel": "Output"})
    dtype: Dtype = "auto"
    force: bool = False
    device: str = field(default="auto", metadata={"panel": "Computation"})
    revision: str | None = field(default=None, metadata={"panel": "Checkpoint"})
    allow_pickle: bool = False

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if isinstance(value, int) and value < option.metadata.get("minimum", value):
                raise ValueError(f"{option.name} must be at least {option.metadata['minimum']}, got {value}.")
        for name, choices in (("preset", (None, *get_args(Preset))), ("dtype", get_args(Dtype))):
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(filter(None, choices))}, got {value!r}.")

    def words(self) -> list[str]:
        """Return the words of a command line that set the options other than their defaults."""
        words = []
        for option in fields(self):
            value = getattr(self, option.name)
            if value == option.default:
                continue
            on, _, off = flag_of(option).partition("/")
            if isinstance(value, bool):
                words.append(on if value else off)
            elif isinstance(value, dict):
                for key, item in value.items():
                    words += [on, f"{key}={item if isinstance(item, str) else json.dumps(item)}"]
            elif isinstance(value, list | tuple):
                pairs = option.name == "retrieval_heads"
                items = [f"{item[0]}.{item[1]}" if pairs else str(item) for item in value]
                words += [on, ",".join(items) or "none"]
            else:
                words += [on, str(value)]
        return words


def flag_of(option: Field) -> str:
    """Return the flag of an option, and of some switches the one that turns it off: ``--on/--off``."""
    return option.metadata.get("flag", "--" + option.name.replace("_", "-"))


def help_texts() -> dict[str, str]:
    """Return the descriptions of the options from the docstring of `ConversionOptions`, by name."""
    section = inspect.cleandoc(ConversionOptions.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    return {name: " ".join(text.split()) for name, text in re.findall(r"(?m)^ {4}(\w+): (.*(?:\n {6,}.*)*)", section)}
