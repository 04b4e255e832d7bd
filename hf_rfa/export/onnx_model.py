"""An exported decoder as one ONNX graph that takes any number of tokens: passes over some of them at a time, by a Scan."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    DeduplicateInitializersPass,
    InlinePass,
    NameFixPass,
)
from onnx_ir.tape import Tape
from onnx_ir.tensor_adapters import TorchTensor
from onnxscript import OnnxFunction, optimizer
from torch import Tensor

from hf_rfa.models.importance import LearnedImportance

from . import operators
from .graph import DOMAIN, DecoderGraph, Group, Stack, summary_weights, turning
from .traced import OPSET, trace

#: Tokens of a text that are read at once.
PASS_LENGTH = 128


def make_model(graph: DecoderGraph, vocabulary: int) -> ir.Model:
    """Return the ONNX model of a decoder's graph."""
    model = trace(graph)
    return _with_passes(model, Assembly(graph, model.graph), vocabulary)


class Assembly:
    """Writes all but the traced nodes of a pass into its graph.

    Args:
        graph: the decoder.
        body: what was traced of it, with marks for attention.
    """

    def __init__(self, graph: DecoderGraph, body: ir.Graph) -> None:
        self.graph, self.body = graph, body
        self.tape = Tape()
        self.past = {name: _state(name, shape) for name, shape in graph.states()}
        self.present: dict[str, ir.Value] = {}
        self.of_pass: dict[str, Any] = {}
        self.of_group: dict[Group, dict[str, Any]] = {group: {} for group in graph.groups}
        self.number = {group: number for number, group in enumerate(graph.groups)}

    def constant(self, name: str, tensor: Tensor) -> ir.Value:
        """Return a tensor that is stored with the graph."""
        stored = TorchTensor(tensor.detach().contiguous(), name)
        kind = ir.TensorType(stored.dtype)
        value = ir.Value(name=name, type=kind, shape=ir.Shape(tensor.shape), const_value=stored)
        self.body.register_initializer(value)
        return value

    def call(self, name: str, inputs: list[Any], count: int, **attributes: Any) -> tuple[Any, ...]:
        """Return what one of the functions makes of values."""
        return tuple(self.tape.op_multi_out(name, inputs, attributes, num_outputs=count, domain=DOMAIN))

    def split(self, value: ir.Value, sizes: list[int], axis: int) -> tuple[Any, ...]:
        """Return parts of a value."""
        if len(sizes) == 1:
            return (value,)
        sizes_value = self.tape.op("Constant", [], {"value_ints": sizes})
        return tuple(self.tape.op_multi_out("Split", [value, sizes_value], {"axis": axis}, num_outputs=len(sizes)))

    def join(self, values: list[Any], axis: int) -> Any:
        """Return values side by side."""
        return values[0] if len(values) == 1 else self.tape.op("Concat", values, {"axis": axis})

    def begin(self, is_token: ir.Value) -> ir.Value:
        """Write what comes before the layers, and return the positions."""
        graph, layout = self.graph, self.graph.groups[0].layout
        sizes = {"distance": float(graph.distance), "step": float(graph.step), "sinks": float(layout.sinks)}
        names = ("arrival", "is_sink", "taken_off", "last", "is_step")
        positions, *found = self.call("positions_of", [is_token, self.past["places.0"]], 6, **sizes)
        self.of_pass = {"is_token": is_token, **dict(zip(names, found, strict=True))}
        self.none = self.tape.op("Constant", [], {"value": ir.tensor(np.zeros((1, 1, 1, 1), np.float32))})
        horizon = getattr(graph.groups[0].layer.feature_map, "horizon", None)
        self.of_pass["decay"] = self.none
        if layout.state_rows and horizon:
            (self.of_pass["decay"],) = self.call("decay_of", [is_token], 1, horizon=float(horizon))
        self.turns: dict[Any, Any] = {}
        for group in graph.groups:
            self._prepare_group(group)
        for number, stack in enumerate(graph.stacks):
            self._prepare_stack(number, stack)
        return positions

    def _prepare_group(self, group: Group) -> None:
        """Write the weights of a group, and what its layer's rotation makes of the positions."""
        number, layer, found = self.number[group], group.layer, self.of_group[group]
        frequency, partner = turning(layer)
        recency = torch.zeros(group.layout.heads)
        if group.importance is not None:
            recency = group.importance.recency.float()
        found |= {name: self.none for name in ("turns", "summary", "matrix", "bias", *SUMMARY_WEIGHTS)}
        found["tensors"] = {"recency": recency[None, :, None], "frequency": frequency, "partner": partner}
        if group.layout.state_rows:
            if layer.rotation not in self.turns:
                inputs = [self.of_pass["arrival"], self.constant(f"frequency_of.{number}", frequency)]
                (self.turns[layer.rotation],) = self.call("turns_of", inputs, 1)
            found["turns"] = self.turns[layer.rotation]
            found["tensors"] |= summary_weights(layer)
        for name, tensor in found["tensors"].items():
            found[name] = self.constant(f"{name}.{number}", tensor)

    def _prepare_stack(self, number: int, stack: Stack) -> None:
        """Write what steps of a stack read, and where its next token goes."""
        heads, groups, past = stack.heads, stack.groups, self.past[f"places.{number}"]
        head = self.constant(f"head.{number}", torch.cat([torch.arange(count) for count in heads])[:, None])
        inputs = [past, self.of_pass["last"], head]
        place, index, came, unseen = self.call("target_of", inputs, 4, window=float(stack.layout.window))
        parts = {"index": (index, 1), "unseen": (unseen, 1), "places": (past, 2)}
        if stack.layout.state_rows:
            summary, tensors = self.past[f"summary.{number}"], [self.of_group[group]["tensors"] for group in groups]
            indices = self.split(index, heads, 1)
            states = [
                [
                    self.tape.op("GatherND", [self.past[f"{kind}.{self.number[group]}"], at])
                    for group, at in zip(groups, indices, strict=True)
                ]
                for kind in ("keys", "values")
            ]
            frequency = torch.cat(
                [each["frequency"].expand(count, 1, -1) for each, count in zip(tensors, heads, strict=True)]
            )
            weights = [
                self.constant(f"{name}.stack.{number}", torch.cat([each[name] for each in tensors]))
                for name in ("key_weight", "key_bias", "query_bias", "count_weight")
            ]
            of_all = [
                summary,
                *(self.join(each, 1) for each in states),
                came,
                self.constant(f"frequency.stack.{number}", frequency),
            ]
            horizon = float(groups[0].layer.feature_map.horizon)
            found = self.call("summarize", [*of_all, *weights], 3, horizon=horizon, sinks=float(stack.layout.sinks))
            self.present[f"summary.{number}"], matrix, bias = found
            parts |= {"matrix": (matrix, 1), "bias": (bias, 1), "summary": (summary, 1)}
        self.of_pass[f"place.{number}"] = place
        for name, (whole, axis) in parts.items():
            for group, part in zip(groups, self.split(whole, heads, axis), strict=True):
                self.of_group[group][name] = part

    def attend(self, node: ir.Node) -> Any:
        """Write the attention of a layer, and return its output."""
        query, key, value, read = node.inputs
        layer = self.graph.layer_of(node.attributes["layer"].as_int())
        outputs, order = [], []
        for group in (group for group in self.graph.groups if group.layer is layer):
            number, found, layout = self.number[group], self.of_group[group], group.layout
            groups = layer.feature_map.groups
            inputs: list[Any] = [query, key, value]
            if group.chosen:
                rows = [head * groups + index for head in group.chosen for index in range(groups)]
                order += rows
                chosen = [(query, rows), (key, group.chosen), (value, group.chosen)]
                inputs = [self._chosen(tensor, heads) for tensor, heads in chosen]
            found["importance"] = self._importance(group, read)
            names = {"keys": self.past[f"keys.{number}"], "values": self.past[f"values.{number}"]}
            given = {**self.of_pass, **found, **names}
            sizes = {
                "heads": layout.heads,
                "groups": groups,
                "head_dim": layout.head_dim,
                "places_count": layout.places,
            }
            sizes |= {name: float(getattr(layout, name)) for name in ("window", "sinks", "slots")}
            output, *after = self.call(
                "attend",
                [*inputs, *(given[name] for name in READ)],
                5,
                **sizes,
                scale=float(layer.scaling),
                features=layout.state_rows,
            )
            outputs.append(output)
            self.present |= {f"keys.{number}": after[0], f"values.{number}": after[1]}
            found["places_after"], found["summary_after"] = after[2:]
        if not order:
            return outputs[0]
        return self._chosen(self.join(outputs, 1), [order.index(head) for head in range(len(order))])

    def _chosen(self, value: Any, heads: Any) -> Any:
        index = self.tape.op("Constant", [], {"value_ints": list(heads)})
        return self.tape.op("Gather", [value, index], {"axis": 1})

    def _importance(self, group: Group, read: Any) -> Any:
        """Return the importance of the new tokens, [B, W, H], or one 0 for heads without slots."""
        importance = group.importance
        if not group.layout.slots:
            return self.tape.op("Constant", [], {"value": ir.tensor(np.zeros((1, 1, 1), np.float32))})
        if not isinstance(importance, LearnedImportance):
            others = group.layer.importance
            first = 0 if importance is others or others is None else group.layer.feature_map.num_heads
            heads = self.tape.op("Constant", [], {"value_ints": list(range(first, first + group.layout.heads))})
            return self.tape.op("Gather", [read, heads], {"axis": 2})
        return self.tape.op(
            "MatMul", [read, self.constant(f"importance.{self.number[group]}", importance.weight.float().T)]
        )

    def end(self) -> None:
        """Write what comes after the layers: places and summaries of all stacks."""
        for number, stack in enumerate(self.graph.stacks):
            found = [self.of_group[group] for group in stack.groups]
            importance = found[0]["importance"]
            if stack.layout.slots:
                importance = self.join([each["importance"] for each in found], 2)
            tensor = torch.cat([each["tensors"]["recency"] for each in found], 1)
            of_pass = self.of_pass
            inputs = [of_pass["is_step"], self.past[f"places.{number}"], of_pass[f"place.{number}"], importance]
            inputs += [self.constant(f"recency.stack.{number}", tensor), of_pass["arrival"], of_pass["is_sink"]]
            others = self.join([each["places_after"] for each in found], 2)
            (self.present[f"places.{number}"],) = self.call("placed", [*inputs, others], 1)
            if stack.layout.state_rows:
                name, others = f"summary.{number}", self.join([each["summary_after"] for each in found], 1)
                (self.present[name],) = self.call("either", [of_pass["is_step"], self.present[name], others], 1)

    def take(self) -> list[ir.Node]:
        """Return the nodes written since the last call."""
        nodes, self.tape = list(self.tape.nodes), Tape()
        return nodes


