"""The figures of an export: how a graph compares with its model, and what it takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Measured:
    """How a graph compares with its model in torch, on a text that the model wrote.

    Attributes:
        difference: largest difference of two logits, over the largest logit.
        same_top: share of tokens whose most likely successor is the same.
        perplexity: the graph's perplexity over torch's.
        split_difference: the same as ``difference``, of a text read at once and read token by token.
        step_ms: milliseconds of a step, the median.
        prompt_ms: milliseconds a token of a prompt of `PROMPT` tokens.
    """

    difference: float
    same_top: float
    perplexity: float
    split_difference: float
    step_ms: float
    prompt_ms: float


@dataclass(frozen=True, kw_only=True)
class ExportReport(Measured):
    """The figures of an export.

    Attributes:
        source: the checkpoint.
        destination: the folder.
        int8: whether the weights are of 8 bits.
        num_bytes: bytes of the graph and its weights.
        state_bytes: bytes of the states of one text, of any length.
    """

    source: str
    destination: str
    int8: bool
    num_bytes: int
    state_bytes: int

    def rows(self) -> list[tuple[str, str]]:
        """Return the figures for people."""
        return [
            ("graph and weights", f"{self.num_bytes / 1e6:.1f} MB, {'8 bits' if self.int8 else 'float32'}"),
            ("states of one text, of any length", f"{self.state_bytes / 1e6:.2f} MB"),
            ("a token", f"{self.step_ms:.1f} ms; {self.prompt_ms:.1f} ms in a prompt"),
            ("largest difference of logits from torch's", f"{self.difference:.1e} of the largest"),
            ("the same, of a text at once and by token", f"{self.split_difference:.1e}"),
            ("same most likely token", f"{self.same_top:.1%}"),
            ("perplexity over torch's", f"{self.perplexity:.4f}"),
        ]
