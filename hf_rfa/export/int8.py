"""Weights of 8 bits for an exported graph: matrix products, and the table of tokens, in a quarter of the bytes.

A weight has a scale for every output, and an input one for every token (`hf_rfa.export.operators.linear_int8`), so that no
token's rounding depends on those beside it. All else stays float32: norms, importance, and attention.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from .graph import DOMAIN
from .onnx_model import own_functions

#: Weights with fewer numbers stay as they are.
LEAST_SIZE = 2**12


def quantize(model: ir.Model) -> None:
    """Store the weights of a model of `hf_rfa.export.onnx_model` in 8 bits."""
    graph = model.graph
    model.functions.update({function.identifier(): function for function in own_functions()})
    (scan,) = (node for node in graph if node.op_type == "Scan")
    done: dict[str, tuple[ir.Value, ir.Value]] = {}

    def stored(weight: Any, outputs: int) -> tuple[ir.Value, ir.Value]:
        """Return a weight in 8 bits and the scales of its outputs, which are along an axis."""
        name = f"{weight.name}_{outputs}"
        if name not in done:
            numbers = weight.const_value.numpy().astype(np.float32)
            scale = np.maximum(np.abs(numbers).max(1 - outputs), 1e-30) / 127
            rounded = np.round(numbers / (scale if outputs else scale[:, None])) + 128
            done[name] = _constant(graph, name, rounded.astype(np.uint8)), _constant(graph, f"{name}_scale", scale)
        return done[name]

    body = scan.attributes["body"].as_graph()
    for node in list(body):
        weight, transposed = _weight_of(node, graph)
        if weight is None:
            continue
        if node.op_type == "Gather":
            new = ir.node("embedding_int8", [*stored(weight, 0), node.inputs[1]], domain=DOMAIN)
        else:
            numbers, scale = stored(weight, 0 if transposed else 1)
            if transposed:
                turn = ir.node("Transpose", [numbers], attributes={"perm": [1, 0]})
                graph.insert_before(graph[0], turn)  # outside of the Scan, where onnxruntime does it once
                numbers = turn.outputs[0]
            new = ir.node("linear_int8", [node.inputs[0], numbers, scale], domain=DOMAIN)
        ir.convenience.replace_nodes_and_values(body, node, [node], [new], node.outputs, new.outputs)
    for node in list(body):  # transpositions of what was there before
        if node.op_type == "Transpose" and not any(output.uses() for output in node.outputs):
            body.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses():
            del graph.initializers[name]


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
    fits = is_weight and len(weight.const_value.shape) == 2 and weight.const_value.size >= LEAST_SIZE
    floating = fits and weight.const_value.dtype == ir.DataType.FLOAT
    return (weight if floating else None), transposed


def _constant(graph: ir.Graph, name: str, numbers: np.ndarray[Any, Any]) -> ir.Value:
    tensor = ir.tensor(numbers, name=name)
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(numbers.shape), const_value=tensor)
    graph.register_initializer(value)
    return value
