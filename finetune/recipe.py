"""Recipes in YAML files: the settings of a distillation, and options of `hf-rfa finetune`."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
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
        known = ", ".join(sorted(each.stem for each in (FOLDER / command).glob("*.yaml")))
        raise InputError(f"there is no recipe {name}. Pass a YAML file, or one of: {known}.")
    try:
        values: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"cannot read the recipe {path}: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"the recipe {path} holds no settings.")
    return path, values


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
    "student_inputs": _SHARE,
    "output_mse_weight": _NUMBER,
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
            processor or the accelerator has instructions for it.
        student_inputs: share of the steps, the last ones, of attention transfer on the inputs that the layers have in the
            converted model, errors included, instead of those in the teacher.
        output_mse_weight: weight of the relative squared error of the attention's outputs, added to the KL of its weights in
            attention transfer.
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
    student_inputs: float = 0.0
    output_mse_weight: float = 0.0
    repeating_share: float = 0.0

    def check(self, name: str) -> None:
        """Raise an `InputError` that names the setting, its value and the values it may have."""
        for setting, (words, allowed) in ALLOWED.items():
            value = getattr(self, setting)
            if not allowed(value) and not (value is None and setting in ("batch_size", "block_length")):
                raise InputError(f"recipe: {name}.{setting} must be {words}, got {value!r}.")


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
        path, values = read_recipe("distill", name)
        known = [field.name for field in fields(Stage)]
        stages = {}
        for stage, default in cls().stages().items():
            given = values.pop(stage, None) or {}
            unknown = ", ".join(sorted(set(given) - set(known)))
            if unknown:
                raise InputError(f"recipe {path}: {stage} has no setting {unknown}. There are: {', '.join(known)}.")
            stages[stage] = replace(default, **given)
            stages[stage].check(stage)
        seed = values.pop("seed", 0)
        if values or not isinstance(seed, int):
            wrong = ", ".join(sorted(values)) or f"seed {seed!r}"
            raise InputError(f"recipe {path}: {wrong} is not understood. There are: transfer, end_to_end, seed.")
        return cls(**stages, seed=seed)

    def stages(self) -> dict[str, Stage]:
        """Return the stages by name, in order."""
        return {"transfer": self.transfer, "end_to_end": self.end_to_end}

    def with_steps(self, *, transfer: int | None = None, end_to_end: int | None = None) -> Recipe:
        """Return this recipe with other numbers of steps."""
        stages = self.stages()
        for name, steps in (("transfer", transfer), ("end_to_end", end_to_end)):
            stages[name] = stages[name] if steps is None else replace(stages[name], steps=steps)
        return Recipe(**stages, seed=self.seed)

    def resolve(self, config: Any, positions: int) -> Recipe:
        """Return this recipe with the block length, the batch size, the precision and the repetitions of its stages.

        Args:
            config: the model's configuration.
            positions: the most tokens that both models take.

        Raises:
            InputError: if a stage's blocks are longer than that.
        """
        stages = {}
        for name, stage in self.stages().items():
            # One long block teaches more than two of half its length: benchmarks/results/memory.md.
            whole_step = name == "end_to_end" and not config.is_encoder_decoder
            most = TOKENS_PER_STEP if whole_step else BLOCK_LENGTH
            length = min(most, positions) if stage.block_length is None else stage.block_length
            if stage.steps and length > positions:
                raise InputError(f"recipe: {name}.block_length is {length}, but the models have {positions} positions.")
            size = PAIRS_PER_STEP if config.is_encoder_decoder else max(1, TOKENS_PER_STEP // length)
            bf16 = has_bf16() if stage.bf16 == "auto" else stage.bf16
            share = 0.0 if config.is_encoder_decoder else stage.repeating_share  # which pairs have none of
            size = stage.batch_size or size
            stages[name] = replace(stage, block_length=length, batch_size=size, bf16=bf16, repeating_share=share)
        return Recipe(**stages, seed=self.seed)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values."""
        return asdict(self)


def has_bf16() -> bool:
    """Return whether the accelerator, or the processor where there is none, multiplies matrices in bf16."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if torch.accelerator.is_available():
        return False
    found: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(found.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def load_settings(name: str | Path, *, small: bool = False) -> dict[str, Any]:
    """Load a recipe of `hf-rfa finetune`, named as in `read_recipe`: its options by name, those under ``small`` if asked for.

    Raises:
        InputError: if there is no such recipe, it cannot be read, or has no small variant.
    """
    path, values = read_recipe("finetune", name)
    smaller = values.pop("small", None)
    if not small:
        return values
    if not isinstance(smaller, dict):
        raise InputError(f"the recipe {path} has no small variant.")
    return merge(values, smaller)


def merge(values: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Return settings in which ``others`` win; fields of ``config_overrides`` one by one."""
    overrides = {**values.get("config_overrides", {}), **others.get("config_overrides", {})}
    return {**values, **others, **({"config_overrides": overrides} if overrides else {})}


def read_overrides(text: str) -> dict[str, Any]:
    """Return the fields of a configuration that are given as a JSON object; raise an `InputError` if the text is none."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"config_overrides must be a JSON object, got {text!r}: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f'config_overrides must be a JSON object such as {{"n_layer": 4}}, got {found!r}.')
    return found


def with_recipe(words: list[str]) -> list[str]:
    """Return a command line in which ``--recipe NAME [--small]`` is replaced by the recipe's options, before all others."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--recipe", nargs="?", const="")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--config-overrides", "--config_overrides", nargs="?", const="")
    given, others = parser.parse_known_args(words)
    if given.recipe is None and given.small:
        raise InputError("--small is a variant of a recipe: pass --recipe with it.")
    if given.recipe is None:
        return words
    if not given.recipe:
        raise InputError("--recipe needs a name or a YAML file.")
    values = load_settings(given.recipe, small=given.small)
    if given.config_overrides is not None:
        values = merge(values, {"config_overrides": read_overrides(given.config_overrides)})
    return to_words(values) + others


def to_words(values: dict[str, Any]) -> list[str]:
    """Return settings as words of a command line."""
    words = []
    for name, value in values.items():
        given = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
        words += [f"--{name.replace('_', '-')}", *map(str, given)]
    return words
