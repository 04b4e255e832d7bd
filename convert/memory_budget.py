"""One knob, memory: find what to keep in a cache of given size, by how well it predicts text.

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
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_rfa.errors import InputError
from hf_rfa.evaluation.perplexity import score_labels
from hf_rfa.families import position_count
from hf_rfa.inference.devices import find_device
from hf_rfa.models.feature_maps import FEATURE_MAPS, compute_dtype
from hf_rfa.models.memory import MemoryLayout

from .base_model import softmax_base_model
from .calibration import calibrate
from .calibration_data import Inputs, batches
from .checkpoint import Checkpoint, load_rfa_model
from .configuration import RETRIEVAL_WINDOW, SINKS, converted_layers, predicts_tokens, rfa_config, with_defaults
from .options import ConversionOptions
from .retrieval_heads import RetrievalHead, choose_retrieval_heads, repeated_passages

#: The features of the way that has some, and by what their number is divisible.
FEATURE_MAP, FEATURES_STEP = "positive", 8
#: Options that a memory decides on.
DECIDED = ["feature_map", "num_features", "unit_norm", "trainable_projection", "redraw_pool"]
DECIDED += ["window_size", "num_sinks", "num_slots", "gate", "retrieval_heads", "retrieval_window"]
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


def check_memory(checkpoint: Checkpoint, options: ConversionOptions) -> None:
    """Raise an `InputError` where a memory cannot be asked for."""
    defaults = {each.name: each.default for each in fields(ConversionOptions)}
    given = [name for name in DECIDED if getattr(options, name) != defaults[name]]
    memory = f"memory={options.memory}"
    if given:
        raise InputError(f"{memory} decides on {', '.join(given)}: leave them out, or leave the memory out.")
    if options.calibrate_on is None:
        raise InputError(f"{memory} needs a text to measure on: pass one with --calibrate.")
    if checkpoint.config.is_encoder_decoder:
        raise InputError(f"{memory} is for decoders alone, and {checkpoint.config.model_type} has an encoder.")
    if not predicts_tokens(checkpoint):
        raise InputError(f"{memory} needs a model that predicts tokens, and {checkpoint.architecture} does not.")
    if int(options.memory or 0) > position_count(checkpoint.config):
        raise InputError(f"{memory} is more than the positions of {checkpoint.name}: its own cache takes less.")


@dataclass(frozen=True)
class _Budget:
    """A memory in bytes of a layer.

    Attributes:
        total: the memory.
        token: what a token takes in the softmax model's cache.
        layout: that of a layer which keeps nothing yet.
        sinks: what every way keeps of the first tokens.
        longest: most tokens that a retrieval head keeps.
    """

    total: int
    token: int
    layout: MemoryLayout
    sinks: int
    longest: int

    @property
    def unshared(self) -> int:
        """Bytes that a memory takes beside what each of its tokens does."""
        return replace(self.layout, window=1).num_bytes() - self.layout.bytes_per_place()

    def places(self, state_rows: int = 0) -> int:
        """Return how many tokens every head can keep beside a state of some rows."""
        left = self.total - replace(self.layout, state_rows=state_rows).num_bytes() - self.unshared
        return left // self.layout.bytes_per_place()


def _budget_of(checkpoint: Checkpoint, options: ConversionOptions) -> _Budget:
    """Return the memory that options ask for."""
    own = str(checkpoint.config.dtype or "float32").removeprefix("torch.")
    dtype = getattr(torch, own if options.dtype == "auto" else options.dtype)
    config = checkpoint.family.rfa_config.from_base(checkpoint.config)
    heads, width, memory = config.num_heads_for("causal"), config.head_dim_for("causal"), int(options.memory or 0)
    layout = MemoryLayout(heads=heads, head_dim=width, dtype=dtype, state_dtype=compute_dtype(dtype))
    token, longest = heads * 2 * width * dtype.itemsize, min(RETRIEVAL_WINDOW, position_count(checkpoint.config))
    return _Budget(memory * token, token, layout, min(SINKS, memory // 4), longest)


#: What is kept, its worth in tokens, and the options.
Way = tuple[str, float, ConversionOptions]


def ways_to_spend(
    checkpoint: Checkpoint, options: ConversionOptions, heads: list[list[int]] | None = None
) -> list[Way]:
    """Return every way to spend ``options.memory``.

    ``heads`` are [layer, head] of the retrieval heads of those ways that have some; None leaves these ways out.
    """
    budget = _budget_of(checkpoint, options)
    sinks, width = budget.sinks, budget.layout.head_dim

    def way(name: str, num_bytes: float, **chosen: Any) -> Way:
        spent = replace(options, memory=None, num_sinks=sinks, **chosen)
        return (
            name,
            num_bytes / budget.token,
            with_defaults(checkpoint.family, spent, positions=position_count(checkpoint.config)),
        )

    def plain_way(window: int, slots: int, rows: int = 0) -> Way:
        """Return the way without retrieval heads."""
        name = (
            f"window {window}, sinks {sinks}{f', slots {slots}' if slots else ''}{f', {rows} features' if rows else ''}"
        )
        layout = replace(budget.layout, window=window, sinks=sinks, slots=slots, state_rows=rows)
        features: dict[str, Any] = {"feature_map": "none"}
        if rows:
            features = {"feature_map": FEATURE_MAP, "num_features": rows // _features_per_row(width)}
        return way(name, layout.num_bytes(), window_size=window, num_slots=slots, **features)

    count = budget.places() - sinks
    found = [plain_way(count, 0)]
    for parts in (2, 4):
        window = max(1, (count + sinks) // parts)
        found.append(plain_way(window, count - window))
    if heads:
        all_heads = number_of_heads(checkpoint, found[0][2])
        shares: dict[int, float] = {}
        for number, share in retrieval_counts(all_heads).items():
            shares.setdefault(min(len(heads), number), share)
        layers = all_heads // budget.layout.heads
        for number, share in shares.items():
            found += _ways_with_retrieval(budget, heads[:number], share, layers, way)
    row = replace(budget.layout, state_rows=1).num_bytes()
    rows = budget.total // 2 // row // FEATURES_STEP * FEATURES_STEP
    count = budget.places(rows) - sinks
    for parts in (1, 2):
        if rows and count >= parts:
            window = -(-count // parts)
            found.append(plain_way(window, count - window, rows))
    return found


def _ways_with_retrieval(
    budget: _Budget, heads: list[list[int]], share: float, layers: int, way: Callable[..., Way]
) -> list[Way]:
    """Return the ways with slots and retrieval heads, which take at most ``share`` of the memory of all layers."""
    number, sinks, found = len(heads), budget.sinks, []
    rest, place = layers * budget.layout.heads - number, replace(budget.layout, heads=1).bytes_per_place()
    # Retrieval heads are a second memory of their layer.
    unshared = budget.unshared * (layers + len({layer for layer, _ in heads}))
    total = budget.total * layers - unshared
    kept = min(budget.longest, int(total * share) // (number * place))
    others = (total - number * kept * place) // (rest * place)
    if kept <= sinks or others < 2 * sinks:
        return []
    num_bytes = (unshared + (number * kept + rest * others) * place) / layers
    for parts in (2, 4):
        window = max(1, others // parts)
        slots = others - sinks - window
        if slots > 0:
            of_them = f"{number} retrieval head{'s' * (number > 1)} of {kept - sinks}"
            name = f"window {window}, sinks {sinks}, slots {slots}, {of_them}"
            retrieval = {"retrieval_heads": heads, "retrieval_window": kept - sinks}
            found.append(way(name, num_bytes, window_size=window, num_slots=slots, feature_map="none", **retrieval))
    return found


def retrieval_counts(all_heads: int) -> dict[int, float]:
    """Return the numbers of retrieval heads that are tried where a model has so many key-value heads, and their memory.

    That is the most that they take, as a share of all. Of the same numbers the first counts.
    """
    found: dict[int, float] = {}
    for share, memory in RETRIEVAL_SHARES.items():
        found.setdefault(max(1, round(share * all_heads)), memory)
    return found


def number_of_heads(checkpoint: Checkpoint, options: ConversionOptions) -> int:
    """Return the number of key-value heads of all layers that are converted."""
    config = rfa_config(checkpoint, options)
    return config.num_heads_for("causal") * converted_layers(config)


def _features_per_row(width: int) -> int:
    """Return F / D of the map with features."""
    feature_map = FEATURE_MAPS[FEATURE_MAP](num_heads=1, head_dim=width, num_features=FEATURES_STEP, scaling=1.0)
    return feature_map.feature_dim // FEATURES_STEP


def spend_memory(
    checkpoint: Checkpoint,
    options: ConversionOptions,
    inputs: Inputs,
    report_progress: Callable[[str | None, int], None],
) -> tuple[ConversionOptions, list[Trial], list[RetrievalHead]]:
    """Return the options that spend ``options.memory`` best, every trial in order, and the retrieval heads of the best.

    Args:
        checkpoint: the softmax checkpoint.
        options: those asked for (`check_memory`).
        inputs: blocks of the text.
        report_progress: called as the work goes on.
    """
    rows = inputs["input_ids"].shape[0]
    fitted = max(1, rows - max(1, rows * 2 // 5))
    fit = {name: tensor[:fitted] for name, tensor in inputs.items()}
    held_out = {name: tensor[fitted:] if rows > 1 else tensor for name, tensor in inputs.items()}
    texts = [held_out, held_out | {"input_ids": repeated_passages(held_out["input_ids"], seed=options.seed)[0]}]
    batched = [batches(text | {"labels": text["input_ids"]}) for text in texts]
    plain = ways_to_spend(checkpoint, options)[0][2]
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
    ways = ways_to_spend(checkpoint, options, [[each.layer, each.head] for each in heads])
    report_progress("trying ways to spend the memory", len(ways))
    trials: list[Trial] = []
    for name, tokens, chosen in ways:
        model, base_model = _load(checkpoint, chosen)
        calibrate(model, base_model, fit, on_layer=lambda: None)
        found = [score_labels(model, text).perplexity for text in batched]
        trials.append(Trial(name, tokens, found[0], softmax[0], found[1], softmax[1]))
        del model, base_model
        report_progress(None, 1)
    finite = [math.inf if math.isnan(trial.repeating) else trial.repeating for trial in trials]
    best = ways[finite.index(min(finite))][2]
    return best, trials, heads if best.retrieval_heads else []


def _load(checkpoint: Checkpoint, options: ConversionOptions) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return the RFA model of some options, not yet calibrated, and the base model."""
    config, device = rfa_config(checkpoint, options), find_device(options.device)
    model = load_rfa_model(checkpoint, config, options.dtype, device)
    return model, softmax_base_model(model, checkpoint.architecture, checkpoint.config)
