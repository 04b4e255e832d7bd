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

from transformers import PreTrainedModel

from hf_rfa.errors import InputError
from hf_rfa.evaluation.perplexity import score_labels
from hf_rfa.families import position_count
from hf_rfa.inference.devices import find_device

from .base_model import softmax_base_model
from .calibration import calibrate
from .calibration_data import Inputs, batches
from .checkpoint import Checkpoint, load_rfa_model
from .configuration import converted_layers, predicts_tokens, rfa_config
from .options import ConversionOptions
from .presets import FEATURES_STEP, RETRIEVAL_WINDOW, SINKS, Budget, Trained, budget_of
from .retrieval_heads import RetrievalHead, choose_retrieval_heads, repeated_passages

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
    memory = options.memory or DEFAULT_MEMORY
    budget = budget_of(checkpoint, options, memory)
    options = replace(options, search=False, memory=None, gate=False, num_sinks=min(SINKS, memory // 4))
    options = replace(options, preset="exact", feature_map="none")

    def plain_way(window: int, slots: int, features: int = 0) -> Way:
        """Return the way without retrieval heads."""
        sinks = int(options.num_sinks or 0)
        name = f"window {window}, sinks {sinks}"
        name += f", slots {slots}" if slots else ""
        name += f", {features} features" if features else ""
        rows = budget.state_rows(FEATURE_MAP, features) if features else 0
        layout = replace(budget.layout, window=window, sinks=sinks, slots=slots, state_rows=rows)
        chosen = replace(options, window_size=window, num_slots=slots)
        if features:
            chosen = replace(chosen, preset="mixed", feature_map=FEATURE_MAP, num_features=features)
        return Way(name, layout.num_bytes() / budget.token, chosen)

    sinks = int(options.num_sinks or 0)
    places = budget.places()
    ways = [plain_way(places - sinks, 0)]
    for parts in (2, 4):
        window = max(1, places // parts)
        ways.append(plain_way(window, places - sinks - window))
    if heads:
        all_heads = number_of_heads(checkpoint, ways[0].options)
        shares: dict[int, float] = {}
        for number, share in retrieval_counts(all_heads).items():
            shares.setdefault(min(len(heads), number), share)
        longest = min(RETRIEVAL_WINDOW, position_count(checkpoint.config))
        for number, share in shares.items():
            ways += _ways_with_retrieval(budget, options, heads[:number], share, all_heads, longest)
    features = budget.features(FEATURE_MAP, budget.total // 2, FEATURES_STEP)
    places = budget.places(budget.state_rows(FEATURE_MAP, features)) - sinks if features else 0
    for parts in (1, 2):
        if places >= parts:
            window = -(-places // parts)
            ways.append(plain_way(window, places - window, features))
    return ways


def _ways_with_retrieval(
    budget: Budget, options: ConversionOptions, heads: list[list[int]], share: float, all_heads: int, longest: int
) -> list[Way]:
    """Return the ways with slots and retrieval heads.

    Args:
        budget: the memory of a layer.
        options: those that all ways have in common.
        heads: the retrieval heads.
        share: the most of the memory of all layers that these take.
        all_heads: number of heads in all layers that are converted.
        longest: most tokens that a retrieval head keeps.
    """
    number, layers, sinks = len(heads), all_heads // budget.layout.heads, int(options.num_sinks or 0)
    others, place = all_heads - number, replace(budget.layout, heads=1).bytes_per_place()
    total = budget.total * layers
    far = min(longest, int(total * share) // (number * place))
    near = (total - number * far * place) // (others * place)
    if far <= sinks or near < 2 * sinks:
        return []
    tokens = (number * far + others * near) * place / layers / budget.token
    options = replace(options, retrieval_heads=heads, retrieval_window=far - sinks)
    ways = []
    for parts in (2, 4):
        window = max(1, near // parts)
        slots = near - sinks - window
        if slots > 0:
            of_them = f"{number} retrieval head{'s' * (number > 1)} of {far - sinks}"
            name = f"window {window}, sinks {sinks}, slots {slots}, {of_them}"
            ways.append(Way(name, tokens, replace(options, window_size=window, num_slots=slots)))
    return ways


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
    report_progress("loading the weights", 1)
    model, base_model = _load(checkpoint, plain)
    report_progress("scoring the base model", 1)
    softmax = [score_labels(base_model, text).perplexity for text in batched]
    count = max(retrieval_counts(number_of_heads(checkpoint, plain)))
    heads: list[RetrievalHead] = []
    if model.config.num_heads_for("causal") > 1:
        report_progress("choosing retrieval heads", count)
        heads = choose_retrieval_heads(
            model,
            base_model,
            fit,
            count,
            seed=options.seed,
            on_head=lambda: report_progress(None, 1),
        )
    ways = ways_to_spend(checkpoint, options, [[head.layer, head.head] for head in heads])
    report_progress("trying ways to spend the memory", len(ways))
    trials: list[Trial] = []
    for name, tokens, chosen in ways:
        model, base_model = _load(checkpoint, chosen)
        calibrate(model, base_model, fit, on_layer=lambda: None)
        perplexity, repeating = (score_labels(model, text).perplexity for text in batched)
        trials.append(Trial(name, tokens, perplexity, softmax[0], repeating, softmax[1]))
        del model, base_model
        report_progress(None, 1)
    finite = [math.inf if math.isnan(trial.repeating) else trial.repeating for trial in trials]
    best = ways[finite.index(min(finite))].options
    return best, trials, heads if best.retrieval_heads else []


def _load(checkpoint: Checkpoint, options: ConversionOptions) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return the RFA model of some options, not yet calibrated, and the base model."""
    config, device = rfa_config(checkpoint, options), find_device(options.device)
    model = load_rfa_model(checkpoint, config, options.dtype, device)
    return model, softmax_base_model(model, checkpoint.architecture, checkpoint.config)
