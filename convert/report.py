"""The report of a conversion: its figures, and their table."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import chain
from statistics import fmean
from typing import Any, get_args

from rich.table import Table
from transformers import PreTrainedModel

from hf_rfa.errors import InputError
from hf_rfa.evaluation.memory import CacheMemory, cache_memory
from hf_rfa.evaluation.perplexity import shown
from hf_rfa.families import position_count, reads_audio
from hf_rfa.models.configuration_rfa import AttentionKind
from hf_rfa.models.feature_maps import FEATURE_MAPS
from hf_rfa.models.projected_feature_maps import RandomFeatureMap

from .calibrate.calibration import LayerGain
from .calibrate.retrieval_heads import RetrievalHeads
from .calibrate.sensitivity import LayerSensitivity
from .checkpoint.base_model import rfa_layers
from .checkpoint.loading import new_keys
from .checkpoint.source import Checkpoint
from .configuration import converted_layers, outside_module
from .options import ConversionOptions

#: Lengths at which caches are compared with a softmax model's, with the model's own number of positions.
CACHE_LENGTHS = (1024, 2048, 8192)
#: A conversion whose perplexity is more than so many times the base model's has ruined the model.
MAX_PERPLEXITY_RATIO = 2.0


@dataclass(frozen=True)
class Perplexities:
    """Perplexity on the calibration text: of the base model, of the swap before calibration, and after it.

    With ``own_outputs`` the labels are the base model's own outputs for the sources of the text.
    """

    softmax: float
    swapped: float
    calibrated: float
    tokens: int
    own_outputs: bool = False

    @property
    def ratio(self) -> float:
        """The result's perplexity relative to the base model's."""
        return self.calibrated / self.softmax

    @property
    def ruined(self) -> bool:
        """Whether the conversion has ruined the model; so it has where a perplexity is not a number."""
        return not self.ratio <= MAX_PERPLEXITY_RATIO


def check_perplexity(perplexities: Perplexities, config: Any) -> None:
    """Raise an `InputError` where a conversion, to such a configuration, has ruined the model."""
    if perplexities.ruined:
        cross = " or cross attention (--cross-layers none)" if converted_layers(config, "cross") else ""
        raise InputError(
            "the conversion has ruined the model, and nothing was written: on the text its perplexity is "
            f"{shown(perplexities.calibrated)}, more than {MAX_PERPLEXITY_RATIO:g} times the base model's "
            f"{shown(perplexities.softmax)}. Calibrate on other text, give it more memory (--memory), keep layers "
            f"(--keep-softmax){cross} softmax, or train it at once (--data). To write it all the same, pass --force."
        )


@dataclass(frozen=True)
class ConversionReport:
    """The figures of one conversion.

    Attributes:
        source: the softmax checkpoint, as the user named it.
        source_revision: the commit of a checkpoint on the hub, None for a folder.
        destination: the folder written.
        command: the command line that repeats the conversion.
        layers: number of RFA layers and of all layers, by kind of attention.
        keeps: what every converted layer keeps of a text.
        feature_map: name of the feature map.
        feature_dims: F, features per head, by kind of attention.
        num_parameters: parameters of the result.
        added_parameters: parameters that the base model does not have, extended positions included.
        added_buffers: numbers in buffers that the base model does not have: random matrices and calibrated constants.
        state_bytes: bytes of the states per sequence, all layers.
        token_bytes: bytes of a token in the base model's cache, and of one of the source where cross attention was converted.
        own_cache_bytes: bytes of the whole cache per sequence, by length of output and source: states, and the keys and
            values of softmax layers. No length is over the model's positions.
        cache_bytes: bytes of the base model's cache at the same lengths.
        gains: divergence from softmax before and after calibration, by layer.
        divergences: their means over heads and layers, by kind of attention.
        sensitivities: sensitivity of every layer, the largest first, if layers were kept softmax by it.
        retrieval_heads: retrieval heads and what they change, if they were chosen.
        grows: whether a softmax layer keeps the keys and values of all tokens of the sequence.
        source_bytes: bytes that softmax cross attention keeps of every token of a source, or of audio in all; 0 for none.
        other_bytes: most bytes per sequence of the base model's layers whose caches have one size, by what these are: layers
            with a sliding window, and recurrent ones.
        perplexities: on the calibration text, if there was one.
        audio_positions: positions of the source at any length of output, for an encoder of audio; None for one of text.
        max_logit_difference: largest difference between the logits of the model in memory and of the reloaded one.
        notes: hints for the user.
    """

    source: str
    destination: str
    command: str
    layers: dict[str, tuple[int, int]]
    keeps: str
    feature_map: str
    feature_dims: dict[str, int]
    num_parameters: int
    added_parameters: int
    added_buffers: int
    state_bytes: int
    token_bytes: int
    own_cache_bytes: dict[int, int]
    cache_bytes: dict[int, int]
    gains: tuple[LayerGain, ...]
    sensitivities: tuple[LayerSensitivity, ...]
    perplexities: Perplexities | None
    max_logit_difference: float
    notes: tuple[str, ...]
    source_revision: str | None = None
    audio_positions: int | None = None
    retrieval_heads: RetrievalHeads | None = None
    divergences: dict[str, tuple[float, float]] = field(default_factory=dict)
    grows: bool = False
    source_bytes: int = 0
    other_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def state_tokens(self) -> float:
        """The state in tokens of the base model's cache that take as many bytes."""
        return self.state_bytes / self.token_bytes

    def rows(self) -> list[tuple[str, str]]:
        """Return the figures as (name, value) pairs, for the table and the model card."""
        share = self.added_parameters / self.num_parameters
        growth = "and the softmax layers' growing cache" if self.grows else "at any length"
        converted = ", ".join(f"{kind} {rfa} of {count}" for kind, (rfa, count) in self.layers.items())
        rows = [
            ("attention layers converted", converted),
            ("every layer keeps, per head", self.keeps),
            ("parameters added", f"{self.added_parameters:,} ({share:.3%} of {self.num_parameters:,})"),
            ("numbers in buffers added", f"{self.added_buffers:,}"),
            ("state per sequence", f"{_size(self.state_bytes)} ({self.state_tokens:,.0f} tokens' worth), {growth}"),
            *((f"cache of the {what}", f"{_size(size)}, at any length") for what, size in self.other_bytes.items()),
        ]
        if self.source_bytes:
            of = "a token of the source" if self.audio_positions is None else "for the audio"
            rows.append(
                ("cache of softmax cross attention", f"{_size(self.source_bytes)} {of}, at any length of output")
            )
        of = " of source and output" if "cross" in self.layers else ""
        of = of if self.audio_positions is None else f" of output and {self.audio_positions:,} of audio"
        for length, whole in self.cache_bytes.items():
            size = self.own_cache_bytes[length]
            times = f"{max(whole / size, size / whole):.1f}"
            ratio = "as much" if times == "1.0" else f"{times} × {'less' if size < whole else 'more'}"
            rows.append((f"cache at {length:,} tokens{of}", f"{_size(size)}, all softmax {_size(whole)} ({ratio})"))
        for kind, (before, after) in self.divergences.items():
            rows.append((f"KL to the softmax weights, {kind}", f"{before:.3f} nats, {after:.3f} after calibration"))
        if self.sensitivities:
            layers = (f"{layer.kind} {layer.layer}: {layer.divergence:.4f}" for layer in self.sensitivities)
            rows.append(("layer sensitivity, nats per token", ", ".join(layers)))
        if self.retrieval_heads is not None:
            names = ", ".join(f"{layer}.{head}" for layer, head in self.retrieval_heads.heads)
            gained = f"{self.retrieval_heads.before:.3f} nats without them, {self.retrieval_heads.after:.3f} with them"
            rows.append(("retrieval heads (layer.head)", f"{names}; KL to softmax on repeated passages {gained}"))
        if self.perplexities is not None:
            text = "the base model's own outputs" if self.perplexities.own_outputs else "the calibration text"
            stages = ("softmax", "swapped", "calibrated")
            values = ", ".join(f"{stage} {shown(getattr(self.perplexities, stage))}" for stage in stages)
            rows.append((f"perplexity on {text} ({self.perplexities.tokens:,} tokens)", values))
        rows.append(("largest logit difference after reloading", f"{self.max_logit_difference:.1e}"))
        return rows

    def costs(self) -> list[str]:
        """Return what a user of the model gives up, one sentence or two each: memory, recall, quality."""
        beside = "at any length of the text"
        if self.grows:
            beside = "beside the cache of the softmax layers, which grows with the text"
        elif self.source_bytes:
            beside = "beside the cache of softmax cross attention, which has the source's length"
        tokens = f"{self.state_tokens:,.0f} tokens of the base model's cache"
        costs = [f"**Memory**: {_size(self.state_bytes)} per sequence, the bytes of {tokens}, {beside}."]
        if "causal" in self.feature_dims:
            fate = "part of a sum, from which it can hardly be told" if self.feature_dims["causal"] else "forgotten"
            costs.append(f"**Recall**: a token that a head does not keep exactly is {fate}.")
        if self.perplexities is not None:
            text = "the base model's own outputs" if self.perplexities.own_outputs else "the text of the calibration"
            costs.append(
                f"**Quality**, as converted: {self.perplexities.ratio:.3f} times the base model's perplexity on {text} "
                f"({self.perplexities.tokens:,} tokens). Expect more on other text."
            )
        return costs

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return asdict(self)

    def table(self) -> Table:
        """Return the figures as a table to print."""
        table = Table(title=f"{self.source} → {self.destination}", show_header=False)
        for name, value in self.rows():
            table.add_row(name, value)
        return table


