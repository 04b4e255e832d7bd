"""The model families: one declaration each, from which registration, conversion and benchmarks derive what they need."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel
from transformers.models.auto import modeling_auto as auto

from .models import modeling_rfa_decoder, modeling_rfa_seq2seq
from .models.configuration_rfa import RFAConfigMixin, base_config_class, decoder_config_class
from .models.configuration_rfa_seq2seq import RFASeq2SeqConfigMixin, seq2seq_config_class
from .models.rfa_classes import register_name

#: The Auto classes of RFA models. The first that knows a family loads its language model.
AUTO_CLASSES: tuple[Any, ...] = (
    auto.AutoModelForSeq2SeqLM,
    auto.AutoModelForSpeechSeq2Seq,
    auto.AutoModelForCausalLM,
    auto.AutoModel,
    auto.AutoModelForPreTraining,
    auto.AutoModelForMaskedLM,
    auto.AutoModelForSequenceClassification,
    auto.AutoModelForTokenClassification,
    auto.AutoModelForQuestionAnswering,
)


def interpolate_positions(embedding: nn.Embedding, count: int) -> Tensor:
    """Return learned positions stretched to ``count`` by linear interpolation (position interpolation, Chen et al. 2023).

    Position p of the new table lies at p (n − 1) / (count − 1) of the old one of n rows, so that sequences that fitted before
    see other positions too; benchmarks/results/small-models.md compares other ways. Rows before position 0, which BART's
    tables have, are kept.
    """
    offset = int(getattr(embedding, "offset", 0))
    before, learned = embedding.weight.data[:offset], embedding.weight.data[offset:].float()
    positions = torch.linspace(0, learned.shape[0] - 1, count, dtype=torch.float64, device=learned.device)
    below = positions.floor().long().clamp(max=learned.shape[0] - 2)
    share = (positions - below).float()[:, None]
    table = torch.lerp(learned[below], learned[below + 1], share).to(embedding.weight.dtype)
    return torch.cat([before, table])


def continue_sinusoids(embedding: Any, count: int) -> Tensor:
    """Return Marian's or Pegasus's sinusoidal positions up to ``count``; those that were there stay as they are."""
    longer = type(embedding)(count, embedding.embedding_dim)
    return longer.create_weight().to(embedding.weight)


def reads_audio(config: Any) -> bool:
    """Return whether a model's encoder takes mel features of audio, [B, bins, frames], in place of tokens."""
    return bool(config.is_encoder_decoder and hasattr(config, "num_mel_bins"))


def position_count(config: Any) -> int:
    """Return the number of positions of a model, RFA or softmax; of the decoder, where the encoder has others."""
    return getattr(config, "max_position_embeddings", None) or config.max_target_positions


def has_rotary_positions(config: Any) -> bool:
    """Return whether a model rotates queries and keys by their positions, so that it has no table of them."""
    return bool(getattr(config, "rope_parameters", None))


