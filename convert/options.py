"""The options of a conversion, declared once: for the function, the command line and the command on a model card.

Imports nothing but the standard library: the command line reads this file by its path, without loading torch.
"""

import inspect
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args, get_origin

#: Indices of the layers to convert, or all of them.
Layers = list[int] | Literal["all"]
#: A number of retrieval heads, or [layer, key-value head] of each.
RetrievalHeads = int | list[list[int]]


@dataclass(frozen=True, kw_only=True)
class ConversionOptions:
    """The options of a conversion.

    Attributes:
        feature_map: name of the feature map. Default: positive (exponential where it is trained) for GPT-2 and models with an
            encoder; none for other decoders, unless another option is of features.
        num_features: D, rows of W per head of causal attention. Default: the map's own; see window_size.
        num_cross_features: D of cross attention. Default: the map's own.
        num_encoder_features: D of an encoder's attention. Default: the map's own.
        unit_norm: ℓ2-normalize queries and keys (Peng et al. 2021).
        orthogonal: draw W in orthogonal blocks, not independently.
        trainable_projection: make W a parameter, for training.
        redraw_pool: redraw W from a pool of this size at every step of training; 0 keeps it fixed.
        seed: seed of W and of random tokens.
        layers: layers whose causal attention to convert: all, none, or indices (0,2,4-7). The others stay softmax, and
            their cache grows.
        cross_layers: decoder layers whose cross attention to convert. Default: all.
        encoder_layers: encoder layers to convert. Default: none.
        keep_softmax: keep this number of those layers softmax: the most sensitive ones, each measured as the only one
            converted, after calibration.
        window_size: number of last tokens that causal attention sees exactly, and the others through features; 0 for none.
            Default, where no option of features, sinks or slots is given and no attention transfer follows: 14, with 4 sinks,
            14 slots and 64 features; 31, with 4 sinks and 28 slots, for decoders other than GPT-2. Else 0.
        num_sinks: number of first tokens that it sees exactly as well, for good; with a window. Default: 0; 4 beside a
            window where there are no features by default; or see window_size.
        num_slots: number of most important tokens before the window that it sees exactly as well; with a window. Default: 0,
            or see window_size.
        retrieval_heads: number of key-value heads that see more, and exactly: those that tell the model most of what stood
            far back, found on texts that repeat themselves; or the heads, as layer.head (18.2,7.2).
        retrieval_window: number of last tokens that these heads see. Default: 1,024, or a smaller model's positions.
        gate: add a recency gate per head. Default: where features are trained, without a window.
        memory: the cache of causal attention in tokens of the softmax model's, on average per layer: window, sinks, slots and
            features that predict the text best in that memory are found and used.
        calibrate_on: text to calibrate on (.txt or .jsonl, plain or .gz; for an encoder one source a line). Default: random
            tokens.
        max_positions: extend the positions to this number. Default: keep them.
        dtype: precision of the weights; auto for the checkpoint's. Feature maps and gates are float32.
        device: what to compute on: cpu, cuda, cuda:1, …; auto for an accelerator where there is one.
        revision: branch, tag or commit of a checkpoint on the hub. Default: main.
        allow_pickle: load weights that exist only as a pickle. Only if you trust them.

    Raises:
        ValueError: for a number out of range, or a value that is not one of a field's choices.
    """

    feature_map: str | None = None
    num_features: int | None = None
    num_cross_features: int | None = None
    num_encoder_features: int | None = None
    unit_norm: bool = False
    orthogonal: bool = True
    trainable_projection: bool = False
    redraw_pool: int = 0
    seed: int = 0
    layers: Layers = "all"
    cross_layers: Layers | None = None
    encoder_layers: Layers | None = None
    keep_softmax: int = 0
    window_size: int | None = None
    num_sinks: int | None = None
    num_slots: int | None = None
    retrieval_heads: RetrievalHeads = 0
    retrieval_window: int | None = None
    gate: bool | None = None
    memory: int | None = None
    calibrate_on: str | Path | None = None
    max_positions: int | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    revision: str | None = None
    allow_pickle: bool = False

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in MINIMUM and isinstance(value, int) and value < MINIMUM[each.name]:
                raise ValueError(f"{each.name} must be at least {MINIMUM[each.name]}, got {value}.")
            if get_origin(each.type) is Literal and value not in get_args(each.type):
                raise ValueError(f"{each.name} must be one of {', '.join(get_args(each.type))}, got {value!r}.")

    def words(self) -> list[str]:
        """Return the words of a command line that set the options other than their defaults."""
        words = []
        for each in fields(self):
            value = getattr(self, each.name)
            if value == each.default:
                continue
            on, _, off = flag_of(each.name).partition("/")
            words.append(off if value is False else on)
            if each.name == "retrieval_heads" and not isinstance(value, int):
                value = [f"{layer}.{head}" for layer, head in value]
            if not isinstance(value, bool):
                words.append((",".join(map(str, value)) or "none") if isinstance(value, list | tuple) else str(value))
        return words


#: Least values of numbers.
MINIMUM = dict.fromkeys(("num_features", "num_cross_features", "num_encoder_features", "max_positions"), 1)
MINIMUM["retrieval_window"] = 1
MINIMUM["memory"] = 8
MINIMUM |= dict.fromkeys(("redraw_pool", "seed", "keep_softmax", "window_size", "num_sinks", "num_slots"), 0)
MINIMUM["retrieval_heads"] = 0
#: Flags that are not named as their fields, and switches that can be turned off.
FLAGS = {"orthogonal": "--orthogonal/--iid", "gate": "--gate/--no-gate"}
FLAGS |= {"calibrate_on": "--calibrate", "num_sinks": "--sinks", "num_slots": "--slots"}
#: Groups of the command line's help, each from its first option on.
PANELS = {
    "feature_map": "Feature map",
    "layers": "Which layers",
    "window_size": "Window and gate",
    "calibrate_on": "Calibration",
    "max_positions": "Output",
    "device": "Computation",
    "revision": "Checkpoint",
}


def flag_of(name: str) -> str:
    """Return the flag of an option, and of some switches the one that turns it off: ``--on/--off``."""
    return FLAGS.get(name, "--" + name.replace("_", "-"))


def help_texts() -> dict[str, str]:
    """Return the descriptions of the options from the docstring of `ConversionOptions`, by name."""
    section = inspect.cleandoc(ConversionOptions.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    return {name: " ".join(text.split()) for name, text in re.findall(r"(?m)^ {4}(\w+): (.*(?:\n {6,}.*)*)", section)}
