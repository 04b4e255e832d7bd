"""What a conversion tells: figures, a table, and the model card."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from rich.table import Table
from transformers import PreTrainedModel

from hf_rfa.models.linear_attention import state_shape
from hf_rfa.models.sliding_window import window_shape
from hf_rfa.version import __version__

from .calibration import LayerGain
from .options import outside_module
from .sensitivity import Damage
from .twin import rfa_layers

#: Lengths at which caches are compared with a softmax model's, and beside them the longest that the model takes.
CACHE_LENGTHS = (1024, 2048, 8192)


@dataclass(frozen=True)
class Perplexities:
    """Perplexity on the calibration text: of the softmax parent, of the bare swap, and after calibration.

    ``own_outputs`` says that it is the parent's own outputs that are predicted, given the text.
    """

    softmax: float
    swapped: float
    calibrated: float
    tokens: int
    own_outputs: bool = False


@dataclass(frozen=True)
class ConversionReport:
    """The figures of one conversion.

    Attributes:
        source: what was converted.
        destination: the folder written.
        command: the command that does it again.
        layers: by kind of attention, how many layers are RFA now and how many there are.
        feature_map: name of the feature map.
        feature_dims: F, features per head, by kind of attention.
        num_parameters: parameters of the result.
        added_parameters: parameters that the parent does not have, the extended positions among them.
        added_buffers: numbers in buffers that the parent does not have (random matrices and calibrated constants).
        state_bytes: bytes of the states per sequence, all layers.
        own_cache_bytes: bytes of the whole cache per sequence, by length (of the source too, if there is one): states, and
            the keys and values of layers that are softmax. No length is over the model's positions.
        cache_bytes: bytes that it would be if all layers were softmax, as the parent's are.
        gains: what calibration gained per layer.
        damages: what converting each layer alone does, if layers were left softmax by that, the worst first.
        perplexities: on the calibration text, if there was one.
        max_logit_difference: largest difference between the logits of the model in memory and of the reloaded one.
        notes: what the user should know besides.
    """

    source: str
    destination: str
    command: str
    layers: dict[str, tuple[int, int]]
    feature_map: str
    feature_dims: dict[str, int]
    num_parameters: int
    added_parameters: int
    added_buffers: int
    state_bytes: int
    own_cache_bytes: dict[int, int]
    cache_bytes: dict[int, int]
    gains: tuple[LayerGain, ...]
    damages: tuple[Damage, ...]
    perplexities: Perplexities | None
    max_logit_difference: float
    notes: tuple[str, ...]

    @property
    def grows(self) -> bool:
        """Whether the cache grows with the text or the source: whether any layer that has one is softmax."""
        return any(rfa < count for kind, (rfa, count) in self.layers.items() if kind != "encoder")

    def rows(self) -> list[tuple[str, str]]:
        """Return the figures as (what, value) pairs, for the table and the model card."""
        share = self.added_parameters / self.num_parameters
        converted = {kind: f"{rfa} of {count}" for kind, (rfa, count) in self.layers.items()}
        features = {kind: str(count) for kind, count in self.feature_dims.items()}
        rows = [
            ("attention layers converted", _by_kind(converted)),
            ("feature map", f"{self.feature_map}, features per head: {_by_kind(features)}"),
            ("parameters added", f"{self.added_parameters:,} ({share:.3%} of {self.num_parameters:,})"),
            ("numbers in buffers added", f"{self.added_buffers:,}"),
            (
                "state per sequence",
                f"{_size(self.state_bytes)}, "
                + ("and the softmax layers' growing cache" if self.grows else "at any length"),
            ),
        ]
        of = " of source and output" if "cross" in self.layers else ""
        for length, softmax in self.cache_bytes.items():
            own = self.own_cache_bytes[length]
            said = f"{_size(own)}, all softmax {_size(softmax)} ({_compared(own, softmax)})"
            rows.append((f"cache at {length:,} tokens{of}", said))
        if self.gains:
            before, after = (
                fmean(value for gain in self.gains for value in getattr(gain, name)) for name in ("before", "after")
            )
            rows.append(("KL to the softmax weights", f"{before:.3f} nats, {after:.3f} after calibration"))
        if self.damages:
            worst = ", ".join(f"{each.kind} {each.layer}: {each.damage:.4f}" for each in self.damages)
            rows.append(("damage by a layer alone, nats per token", worst))
        if self.perplexities is not None:
            found = self.perplexities
            text = "the parent's own outputs" if found.own_outputs else "the calibration text"
            rows.append(
                (
                    f"perplexity on {text} ({found.tokens:,} tokens)",
                    f"softmax {found.softmax:.2f}, swapped {found.swapped:.2f}, calibrated {found.calibrated:.2f}",
                )
            )
        rows.append(("largest logit difference after reloading", f"{self.max_logit_difference:.1e}"))
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return asdict(self)

    def table(self) -> Table:
        """Return the figures as a table to print."""
        table = Table(title=f"{self.source} → {self.destination}", show_header=False)
        for what, value in self.rows():
            table.add_row(what, value)
        return table


def _by_kind(values: dict[str, str]) -> str:
    """Return one value as it is, and several with their kinds of attention."""
    return (
        next(iter(values.values()))
        if len(values) == 1
        else ", ".join(f"{kind} {value}" for kind, value in values.items())
    )


def _size(num_bytes: int) -> str:
    """Return a number of bytes as a person reads it."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def cache_bytes(model: PreTrainedModel, length: int, *, softmax: bool = False) -> int:
    """Return the bytes that a cache holds for one sequence; an encoder's attention keeps none.

    Args:
        model: the RFA model; its layers that are softmax keep keys and values.
        length: tokens of the text, and of its source where there is one; 0 counts the states alone.
        softmax: count what the model would hold if all of its layers were softmax, as its parent's are.
    """
    config: Any = model.config
    states = {
        (layer.rfa_kind, layer.rfa_layer_idx): _state_bytes(layer, model.dtype) for layer in rfa_layers(model).values()
    }
    keys_and_values = 2 * config.hidden_size * length * model.dtype.itemsize
    return sum(
        keys_and_values if softmax else states.get((kind, index), keys_and_values)
        for kind in (("causal", "cross") if config.is_encoder_decoder else ("causal",))
        for index in range(config.num_layers_for(kind))
    )