def scale_rotations(config: Any, count: int) -> Any:
    """Return a configuration whose rotations serve ``count`` positions, by YaRN (Peng et al. 2023, arXiv 2309.00071).

    Raises:
        ValueError: if the rotations are scaled already, by another method than YaRN.
    """
    config = copy.deepcopy(config)
    rotations = config.rope_parameters
    # Some models have rotations for each type of layer; those of sliding layers see no distance that is new.
    parameters = rotations if "rope_type" in rotations else rotations["full_attention"]
    if parameters:  # None where layers with full attention have no positions
        kind = parameters["rope_type"]
        if kind not in ("default", "yarn"):
            raise ValueError(f"its rotations are scaled already (rope_type {kind!r}). Leave --max-positions out.")
        original = parameters.get("original_max_position_embeddings", config.max_position_embeddings)
        parameters |= {"rope_type": "yarn", "factor": count / original, "original_max_position_embeddings": original}
    config.max_position_embeddings = count
    try:
        is_yarn = type(config)(**config.to_dict()).rope_parameters == config.rope_parameters
    except (KeyError, ValueError, StrictDataclassError):
        is_yarn = False
    if not is_yarn:  # Phi-3 reads the name of another method in it
        raise ValueError(f"{config.model_type} models do not take rotations scaled by YaRN. Leave --max-positions out.")
    return config


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of softmax models and its RFA models.

    Attributes:
        rfa_config: configuration class of the RFA models: `RFAConfigMixin` mixed into the family's own.
        models: the RFA model classes, the language model first. Each is the softmax class's name with ``RFA`` before it, and
            subclasses that class. None, for a family that `modeling_rfa_decoder` or `modeling_rfa_seq2seq` serves: those that
            the Auto classes know, and ``more_models``.
        more_models: names of softmax classes that no Auto class knows, and that have RFA classes all the same.
        position_embedding: attribute name of the modules that hold position embeddings, or the end of their path.
        more_positions: makes a longer table of positions from such a module and a count.
        more_positions_note: note for the user on what that changes; ``{}`` stands for the count.
        preset: what conversion lets causal attention keep by default (`hf_rfa.convert.presets`). Features were measured to be
            worth their bytes on small GPT-2 models, and neither on a pretrained decoder nor on Whisper; cross attention needs
            them.
        memory: tokens' worth that causal attention keeps by default with this preset; None leaves the sizes to the preset.
            Whisper writes about 100 tokens of 30 s, and what it has forgotten of them changes what it writes.
    """

    rfa_config: Any
    models: tuple[type[PreTrainedModel], ...] | None = None
    more_models: tuple[str, ...] = ()
    position_embedding: str = "embed_positions"
    more_positions: Callable[[Any, int], Tensor] = interpolate_positions
    more_positions_note: str = "The learned positions were stretched to {} by interpolation, which short texts see too."
    preset: Literal["exact", "mixed", "rfa"] = "mixed"
    memory: int | None = None

    @property
    def base_config(self) -> Any:
        """Configuration class of the softmax models."""
        return base_config_class(self.rfa_config)

    @property
    def _softmax_classes(self) -> dict[Any, type[PreTrainedModel]]:
        """The softmax classes by the Auto class that loads them, the language model first."""
        classes = {auto_class: auto_class._model_mapping.get(self.base_config, None) for auto_class in AUTO_CLASSES}
        return {auto_class: cls for auto_class, cls in classes.items() if isinstance(cls, type)}

    @cached_property
    def architectures(self) -> dict[str, tuple[type[PreTrainedModel], type[PreTrainedModel]]]:
        """The softmax class and the RFA class, by the name that checkpoints have in ``config.architectures``."""
        models = self.models
        if models is None:
            is_seq2seq = issubclass(self.rfa_config, RFASeq2SeqConfigMixin)
            module: Any = modeling_rfa_seq2seq if is_seq2seq else modeling_rfa_decoder
            bases = [*self._softmax_classes.values(), *(getattr(transformers, name) for name in self.more_models)]
            models = tuple(module.rfa_model_class(base) for base in dict.fromkeys(bases))
        return {base.__name__: (base, model) for model in models for base in [_base_class(model)]}

    @property
    def default_architecture(self) -> str:
        """The softmax class assumed where a checkpoint names none: its language model."""
        return next(iter(self.architectures))

    @property
    def auto_models(self) -> dict[Any, type[PreTrainedModel]]:
        """The RFA model classes by the Auto class that loads their softmax class."""
        by_base = dict(self.architectures.values())
        return {auto_class: by_base[base] for auto_class, base in self._softmax_classes.items() if base in by_base}

    def note_on_positions(self, config: Any, count: int) -> str:
        """Return the note for the user on what ``count`` positions instead of the base model's change."""
        if has_rotary_positions(config):
            return f"The rotations were scaled to {count} positions by YaRN, which short texts see too."
        return self.more_positions_note.format(count)

    @property
    def positions_field(self) -> str:
        """The configuration's field with the number of positions."""
        return self.rfa_config.attribute_map.get("max_position_embeddings", "max_position_embeddings")

    def position_embeddings(self, model: nn.Module) -> list[nn.Embedding]:
        """Return the modules that hold a model's positions."""
        return [
            module
            for name, module in model.named_modules()
            if isinstance(module, nn.Embedding) and f".{name}".endswith(f".{self.position_embedding}")
        ]


#: The families by the ``model_type`` of their softmax models.
FAMILIES: dict[str, Family] = {}


def register_family(family: Family) -> None:
    """Let Auto classes load a family's RFA models, their checkpoints carry their code, and `hf_rfa.convert` convert to them.

    `hf_rfa.FAMILIES` holds the families by the ``model_type`` of their softmax models.

    Raises:
        ValueError: if the configuration has no `RFAConfigMixin`, if its ``model_type`` is that of a softmax model, or if a
            model class does not subclass the softmax class that it is named after.
    """
    config = family.rfa_config
    if not issubclass(config, RFAConfigMixin):
        raise ValueError(f"{config.__name__} has no RFA fields. Mix RFAConfigMixin or RFASeq2SeqConfigMixin into it.")
    if family.models is not None:
        family.architectures  # noqa: B018  # which raises before anything is registered
    AutoConfig.register(config.model_type, config)
    # `save_pretrained` then copies these classes' modules into the checkpoint, for machines without this package.
    config.register_for_auto_class()
    if family.models is None:  # importing the models of many families takes a second
        config.ON_FIRST_USE[config] = partial(_register_models, family)
    else:
        _register_models(family)
    FAMILIES[family.base_config.model_type] = family