def _tokens(sinks: int, recent: int, important: int = 0) -> str:
    """Return tokens that are kept exactly in words: "4 sinks, 31 recent and 28 important tokens"."""
    counts = {"sinks": sinks, "recent": recent, "important": important}
    words = [f"{number:,} {what}" for what, number in counts.items() if number]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words) + " tokens"


def what_layers_keep(config: Any, feature_dims: dict[str, int]) -> str:
    """Return in one line what a head of a converted layer keeps, by kind of attention.

    Args:
        config: the RFA model's configuration.
        feature_dims: F, features per head, of every kind that is converted.
    """
    random = "random " if issubclass(FEATURE_MAPS[config.feature_map], RandomFeatureMap) else ""
    lines = {kind: f"{count} {random}features ({config.feature_map})" for kind, count in feature_dims.items()}
    if "causal" in feature_dims:
        features = lines["causal"].replace(")", ", gated)") if config.gate else lines["causal"]
        line = f"{features}, no exact tokens"
        if config.window_size:
            exact = _tokens(config.num_sinks, config.window_size, config.num_slots)
            line = f"{exact}; {features if feature_dims['causal'] else 'no random features'}"
        if config.retrieval_heads:
            far = _tokens(config.num_sinks, config.retrieval_window)
            line += f"; in retrieval heads, {len(config.retrieval_heads)} in all, {far}"
        lines["causal"] = line
    return "; ".join(line if lines.keys() == {"causal"} else f"{kind}: {line}" for kind, line in lines.items())


