"""The names and files by which onnxruntime-genai and transformers.js run an exported graph, as they are."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx_ir.tape import Tape

#: Most tokens of a text in onnxruntime-genai, which asks for a number.
CONTEXT_LENGTH = 1_000_000


def token_ids(model: Any) -> dict[str, Any]:
    """Return the special tokens of a model, those that end a text as a list."""
    own = {name: getattr(model.config, f"{name}_token_id", None) for name in ("bos", "eos", "pad")}
    ends = model.generation_config.eos_token_id
    ends = own["eos"] if ends is None else ends
    ends = [] if ends is None else list(ends) if isinstance(ends, list | tuple) else [ends]
    first = ends[0] if ends else 0
    bos, pad = (first if own[name] is None else own[name] for name in ("bos", "pad"))
    return {"bos_token_id": bos, "eos_token_id": ends, "pad_token_id": pad}


def name_for_genai(graph: ir.Graph) -> None:
    """Give the states the names of a layer's recurrent states, of which onnxruntime-genai keeps two a layer.

    It gives those of all layers one shape. So there is one layer, whose two states hold all others.
    """
    past: list[Any] = list(graph.inputs[2:])
    present: list[Any] = list(graph.outputs[1:])
    del graph.inputs[2:], graph.outputs[1:]
    before, after = Tape(), Tape()
    for kind, start, axes in (("recurrent", 0, 2), ("conv", 1, 1)):
        shapes = [[int(size) for size in value.shape[1:]] for value in past[start::2]]
        sizes = [math.prod(shape) for shape in shapes]
        shape = ir.Shape(["batch_size", *[1] * axes, sum(sizes)])
        whole, whole_after = (ir.Value(type=past[0].type, shape=shape) for _ in range(2))
        whole.name, whole_after.name = f"past_key_values.0.{kind}_state", f"present.0.{kind}_state"
        parts = before.op_multi_out(
            "Split", [whole, _numbers(before, sizes)], {"axis": axes + 1}, num_outputs=len(sizes)
        )
        for value, part, size in zip(past[start::2], parts, shapes, strict=True):
            ir.convenience.replace_all_uses_with(value, before.op("Reshape", [part, _numbers(before, [0, *size])]))
        flat = [after.op("Reshape", [value, _numbers(after, [0, *[1] * axes, -1])]) for value in present[start::2]]
        after.op("Concat", flat, {"axis": axes + 1}, output=whole_after)
        graph.inputs.append(whole)
        graph.outputs.append(whole_after)
    graph.insert_before(graph[0], before.nodes)
    graph.extend(after.nodes)


def _numbers(tape: Tape, numbers: list[int]) -> ir.Value:
    return tape.op("Constant", [], {"value_ints": numbers})


def write_genai_config(model: Any, folder: Path) -> None:
    """Write ``genai_config.json``."""
    config = model.config
    decoder = {
        "filename": "model.onnx",
        "head_size": config.head_dim_for("causal"),
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_query_heads_for("causal"),
        "num_key_value_heads": config.num_heads_for("causal"),
        "num_hidden_layers": 1,
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "inputs": {
            "input_ids": "input_ids",
            "attention_mask": "attention_mask",
            # Of no tensor in the graph, which therefore has no cache that grows.
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
    }
    about = {"type": "llama", "context_length": CONTEXT_LENGTH, "vocab_size": config.vocab_size, **token_ids(model)}
    search = {"do_sample": False, "max_length": CONTEXT_LENGTH, "past_present_share_buffer": False}
    content = {"model": {**about, "decoder": decoder}, "search": search}
    (folder / "genai_config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def name_for_transformers_js(graph: ir.Graph) -> int:
    """Give the states the names of the two that layers have, and return how many layers that makes.

    A cache of no bytes beside them counts the tokens so far, as that of one more layer: transformers.js asks the shape of a
    tensor of this name, [batch, 1, tokens, 0], and takes one from the states of a layer otherwise.
    """
    states = list(zip(graph.inputs[2:], graph.outputs[1:], strict=True))
    for number, (past, present) in enumerate(states):
        name = f"{('recurrent', 'conv')[number % 2]}.{number // 2}"
        past.name, present.name = f"past_{name}", f"present_{name}"
    layers, tape = -(-len(states) // 2), Tape()
    one, none = _numbers(tape, [1]), _numbers(tape, [0])
    batch, length = (tape.op("Shape", [graph.inputs[0]], {"start": start, "end": start + 1}) for start in (0, 1))
    new = tape.op("ConstantOfShape", [tape.op("Concat", [batch, one, length, none], {"axis": 0})])
    for name in ("key", "value"):
        shapes = (["batch_size", 1, size, 0] for size in ("past_sequence_length", "total_sequence_length"))
        kind = ir.TensorType(ir.DataType.FLOAT)
        past, present = (ir.Value(type=kind, shape=ir.Shape(shape)) for shape in shapes)
        past.name, present.name = f"past_key_values.{layers}.{name}", f"present.{layers}.{name}"
        tape.op("Concat", [past, new], {"axis": 2}, output=present)
        graph.inputs.append(past)
        graph.outputs.append(present)
    graph.extend(tape.nodes)
    return layers


def write_transformers_js_config(model: Any, layers: int, file: str, folder: Path) -> None:
    """Write the ``config.json`` of a model whose layers have the two states that ours have (Qwen3-Next)."""
    config = model.config
    content = {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": layers + 1,
        "num_attention_heads": config.num_query_heads_for("causal"),
        "num_key_value_heads": config.num_heads_for("causal"),
        "head_dim": config.head_dim_for("causal"),
        "layer_types": ["linear_attention"] * layers + ["full_attention"],
        "transformers.js_config": {"use_external_data_format": {file: 1}},
        **token_ids(model),
    }
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
