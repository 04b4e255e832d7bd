"""Weights of 8 bits for an exported graph: matrix products, and the table of tokens, in a quarter of the bytes.

Inputs are rounded to 8 bits too, each token's by scales of its own, so that no token's rounding depends on those beside it.
There are two ways. By blocks of `BLOCK` numbers, which have a scale each in weights and inputs, onnxruntime multiplies with
little loss, but slowly where its kernels are missing, as in WebAssembly. Else a weight has a scale for every output, and a
token's input one. All else stays float32: norms, importance, summary, and attention.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from .graph import DOMAIN
from .onnx_model import own_functions

#: Weights with fewer numbers stay as they are.
LEAST_SIZE = 2**12
#: Numbers that have a scale of their own.
BLOCK = 32


def quantize(model: ir.Model, *, by_blocks: bool = True) -> None:
    """Store the weights of a model of `hf_rfa.export.onnx_model` in 8 bits."""
    graph = model.graph
    model.functions.update({function.identifier(): function for function in own_functions()})
    scans = [node for node in graph if node.op_type == "Scan"]
    body = scans[0].attributes["body"].as_graph() if scans else graph
    blocks = _constant(graph, "axis_of_blocks", np.array([1]))
    done: dict[str, tuple[ir.Value, ir.Value, tuple[int, int]]] = {}
    for node in list(body):
        weight, transposed = _weight_of(node, graph)
        if weight is None:
            continue
        is_table = node.op_type == "Gather"
        if weight.name not in done:
            rows = weight.const_value.numpy().astype(np.float32)
            rows = rows if is_table or transposed else rows.T
            numbers, scale = rounded(rows, BLOCK if by_blocks else rows.shape[1])
            stored = _constant(graph, f"{weight.name}_int8", numbers), _constant(graph, f"{weight.name}_scale", scale)
            done[weight.name] = *stored, rows.shape
        numbers_8, scale_8, (outputs, width) = done[weight.name]
        if is_table:
            inputs = [numbers_8, scale_8, node.inputs[1]]
            new = ir.node("embedding_int8", inputs, {"width": width}, domain=DOMAIN)
        elif by_blocks:
            sizes = {"K": width, "N": outputs, "bits": 8, "block_size": BLOCK, "accuracy_level": 4}
            new = ir.node("MatMulNBits", [node.inputs[0], numbers_8, scale_8], sizes, domain="com.microsoft")
        else:
            flat, flat_scale = (ir.node("Squeeze", [value, blocks]) for value in (numbers_8, scale_8))
            turned = ir.node("Transpose", [flat.outputs[0]], {"perm": [1, 0]})
            graph.insert_before(graph[0], [flat, flat_scale, turned])  # outside of the Scan, where it is done once
            inputs = [node.inputs[0], turned.outputs[0], flat_scale.outputs[0]]
            new = ir.node("linear_int8", inputs, domain=DOMAIN)
        ir.convenience.replace_nodes_and_values(body, node, [node], [new], node.outputs, new.outputs)
    for node in list(body):  # transpositions of what was there before
        if node.op_type == "Transpose" and not any(output.uses() for output in node.outputs):
            body.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses():
            del graph.initializers[name]


def rounded(rows: np.ndarray[Any, Any], block: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return rows [N, K] in blocks of whole numbers around 128, [N, blocks, block], and their scales, [N, blocks]."""
    count = -(-rows.shape[1] // block)
    blocks = np.pad(rows, ((0, 0), (0, count * block - rows.shape[1]))).reshape(len(rows), count, block)
    scale = np.maximum(np.abs(blocks).max(-1), 1e-30) / 127
    return (np.round(blocks / scale[..., None]) + 128).astype(np.uint8), scale


def _weight_of(node: ir.Node, graph: ir.Graph) -> tuple[Any, bool]:
    """Return the weight that a node looks up or multiplies by, or None, and whether it is transposed."""
    place = {"Gather": 0, "MatMul": 1}.get(node.op_type)
    if place is None:
        return None, False
    weight: Any = node.inputs[place]
    before = weight.producer()
    transposed = before is not None and before.op_type == "Transpose"
    weight = before.inputs[0] if transposed else weight
    is_weight = weight is not None and weight.name in graph.initializers and weight.const_value is not None
    is_weight = is_weight and not weight.name.startswith("importance.")
    fits = is_weight and len(weight.const_value.shape) == 2 and weight.const_value.size >= LEAST_SIZE
    floating = fits and weight.const_value.dtype == ir.DataType.FLOAT
    return (weight if floating else None), transposed


def _constant(graph: ir.Graph, name: str, numbers: np.ndarray[Any, Any]) -> ir.Value:
    tensor = ir.tensor(numbers, name=name)
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(numbers.shape), const_value=tensor)
    graph.register_initializer(value)
    return value
