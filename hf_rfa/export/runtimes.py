"""The names and files by which onnxruntime-genai and transformers.js run an exported graph, as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx_ir as ir

from .graph import DecoderGraph

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
    """Give the states the names of a layer's recurrent states, of which onnxruntime-genai keeps two a layer."""
    for value in (*graph.inputs, *graph.outputs):
        when, _, rest = str(value.name).partition("_")
        if when in ("past", "present"):
            kind, number = rest.split(".")
            prefix = {"past": "past_key_values", "present": "present"}[when]
            value.name = f"{prefix}.{number}.{kind}_state"


def write_genai_config(model: Any, graph: DecoderGraph, folder: Path) -> None:
    """Write ``genai_config.json``; a group of heads counts as a layer."""
    config = model.config
    decoder = {
        "filename": "model.onnx",
        "head_size": config.head_dim_for("causal"),
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_query_heads_for("causal"),
        "num_key_value_heads": config.num_heads_for("causal"),
        "num_hidden_layers": len(graph.groups),
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


def add_length(graph: ir.Graph, layer: int) -> None:
    """Add a cache of no bytes by which transformers.js counts the tokens so far, as that of one more layer.

    It asks the shape of a tensor of this name, [batch, 1, tokens, 0], and takes one from the states of a layer otherwise.
    """

    def constant(value: list[int]) -> ir.Value:
        node = ir.node("Constant", [], attributes={"value_ints": value})
        graph.insert_before(graph[0], node)
        return node.outputs[0]

    def node(kind: str, inputs: list[Any], **attributes: Any) -> ir.Value:
        graph.append(added := ir.node(kind, inputs, attributes=attributes))
        return added.outputs[0]

    one, none = constant([1]), constant([0])
    batch, length = (node("Shape", [graph.inputs[0]], start=start, end=start + 1) for start in (0, 1))
    new = node("ConstantOfShape", [node("Concat", [batch, one, length, none], axis=0)])
    for name in ("key", "value"):
        shapes = (["batch_size", 1, size, 0] for size in ("past_sequence_length", "total_sequence_length"))
        kind = ir.TensorType(ir.DataType.FLOAT)
        past, present = (ir.Value(type=kind, shape=ir.Shape(shape)) for shape in shapes)
        past.name, present.name = f"past_key_values.{layer}.{name}", f"present.{layer}.{name}"
        graph.append(ir.Node("", "Concat", [past, new], [ir.AttrInt64("axis", 2)], outputs=[present]))
        graph.inputs.append(past)
        graph.outputs.append(present)


def write_transformers_js_config(model: Any, graph: DecoderGraph, file: str, folder: Path) -> None:
    """Write the ``config.json`` of a model whose layers have the two states that ours have (Qwen3-Next)."""
    layers, config = len(graph.groups), model.config
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
