"""Weights of 8 bits: the matrices of a model's linear layers as whole numbers from −127 to 127, with a scale for each output.

    W_oi ≈ s_o · Q_oi,    s_o = max_i |W_oi| / 127

Queries, keys, values and all that attention makes of them stay as they are. So do embeddings and the matrix of the logits,
feature maps and gates, and the experts of a mixture, which are no linear layers. A decoding step reads half the bytes of 16
bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .errors import InputError

#: Rows up to which a CPU multiplies 8-bit weights as they are. With more, making 16 bits of them once costs less.
MOST_ROWS = 32
#: torch's kernel reads so many inputs at a time, past the end of a matrix whose number of inputs is no multiple of it.
INPUTS_AT_ONCE = 16
#: The largest number of 8 bits that is used.
LARGEST = 127


class Int8Linear(nn.Module):
    """A linear layer with weights of 8 bits, for inference.

    Attributes:
        weight: Q, [outputs, inputs], int8.
        scale: s, [outputs], in the dtype that the layer was in.
        bias: [outputs], or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        values = weight.detach()
        scale = values.float().abs().amax(1).clamp_min(1e-30) / LARGEST
        scale = scale.to(values.dtype)  # what is divided by is what is multiplied with later
        whole = (values.float() / scale.float()[:, None]).round().clamp(-LARGEST, LARGEST)
        self.weight = nn.Parameter(whole.to(torch.int8).contiguous(), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.out_features, self.in_features = self.weight.shape

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + b, [..., outputs], for x [..., inputs]."""
        rows = x.reshape(-1, self.in_features)
        scale = self.scale.to(x.dtype)
        few = len(rows) <= MOST_ROWS and self.in_features % INPUTS_AT_ONCE == 0
        if few and x.device.type == "cpu" and x.dtype == torch.bfloat16:
            output = torch._weight_int8pack_mm(rows, self.weight, scale)
        else:
            output = F.linear(rows, self.weight.to(x.dtype)) * scale
        output = output if self.bias is None else output + self.bias.to(x.dtype)
        return output.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Return the layer's shape, as `nn.Linear` does."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def linear_layers(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear | Conv1D]]:
    """Return the linear layers of a model, GPT-2's `Conv1D` among them, each as (its parent, its name there, the layer)."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, (nn.Linear, Conv1D))
    ]


def plain_weight(layer: nn.Linear | Conv1D) -> Tensor:
    """Return a linear layer's weight as [outputs, inputs]; `Conv1D` has it the other way."""
    return layer.weight.mT if isinstance(layer, Conv1D) else layer.weight


def quantize_weights(model: PreTrainedModel) -> None:
    """Replace the linear layers of a model by layers with weights of 8 bits (`Int8Linear`), in place.

    The model then serves inference alone: it is not trained and not saved.

    Raises:
        InputError: if it has no linear layers, or if its weights are quantized already.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        raise InputError("the weights of this checkpoint are quantized already. Leave int8 out.")
    logits = model.get_output_embeddings()
    found = [each for each in linear_layers(model) if each[2] is not logits]
    if not found:
        raise InputError(f"a {model.config.model_type} model has no linear layers, whose weights int8 is about.")
    while found:
        parent, name, child = found.pop()  # a plain weight is let go when it is replaced
        setattr(parent, name, Int8Linear(plain_weight(child), child.bias))
