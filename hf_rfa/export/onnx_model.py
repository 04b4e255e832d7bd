"""An exported decoder as one ONNX graph that takes any number of tokens: passes over some of them at a time, by a Scan."""

from __future__ import annotations

import logging
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes.common import InlinePass, NameFixPass
from onnxscript import OnnxFunction, optimizer

from . import operators
from .graph import DOMAIN, DecoderGraph

OPSET = 21
#: Tokens of a text that are read at once.
PASS_LENGTH = 128


def make_model(graph: DecoderGraph, vocabulary: int) -> ir.Model:
    """Return the ONNX model of a decoder's graph."""
    any_size = torch.export.Dim.DYNAMIC
    states = graph.zeros(2)
    shapes = ({0: any_size, 1: any_size}, {0: any_size, 1: any_size}, tuple({0: any_size} for _ in states))
    arguments = (torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.bool), *states)
    with torch.no_grad(), graph.attending(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # which misses torchvision
        program: Any = torch.onnx.export(
            graph, arguments, dynamo=True, verbose=False, opset_version=OPSET, dynamic_shapes=shapes, optimize=False
        )
    _prepare(program.model.graph)
    optimizer.fold_constants(program.model)
    optimizer.remove_unused_nodes(program.model)
    for node in program.model.graph:  # where in Python each came from, in most of the file
        for part in (node, *node.outputs):
            part.metadata_props.clear()
    return _with_passes(program.model, graph, vocabulary)


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


def _turned(tensor: Any) -> ir.TensorProtocol:
    return ir.tensor(tensor.numpy().T.copy())


def _with_passes(model: ir.Model, graph: DecoderGraph, vocabulary: int) -> ir.Model:
    """Return the model that runs the graph of another, of one pass, over all tokens."""
    body = model.graph
    ids, is_token, *states = body.inputs
    logits, *after = body.outputs
    outside = [
        _value("input_ids", "INT64", ["batch_size", "sequence_length"]),
        _value("attention_mask", "INT64", ["batch_size", "total_length"]),
    ]
    past = [_value(name, "FLOAT", ["batch_size", *shape]) for name, shape in state_names(graph, "past")]
    present = [_value(name, "FLOAT", ["batch_size", *shape]) for name, shape in state_names(graph, "present")]
    final = _value("logits", "FLOAT", ["batch_size", 1, vocabulary])
    sizes = {"distance": float(graph.distance), "step": float(graph.step or 1), "size": float(PASS_LENGTH)}
    plan = _call("passes", [*outside, past[1]], 3, **sizes, vocabulary=vocabulary)
    pass_of, numbers, no_logits = plan.outputs
    # The body: a pass reads its tokens, and keeps the logits of rows that have none.
    number, before = _value("pass", "INT64", []), _value("logits_before", "FLOAT", ["batch_size", 1, vocabulary])
    taken = _call("tokens_of", [number, outside[0], pass_of], 2)
    for old, new in zip((ids, is_token), taken.outputs, strict=True):
        new.type, new.shape, new.name = old.type, old.shape, old.name
        ir.convenience.replace_all_uses_with(old, new)
    kept = _call("last_logits", [logits, before, taken.outputs[1]], 1)
    kept.outputs[0].type, kept.outputs[0].name = logits.type, "logits_after"
    body.insert_before(body[0], taken)
    body.append(kept)
    weights = dict(body.initializers)
    body.initializers.clear()
    body.inputs[:] = [before, *states, number]
    body.outputs[:] = [kept.outputs[0], *after]
    attributes = [ir.AttrGraph("body", body), ir.AttrInt64("num_scan_inputs", 1)]
    scan = ir.Node("", "Scan", [no_logits, *past, numbers], attributes, outputs=[final, *present])
    for value in (pass_of, numbers, no_logits):
        value.name = f"passes_{value.index()}"
    outer = ir.Graph(
        [*outside, *past],
        [final, *present],
        nodes=[plan, scan],
        initializers=list(weights.values()),
        opset_imports={"": OPSET, DOMAIN: 1, "com.microsoft": 1},
        name="decoder",
    )
    return ir.Model(outer, ir_version=10, producer_name="hf-rfa", functions=own_functions())


def own_functions() -> list[ir.Function]:
    """Return the functions of the graph."""
    functions: list[Any] = [each.function_ir for each in vars(operators).values() if isinstance(each, OnnxFunction)]
    for function in functions:
        function.opset_imports.update({DOMAIN: 1, "com.microsoft": 1})  # they call one another
        nodes: list[Any] = list(ir.traversal.RecursiveGraphIterator(function))
        for node in nodes:
            if node.op_type == "CastLike":  # of numbers, which are of the right kind as they are written
                ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])
                node.graph.remove(node, safe=True)
    return functions


def _value(name: str, dtype: str, shape: list[Any]) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(ir.DataType[dtype]), shape=ir.Shape(shape))


def _call(name: str, inputs: list[ir.Value], count: int, **attributes: Any) -> ir.Node:
    """Return a call of one of the functions."""
    return ir.node(name, inputs, attributes=attributes, domain=DOMAIN, num_outputs=count)


def state_names(graph: DecoderGraph, when: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return the names of the states, ``when`` being past or present, and their shapes without the batch."""
    shapes = enumerate(group.shapes() for group in graph.groups)
    named = ("recurrent", "conv")  # as transformers.js calls the two states of a layer
    return [
        (f"{when}_{name}.{number}", shape) for number, pair in shapes for name, shape in zip(named, pair, strict=True)
    ]


def save(model: ir.Model, path: Path) -> None:
    """Write a model, its weights beside it; its functions are put in where they are called."""
    InlinePass()(model)
    optimizer.fold_constants(model)
    optimizer.remove_unused_nodes(model)
    NameFixPass()(model)
    for number, node in enumerate(ir.traversal.RecursiveGraphIterator(model.graph)):
        for place, output in enumerate(node.outputs):  # a name that a Scan's body and the graph share is refused
            if output not in model.graph.outputs:
                output.name = f"value_{number}_{place}"
    ir.save(model, path, external_data=f"{path.name}_data")  # the name that transformers.js looks for
