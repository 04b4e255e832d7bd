"""The search for what to keep in a cache of given size, by how well it predicts text.

The ways to spend the memory are a window with sinks, the same with slots in place of a half or three quarters of it, and both
with features in place of half of the memory. With slots there may be a few retrieval heads, whose windows take up to a third
of the memory, or twice as many that take up to two thirds. Each way is converted, calibrated on three fifths of the text,
and scored on the rest: as it is, and made to repeat itself in its last quarter
(`hf_rfa.convert.retrieval_heads.repeated_passages`). The second perplexity decides, for it is of both: of text, and of
remembering it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from hf_rfa.errors import InputError
from hf_rfa.evaluation.perplexity import score_labels
from hf_rfa.families import position_count

from .calibration import calibrate
from .calibration_data import Inputs, batches
from .checkpoint import Checkpoint, load_models
from .configuration import converted_layers, predicts_tokens, rfa_config
from .options import ConversionOptions
from .presets import FEATURES_STEP, RETRIEVAL_WINDOW, SINKS, Budget, Trained, budget_of
from .retrieval_heads import RetrievalHead, find_retrieval_heads, repeated_passages

#: Tokens of the base model's cache that are spent by default: about what the presets take.
DEFAULT_MEMORY = 64
#: The feature map of the ways that have one.
FEATURE_MAP = "positive"
#: Options that a search decides on.
DECIDED = [
    *("preset", "window_size", "num_sinks", "num_slots", "retrieval_heads", "retrieval_window"),
    *("feature_map", "num_features", "gate", "config"),
]
#: Retrieval heads that are tried, as shares of all heads, with the most of the memory that they take.
RETRIEVAL_SHARES = {0.045: 1 / 3, 0.09: 1 / 3, 0.18: 2 / 3}


@dataclass(frozen=True)
class Trial:
    """One way to spend a memory.

    Attributes:
        name: what is kept.
        tokens: its bytes per layer, in tokens of the softmax model's cache.
        perplexity: on text that it was not calibrated on.
        softmax: that of the softmax model.
        repeating: perplexity on the same text, which repeats itself in the end.
        softmax_repeating: that of the softmax model.
    """

    name: str
    tokens: float
    perplexity: float
    softmax: float
    repeating: float
    softmax_repeating: float


def check_search(checkpoint: Checkpoint, options: ConversionOptions, trained: Trained | None) -> None:
    """Raise an `InputError` where the use of a memory cannot be searched for."""
    defaults = {option.name: option.default for option in fields(ConversionOptions)}
    named = [name for name in DECIDED if getattr(options, name) != defaults[name]]
    if named:
        raise InputError(f"search decides on {', '.join(named)}: leave them out, or leave the search out.")
    if options.calibrate_on is None:
        raise InputError("search needs a text to measure on: pass one with --calibrate.")
    if trained == "features":
        raise InputError(
            "attention transfer trains features, and search may find that there should be none. Train the whole model: "
            "--end-to-end-steps."
        )
    if checkpoint.config.is_encoder_decoder:
        raise InputError(f"search is for decoders alone, and {checkpoint.config.model_type} has an encoder.")
    if not predicts_tokens(checkpoint):
        raise InputError(f"search needs a model that predicts tokens, and {checkpoint.architecture} does not.")


class Way(NamedTuple):
    """A way to spend a memory.

    Attributes:
        name: what is kept.
        tokens: its bytes per layer, in tokens of the base model's cache.
        options: those that convert to it.
    """

    name: str
    tokens: float
    options: ConversionOptions


def ways_to_spend(
    checkpoint: Checkpoint, options: ConversionOptions, heads: list[list[int]] | None = None
) -> list[Way]:
    """Return every way to spend ``options.memory``.

    ``heads`` are [layer, head] of the retrieval heads of those ways that have some; None leaves these ways out.
    """
    memory, heads = options.memory or DEFAULT_MEMORY, heads or []
    budget, sinks = budget_of(checkpoint, options, memory), min(SINKS, memory // 4)
    exact = replace(options, search=False, memory=None, gate=False, num_sinks=sinks, num_slots=0, preset="exact")
    exact = replace(exact, feature_map="none", window_size=budget.places() - sinks)
    all_heads = number_of_heads(checkpoint, exact)
    with_retrieval = []
    shares: dict[int, float] = {}
    for number, share in retrieval_counts(all_heads).items():
        shares.setdefault(min(len(heads), number), share)
    place = replace(budget.layout, heads=1).bytes_per_place()
    for number, share in shares.items() if heads else ():
        total = budget.total * all_heads // budget.layout.heads
        far = min(RETRIEVAL_WINDOW, position_count(checkpoint.config), int(total * share) // (number * place))
        near = (total - number * far * place) // ((all_heads - number) * place)
        if far > sinks and near >= 2 * sinks:
            chosen = replace(exact, retrieval_heads=heads[:number], retrieval_window=far - sinks)
            with_retrieval += [way for way in _with_slots(chosen, near) if way.num_slots]
    mixed = []
    features = budget.features(FEATURE_MAP, budget.total // 2, FEATURES_STEP)
    places = budget.places(budget.state_rows(FEATURE_MAP, features)) - sinks if features else 0
    for parts in (1, 2):
        if places >= parts:
            window = -(-places // parts)
            chosen = replace(exact, preset="mixed", feature_map=FEATURE_MAP, num_features=features)
            mixed.append(replace(chosen, window_size=window, num_slots=places - window))
    ways = [exact, *_with_slots(exact, budget.places()), *with_retrieval, *mixed]
    return [_named(way, budget, all_heads) for way in ways]


def _with_slots(options: ConversionOptions, places: int) -> list[ConversionOptions]:
    """Return the options with slots in place of a half and of three quarters of the places of a head."""
    windows = [max(1, places // parts) for parts in (2, 4)]
    sinks = int(options.num_sinks or 0)
    return [replace(options, window_size=window, num_slots=places - sinks - window) for window in windows]


def _named(options: ConversionOptions, budget: Budget, all_heads: int) -> Way:
    """Return a way with its name and its bytes; ``all_heads`` is the number of heads of all layers that are converted."""
    window, sinks, slots = (int(size or 0) for size in (options.window_size, options.num_sinks, options.num_slots))
    features, number, num_bytes = options.num_features, 0, 0
    name = f"window {window}, sinks {sinks}"
    name += f", slots {slots}" if slots else ""
    name += f", {features} features" if features else ""
    head = replace(budget.layout, heads=1)
    if isinstance(options.retrieval_heads, list):
        number, far = len(options.retrieval_heads), int(options.retrieval_window or 0)
        name += f", {number} retrieval head{'s' * (number > 1)} of {far}"
        num_bytes = number * replace(head, window=far, sinks=sinks).num_bytes()
    rows = budget.state_rows(FEATURE_MAP, features) if features else 0
    others = replace(head, window=window, sinks=sinks, slots=slots, state_rows=rows)
    num_bytes += (all_heads - number) * others.num_bytes()
    return Way(name, num_bytes / (all_heads // budget.layout.heads) / budget.token, options)


def retrieval_counts(all_heads: int) -> dict[int, float]:
    """Return the numbers of retrieval heads that are tried where a model has so many key-value heads, and their memory.

    That is the most that they take, as a share of all. Of the same numbers the first counts.
    """
    counts: dict[int, float] = {}
    for share, memory in RETRIEVAL_SHARES.items():
        counts.setdefault(max(1, round(share * all_heads)), memory)
    return counts


def number_of_heads(checkpoint: Checkpoint, options: ConversionOptions) -> int:
    """Return the number of key-value heads of all layers that are converted."""
    config = rfa_config(checkpoint, options)
    return config.num_heads_for("causal") * converted_layers(config)


def search_memory(
    checkpoint: Checkpoint,
    options: ConversionOptions,
    inputs: Inputs,
    report_progress: Callable[[str | None, int], None],
) -> tuple[ConversionOptions, list[Trial], list[RetrievalHead]]:
    """Return the options that spend ``options.memory`` best, every trial in order, and the retrieval heads of the best.

    Args:
        checkpoint: the softmax checkpoint.
        options: those asked for (`check_search`).
        inputs: blocks of the text.
        report_progress: called as the work goes on.
    """
    rows = inputs["input_ids"].shape[0]
    fitted = max(1, rows - max(1, rows * 2 // 5))
    fit = {name: tensor[:fitted] for name, tensor in inputs.items()}
    held_out = {name: tensor[fitted:] if rows > 1 else tensor for name, tensor in inputs.items()}
    texts = [held_out, held_out | {"input_ids": repeated_passages(held_out["input_ids"], seed=options.seed)[0]}]
    batched = [batches(text | {"labels": text["input_ids"]}) for text in texts]
    plain = ways_to_spend(checkpoint, options)[0].options
    count = max(retrieval_counts(number_of_heads(checkpoint, plain)))
    heads = find_retrieval_heads(checkpoint, rfa_config(checkpoint, plain), plain, fit, count, report_progress)
    ways = ways_to_spend(checkpoint, options, [[head.layer, head.head] for head in heads])
    report_progress("trying ways to spend the memory", len(ways))
    softmax: list[float] = []
    trials: list[Trial] = []
    for name, tokens, chosen in ways:
        model, base_model = load_models(checkpoint, rfa_config(checkpoint, chosen), chosen)
        softmax = softmax or [score_labels(base_model, text).perplexity for text in batched]
        calibrate(model, base_model, fit, on_layer=lambda: None)
        perplexity, repeating = (score_labels(model, text).perplexity for text in batched)
        trials.append(Trial(name, tokens, perplexity, softmax[0], repeating, softmax[1]))
        del model, base_model
        report_progress(None, 1)
    finite = [math.inf if math.isnan(trial.repeating) else trial.repeating for trial in trials]
    best = ways[finite.index(min(finite))].options
    return best, trials, heads if best.retrieval_heads else []