#: What the function of attention reads besides queries, keys and values, in its order.
SUMMARY_WEIGHTS = ("key_weight", "key_bias", "query_weight", "query_bias", "count_weight")
READ = (
    *("importance", "keys", "values", "is_step", "index", "unseen", "matrix", "bias", "is_token", "arrival", "is_sink"),
    *("taken_off", "places", "summary", "turns", "decay", "recency", "frequency", "partner"),
    *SUMMARY_WEIGHTS,
)


def _with_passes(model: ir.Model, assembly: Assembly, vocabulary: int) -> ir.Model:
    """Return the model that runs a traced graph, of one pass, over all tokens."""
    graph, body = assembly.graph, model.graph
    ids, positions = body.inputs
    logits = body.outputs[0]
    outside = [
        _value("input_ids", "INT64", ["batch_size", "sequence_length"]),
        _value("attention_mask", "INT64", ["batch_size", "total_length"]),
    ]
    past = [_value(f"past_{name}", "FLOAT", ["batch_size", *shape]) for name, shape in graph.states()]
    present = [_value(f"present_{name}", "FLOAT", ["batch_size", *shape]) for name, shape in graph.states()]
    final = _value("logits", "FLOAT", ["batch_size", 1, vocabulary])
    sizes = {"distance": float(graph.distance), "step": float(graph.step or 1), "size": float(PASS_LENGTH)}
    places = list(assembly.past).index("places.0")
    plan = _call("passes", [*outside, past[places]], 3, **sizes, vocabulary=vocabulary)
    pass_of, numbers, no_logits = plan.outputs
    # The body: a pass reads its tokens, and keeps the logits of rows that have none.
    number, before = _value("pass", "INT64", []), _value("logits_before", "FLOAT", ["batch_size", 1, vocabulary])
    taken, is_token = assembly.call("tokens_of", [number, outside[0], pass_of], 2)
    of_tokens = assembly.begin(is_token)
    for old, new in ((ids, taken), (positions, of_tokens)):
        new.type, new.shape = old.type, old.shape
        ir.convenience.replace_all_uses_with(old, new)
    body.insert_before(body[0], assembly.take())
    for node in [node for node in body if node.op_type == "attention"]:
        output = assembly.attend(node)
        ir.convenience.replace_all_uses_with(node.outputs[0], output)
        body.insert_before(node, assembly.take())
        body.remove(node, safe=True)
    (kept,) = assembly.call("last_logits", [logits, before, is_token], 1)
    kept.type, kept.name = logits.type, "logits_after"
    assembly.end()
    body.extend(assembly.take())
    weights = dict(body.initializers)
    body.initializers.clear()
    body.inputs[:] = [before, *assembly.past.values(), number]
    body.outputs[:] = [kept, *(assembly.present[name] for name in assembly.past)]
    for value, state in zip(body.outputs[1:], assembly.past.values(), strict=True):
        value.type = state.type
    attributes = [ir.AttrGraph("body", body), ir.AttrInt64("num_scan_inputs", 1)]
    scan = ir.Node("", "Scan", [no_logits, *past, numbers], attributes, outputs=[final, *present])
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


def _state(name: str, shape: tuple[int, ...]) -> ir.Value:
    return _value(name, "FLOAT", ["batch_size", *shape])


def save(model: ir.Model, path: Path) -> None:
    """Write a model, its weights beside it; its functions are put in where they are called."""
    logging.getLogger("onnx_ir").setLevel(logging.ERROR)  # which says what it leaves as it is
    InlinePass()(model)
    optimizer.fold_constants(model)
    DeduplicateInitializersPass(size_limit=16)(model)
    CommonSubexpressionEliminationPass()(model)
    optimizer.remove_unused_nodes(model)
    NameFixPass()(model)
    for number, node in enumerate(ir.traversal.RecursiveGraphIterator(model.graph)):
        for place, output in enumerate(node.outputs):  # a name that a Scan's body and the graph share is refused
            if output not in model.graph.outputs:
                output.name = f"value_{number}_{place}"
    # The name that transformers.js looks for. Browsers find no tensor of a branch there, and those of branches are small.
    ir.save(model, path, external_data=f"{path.name}_data", size_threshold_bytes=2**16)