def _size(num_bytes: int) -> str:
    """Return a number of bytes with a binary unit."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def model_figures(
    model: PreTrainedModel, gains: list[LayerGain], base_memory: CacheMemory, checkpoint: Checkpoint
) -> dict[str, Any]:
    """Return the fields of a `ConversionReport` that can be read off the model, its gains and its base model's memory."""
    config, memory = model.config, cache_memory(model)
    divergences: dict[str, tuple[float, float]] = {}
    layers: dict[str, tuple[int, int]] = {}
    feature_dims: dict[str, int] = {}
    for kind in get_args(AttentionKind):
        converted = {name: layer for name, layer in rfa_layers(model).items() if layer.rfa_kind == kind}
        if converted or kind == "causal" or config.is_encoder_decoder:
            layers[kind] = (len(converted), config.num_layers_for(kind))
        if converted:
            feature_dims[kind] = next(iter(converted.values())).feature_map.feature_dim
        of_kind = [gain for gain in gains if gain.name in converted]
        if of_kind:
            before, after = (fmean(chain(*(getattr(gain, when) for gain in of_kind))) for when in ("before", "after"))
            divergences[kind] = (before, after)
    parameters = {name: parameter.numel() for name, parameter in model.named_parameters()}
    state, new = model.state_dict(), new_keys(model)
    positions = config.max_position_embeddings
    extended = sum(
        (positions - position_count(checkpoint.config)) * embedding.embedding_dim
        for embedding in checkpoint.family.position_embeddings(model)
        if embedding.weight.requires_grad
    )
    lengths = [*(length for length in CACHE_LENGTHS if length < positions), positions]
    others = {"sliding layers": memory.sliding_after(positions), "recurrent layers": memory.recurrent}
    return {
        "layers": layers,
        "keeps": what_layers_keep(config, feature_dims),
        "feature_map": config.feature_map,
        "feature_dims": feature_dims,
        "num_parameters": sum(parameters.values()),
        "added_parameters": extended + sum(parameters.get(key, 0) for key in new),
        "added_buffers": sum(state[key].numel() for key in new if key not in parameters),
        "state_bytes": memory.fixed,
        "token_bytes": base_memory.per_token + base_memory.per_source_token - memory.per_source_token,
        "divergences": divergences,
        "grows": memory.per_token > 0,
        "source_bytes": memory.per_source_token + memory.audio,
        "other_bytes": {what: size for what, size in others.items() if size},
        "audio_positions": config.max_source_positions if reads_audio(config) else None,
        "own_cache_bytes": {length: memory.after(length) for length in lengths},
        "cache_bytes": {length: base_memory.after(length) for length in lengths},
    }


