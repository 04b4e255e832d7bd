"""Recipes: the settings of a distillation, one YAML file each."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import yaml

from hf_rfa.convert.calibration_data import BLOCK_LENGTH
from hf_rfa.errors import InputError

#: Tokens per step where a recipe does not say how many blocks, and pairs per step.
TOKENS_PER_STEP, PAIRS_PER_STEP = 2048, 8
#: Recipes that come with the package.
FOLDER = Path(__file__).parent / "recipes" / "distill"


def read_recipe(folder: Path, name: str | Path) -> tuple[Path, dict[str, Any]]:
    """Read a YAML file of settings.

    Args:
        folder: of the recipes that come with the package.
        name: of one of these, or the path of a file.

    Returns:
        The file, and what it holds.

    Raises:
        InputError: if there is none, or if it holds no settings.
    """
    path = folder / f"{name}.yaml"
    if not path.is_file():
        path = Path(name)
    if not path.is_file():
        known = ", ".join(sorted(each.stem for each in folder.glob("*.yaml")))
        raise InputError(f"there is no recipe {name}. Pass a YAML file, or one of: {known}.")
    try:
        values: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"cannot read the recipe {path}: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"the recipe {path} holds no settings.")
    return path, values


@dataclass(frozen=True)
class Stage:
    """One stage of training.

    Attributes:
        steps: optimiser steps; 0 leaves the stage out.
        batch_size: blocks or pairs per step; None takes `PAIRS_PER_STEP` pairs, or blocks of `TOKENS_PER_STEP` tokens.
        block_length: tokens per block; for pairs the most tokens of either side. None takes `BLOCK_LENGTH`, or the models'
            positions if they are fewer.
        learning_rate: of what the stage is about: feature maps and gates in attention transfer (default 1e-2), all else end
            to end (default 1e-4).
        rfa_learning_rate: of feature maps and gates, end to end.
        kl_weight: share of the KL in the loss, end to end.
        dropout: whether the model's own dropout acts, end to end.
        lora_rank: rank of LoRA matrices to train end to end instead of the parent's own weights; 0 trains these.
        bf16: compute in mixed precision; phases, features, gates and states stay in float32.
        own_inputs: share of the steps, the last ones, of attention transfer on what the converted model itself feeds its
            layers, errors included, instead of the parent's inputs.
        output_weight: weight of the relative squared error of the attention's outputs beside the KL of its weights, in
            attention transfer.
    """

    steps: int = 0
    batch_size: int | None = None
    block_length: int | None = None
    learning_rate: float = 1e-2
    rfa_learning_rate: float = 1e-3
    kl_weight: float = 0.5
    dropout: bool = False
    lora_rank: int = 0
    bf16: bool = False
    own_inputs: float = 0.0
    output_weight: float = 0.0

    def check(self, name: str) -> None:
        """Raise an `InputError` that names the field, its value and what is allowed."""
        least = {"steps": 0, "batch_size": 1, "block_length": 2, "lora_rank": 0}
        for each, smallest in least.items():
            value = getattr(self, each)
            if each in ("batch_size", "block_length") and value is None:
                continue
            if not isinstance(value, int) or value < smallest:
                raise InputError(f"recipe: {name}.{each} must be a whole number of at least {smallest}, got {value!r}.")
        for each in ("learning_rate", "rfa_learning_rate", "output_weight"):
            value = getattr(self, each)
            if not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise InputError(f"recipe: {name}.{each} must be a number of at least 0, got {value!r}.")
        for each in ("kl_weight", "own_inputs"):
            value = getattr(self, each)
            if not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise InputError(f"recipe: {name}.{each} must be from 0 to 1, got {value!r}.")
        for each in ("dropout", "bf16"):
            if not isinstance(getattr(self, each), bool):
                raise InputError(f"recipe: {name}.{each} must be true or false, got {getattr(self, each)!r}.")

    def resolve(self, config: Any, positions: int) -> Stage:
        """Return this stage with every number stated.

        Args:
            config: the model's configuration.
            positions: the most tokens that both models take.
        """
        length = min(BLOCK_LENGTH, positions) if self.block_length is None else self.block_length
        size = PAIRS_PER_STEP if config.is_encoder_decoder else max(1, TOKENS_PER_STEP // length)
        return replace(self, block_length=length, batch_size=size if self.batch_size is None else self.batch_size)


@dataclass(frozen=True)
class Recipe:
    """The settings of a distillation; ``finetune/recipes/distill`` holds those that come with the package, as YAML.

    Attributes:
        transfer: attention transfer, layer by layer.
        end_to_end: training of the whole model on the parent's logits.
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
            InputError: if there is none, or if it says something that no recipe says.
        """
        path, values = read_recipe(FOLDER, name)
        stages = {}
        for stage in ("transfer", "end_to_end"):
            given = values.pop(stage, {}) or {}
            unknown = sorted(set(given) - {item.name for item in fields(Stage)})
            if unknown:
                allowed = ", ".join(item.name for item in fields(Stage))
                raise InputError(f"recipe {path}: {stage} has no setting {', '.join(unknown)}. There are: {allowed}.")
            stages[stage] = replace(getattr(cls(), stage), **given)
            stages[stage].check(stage)
        seed = values.pop("seed", 0)
        if values or not isinstance(seed, int):
            wrong = ", ".join(sorted(values)) or f"seed {seed!r}"
            raise InputError(f"recipe {path}: {wrong} is not understood. There are: transfer, end_to_end, seed.")
        return cls(**stages, seed=seed)

    def with_steps(self, *, transfer: int | None = None, end_to_end: int | None = None) -> Recipe:
        """Return this recipe with other numbers of steps."""
        return replace(
            self,
            transfer=self.transfer if transfer is None else replace(self.transfer, steps=transfer),
            end_to_end=self.end_to_end if end_to_end is None else replace(self.end_to_end, steps=end_to_end),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values."""
        return asdict(self)
