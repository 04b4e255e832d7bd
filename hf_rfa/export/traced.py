"""What torch's exporter makes of a decoder's layers, without their attention, as onnxruntime runs it fastest."""

from __future__ import annotations

import logging
import re
import warnings
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes.common import CommonSubexpressionEliminationPass
from onnx_ir.tape import Tape
from onnx_ir.tensor_adapters import TorchTensor
from onnxscript import optimizer
from onnxscript.rewriter import pattern, rewrite

from .graph import DecoderGraph

OPSET = 21


class LayersDiffer(Exception):
    """Layers that look alike read more of one another than hidden states."""


def trace(graph: DecoderGraph) -> ir.Model:
    """Return the layers of a decoder, with marks where they attend: a few are traced, the others repeated."""
    count, like = graph.traced_layers()
    try:
        model = _traced(graph, count, like)
    except LayersDiffer:
        model = _traced(graph, len(graph.layers), {})
    _prepare(model.graph)
    _join_products(model.graph)
    return model


def _traced(graph: DecoderGraph, count: int, like: dict[int, int]) -> ir.Model:
    """Return what torch exports of the first layers, repeated for the others by which of these each is like."""
    any_size = torch.export.Dim.DYNAMIC
    arguments = torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64)
    with torch.no_grad(), graph.marking(count), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # which misses torchvision
        program: Any = torch.onnx.export(
            graph,
            arguments,
            dynamo=True,
            verbose=False,
            opset_version=OPSET,
            dynamic_shapes=({0: any_size, 1: any_size},) * 2,
            optimize=False,
        )
    model: ir.Model = program.model
    weights = set(model.graph.initializers.values())
    optimizer.fold_constants(model, should_fold=lambda node: False if weights & {*node.inputs} else None)
    rewrite(model, [pattern.RewriteRule(_rotation, _rotated, _are_halves)])
    CommonSubexpressionEliminationPass()(model)
    optimizer.remove_unused_nodes(model)
    _repeat(model.graph, graph, count, like)
    nodes: list[Any] = list(model.graph)
    for node in nodes:  # where in Python each came from, in most of the file
        for part in (node, *node.outputs):
            part.metadata_props.clear()
    return model


def _rotation(op: Any, x: Any, cos: Any, sin: Any, low: Any, half: Any, start: Any, end: Any) -> Any:
    """Return rotary positions of halves, x cos + [−x₂, x₁] sin: a pattern."""
    first = op.Slice(x, low, half, [3], [1])
    second = op.Slice(x, start, end, [3], [1])
    return x * cos + op.Concat(op.Neg(second), first, axis=-1) * sin


def _are_halves(context: Any, x: Any, cos: Any, sin: Any, half: Any, start: Any, **unread: Any) -> bool:
    """Return whether both halves of cosines and sines are the same, and as many as the columns of x."""
    shapes = [value.shape for value in (x, cos, sin)]
    if any(shape is None or len(shape) != 4 or shape[3] != shapes[0][3] for shape in shapes):
        return False
    bounds: list[Any] = [ir.convenience.get_const_tensor(value) for value in (half, start)]
    if any(bound is None or 2 * int(bound.numpy()[0]) != shapes[0][3] for bound in bounds):
        return False
    for value in (cos, sin):
        while (node := value.producer()) is not None and node.op_type in ("Unsqueeze", "Mul", "Cos", "Sin", "Cast"):
            value = node.inputs[0]
        if node is None or node.op_type != "Concat" or len({*node.inputs}) > 1:
            return False
    return True


def _rotated(op: Any, x: Any, cos: Any, sin: Any, **unread: Any) -> Any:
    """Return the one node that onnxruntime has for them, whose tables have a row for every token of the pass."""
    half = x.shape[3] // 2
    sizes = op.Gather(op.Shape(cos), op.Constant(value_ints=[0, 2]))
    count = op.ReduceProd(sizes, keepdims=0)
    zero, one = op.Constant(value_int=0), op.Constant(value_int=1)
    rows = op.Reshape(op.Range(zero, count, one), sizes)
    bounds = [op.Constant(value_ints=[number]) for number in (0, half, 3)]
    flat = op.Constant(value_ints=[-1, half])
    tables = [op.Reshape(op.Slice(value, *bounds), flat) for value in (cos, sin)]
    return op.RotaryEmbedding(x, rows, *tables, _domain="com.microsoft", _version=1)


