"""The report of a conversion: its figures, what it tells its user beside them, and when they are those of a ruined model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Any, get_args

from transformers import PreTrainedModel

from hf_rfa.errors import InputError
from hf_rfa.evaluation.memory import CacheMemory, cache_memory
from hf_rfa.evaluation.perplexity import shown
from hf_rfa.families import reads_audio
from hf_rfa.models.configuration_rfa import AttentionKind
from hf_rfa.models.importance import IMPORTANCES
from hf_rfa.models.no_features import feature_map_class
from hf_rfa.models.projected_feature_maps import RandomFeatureMap

from .calibrate.calibration import LayerGain
from .calibrate.retrieval_heads import RetrievalHeads
from .checkpoint.base_model import rfa_layers
from .checkpoint.loading import new_keys
from .configuration import converted_layers, outside_modules
from .plan import Plan

#: Lengths at which caches are compared with a softmax model's, with the model's own number of positions.
CACHE_LENGTHS = (1024, 2048, 8192)
#: A conversion whose perplexity is more than so many times the base model's has ruined the model.
MAX_PERPLEXITY_RATIO = 2.0


@dataclass(frozen=True)
class Perplexities:
    """Perplexity on the calibration text, of the base model and of the result.

    With ``own_outputs`` the labels are the base model's own outputs for the sources of the text.
    """

    softmax: float
    calibrated: float
    tokens: int
    own_outputs: bool = False

    def __str__(self) -> str:
        """Say them in words."""
        return f"softmax {shown(self.softmax)}, calibrated {shown(self.calibrated)}"

    @property
    def ratio(self) -> float:
        """The result's perplexity relative to the base model's."""
        return self.calibrated / self.softmax

    @property
    def ruined(self) -> bool:
        """Whether the conversion has ruined the model; so it has where a perplexity is not a number."""
        return not self.ratio <= MAX_PERPLEXITY_RATIO


@dataclass(frozen=True, kw_only=True)
class ConversionReport:
    """The figures of one conversion."""

    source: str  # the softmax checkpoint, as the user named it
    source_revision: str | None  # the commit of a checkpoint on the hub, None for a folder
    destination: str  # the folder written
    command: str  # the command line that repeats the conversion
    layers: dict[str, tuple[int, int]]  # number of RFA layers and of all layers, by kind of attention
    keeps: str  # what every converted layer keeps of a text
    feature_map: str  # name of the feature map
    feature_dims: dict[str, int]  # F, features per head, by kind of attention
    num_parameters: int  # parameters of the result
    added_parameters: int  # parameters that the base model does not have, extended positions included
    added_buffers: int  # numbers in buffers that the base model does not have: random matrices and calibrated constants
    # positions of the source at any length of output, for an encoder of audio; None for one of text
    audio_positions: int | None
    memory: CacheMemory  # the cache of the result, in bytes per sequence
    base_memory: CacheMemory  # the same of the base model
    # bytes of both caches, by length of output and source, none over the model's positions
    cache_bytes: dict[int, tuple[int, int]]
    gains: tuple[LayerGain, ...]  # divergence from softmax before and after calibration, by layer
    retrieval_heads: RetrievalHeads | None  # retrieval heads and what they change, if they were chosen
    perplexities: Perplexities | None  # on the calibration text, if there was one
    notes: tuple[str, ...]  # hints for the user
    # largest difference between the logits of the model in memory and of the reloaded one
    max_logit_difference: float = math.nan

    @property
    def state_tokens(self) -> float:
        """What converted layers keep, in tokens of the base model's cache that take as many bytes."""
        token = self.base_memory.per_token + self.base_memory.per_source_token - self.memory.per_source_token
        return self.memory.fixed / token

    @property
    def grows(self) -> bool:
        """Whether a softmax layer keeps the keys and values of all tokens of the sequence."""
        return self.memory.per_token > 0

    @property
    def source_bytes(self) -> int:
        """Bytes that softmax cross attention keeps of every token of a source, or of audio in all; 0 for none."""
        return self.memory.per_source_token + self.memory.audio

    @property
    def divergences(self) -> dict[str, tuple[float, float]]:
        """Means of the gains over heads and layers, before and after, by kind of attention."""
        by_kind = {kind: [gain for gain in self.gains if gain.kind == kind] for kind in self.layers}
        return {
            kind: (fmean(chain(*(gain.before for gain in gains))), fmean(chain(*(gain.after for gain in gains))))
            for kind, gains in by_kind.items()
            if gains
        }

    def rows(self) -> list[tuple[str, str]]:
        """Return the figures as (name, value) pairs, for the table and the model card."""
        memory, perplexities = self.memory, self.perplexities
        growth = "and the softmax layers' growing cache" if self.grows else "at any length"
        share = f"{self.added_parameters / self.num_parameters:.3%} of {self.num_parameters:,}"
        of = "a token of the source" if self.audio_positions is None else "for the audio"
        scored = ""
        if perplexities is not None:
            text = "the base model's own outputs" if perplexities.own_outputs else "the calibration text"
            scored = f"perplexity on {text} ({perplexities.tokens:,} tokens)"
        rows = [
            ("attention layers converted", ", ".join(f"{kind} {rfa} of {n}" for kind, (rfa, n) in self.layers.items())),
            ("every layer keeps, per head", self.keeps),
            ("parameters added", f"{self.added_parameters:,} ({share})"),
            ("numbers in buffers added", f"{self.added_buffers:,}"),
            ("state per sequence", f"{in_units(memory.fixed)} ({self.state_tokens:,.0f} tokens' worth), {growth}"),
            ("cache of the sliding layers", _constant(memory.sliding_after(max(self.cache_bytes)), "at any length")),
            ("cache of the recurrent layers", _constant(memory.recurrent, "at any length")),
            ("cache of softmax cross attention", _constant(self.source_bytes, "at any length of output", of)),
            *self._cache_rows(),
            *(
                (f"KL to the softmax weights, {kind}", f"{before:.3f} nats, {after:.3f} after calibration")
                for kind, (before, after) in self.divergences.items()
            ),
            ("retrieval heads (layer.head)", str(self.retrieval_heads or "")),
            (scored, str(perplexities or "")),
            ("largest logit difference after reloading", f"{self.max_logit_difference:.1e}"),
        ]
        return [(name, value) for name, value in rows if value]

    def _cache_rows(self) -> Iterator[tuple[str, str]]:
        """Yield the rows of both models' caches by length."""
        of = f" of output and {self.audio_positions:,} of audio" if self.audio_positions else " of source and output"
        for length, (size, whole) in self.cache_bytes.items():
            times = f"{max(whole / size, size / whole):.1f}"
            ratio = "as much" if times == "1.0" else f"{times} × {'less' if size < whole else 'more'}"
            name = f"cache at {length:,} tokens{of if 'cross' in self.layers else ''}"
            yield name, f"{in_units(size)}, all softmax {in_units(whole)} ({ratio})"


