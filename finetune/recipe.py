"""Recipes in YAML files: the settings of a distillation, and options of `hf-rfa finetune`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from inspect import formatannotation
from pathlib import Path
from typing import Any, Literal, Self, get_args, get_type_hints

import torch
import yaml
from huggingface_hub.dataclasses import type_validator
from torch.utils.benchmark import Timer
from transformers import Seq2SeqTrainingArguments

from hf_rfa.errors import InputError
from hf_rfa.io.text_io import BLOCK_LENGTH

from .arguments import FinetuneArguments, read_overrides

#: Tokens per step if a recipe does not say how many blocks, and pairs per step.
TOKENS_PER_STEP, PAIRS_PER_STEP = 2048, 8
#: How much faster products must be in bf16 for the rest, which is not, to matter no more.
FAST_RATIO = 1.5
#: Recipes that come with the package, a folder for each command.
FOLDER = Path(__file__).parent / "recipes"
#: Least and most of a stage's numbers, where these are not 0 and any.
LIMITS = {"batch_size": (1, math.inf), "block_length": (2, math.inf), "kl_weight": (0, 1), "repeating_share": (0, 1)}


def read_recipe(command: Literal["distill", "finetune"], name: str | Path) -> tuple[Path, dict[str, Any]]:
    """Return the YAML file of a recipe for a command, a name or a path, and what it holds; an `InputError` if nothing."""
    path = FOLDER / command / f"{name}.yaml"
    if not path.is_file():
        path = Path(name)
    if not path.is_file():
        names = ", ".join(sorted(recipe.stem for recipe in (FOLDER / command).glob("*.yaml")))
        raise InputError(f"there is no recipe {name}. Pass a YAML file, or one of: {names}.")
    try:
        settings: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"cannot read the recipe {path}: {error}") from error
    if not isinstance(settings, dict):
        raise InputError(f"the recipe {path} holds no settings.")
    return path, settings


def checked(settings: Any, *classes: type, where: str) -> dict[str, Any]:
    """Return settings, as YAML has them, that are fields of dataclasses; numbers may be whole, and texts such as 1e-3.

    Raises:
        InputError: for a name that no class has, with the nearest that one has, and for a value of another type; it says
            ``where``.
    """
    if not isinstance(settings, Mapping):
        raise InputError(f"{where} holds no settings.")
    types = {name: hint for cls in classes for name, hint in get_type_hints(cls).items()}
    values = {}
    for name, value in settings.items():
        if name not in types:
            (nearest,) = get_close_matches(str(name), types, n=1, cutoff=0.0)
            raise InputError(f"{where} has no setting {name}. Did you mean {nearest}?")
        kind = types[name]
        try:
            if float in (kind, *get_args(kind)) and isinstance(value, (int, str)) and not isinstance(value, bool):
                value = float(value)  # YAML reads 1e-3 as a text
            type_validator(name, value, kind)
        except (TypeError, ValueError) as error:
            raise InputError(f"{where}: {name} must be {formatannotation(kind)}, got {value!r}.") from error
        values[name] = value
    return values


@dataclass(frozen=True)
class Stage:
    """One stage of a distillation.

    Attributes:
        steps: optimizer steps; 0 leaves the stage out.
        batch_size: blocks or pairs per step; None takes `PAIRS_PER_STEP` pairs, or blocks of `TOKENS_PER_STEP` tokens.
        block_length: tokens per block; for pairs the most tokens of either side. None takes `TOKENS_PER_STEP` of a text end
            to end, and `BLOCK_LENGTH` otherwise, or the models' positions if they are fewer.
        learning_rate: of feature maps and gates in attention transfer (default 1e-2), of all else end to end (default 1e-4).
        rfa_learning_rate: of feature maps and gates, end to end.
        kl_weight: share of the KL in the loss, end to end.
        dropout: whether the model's own dropout acts, end to end.
        lora_rank: rank of LoRA matrices to train end to end instead of the model's own weights; 0 trains these.
        bf16: compute in mixed precision; phases, features, gates and states stay in float32. "auto" asks `fast_bf16`.
        compiled: compute the model under ``torch.compile``, end to end: for many steps on blocks of text on a GPU. The first
            step takes minutes; pairs have lengths of their own, each of which may be compiled anew.
        repeating_share: share of the blocks of text that repeat themselves, from which heads that copy learn; 0 for pairs.
    """

    steps: int = 0
    batch_size: int | None = None
    block_length: int | None = None
    learning_rate: float = 1e-2
    rfa_learning_rate: float = 1e-3
    kl_weight: float = 0.5
    dropout: bool = False
    lora_rank: int = 0
    bf16: bool | Literal["auto"] = False
    compiled: bool = False
    repeating_share: float = 0.0


@dataclass(frozen=True)
class Recipe:
    """The settings of a distillation; ``finetune/recipes/distill`` holds those that come with the package, as YAML.

    Attributes:
        transfer: attention transfer, layer by layer.
        end_to_end: training of the whole model on the teacher's logits.
        seed: of the training.
    """

    transfer: Stage = Stage()
    end_to_end: Stage = Stage(learning_rate=1e-4)
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise an `InputError` that names a setting which cannot be, its value and the values it may have."""
        for name, stage in self.stages().items():
            for setting, value in checked(vars(stage), Stage, where=f"recipe, {name}").items():
                least, most = LIMITS.get(setting, (0, math.inf))
                if isinstance(value, (int, float)) and not (least <= value <= most and math.isfinite(value)):
                    allowed = f"from {least} to {most}" if math.isfinite(most) else f"a number of at least {least}"
                    raise InputError(f"recipe: {name}.{setting} must be {allowed}, got {value!r}.")

    @classmethod
    def load(cls, name: str | Path) -> Self:
        """Load a recipe that comes with the package, by its name, or a YAML file.

        Raises:
            InputError: if there is none, or if it has an unknown setting.
        """
        path, settings = read_recipe("distill", name)
        stages: dict[str, Any] = {}
        for stage, default in cls().stages().items():
            changes = settings.pop(stage, None) or {}
            stages[stage] = replace(default, **checked(changes, Stage, where=f"recipe {path}, {stage}"))
        return cls(**stages, **checked(settings, cls, where=f"recipe {path}"))

    def stages(self) -> dict[str, Stage]:
        """Return the stages by name, in order."""
        return {"transfer": self.transfer, "end_to_end": self.end_to_end}

    def with_steps(self, *, transfer: int | None = None, end_to_end: int | None = None) -> Recipe:
        """Return this recipe with other numbers of steps."""
        counts = {"transfer": transfer, "end_to_end": end_to_end}
        stages: Any = {name: replace(self.stages()[name], steps=n) for name, n in counts.items() if n is not None}
        return replace(self, **stages)

    def resolve(self, config: Any, positions: int) -> Recipe:
        """Return this recipe with the block length, the batch size, the precision and the repetitions of its stages.

        Raises:
            InputError: if a stage's blocks are longer than the positions that both models have.
        """
        stages: dict[str, Any] = {}
        for name, stage in self.stages().items():
            # One long block teaches more than two of half its length: benchmarks/results/memory.md.
            whole_step = name == "end_to_end" and not config.is_encoder_decoder
            most = TOKENS_PER_STEP if whole_step else BLOCK_LENGTH
            length = min(most, positions) if stage.block_length is None else stage.block_length
            if stage.steps and length > positions:
                raise InputError(f"recipe: {name}.block_length is {length}, but the models have {positions} positions.")
            size = PAIRS_PER_STEP if config.is_encoder_decoder else max(1, TOKENS_PER_STEP // length)
            stages[name] = replace(
                stage,
                block_length=length,
                batch_size=stage.batch_size or size,
                bf16=fast_bf16() if stage.bf16 == "auto" else stage.bf16,
                repeating_share=0.0 if config.is_encoder_decoder else stage.repeating_share,
            )
        return replace(self, **stages)


@cache
def fast_bf16() -> bool:
    """Return whether training is faster in bf16: on a GPU that computes in it, and a processor that is found to be so.

    The instructions of a processor do not tell. With ``avx512_bf16``, a Xeon does 84 GFLOP/s in bf16 and 150 in float32, an
    EPYC 480 and 107.
    """
    if torch.accelerator.is_available():
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return product_seconds(torch.float32) > FAST_RATIO * product_seconds(torch.bfloat16)


def product_seconds(dtype: torch.dtype) -> float:
    """Return how long a processor takes for a product of two matrices of 1,024 rows and columns, in seconds."""
    matrix = torch.ones(1024, 1024, dtype=dtype)
    return Timer("matrix @ matrix.T", globals={"matrix": matrix}).blocked_autorange(min_run_time=0.05).median


def load_settings(name: str | Path, *, small: bool = False) -> dict[str, Any]:
    """Load a recipe of `hf-rfa finetune`, a name or a YAML file: options by name, with those of its ``small`` variant.

    Raises:
        InputError: if there is no such recipe, it cannot be read, has an unknown option, or has no small variant.
    """
    path, settings = read_recipe("finetune", name)
    variant = settings.pop("small", None)
    changes = variant if small else {}
    if not isinstance(changes, dict):
        raise InputError(f"the recipe {path} has no small variant.")
    return checked(merge(settings, changes), FinetuneArguments, Seq2SeqTrainingArguments, where=f"recipe {path}")


def merge(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which ``changes`` win; fields of ``config_overrides`` one by one."""
    merged = {**settings, **changes}
    if merged.get("config_overrides") is not None:
        before, after = (read_overrides(each.get("config_overrides")) for each in (settings, changes))
        merged["config_overrides"] = {**before, **after}
    return merged
