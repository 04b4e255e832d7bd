"""Heads without features: what stands in place of a feature map, and the maps of those that have some, by name.

Checkpoints without features carry no other module of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

from torch import Tensor, nn

#: The map whose checkpoints carry no module of other maps.
SUMMARY = "summary"


class NoFeatures(nn.Module):
    """``feature_map="none"``: what leaves a head's memory is forgotten for good.

    Args:
        num_heads: H, heads.
        head_dim: d, width of a head.
        groups: G, the number of query heads that share each of the H key-value heads.
        seed: of the queries that calibration draws.
    """

    name: ClassVar[str] = "none"
    feature_dim = state_rows = 0
    windowed = signed = has_exponent = False
    denominator_floor = horizon = None
    has_random_matrix = learns_from_raw = needs_text = False
    needs_window = unrotated = True
    reads_means = False
    default_num_features = None

    def __init__(self, *, num_heads: int, head_dim: int, groups: int = 1, seed: int = 0) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.groups, self.seed = num_heads, head_dim, groups, seed

    @classmethod
    def resolve_num_features(cls, num_features: int | None, head_dim: int, *, name: str = "num_features") -> int:
        """Return 0, or raise a ValueError for another number."""
        if num_features:
            raise ValueError(
                f"{name}={num_features} does not fit feature_map='none', which has no features. Leave it out."
            )
        return 0

    def reset_parameters(self) -> None:
        """Do nothing: there are none."""

    def least_shift(self, state: Tensor | None) -> None:
        """Return None: nothing is to be shifted."""


def feature_map_class(name: str) -> Any:
    """Return the class of a feature map by its name, `NoFeatures` for ``"none"``, or None if there is none."""
    if name == NoFeatures.name:
        return NoFeatures
    if name == SUMMARY:
        return import_module(".summary_feature_map", __package__).SummaryMap
    return all_feature_maps().get(name)


def all_feature_maps() -> dict[str, Any]:
    """Return `hf_rfa.models.feature_maps.FEATURE_MAPS`, once all of them are registered."""
    import_module(".summary_feature_map", __package__)
    return import_module(".learned_feature_maps", __package__).FEATURE_MAPS
