"""What makes a token important, so that a slot keeps it: one class a rule, with one method.

A token's importance falls with its age. At query t that of token j is

    i_tj = i_j − r (t − j)

All tokens lose the same importance at a step, so that their order never changes, and the score i_j + r j stands for it. The
slots hold the first K tokens by score among those that have left the window, and the earlier of two that are equal: what is
kept depends on no split of the text (`hf_rfa.models.lifetimes`).

Choosing tokens by a score of their own that needs no later query follows Devoto et al. 2024 (arXiv 2406.11430), who take the
norm of the key; fitting it to the attention that is received, Huang et al. 2024 (Locret, arXiv 2410.01805).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

IMPORTANCES: dict[str, type[Importance]] = {}
#: The name of `LearnedImportance`.
DEFAULT_IMPORTANCE = "learned"


def register_importance(name: str) -> Callable[[type[Importance]], type[Importance]]:
    """Class decorator: make an `Importance` available as ``importance=name`` of a configuration."""

    def register(cls: type[Importance]) -> type[Importance]:
        cls.name = name
        IMPORTANCES[name] = cls
        return cls

    return register


class Importance(nn.Module, ABC):
    """How important tokens are to the heads of a layer that have slots.

    Args:
        hidden_size: width of the layer's input.
        num_heads: H, the key-value heads that have slots.
        head_dim: d, width of a head.

    Attributes:
        recency: r, what a token's score grows by with every token before it, [H] in float32; a buffer that is zero at first.
    """

    name: ClassVar[str]
    #: Whether conversion fits the buffers to a text (`hf_rfa.convert.calibrate.importance`).
    needs_text: ClassVar[bool] = False
    recency: Tensor

    def __init__(self, *, hidden_size: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.register_buffer("recency", torch.zeros(num_heads))

    def reset_parameters(self) -> None:
        """Set the buffers to their initial values, where no checkpoint has set them."""
        init.zeros_(self.recency)

    @abstractmethod
    def score(self, hidden_states: Tensor, key: Tensor, ordinal: Tensor) -> Tensor:
        """Return the scores of tokens, by which slots rank them, [B, H, T] in float32.

        Args:
            hidden_states: the layer's input, [B, T, width].
            key: the tokens' keys, rotated by their positions, [B, H, T, d].
            ordinal: how many tokens came before each since the origin (`hf_rfa.models.positions`), [B, T]. A score may grow
                with it by `recency`, and must not depend on it otherwise.
        """


@register_importance(DEFAULT_IMPORTANCE)
class LearnedImportance(Importance):
    """i_j = w·x_j of the layer's input x: buffers that conversion fits to the attention that tokens receive.

    Attributes:
        weight: w, [H, width]. Zero until calibration, as r is; the slots then hold the first tokens that leave the window.
    """

    needs_text = True
    weight: Tensor

    def __init__(self, *, hidden_size: int, num_heads: int, head_dim: int) -> None:
        super().__init__(hidden_size=hidden_size, num_heads=num_heads, head_dim=head_dim)
        self.register_buffer("weight", torch.zeros(num_heads, hidden_size))

    def reset_parameters(self) -> None:
        """Set both buffers to 0, where no checkpoint has set them."""
        super().reset_parameters()
        init.zeros_(self.weight)

    def score(self, hidden_states: Tensor, key: Tensor, ordinal: Tensor) -> Tensor:
        """Return w·x_j + r j; see the base class. No gradient flows into the input."""
        hidden_states, weight = hidden_states.detach() if hidden_states.requires_grad else hidden_states, self.weight
        importance = F.linear(hidden_states.to(weight.dtype), weight)
        return torch.addcmul(importance, self.recency, ordinal.unsqueeze(-1)).transpose(1, 2)


@register_importance("key_norm")
class KeyNorm(Importance):
    """i_j = −log ‖k_j‖: tokens with short keys receive most attention (Devoto et al. 2024, arXiv 2406.11430).

    A word that comes again has a key of the same length up to rounding. Steps of `STEP` make the two equal, so that the
    earlier one stays however the text is split.
    """

    STEP: ClassVar[float] = 2.0**-12

    def score(self, hidden_states: Tensor, key: Tensor, ordinal: Tensor) -> Tensor:
        """Return −log ‖k_j‖, rounded; see the base class."""
        norm = key.detach().float().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        return -(norm.log() / self.STEP).round() * self.STEP
