"""Weights packed for a CPU: the float32 matrices of a model's linear layers in the layout in which oneDNN multiplies fastest.

A decoding step multiplies every weight by as few rows as there are sequences, and should take as long as reading the weights
does. torch's products of plain weights take up to 3 × as long on some processors, most of all for 2 to 16 rows. The products
are the same in float32, sums in another order. A model with packed weights is for inference: it is not trained and not saved.

The queries, keys and values of RFA's self-attention become one product, for a step of few rows spends a part of its time on
starting products.
"""

from __future__ import annotations

import platform
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .errors import InputError
from .models.attention import RFAAttentionMixin

#: The number of rows that oneDNN is told to expect. Its layout is good for any number.
EXPECTED_ROWS = 8
PROCESSORS = ("x86_64", "amd64")
#: Layers of self-attention that have its input in common.
PROJECTIONS = ("q_proj", "k_proj", "v_proj")

# Under torch.compile an operator of its own: the compiler takes oneDNN's operator for constant weights alone.
_library = torch.library.Library("hf_rfa", "DEF")
_library.define("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


def packed_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x Wᵀ + b, [..., outputs], for x [..., inputs] and a packed W."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


for _key in ("CPU", "MkldnnCPU"):
    _library.impl("packed_linear", packed_product, _key)


@torch.library.register_fake("hf_rfa::packed_linear")
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


class PackedLinear(nn.Module):
    """A linear layer with packed weights, for inference.

    Attributes:
        weight: W, [outputs, inputs], float32 in oneDNN's layout.
        bias: [outputs], or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), EXPECTED_ROWS)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + b, [..., outputs], for x [..., inputs] in float32.

        Raises:
            InputError: for another dtype, under autocast, or where a gradient would be lost.
        """
        if (
            x.dtype != torch.float32
            or torch.is_autocast_enabled("cpu")
            or (x.requires_grad and torch.is_grad_enabled())
        ):
            raise InputError(
                f"packed weights multiply float32 without autocast and without gradients, and got {x.dtype}, requires_grad "
                f"{x.requires_grad}. Load the checkpoint again, and leave its weights as they are."
            )
        if torch.compiler.is_compiling():
            return torch.ops.hf_rfa.packed_linear(x, self.weight, self.bias)
        return packed_product(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Return the layer's shape, as `nn.Linear` does."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _save_to_state_dict(self, *args: object, **kwargs: object) -> None:
        raise InputError(
            "packed weights are for inference and cannot be saved. Load the checkpoint again and save that."
        )


class PackedParts(nn.Module):
    """Linear layers of the same inputs as one product, for inference.

    Whatever asks for the first part of an input (`PackedPart`) has all parts computed, and the others find theirs. An input
    that another part was not asked for is another product: results do not depend on who asks for what, and when, as long as
    nobody changes an input in place before all have asked.

    Attributes:
        linear: the layers' rows, one layer after the other.
        sizes: outputs of each layer.
    """

    def __init__(self, layers: list[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [each.out_features for each in layers]
        bias = None
        if any(each.bias is not None for each in layers):
            zeros = [each.weight.new_zeros(each.out_features) for each in layers]
            bias = torch.cat(
                [zero if each.bias is None else each.bias for each, zero in zip(layers, zeros, strict=True)]
            )
        self.linear = PackedLinear(torch.cat([each.weight.detach() for each in layers]), bias)
        self._found: tuple[Tensor, dict[int, Tensor]] | None = None  # an input, and the parts of it not asked for yet

    def part(self, x: Tensor, index: int) -> Tensor:
        """Return the outputs of one layer, [..., outputs], for x [..., inputs]."""
        found = self._found
        if found is None or found[0] is not x or index not in found[1]:
            found = x, dict(enumerate(self.linear(x).split(self.sizes, dim=-1)))
        others = {other: each for other, each in found[1].items() if other != index}
        self._found = (x, others) if others else None  # nothing is kept when all have their parts
        return found[1][index].contiguous()


class PackedPart(nn.Module):
    """One layer of `PackedParts`."""

    def __init__(self, parts: PackedParts, index: int) -> None:
        super().__init__()
        self.parts, self.index = parts, index
        self.in_features, self.out_features = parts.linear.in_features, parts.sizes[index]

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's outputs, [..., outputs], for x [..., inputs]; see `PackedLinear.forward`."""
        return self.parts.part(x, self.index)


def why_not_packed(model: PreTrainedModel) -> str | None:
    """Return why a model's weights cannot be packed, None if they can be."""
    if platform.machine().lower() not in PROCESSORS or not torch.backends.mkldnn.is_available():
        return f"packing needs an x86-64 processor and a torch with oneDNN, and this is {platform.machine()}"
    if model.device.type != "cpu" or model.dtype != torch.float32:
        return f"packing is for float32 on a CPU, and this model is in {model.dtype} on {model.device}"
    if getattr(model.config, "quantization_config", None) is not None:
        return "the weights of this checkpoint are quantized"
    return None


def pack_weights(model: PreTrainedModel) -> None:
    """Replace the linear layers of a model, that of the logits among them, by layers with packed weights, in place.

    They take as many bytes as before, but for logits tied to the embeddings, which then have both layouts. The model serves
    inference alone afterwards.

    Raises:
        InputError: if the model's weights are not float32 on an x86-64 CPU, or not plain.
    """
    if reason := why_not_packed(model):
        raise InputError(f"{reason}. Leave the weights as they are.")
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, RFAAttentionMixin) and module.rfa_kind != "cross":
            _join_projections(module)
    places = [  # of the layers, and not the layers: a plain weight is let go when it is packed
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, (nn.Linear, Conv1D))
    ]
    for parent, name in places:
        layer = getattr(parent, name)
        weight = layer.weight.mT if isinstance(layer, Conv1D) else layer.weight  # [outputs, inputs]
        setattr(parent, name, PackedLinear(weight, layer.bias))


def _join_projections(attention: nn.Module) -> None:
    """Replace the layers of queries, keys and values, where attention has them apart, by the parts of one."""
    layers = [getattr(attention, name, None) for name in PROJECTIONS]
    if all(type(each) is nn.Linear for each in layers):
        parts = PackedParts(cast(list[nn.Linear], layers))
        for index, name in enumerate(PROJECTIONS):
            setattr(attention, name, PackedPart(parts, index))