def _state_bytes(layer: Any, dtype: torch.dtype) -> int:
    """Return the bytes of an RFA layer's state, and of its window."""
    feature_map = layer.feature_map
    shapes = [state_shape(feature_map.feature_dim, feature_map.head_dim, signed=feature_map.signed)]
    if layer.window_size:
        shapes.append(window_shape(layer.window_size, feature_map.head_dim))
    return feature_map.num_heads * sum(map(math.prod, shapes)) * torch.promote_types(layer.state_dtype, dtype).itemsize


def cache_lengths(positions: int) -> list[int]:
    """Return the lengths to compare caches at, none of them longer than a model's texts can be."""
    return [*(length for length in CACHE_LENGTHS if length < positions), positions]


def _compared(own: int, softmax: int) -> str:
    """Return how much less or more memory a cache takes than a softmax model's."""
    times = f"{max(softmax / own, own / softmax):.1f}"
    return "as much" if times == "1.0" else f"{times} × {'less' if own < softmax else 'more'}"


#: How the paragraph of a card begins that says how the model was trained.
TRAINING = "**Training**:"
#: That paragraph, until there is any.
UNTRAINED = (
    f"{TRAINING} none after the conversion. The projections of queries, keys, values and outputs are the parent's, "
    "untouched. Distil or fine-tune it before you rely on it."
)

CONSTANT = """A recurrent state of fixed size stands in for the cache of keys and values, so a token costs the same time
and memory at any length."""

GROWING = """Layers that were left softmax keep their cache of keys and values, so a token costs more the longer the text or
its source is; in the others a recurrent state of fixed size stands in for it."""