def _register_models(family: Family) -> None:
    """Let Auto classes load a family's RFA models, and its configurations name them."""
    config = family.rfa_config
    if config.model_type == "rfa_whisper":
        from . import pipelines  # noqa: F401  # takes the place of transformers' own, which takes a while to load
    config.AUTO_MAP = {"AutoConfig": _module_and_class(config)}
    for model in family.models or ():  # classes that are made by name do so themselves
        register_name(_base_class(model), model)
    for auto_class, model in family.auto_models.items():
        auto_class.register(config, model, exist_ok=True)
        model.register_for_auto_class(auto_class)
        config.AUTO_MAP[auto_class.__name__] = _module_and_class(model)


def _base_class(model: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return the softmax class that an RFA class subclasses and is named after."""
    name = model.__name__.removeprefix("RFA")
    for base in model.__mro__[1:]:
        if base.__name__ == name:
            return base
    raise ValueError(f"{model.__name__} subclasses no class {name}. Name it RFA and the name of its softmax class.")


def _module_and_class(cls: type) -> str:
    """Return a class as transformers names it in ``auto_map``: module.Class."""
    return f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}"


#: Decoders whose attention goes through transformers' attention interface, by ``model_type``. The name is all that it takes:
#: `modeling_rfa_decoder` makes the classes, those of every head that the Auto classes know.
DECODERS = (
    *("afmoe", "apertus", "apertus1p5_text", "arcee", "aria_text", "bamba", "beam", "biogpt", "bitnet", "cohere"),
    *("cohere2", "cohere2_moe", "cohere_compass_text", "cwm", "dbrx", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4"),
    *("exaone_moe", "flex_olmo", "flint", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2"),
    *("gpt_bigcode", "gpt_neox", "gpt_oss", "granite", "granite_swa", "granitemoe", "granitemoe_swa"),
    *("granitemoehybrid", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3"),
    *("hyperclovax", "jais2", "jamba"),
    *("kolibri1", "lfm2", "lfm2_moe", "llama", "mellum", "minimax_m2", "ministral", "ministral3"),
    *("mistral", "mixtral", "modernbert-decoder", "nanochat", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3"),
    *("olmo_hybrid", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3"),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3", "solar_open", "stablelm"),
    *("starcoder2", "vaultgemma"),
)
#: Models with an encoder and a decoder that are built as BART's are, by ``model_type``. `modeling_rfa_seq2seq` makes the
#: classes.
SEQ2SEQ = ("bart", "mbart", "blenderbot", "blenderbot-small", "plbart", "marian", "pegasus", "m2m_100", "whisper")
#: What deviates in models with sinusoidal positions.
SINUSOIDS: dict[str, Any] = {
    "more_positions": continue_sinusoids,
    "more_positions_note": "The sinusoidal positions were continued to {}; short texts see no change.",
}
#: What deviates in the declarations of families, by ``model_type``.
DEVIATIONS: dict[str, dict[str, Any]] = {
    "gpt2": {"position_embedding": "wpe", "preset": "mixed", "more_models": ("GPT2DoubleHeadsModel",)},
    "gpt_bigcode": {"position_embedding": "wpe"},
    **dict.fromkeys(("marian", "pegasus", "m2m_100"), SINUSOIDS),
    "whisper": {"position_embedding": "decoder.embed_positions", "preset": "exact", "memory": 128},
}


def family_of(model_type: str, **deviations: Any) -> Family:
    """Return the family of a decoder, or of a model with an encoder that is built as BART's are, with classes made by name.

    Args:
        model_type: of its softmax models.
        **deviations: fields of `Family` with another value than their default; ``preset`` is exact for a decoder.

    Raises:
        ValueError: if transformers knows no such ``model_type``, or one with an encoder that is built otherwise.
    """
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"transformers knows no model_type {model_type!r}. Pass that of a softmax model's config.json."
        )
    base: Any = CONFIG_MAPPING[model_type]
    if base.is_encoder_decoder:
        return Family(rfa_config=seq2seq_config_class(base), **deviations)
    return Family(rfa_config=decoder_config_class(base), **{"preset": "exact", **deviations})


for _model_type in (*SEQ2SEQ, *DECODERS):
    if _model_type in CONFIG_MAPPING:  # which an older transformers may not know
        register_family(family_of(_model_type, **DEVIATIONS.get(_model_type, {})))