def _repeat(graph: ir.Graph, decoder: DecoderGraph, count: int, like: dict[int, int]) -> None:
    """Put other layers behind the ones between marks, and take the marks out."""
    name = re.compile(rf"{re.escape(decoder.layers_name)}\.(\d+)\.(.*)")
    of: dict[Any, int] = {}  # the layer that a value is of
    nodes: dict[int, list[Any]] = {number: [] for number in range(count)}
    marks: dict[str, list[Any]] = {"begin": [], "end": []}
    for weight in graph.initializers.values():
        if found := name.match(str(weight.name)):
            of[weight] = int(found[1])
    for node in graph:
        if node.op_type in marks:
            marks[node.op_type].append(node)
            if node.op_type == "begin":
                of[node.outputs[0]] = node.attributes["layer"].as_int()
            continue
        layers = {of[value] for value in node.inputs if value in of}
        if like and len(layers) > 1:
            raise LayersDiffer
        for number in layers:
            nodes[number].append(node)
            of |= dict.fromkeys(node.outputs, number)
    if like and any(output in of for output in graph.outputs):
        raise LayersDiffer
    hidden, last = marks["end"][-1].outputs[0], marks["end"][-1]
    readers = list(hidden.uses())
    weights = dict([*decoder.named_parameters(), *decoder.named_buffers()])
    for number, model_of in like.items():
        values: dict[Any, Any] = {marks["begin"][model_of].outputs[0]: hidden}
        copies = []
        for node in nodes[model_of]:
            for value in node.inputs:
                found = name.match(str(value.name)) if value in of and value not in values else None
                if found and value.name in graph.initializers:
                    of_layer = f"{decoder.layers_name}.{number}.{found[2]}"
                    tensor = TorchTensor(weights[of_layer].detach(), of_layer)
                    values[value] = ir.Value(name=of_layer, type=value.type, shape=value.shape, const_value=tensor)
                    graph.register_initializer(values[value])
            attributes = dict(node.attributes)
            if node.op_type == "attention":
                attributes["layer"] = ir.AttrInt64("layer", number)
            inputs = [values.get(value, value) for value in node.inputs]
            outputs = [ir.Value(type=value.type, shape=value.shape) for value in node.outputs]
            copies.append(ir.Node(node.domain, node.op_type, inputs, attributes.values(), outputs=outputs))
            values |= zip(node.outputs, outputs, strict=True)
        graph.insert_after(last, copies)
        hidden, last = values[marks["end"][model_of].inputs[0]], copies[-1]
    for node, place in readers:
        node.replace_input_with(place, hidden)
    for node in (*marks["begin"], *marks["end"]):
        ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])
        graph.remove(node, safe=True)


def _prepare(graph: ir.Graph) -> None:
    """Write a graph as onnxruntime runs it fastest: weights as products read them, and norms as it knows them."""
    nodes: list[Any] = list(graph)
    for node in nodes:
        if node.op_type == "Transpose" and node.inputs[0].name in graph.initializers:
            (weight,), (turned,) = node.inputs, node.outputs
            if len(weight.uses()) > 1 or weight.shape is None or weight.shape.rank() != 2:
                continue  # a table of tokens that is the last layer's too
            stored: Any = weight.const_value
            shape = ir.Shape(stored.shape[::-1])
            lazy = ir.LazyTensor(
                partial(_turned, stored), dtype=stored.dtype, shape=shape, name=f"{weight.name}_turned"
            )
            new = ir.Value(name=lazy.name, type=weight.type, shape=shape, const_value=lazy)
            graph.register_initializer(new)
            ir.convenience.replace_all_uses_with(turned, new)
            graph.remove(node, safe=True)
            del graph.initializers[str(weight.name)]
        elif node.op_type == "Reciprocal" and len(node.outputs[0].uses()) == 1:
            ((product, _),) = node.outputs[0].uses()
            if product.op_type == "Mul":
                other = product.inputs[0] if product.inputs[1] is node.outputs[0] else product.inputs[1]
                quotient = ir.node("Div", [other, node.inputs[0]])
                ir.convenience.replace_nodes_and_values(
                    graph, product, [product], [quotient], product.outputs, quotient.outputs
                )
                graph.remove(node, safe=True)


def _join_products(graph: ir.Graph) -> None:
    """Multiply rows once by all weights that they are multiplied by: a token's products are short, and rounded in 8 bits."""
    readers: dict[Any, list[Any]] = {}
    every: list[Any] = list(graph)
    for node in every:
        if node.op_type == "MatMul" and node.inputs[1].name in graph.initializers and len(node.inputs[1].shape) == 2:
            readers.setdefault(node.inputs[0], []).append(node)
    for rows, nodes in readers.items():
        weights: list[Any] = [node.inputs[1] for node in nodes]
        if len(nodes) < 2 or any(len(weight.uses()) > 1 for weight in weights):
            continue
        tensors, sizes = [weight.const_value for weight in weights], [weight.shape[1] for weight in weights]
        shape = ir.Shape([weights[0].shape[0], sum(sizes)])
        lazy = ir.LazyTensor(
            partial(_side_by_side, tensors), dtype=tensors[0].dtype, shape=shape, name=f"{weights[0].name}_and_others"
        )
        joined = ir.Value(name=lazy.name, type=weights[0].type, shape=shape, const_value=lazy)
        graph.register_initializer(joined)
        tape = Tape()
        parts = [tape.op("MatMul", [rows, joined]), tape.op("Constant", [], {"value_ints": sizes})]
        if rows.shape is not None:
            parts[0].type, parts[0].shape = rows.type, ir.Shape([*rows.shape[:-1], sum(sizes)])
        found = tape.op_multi_out("Split", parts, {"axis": -1}, num_outputs=len(sizes))
        graph.insert_before(nodes[0], tape.nodes)
        for node, part, weight in zip(nodes, found, weights, strict=True):
            part.type, part.shape = node.outputs[0].type, node.outputs[0].shape
            ir.convenience.replace_all_uses_with(node.outputs[0], part)
            graph.remove(node, safe=True)
            del graph.initializers[weight.name]


def _side_by_side(tensors: list[Any]) -> ir.TensorProtocol:
    return ir.tensor(np.concatenate([tensor.numpy() for tensor in tensors], axis=1))


def _turned(tensor: Any) -> ir.TensorProtocol:
    return ir.tensor(tensor.numpy().T.copy())
