"""The recency gate."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .feature_maps import compute_dtype


class Gate(nn.Module):
    """g = sigmoid(w·x + b), one per head and token (Peng et al. 2021, eq. 6).

    Not a linear layer: it returns two things, in float32, and what adapts or quantises linear layers has to pass it by.

    The start does not depend on x, and spreads the heads' spans 1 / (1 − g) evenly on a logarithmic scale from a quarter
    of the model's positions to four times as many.

    Args:
        hidden_size: width of x.
        num_heads: H.
        max_positions: the model's positions.
    """

    def __init__(self, hidden_size: int, num_heads: int, max_positions: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.max_positions = max_positions
        self.weight = nn.Parameter(torch.empty(num_heads, hidden_size))
        self.bias = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to 0 and the bias to the spans, where no checkpoint has set them."""
        longest, shortest = math.log(4.0 * self.max_positions), math.log(max(2.0, self.max_positions / 4.0))
        spans = torch.linspace(shortest, longest, self.num_heads).exp()
        if self.weight.is_meta:
            return
        init.zeros_(self.weight)
        init.copy_(self.bias, (spans - 1.0).log())

    @torch.no_grad()
    def set_spans(self, spans: Tensor) -> None:
        """Set the bias so that the heads' spans 1 / (1 − g) are these, [H], in tokens and above 1, where w·x is 0."""
        self.bias.copy_((spans - 1.0).log())

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return (log g, 1 − g) for hidden states [B, T, width], each [B, H, T] in the computing dtype."""
        dtype = compute_dtype(hidden_states.dtype)
        logits = F.linear(hidden_states.to(dtype), self.weight.to(dtype), self.bias.to(dtype)).transpose(1, 2)
        return F.logsigmoid(logits), torch.sigmoid(-logits)