def notes(
    checkpoint: Checkpoint,
    config: Any,
    options: ConversionOptions,
    no_tokenizer: str | None,
    perplexities: Perplexities | None,
) -> tuple[str, ...]:
    """Return hints for the user: a ruined model, the code that a feature map needs, growing caches, what would be better."""
    hints = []
    if perplexities is not None and perplexities.ruined:
        hints.append(
            f"The conversion has ruined the model: on the text its perplexity is {perplexities.ratio:.1f} times the base "
            "model's. Train it before you use it."
        )
    module = outside_module(config.feature_map)
    if module is not None:
        advice = f"Import its module {module} before the checkpoint is loaded, in Python or with --import."
        if module == "__main__":
            advice = "Put its class into a module, and import that before the checkpoint is loaded."
        hints.append(
            f"The feature map {config.feature_map} is not hf-rfa's own, and the checkpoint does not hold its code. {advice}"
        )
    if no_tokenizer is not None:
        hints.append(f"The result has no tokenizer (of the checkpoint: {no_tokenizer}).")
    for name, kind in config.SOFTMAX_LAYERS.items():
        indices = getattr(config, name)
        if kind != "encoder" and indices:
            layers = ("layer " if len(indices) == 1 else "layers ") + ", ".join(map(str, indices))
            growth = "grows with the sequence" if kind == "causal" else "has the source's length, whatever the output's"
            hints.append(f"The {kind} attention of {layers} is softmax: its cache {growth}.")
    if options.max_positions is not None:
        hints.append(checkpoint.family.note_on_positions(config, options.max_positions))
    if options.calibrate_on is None and (config.feature_map != "none" or config.num_slots):
        better = "; text like the model's inputs (--calibrate) does better"
        if checkpoint.predicts_tokens and config.feature_map == "none" and config.num_heads_for("causal") > 1:
            better += ", and brings --memory N retrieval heads, which recall what is far back"
        hints.append("Calibrated on random tokens" + (" and noise for audio" if reads_audio(config) else better) + ".")
    return tuple(hints)
