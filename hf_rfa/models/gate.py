"""The recency gate: how fast the state of random features forgets."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .memory import compute_dtype


class Gate(nn.Module):
    """The recency gate g = sigmoid(w·x + b), one per head and token (Peng et al. 2021, eq. 6).

    Not a linear layer: it returns two things, in float32, and what adapts or quantizes linear layers has to pass it by.

    Its initial value does not depend on x, and spreads the heads' time scales 1 / (1 − g) evenly on a logarithmic scale
    from a quarter of the model's ``max_positions`` to four times their number (chrono initialization).
    """

    def __init__(self, hidden_size: int, num_heads: int, max_positions: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.max_positions = max_positions
        self.weight = nn.Parameter(torch.empty(num_heads, hidden_size))
        self.bias = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to 0 and the bias by the time scales, where no checkpoint has set them."""
        if self.weight.is_meta:
            return
        longest, shortest = math.log(4.0 * self.max_positions), math.log(max(2.0, self.max_positions / 4.0))
        time_scales = torch.linspace(shortest, longest, self.num_heads).exp()
        init.zeros_(self.weight)
        init.copy_(self.bias, (time_scales - 1.0).log())

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return (log g, 1 − g) for hidden states [B, T, width], each [B, H, T] in the computing dtype."""
        dtype = compute_dtype(hidden_states.dtype)
        logits = F.linear(hidden_states.to(dtype), self.weight.to(dtype), self.bias.to(dtype)).transpose(1, 2)
        return F.logsigmoid(logits), torch.sigmoid(-logits)