def _tokens(sinks: int, recent: int, important: int = 0) -> str:
    """Return tokens that are kept exactly in words: "4 sinks, 31 recent and 28 important tokens"."""
    counts = {"sinks": sinks, "recent": recent, "important": important}
    words = [f"{number:,} {what}" for what, number in counts.items() if number]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words) + " tokens"


def what_layers_keep(config: Any, feature_dims: dict[str, int]) -> str:
    """Return in one line what a head of a converted layer keeps, by kind of attention, of which each has F features."""
    random = "random " if issubclass(feature_map_class(config.feature_map), RandomFeatureMap) else ""
    lines = {kind: f"{count} {random}features ({config.feature_map})" for kind, count in feature_dims.items()}
    if "causal" in feature_dims:
        features = lines["causal"].replace(")", ", gated)") if config.gate else lines["causal"]
        line = f"{features}, no exact tokens"
        if config.window_size:
            exact = _tokens(config.num_sinks, config.window_size, config.num_slots)
            line = f"{exact}; {features if feature_dims['causal'] else 'no random features'}"
        if config.retrieval_heads:
            far = _tokens(config.num_sinks, config.retrieval_window, config.retrieval_slots)
            line += f"; in retrieval heads, {len(config.retrieval_heads)} in all, {far}"
        lines["causal"] = line
    return "; ".join(line if lines.keys() == {"causal"} else f"{kind}: {line}" for kind, line in lines.items())


