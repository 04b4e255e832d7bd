"""The refusal of a conversion that has ruined the model, by its perplexity on the calibration text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_rfa.errors import InputError
from hf_rfa.evaluation.perplexity import shown

from .configuration import converted_layers

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

    def __str__(self) -> str:
        """Say them in words."""
        stages = ("softmax", "swapped", "calibrated")
        return ", ".join(f"{stage} {shown(getattr(self, stage))}" for stage in stages)

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
        cross = " or cross attention (--config cross_layers=none)" if converted_layers(config, "cross") else ""
        raise InputError(
            "the conversion has ruined the model, and nothing was written: on the text its perplexity is "
            f"{shown(perplexities.calibrated)}, more than {MAX_PERPLEXITY_RATIO:g} times the base model's "
            f"{shown(perplexities.softmax)}. Calibrate on other text, give it more memory (--memory), keep layers "
            f"(--layers){cross} softmax, or train it at once (--data). To write it all the same, pass --config force=true."
        )
