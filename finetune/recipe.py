"""Recipes in YAML files: the settings of a distillation, and options of `hf-rfa finetune`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Literal, Self

import torch
import yaml

from hf_rfa.errors import InputError
from hf_rfa.io.text_io import BLOCK_LENGTH

#: Tokens per step if a recipe does not say how many blocks, and pairs per step.
TOKENS_PER_STEP, PAIRS_PER_STEP = 2048, 8
#: Recipes that come with the package, a folder for each command.
FOLDER = Path(__file__).parent / "recipes"


def read_recipe(command: Literal["distill", "finetune"], name: str | Path) -> tuple[Path, dict[str, Any]]:
    """Return a YAML file of settings for a command, and what it holds: a recipe that comes with the package, or a path.

    Raises:
        InputError: if there is none, or if it holds no settings.
    """
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


def _whole(least: int) -> tuple[str, Callable[[Any], bool]]:
    return f"a whole number of at least {least}", lambda value: isinstance(value, int) and value >= least


_NUMBER = ("a number of at least 0", lambda value: isinstance(value, (int, float)) and 0 <= value < float("inf"))
_SHARE = ("from 0 to 1", lambda value: isinstance(value, (int, float)) and 0 <= value <= 1)
_SWITCH = ("true or false", lambda value: isinstance(value, bool))
_SWITCH_OR_AUTO = ("true, false or auto", lambda value: isinstance(value, bool) or value == "auto")
#: The values that the settings of a stage may have, in words and as a check.
ALLOWED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "steps": _whole(0),
    "batch_size": _whole(1),
    "block_length": _whole(2),
    "learning_rate": _NUMBER,
    "rfa_learning_rate": _NUMBER,
    "kl_weight": _SHARE,
    "dropout": _SWITCH,
    "lora_rank": _whole(0),
    "bf16": _SWITCH_OR_AUTO,
    "compiled": _SWITCH,
    "repeating_share": _SHARE,
}


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
        bf16: compute in mixed precision; phases, features, gates and states stay in float32. "auto" does so where the
            accelerator, or the processor where there is none, is faster in it.
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
            for setting, (words, is_allowed) in ALLOWED.items():
                value = getattr(stage, setting)
                if not is_allowed(value) and not (value is None and setting in ("batch_size", "block_length")):
                    raise InputError(f"recipe: {name}.{setting} must be {words}, got {value!r}.")

    @classmethod
    def load(cls, name: str | Path) -> Self:
        """Load a recipe.

        Args:
            name: of a recipe that comes with the package, or the path of a YAML file.

        Returns:
            The recipe, its settings checked.

        Raises:
            InputError: if there is none, or if it has an unknown setting.
        """
        path, settings = read_recipe("distill", name)
        stages = {}
        for stage, default in cls().stages().items():
            changes = settings.pop(stage, None) or {}
            if unknown := ", ".join(sorted(changes.keys() - ALLOWED.keys())):
                raise InputError(f"recipe {path}: {stage} has no setting {unknown}. There are: {', '.join(ALLOWED)}.")
            stages[stage] = replace(default, **changes)
        seed = settings.pop("seed", 0)
        if settings or not isinstance(seed, int):
            wrong = ", ".join(sorted(settings)) or f"seed {seed!r}"
            raise InputError(f"recipe {path}: {wrong} is not understood. There are: transfer, end_to_end, seed.")
        return cls(**stages, seed=seed)

    def stages(self) -> dict[str, Stage]:
        """Return the stages by name, in order."""
        return {"transfer": self.transfer, "end_to_end": self.end_to_end}

    def with_steps(self, *, transfer: int | None = None, end_to_end: int | None = None) -> Recipe:
        """Return this recipe with other numbers of steps."""
        steps = {"transfer": transfer, "end_to_end": end_to_end}
        stages: Any = {
            name: replace(self.stages()[name], steps=count) for name, count in steps.items() if count is not None
        }
        return replace(self, **stages)

    def resolve(self, config: Any, positions: int, interrupted: Mapping[str, Any] | None = None) -> Recipe:
        """Return this recipe with the block length, the batch size, the precision and the repetitions of its stages.

        Args:
            config: the model's configuration.
            positions: the most tokens that both models take.
            interrupted: the resolved recipe, as a dictionary, of a run that is to go on in the precision it began in, where
                this recipe leaves that open.

        Raises:
            InputError: if a stage's blocks are longer than that.
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
            bf16 = stage.bf16
            if bf16 == "auto":
                bf16 = interrupted[name]["bf16"] if interrupted else bf16_pays()
            share = 0.0 if config.is_encoder_decoder else stage.repeating_share  # which pairs have none of
            size = stage.batch_size or size
            stages[name] = replace(stage, block_length=length, batch_size=size, bf16=bf16, repeating_share=share)
        return replace(self, **stages)


@cache
def bf16_pays() -> bool:
    """Return whether the accelerator, or the processor where there is none, multiplies matrices faster in bf16.

    That processors can is not enough: a Xeon with AVX-512 alone has 84 GFLOP/s in bf16 and 150 in float32, others have twice
    as many in bf16. So it is timed there, once a process, and has to be a fifth faster.
    """
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if torch.accelerator.is_available():
        return False
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    if not any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16")):
        return False
    ratios = (product_seconds(torch.float32) / product_seconds(torch.bfloat16) for _ in range(7))
    return median(ratios) > 1.2


def product_seconds(dtype: torch.dtype) -> float:
    """Return how long the processor takes for the product of two matrices of 768 rows and columns."""
    matrix = torch.ones(768, 768, dtype=dtype)
    matrix @ matrix
    start = time.perf_counter()
    matrix @ matrix
    return time.perf_counter() - start


def load_settings(name: str | Path, *, small: bool = False) -> dict[str, Any]:
    """Load a recipe of `hf-rfa finetune`, named as in `read_recipe`: its options by name, those under ``small`` if asked for.

    Raises:
        InputError: if there is no such recipe, it cannot be read, or has no small variant.
    """
    path, settings = read_recipe("finetune", name)
    small_settings = settings.pop("small", None)
    if not small:
        return settings
    if not isinstance(small_settings, dict):
        raise InputError(f"the recipe {path} has no small variant.")
    return merge(settings, small_settings)


def merge(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return settings in which ``changes`` win; fields of ``config_overrides`` one by one."""
    overrides = {**settings.get("config_overrides", {}), **changes.get("config_overrides", {})}
    return {**settings, **changes, **({"config_overrides": overrides} if overrides else {})}


def read_overrides(text: str) -> dict[str, Any]:
    """Return the fields of a configuration that are given as a JSON object; raise an `InputError` if the text is none."""
    try:
        overrides = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"config_overrides must be a JSON object, got {text!r}: {error}") from error
    if not isinstance(overrides, dict):
        raise InputError(f'config_overrides must be a JSON object such as {{"n_layer": 4}}, got {overrides!r}.')
    return overrides


def to_words(settings: dict[str, Any]) -> list[str]:
    """Return settings as words of a command line, whose parser checks them."""
    words = []
    for name, value in settings.items():
        values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
        words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return words
