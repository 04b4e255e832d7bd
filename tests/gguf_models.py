"""GGUF files of GPT-2 models, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModelForCausalLM

#: llama.cpp's names of a block's tensors, by transformers' names.
BLOCK = {"ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_2": "ffn_norm"}
BLOCK |= {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
OTHERS = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "lm_head": "output"}


def name_of(key: str) -> str:
    """Return llama.cpp's name of a tensor of GPT-2."""
    module, _, kind = key.removeprefix("transformer.").rpartition(".")
    if not module.startswith("h."):
        return f"{OTHERS[module]}.{kind}"
    _, index, part = module.split(".", 2)
    return f"blk.{index}.{BLOCK[part]}.{kind}"


def write_gguf(
    folder: Path,
    path: Path,
    *,
    quantization: str | None = None,
    architecture: str = "gpt2",
    chat_template: str | None = None,
    changed: dict[str, Any] | None = None,
    fields: dict[str, Any] | None = None,
    with_tokenizer: bool = True,
) -> None:
    """Write the GPT-2 checkpoint in ``folder`` as a GGUF file.

    Args:
        folder: the checkpoint.
        path: the file.
        quantization: type of its matrices, such as Q8_0; None for F32.
        architecture: what the file says that it holds.
        chat_template: the tokenizer's chat template.
        changed: tensors to write instead, by transformers' names; None leaves one out.
        fields: further fields, numbers.
        with_tokenizer: whether to write the tokenizer, which has to be a byte-level BPE.
    """
    import gguf

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    config = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("tiny")
    writer.add_license("mit")
    writer.add_languages(["en"])
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(4 * config.n_embd)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    for name, value in (fields or {}).items():
        writer.add_uint32(name, value)
    if with_tokenizer:
        core = json.loads((folder / "tokenizer.json").read_text())
        added = {each["id"]: each["content"] for each in core["added_tokens"]}
        vocabulary = {index: token for token, index in core["model"]["vocab"].items()} | added
        kinds = gguf.TokenType
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([vocabulary[index] for index in range(len(vocabulary))])
        writer.add_token_types([kinds.CONTROL if index in added else kinds.NORMAL for index in range(len(vocabulary))])
        merges = core["model"]["merges"]
        writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
        if chat_template is not None:
            writer.add_chat_template(chat_template)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    tensors = {key: tensor.detach().numpy() for key, tensor in model.named_parameters()} | (changed or {})
    for key, tensor in tensors.items():
        if tensor is None:
            continue
        is_matrix = tensor.ndim == 2
        if is_matrix and ".h." in key:
            tensor = tensor.T
        tensor = np.ascontiguousarray(tensor)
        if quantization is None or not is_matrix:
            writer.add_tensor(name_of(key), tensor)
        else:
            kind = gguf.GGMLQuantizationType[quantization]
            writer.add_tensor(name_of(key), gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