CARD = """# {title}

This is [{source}]({link}) with its softmax attention replaced by random feature attention (Peng et al., 2021), converted by
[hf-rfa](https://pypi.org/project/hf-rfa/) {version}. {costs}

{untrained}

{use}
## How it was made

```bash
{command}
```

| | |
|---|---|
{rows}

{notes}{picture}## Sources

- Hao Peng, Nikolaos Pappas, Dani Yogatama, Roy Schwartz, Noah A. Smith, Lingpeng Kong: *Random Feature Attention*. ICLR 2021.
- Angelos Katharopoulos, Apoorv Vyas, Nikolaos Pappas, François Fleuret: *Transformers are RNNs: Fast Autoregressive
  Transformers with Linear Attention*. ICML 2020.
"""

USE = """## Use

```python
import hf_rfa  # registers the RFA models with transformers
{own_map}from transformers import {auto_class}

model = {auto_class}.from_pretrained("{name}")
```

Where hf-rfa is not installed the code beside the weights takes its place:
`{auto_class}.from_pretrained("{name}", trust_remote_code=True)`.
"""

ATTENTION = """Above: how far every head's weights are from the softmax weights, before and after calibration. Below: weights
of the parent and of this model side by side, for the head that is nearest, the one in the middle and the farthest
(`conversion.json` has the figures).

![attention](attention.png)

"""

AUTO_CLASSES = {
    "LMHeadModel": ("AutoModelForCausalLM", "text-generation"),
    "ForCausalLM": ("AutoModelForCausalLM", "text-generation"),
    "ForConditionalGeneration": ("AutoModelForSeq2SeqLM", "text2text-generation"),
    "MTModel": ("AutoModelForSeq2SeqLM", "translation"),
    "ForSequenceClassification": ("AutoModelForSequenceClassification", "text-classification"),
    "ForTokenClassification": ("AutoModelForTokenClassification", "token-classification"),
    "ForQuestionAnswering": ("AutoModelForQuestionAnswering", "question-answering"),
}


def head_of(architecture: str) -> tuple[str, str]:
    """Return the Auto class that loads a model class, and the hub's name of its task."""
    endings = [value for ending, value in AUTO_CLASSES.items() if architecture.endswith(ending)]
    return endings[0] if endings else ("AutoModel", "feature-extraction")


def use_section(auto_class: str, name: str, feature_map: str) -> str:
    """Return the section of a card that says how an RFA model is loaded."""
    module = outside_module(feature_map)
    nameless = module in (None, "__main__")
    own_map = "" if nameless else f"import {module}  # registers the feature map {feature_map}\n"
    return USE.format(auto_class=auto_class, name=name, own_map=own_map)


def model_card(
    report: ConversionReport, *, architecture: str, hub_name: str | None, parent: ModelCardData | None
) -> ModelCard:
    """Return the model card of a conversion.

    Args:
        report: its figures.
        architecture: name of the softmax model class.
        hub_name: the parent's name on the hub, or None if it came from a folder.
        parent: what the parent's own card states, or None if it has none.
    """
    auto_class, task = head_of(architecture)
    data: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": task,
        "tags": ["hf-rfa", "random-feature-attention", "linear-attention"],
    }
    if hub_name is not None:
        data["base_model"] = hub_name
    for field in ("license", "license_name", "license_link", "language", "pipeline_tag"):
        if parent is not None and parent.get(field) is not None:
            data[field] = parent.get(field)
    source = report.source if hub_name is not None else report.source.rstrip("/").rsplit("/", 1)[-1]
    destination = report.destination.rstrip("/").rsplit("/", 1)[-1]
    content = CARD.format(
        title=destination,
        source=source,
        link=f"https://huggingface.co/{hub_name}" if hub_name is not None else "#how-it-was-made",
        version=__version__,
        costs=GROWING if report.grows else CONSTANT,
        untrained=UNTRAINED,
        use=use_section(auto_class, destination, report.feature_map),
        command=report.command,
        rows="\n".join(f"| {what} | {value} |" for what, value in report.rows()),
        notes="".join(f"{note}\n\n" for note in report.notes),
        picture=ATTENTION if report.gains else "",
    )
    return ModelCard(f"---\n{ModelCardData(**data).to_yaml()}\n---\n\n{content}")
