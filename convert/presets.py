"""What causal attention keeps: the sizes of a preset, or those by which it spends a memory. Nothing is tried or measured.

- exact: the first tokens (sinks), the last ones (window) and the most important of the others (slots);
- mixed: the same, and features: random ones in half of the bytes, or in most decoders a summary that is fitted to a text;
- rfa: random features alone, as in Peng et al. 2021.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError

from hf_rfa.errors import InputError
from hf_rfa.families import position_count
from hf_rfa.io.text_io import BLOCK_LENGTH
from hf_rfa.models.feature_maps import FEATURE_MAPS
from hf_rfa.models.memory import MemoryLayout
from hf_rfa.models.no_features import NoFeatures, feature_map_class

from .checkpoint.source import Checkpoint
from .options import ConversionOptions, Preset

#: What is trained after a conversion: features by attention transfer, or the whole model end to end.
Trained = Literal["features", "model"]
#: First tokens that causal attention keeps exactly.
SINKS = 4
#: By what the number of features beside exact tokens is divisible.
FEATURES_STEP = 8
#: Last tokens that retrieval heads see where no memory is given: as many as the texts have that they are chosen on.
RETRIEVAL_WINDOW = BLOCK_LENGTH
#: Least memory, in tokens, that a summary takes its part of by default.
SUMMARY_FROM = 32
#: What retrieval heads take of a memory's bytes by rule, and their share of all key-value heads that are converted: the first
#: where each keeps as many tokens as follow, else the second. With SmolLM2, 12 heads are better than 8 with a memory of 64
#: tokens, and worse with 128 and 256.
RETRIEVAL_BYTES, RETRIEVAL_HEADS, RETRIEVAL_TOKENS = 1 / 3, (8 / 90, 12 / 90), 384
#: Share of retrieval heads with fewer tokens that are chosen by their recall; of those with as many all are. Any text chooses
#: the others (`hf_rfa.convert.calibrate.retrieval_heads`).
RECALL_SHARE = 1 / 2
#: Of P exact tokens c P^(2/3) are the last ones where a text says which others are important: c, as measured on SmolLM2.
LAST_TOKENS = 1.3


class Sizes(NamedTuple):
    """What causal attention keeps; None features are as many as the map has by itself."""

    window_size: int
    num_sinks: int
    num_slots: int
    num_features: int | None = None


#: The sizes of a preset where no memory is given: with heads of 64 in float32 about 64 tokens' worth.
SIZES: dict[Preset, Sizes] = {
    "exact": Sizes(31, SINKS, 28),
    "mixed": Sizes(14, SINKS, 14, 64),
    "rfa": Sizes(0, 0, 0),
}
#: The same of the preset mixed with a summary, whose state is small.
SMALL_STATE = Sizes(31, SINKS, 24, 8)


@dataclass(frozen=True)
class Budget:
    """A memory of a layer, in bytes."""

    total: int  # the memory
    layout: MemoryLayout  # that of a layer which keeps nothing yet
    layers: int  # the number of layers that are converted

    def places(self, state_rows: int) -> int:
        """Return how many tokens every head can keep beside a state of some rows."""
        left = self.total - replace(self.layout, state_rows=state_rows).num_bytes()
        return left // self.layout.bytes_per_place()

    def state_rows(self, feature_map: str, num_features: int | None) -> int:
        """Return the rows of a map's state; 0 for the map without features."""
        if feature_map == NoFeatures.name:
            return 0
        with torch.device("meta"):
            width = self.layout.head_dim
            features = FEATURE_MAPS[feature_map](num_heads=1, head_dim=width, num_features=num_features)
        return features.state_rows

    def beside(self, heads: int, places: int) -> Budget:
        """Return the budget of the other heads where some of all layers keep so many tokens each, in tokens of a layer."""
        of_one = self.layout.bytes_per_place() // self.layout.heads
        left = self.layers * self.total - heads * places * of_one
        return replace(self, total=max(0, left) * self.layout.heads // (self.layers * self.layout.heads - heads))

    def retrieval_places(self, heads: int) -> int:
        """Return how many tokens some heads of all layers can keep that share `RETRIEVAL_BYTES`."""
        of_one = self.layout.bytes_per_place() // self.layout.heads
        return int(RETRIEVAL_BYTES * self.layers * self.total / (heads * of_one))

    def features(self, feature_map: str, num_bytes: int, step: int) -> int:
        """Return the largest number of features, a multiple of ``step``, whose state takes at most some bytes."""
        least, next_one = (self.state_rows(feature_map, number * step) for number in (1, 2))
        rows = num_bytes // replace(self.layout, state_rows=1).num_bytes()
        return max(0, (rows - least) // (next_one - least) + 1) * step


def budget_of(checkpoint: Checkpoint, options: ConversionOptions, memory: int) -> Budget:
    """Return the budget of ``memory`` tokens of a checkpoint's cache.

    Raises:
        InputError: if the model has fewer positions, or cannot be converted.
    """
    if memory > position_count(checkpoint.config):
        raise InputError(f"memory={memory} is more than the positions of {checkpoint.name}: its own cache takes less.")
    stored = str(checkpoint.config.dtype or "float32").removeprefix("torch.")
    dtype = getattr(torch, stored if options.dtype == "auto" else options.dtype)
    is_none = options.feature_map in (None, NoFeatures.name) or needs_text(options.feature_map)  # which need sizes
    chosen = {} if is_none else {"feature_map": options.feature_map}
    try:
        config = checkpoint.family.rfa_config.from_base(checkpoint.config, **chosen)
    except (ValueError, StrictDataclassError) as error:
        raise InputError(str(error.__cause__ or error)) from error
    heads, width = config.num_heads_for("causal"), config.head_dim_for("causal")
    layout = MemoryLayout(heads=heads, head_dim=width, dtype=dtype)
    layers = {index for index in range(config.num_layers_for("causal")) if config.is_rfa("causal", index)}
    converted = layers if options.layers == "all" else layers & set(options.layers)
    return Budget(memory * heads * 2 * width * dtype.itemsize, layout, len(converted))


def with_preset(
    checkpoint: Checkpoint, options: ConversionOptions, trained: Trained | None = None
) -> ConversionOptions:
    """Return options with a value for each that was left to the preset, and without a memory.

    The preset itself is the family's by default, rfa where features are trained, and mixed for decoders that else keep tokens
    alone, where there is a text to fit a summary to. Cross attention is converted by default where training follows and there
    are features: untrained they blur what it looks up, and its softmax cache does not grow with the output.

    Raises:
        InputError: for options that exclude each other or have no effect, and for a memory that is too little or too much.
    """
    preset = options.preset or _preset(checkpoint, options, trained)
    cross_layers = options.cross_layers
    if cross_layers is None and "cross" in checkpoint.family.rfa_config.SOFTMAX_LAYERS.values():
        converts_cross = trained and preset != "exact" and options.merged_source_length is None
        cross_layers = "all" if converts_cross else []
    _check_preset(checkpoint, replace(options, cross_layers=cross_layers), preset, trained)
    feature_map = options.feature_map or _feature_map(checkpoint, preset, trained)
    named = replace(options, preset=preset, feature_map=feature_map, cross_layers=cross_layers)
    if fits_features(named, trained) and named.calibrate_on is None:
        raise InputError(
            f"feature_map={feature_map} is fitted to a text, and there is none. Pass one (--calibrate), or another map, such "
            "as positive."
        )
    sized = _with_sizes(checkpoint, named)
    gated = preset == "rfa" and trained is not None and not sized.window_size and sized.layers != []
    return replace(sized, gate=gated if options.gate is None else options.gate)


def _preset(checkpoint: Checkpoint, options: ConversionOptions, trained: Trained | None) -> Preset:
    """Return the preset where none is named."""
    if trained == "features":
        return "rfa"
    tokens = min(options.calibration_tokens or BLOCK_LENGTH, BLOCK_LENGTH, position_count(checkpoint.config))
    kept = sum(SMALL_STATE[:3]) if options.memory is None else options.memory
    has_text = options.calibrate_on is not None and options.layers != [] and options.window_size != 0
    fits = has_text and SUMMARY_FROM <= kept <= tokens // 2
    names_none = options.feature_map == NoFeatures.name
    if checkpoint.family.preset == "exact" and not checkpoint.config.is_encoder_decoder and fits and not names_none:
        return "mixed"
    return checkpoint.family.preset


def _feature_map(checkpoint: Checkpoint, preset: Preset, trained: Trained | None) -> str:
    """Return the feature map of a preset.

    Beside exact tokens a decoder for which random features do not pay has a summary.
    """
    if preset == "exact":
        return "none"
    if preset == "mixed" and trained != "features" and checkpoint.family.preset == "exact":
        return "summary" if not checkpoint.config.is_encoder_decoder else "positive"
    return "exponential" if trained else "positive"


def fits_features(options: ConversionOptions, trained: Trained | None) -> bool:
    """Return whether a conversion fits its features to a text, without which they stand for nothing."""
    return needs_text(options.feature_map) and options.layers != [] and trained != "features"


def needs_text(feature_map: str | None) -> bool:
    """Return whether a map is fitted to a text at conversion; False for a map that is unknown."""
    known = feature_map_class(str(feature_map))
    return known is not None and known.needs_text


def _with_sizes(checkpoint: Checkpoint, options: ConversionOptions) -> ConversionOptions:
    """Return options with the sizes of a preset, for what is not named, and without a memory."""
    memory, family, positions = options.memory, checkpoint.family, position_count(checkpoint.config)
    named = (options.window_size, options.num_sinks, options.num_slots)
    if memory is None and options.preset == family.preset and named == (None, None, None) and options.layers != []:
        memory = None if family.memory is None else min(family.memory, positions)
    if memory is None:
        sizes, far = _sizes(checkpoint, options), (min(RETRIEVAL_WINDOW, positions), 0)
    else:
        budget = budget_of(checkpoint, options, memory)
        if options.retrieval_heads is None:
            options = replace(options, retrieval_heads=_retrieval_heads(checkpoint, options, budget))
        sizes, far = _by_rule(memory, budget, options, positions)
    left_open = {name: size for name, size in sizes._asdict().items() if getattr(options, name) is None}
    if options.retrieval_heads:
        of_them = zip(("retrieval_window", "retrieval_slots"), far, strict=True)
        left_open |= {name: size for name, size in of_them if getattr(options, name) is None}
    return replace(options, memory=None, **left_open)


def _retrieval_heads(checkpoint: Checkpoint, options: ConversionOptions, budget: Budget) -> int:
    """Return the number of retrieval heads beside heads that keep a memory's rest.

    They are chosen on a text, and no layer consists of them alone.
    """
    heads, layers = budget.layout.heads, budget.layers
    beside = options.preset == "exact" or (options.preset == "mixed" and needs_text(options.feature_map))
    chooses = options.memory is not None and beside and options.window_size != 0
    if not chooses or options.calibrate_on is None or not checkpoint.predicts_tokens:
        return 0
    few, many = (min(layers * (heads - 1), max(1, round(share * layers * heads))) for share in RETRIEVAL_HEADS)
    return few if not few or budget.retrieval_places(few) >= RETRIEVAL_TOKENS else many


def _sizes(checkpoint: Checkpoint, options: ConversionOptions) -> Sizes:
    """Return the sizes of a preset where no memory is given."""
    if options.layers == []:
        return Sizes(0, 0, 0)
    small = options.preset == "mixed" and needs_text(options.feature_map)
    *tokens, features = SMALL_STATE if small else SIZES[options.preset or "exact"]
    most = 0 if options.window_size == 0 else position_count(checkpoint.config)
    sizes = [min(int(size or 0), most) for size in tokens]
    return Sizes._make([*sizes, None if _has_fixed_size(str(options.feature_map)) else features])


def _has_fixed_size(feature_map: str) -> bool:
    """Return whether a map's number of features follows from the head's width; False for a map that is unknown."""
    known = feature_map_class(feature_map)
    return known is not None and known.default_num_features is None


def _check_preset(checkpoint: Checkpoint, options: ConversionOptions, preset: Preset, trained: Trained | None) -> None:
    """Raise an `InputError` for options that a preset excludes, or that have no effect."""
    of_features = {name: getattr(options, name) for name in ("num_features", "gate")}
    of_features |= {name: (options.config or {}).get(name) for name in ("unit_norm", "trainable_projection")}
    unused = [f"{name}={value!r}" for name, value in of_features.items() if value]
    unused += [f"feature_map={options.feature_map!r}"] if options.feature_map not in (None, "none") else []
    kinds = checkpoint.family.rfa_config.SOFTMAX_LAYERS.values()
    causal = [name for name in ("preset", "memory") if getattr(options, name) is not None]
    if options.layers == [] and causal:
        problem = (
            f"{causal[0]}={getattr(options, causal[0])} applies to causal attention, and none is converted. Leave it out, or "
            "name layers."
        )
    elif preset == "exact" and unused:
        problem = (
            f"{unused[0]} has no effect with preset=exact, which keeps no features. Pass preset mixed, with features in half "
            "of the memory, or rfa, of features alone."
        )
    elif preset == "exact" and trained == "features":
        problem = (
            "preset=exact has no features, which attention transfer trains. Pass preset mixed or rfa, or train the whole "
            "model (--end-to-end-steps)."
        )
    elif preset == "exact" and "cross" in kinds and options.cross_layers != []:
        problem = (
            "preset=exact keeps no features, and cross attention needs them. Leave it softmax (--config "
            "cross_layers=none), or pass another preset."
        )
    elif preset != "exact" and options.feature_map == "none":
        problem = f"feature_map='none' leaves preset={preset} no features. Pass preset exact instead."
    else:
        return
    raise InputError(problem)


def _by_rule(memory: int, budget: Budget, options: ConversionOptions, positions: int) -> tuple[Sizes, tuple[int, int]]:
    """Return sizes by which a preset spends a memory, beside those that are named, and (window, slots) of retrieval heads.

    Retrieval heads take `RETRIEVAL_BYTES`, and have the window of the others where a text says what else is important. Of
    the exact tokens of the others half are the last ones, or fewer where a text says which others are important
    (`LAST_TOKENS`). Beside random features the last and the most important ones are as many. Random features take half of
    the memory, a summary as much as it has by itself.
    """
    feature_map, features = str(options.feature_map), options.num_features
    window, sinks, slots = options.window_size, options.num_sinks, options.num_slots
    if options.preset == "rfa":
        window, sinks, slots = window or 0, sinks or 0, slots or 0
    if window == 0:
        sinks, slots = sinks or 0, slots or 0
    fits_features = options.preset != "exact" and features is None and not _has_fixed_size(feature_map)
    fits_tokens = window is None or slots is None
    if not fits_features and not fits_tokens:
        raise InputError(
            f"memory={memory} has no effect, since all that it would decide on is given already. Leave it out, or one of "
            "window_size, num_slots and num_features."
        )
    sinks = min(SINKS, memory // 4) if sinks is None else sinks
    far, number = 0, options.retrieval_heads or 0
    count = len(number) if isinstance(number, list) else number
    if count and budget.layout.heads > 1:
        count = min(count, budget.layers * (budget.layout.heads - 1))  # more are refused with what they are of
        least = (options.retrieval_window or 1) + (options.retrieval_slots or 0)
        by_share = min(positions, budget.retrieval_places(count) - sinks)
        far = least if options.retrieval_window else max(least, by_share)
        budget = budget.beside(count, far + sinks)
    small = needs_text(feature_map)
    if fits_features and fits_tokens and small:
        features = SMALL_STATE.num_features
    elif fits_features and fits_tokens:
        features = budget.features(feature_map, budget.total // 2, FEATURES_STEP)
    elif fits_features:
        layout = replace(budget.layout, window=window or 0, sinks=sinks, slots=slots or 0)
        features = budget.features(feature_map, budget.total - layout.num_bytes(), 1)
    rows = budget.state_rows(feature_map, features) if features != 0 else 0
    places = budget.places(rows)
    if window is None:
        half = places // 2 if options.preset == "exact" or small else -(-(places - sinks) // 2)
        if (options.preset == "exact" or small) and options.calibrate_on is not None:
            half = min(half, round(LAST_TOKENS * places ** (2 / 3)))
        window = half if slots is None else places - sinks - slots
    slots = places - sinks - window if slots is None else slots
    if min(window - fits_tokens, slots) < 0 or (fits_features and not features):
        raise InputError(
            f"memory={memory} has no room for what preset={options.preset} keeps, beside the sizes that are given. Ask for "
            "more, or for another preset."
        )
    last = far - (options.retrieval_slots or 0)
    if (options.retrieval_window, options.retrieval_slots) == (None, None) and options.calibrate_on is not None:
        last = min(far, window) or far
    return Sizes(window, sinks, slots, features), (last, far - last)
