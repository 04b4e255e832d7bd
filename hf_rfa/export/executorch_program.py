"""A decoder as an ExecuTorch program: ``forward(tokens, input_pos)``, with states in buffers, as its stock runner calls it.

A program reads one token at a time. At position 0 a text begins, and the states are emptied. A text ends where the positions
end that the model was trained for, since old tokens do not move along (`hf_rfa.models.positions`): with a condition in it,
which ExecuTorch traces anew in every pass, a program would take far longer to write than it does (docs/serving.md).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.masking import MASKED_LOGIT
from ..models.memory import INITIAL
from ..models.streaming import find_out_rotations
from .step import DecodingStep


class Program(nn.Module):
    """One token of a text, whose states are buffers.

    Args:
        model: a decoder with a language-model head, all of whose layers are RFA.

    Raises:
        InputError: for a model with an encoder, or with softmax layers, whose caches grow.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.step = DecodingStep(model)
        stack, config = model.rfa_stacks[0], model.config
        if stack.reads_unrotated:
            find_out_rotations(stack, torch.zeros(1, 1, dtype=torch.long))
        layouts = [layout for layer in stack.rfa_attention for layout in layer.memory_layouts(model.dtype)]
        self.length = config.trained_positions() if config.streams() else config.max_position_embeddings
        self.empty: list[float] = []
        for layout in layouts:
            for name, (shape, dtype) in layout.tensors().items():
                value = INITIAL.get(name, 0)
                self.register_buffer(f"state_{len(self.empty)}", torch.full((1, *shape), value, dtype=dtype))
                self.empty.append(value)

    def states(self) -> list[Tensor]:
        """Return the buffers."""
        return [getattr(self, f"state_{number}") for number in range(len(self.empty))]

    def forward(self, tokens: Tensor, input_pos: Tensor) -> Tensor:
        """Return the logits [1, 1, vocabulary] after a token [1, 1] at a position [1]; NaN at one past the last."""
        buffers, begins = self.states(), input_pos == 0
        states = [state.masked_fill(begins, value) for state, value in zip(buffers, self.empty, strict=True)]
        logits, after = self.step(tokens, input_pos[None], states)
        for buffer, state in zip(buffers, after, strict=True):
            buffer.copy_(state)
        return logits.masked_fill(input_pos >= self.length, torch.nan)

    def metadata(self) -> dict[str, Any]:
        """Return what the stock runner asks a program for."""
        config = self.step.model.config
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        return {
            "get_bos_id": -1 if config.bos_token_id is None else config.bos_token_id,
            "get_eos_ids": [token for token in ends if token is not None],
            "get_vocab_size": config.vocab_size,
            "get_max_seq_len": self.length,
            "get_max_context_len": self.length,
            "use_kv_cache": True,
            "enable_dynamic_shape": False,
        }


def write_program(model: Any, path: Path, progress: Callable[[str, int], None]) -> int:
    """Write a decoder's program, and return the bytes of its states. Most of the time is spent in lowering it.

    Linear layers are in XNNPACK, and all else in ExecuTorch's portable operators.
    """
    program = Program(model)
    example = torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, dtype=torch.long)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporters' own
        from executorch.backends.xnnpack.partition.config.gemm_configs import AddmmConfig, LinearConfig
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

        progress("tracing the program", 1)
        with patch.object(F, "scaled_dot_product_attention", _plain_attention):
            exported = torch.export.export(program, example, strict=False)
        exported = exported.run_decompositions({})
        progress("lowering the program", 1)
        edge = to_edge_transform_and_lower(
            exported,
            partitioner=[XnnpackPartitioner(configs=[LinearConfig, AddmmConfig])],
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
            constant_methods=program.metadata(),
        )
        progress("writing the program", 1)
        with path.open("wb") as file:
            edge.to_executorch().write_to_file(file)
    return sum(state.nbytes for state in program.states())


def _plain_attention(query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None, scale: float) -> Tensor:
    """Attend by products and a softmax: torch decomposes its own function into views that the strides forbid."""
    logits = query @ key.mT * scale
    logits = logits if attn_mask is None else logits.masked_fill(~attn_mask, MASKED_LOGIT)
    return logits.softmax(-1) @ value


class RunningProgram:
    """A program and its text."""

    reads_prompts = False

    def __init__(self, path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is experimental
            from executorch.runtime import Runtime

            self.program = Runtime.get().load_program(path)
            self.method = self.program.load_method("forward")
        self.position = 0

    def begin(self) -> None:
        """Begin a new text."""
        self.position = 0

    def read(self, ids: Tensor) -> Tensor:
        """Return the logits [1, vocabulary] of the last of some more tokens [1, T]."""
        for token in ids.split(1, dim=1):
            logits = self.method.execute((token.contiguous(), torch.tensor([self.position])))[0]
            self.position += 1
        return logits[:, -1].clone()