def in_units(num_bytes: int) -> str:
    """Return a number of bytes with a binary unit."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _constant(num_bytes: int, when: str, of: str = "") -> str:
    """Return the size of a cache that does not grow, in words; nothing of no bytes."""
    return f"{in_units(num_bytes)}{of and f' {of}'}, {when}" if num_bytes else ""


def make_report(
    plan: Plan,
    model: PreTrainedModel,
    base_model: PreTrainedModel,
    gains: list[LayerGain],
    perplexities: Perplexities | None,
) -> ConversionReport:
    """Return the report of a calibrated model, which nothing has been compared with yet."""
    config, memory, base_memory = model.config, cache_memory(model), cache_memory(base_model)
    layers: dict[str, tuple[int, int]] = {}
    feature_dims: dict[str, int] = {}
    for kind in get_args(AttentionKind):
        converted = [layer for layer in rfa_layers(model).values() if layer.rfa_kind == kind]
        if converted or kind == "causal" or config.is_encoder_decoder:
            layers[kind] = (len(converted), config.num_layers_for(kind))
        if converted:
            feature_dims[kind] = converted[0].feature_map.feature_dim
    parameters, state, positions = dict(model.named_parameters()), model.state_dict(), config.max_position_embeddings
    lengths = [*(length for length in CACHE_LENGTHS if length < positions), positions]
    return ConversionReport(
        source=plan.source.name,
        source_revision=plan.source.revision,
        destination=str(plan.destination),
        command=plan.command,
        layers=layers,
        keeps=what_layers_keep(config, feature_dims),
        feature_map=config.feature_map,
        feature_dims=feature_dims,
        num_parameters=model.num_parameters(),
        added_parameters=model.num_parameters() - base_model.num_parameters(),
        added_buffers=sum(state[key].numel() for key in new_keys(model) if key not in parameters),
        audio_positions=config.max_source_positions if reads_audio(config) else None,
        memory=memory,
        base_memory=base_memory,
        cache_bytes={length: (memory.after(length), base_memory.after(length)) for length in lengths},
        gains=tuple(gains),
        retrieval_heads=plan.heads,
        perplexities=perplexities,
        notes=_notes(plan, config, perplexities),
    )


def _notes(plan: Plan, config: Any, perplexities: Perplexities | None) -> tuple[str, ...]:
    """Return hints: a ruined model, the code that a feature map needs, growing caches, what would be better."""
    hints = []
    if perplexities is not None and perplexities.ruined:
        hints.append(
            f"The conversion has ruined the model: on the text its perplexity is {perplexities.ratio:.1f} times the base "
            "model's. Train it before you use it."
        )
    for name, module in outside_modules(config).items():
        advice = f"Import its module {module} before the checkpoint is loaded, in Python or with --import."
        if module == "__main__":
            advice = "Put its class into a module, and import that before the checkpoint is loaded."
        hints.append(f"The {name} is not hf-rfa's own, and the checkpoint does not hold its code. {advice}")
    if plan.no_tokenizer is not None:
        hints.append(f"The result has no tokenizer (of the checkpoint: {plan.no_tokenizer}).")
    for name, kind in config.SOFTMAX_LAYERS.items():
        indices = getattr(config, name)
        if kind != "encoder" and indices:
            layers = ("layer " if len(indices) == 1 else "layers ") + ", ".join(map(str, indices))
            growth = "grows with the sequence" if kind == "causal" else "has the source's length, whatever the output's"
            hints.append(f"The {kind} attention of {layers} is softmax: its cache {growth}.")
    if plan.options.max_positions is not None:
        hints.append(plan.source.family.note_on_positions(config, plan.options.max_positions))
    fits_slots = config.num_slots and IMPORTANCES[config.importance].needs_text
    if plan.options.calibrate_on is None and (config.feature_map != "none" or fits_slots):
        better = "; text like the model's inputs (--calibrate) does better"
        if plan.source.predicts_tokens and config.feature_map == "none" and config.num_heads_for("causal") > 1:
            better += ", and brings --memory N retrieval heads, which recall what is far back"
        hints.append("Calibrated on random tokens" + (" and noise for audio" if reads_audio(config) else better) + ".")
    return tuple(hints)


def check_perplexity(perplexities: Perplexities, config: Any) -> None:
    """Raise an `InputError` where a conversion, to such a configuration, has ruined the model."""
    if perplexities.ruined:
        cross = " or cross attention (--config cross_layers=none)" if converted_layers(config, "cross") else ""
        raise InputError(
            "the conversion has ruined the model, and nothing was written: on the text its perplexity is "
            f"{shown(perplexities.calibrated)}, more than {MAX_PERPLEXITY_RATIO:g} times the base model's "
            f"{shown(perplexities.softmax)}. Calibrate on other text, give it more memory (--memory), keep layers "
            f"(--layers){cross} softmax, or train it at once (--data). To write it all the same, pass --config force=true."
        )
