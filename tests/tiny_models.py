"""A tiny shape of every causal language model of the installed transformers, by the names of configuration fields.

[`tiny_config`] takes a type's default configuration and makes every size in it small by its name; what names cannot
tell stands in [`OVERRIDES`], one line per model type. The result has every kind of layer that the default has.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM, POSITIONS = 61, 32, 3, 4, 2, 8, 128

#: The fields that count layers.
LAYER_COUNTS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks"),
    *("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"),
)
#: The value that every field of a name gets where the default configuration holds a number under it.
SIZES: dict[str, int] = {
    name: value
    for value, names in {
        VOCAB: """vocab_size vocab_size_per_layer_input decoder_vocab_size shape_vocab_size
            pronunciation_vocab_size audio_vocab_size unpadded_vocab_size""",
        WIDTH: """hidden_size n_embd d_model embedding_size embedding_dim emb_dim word_embed_proj_dim
            attention_hidden_size input_embedding_size output_embedding_size lru_width pronunciation_embed_dim
            shape_embed_dim ple_embed_dim projection_dim out_hidden_size""",
        40: """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner d_inner dim_ff dff ffn_hidden_size
            feed_forward_size intermediate_size_mlp dense_intermediate_size prefix_dense_intermediate_size""",
        16: """moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size
            shared_intermediate_size moe_shared_expert_intermediate_size expert_ffn_hidden_size router_hidden_size
            hidden_size_per_layer_input kv_lora_rank q_lora_rank o_lora_rank index_head_dim mamba_d_state state_size
            ssm_state_size adapter_rank mamba_d_head qk_head_dim""",
        HEADS: """num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads
            decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads
            swa_num_attention_heads num_attention_heads_per_layer linear_num_heads
            linear_num_value_heads index_n_heads num_experts n_routed_experts num_local_experts
            moe_num_experts laurel_rank hc_lowrank gated_norm_rank linear_key_head_dim index_topk
            mamba_dt_rank time_step_rank d_rel rotary_dim mamba_n_heads mamba_num_heads""",
        KV_HEADS: """num_key_value_heads num_kv_heads swa_num_key_value_heads num_query_groups num_global_key_value_heads
            linear_num_key_heads num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts n_groups hc_mult
            hc_count heads_per_ngram o_groups zero_expert_num index_topk_blocks split_ngram_parts""",
        HEAD_DIM: """head_dim global_head_dim swa_head_dim dim_head d_head kv_channels attention_head_size
            attention_head_dim qk_rope_head_dim qk_nope_head_dim linear_head_dim linear_value_head_dim mamba_headdim
            mamba_head_dim sliding_window sliding_window_size attention_window_size window_size
            local_attention attention_chunk_size chunk_size mamba_chunk_size index_block_size patch_size
            local_attn_chunk_length lsh_attn_chunk_length rel_extent block_size""",
        12: "v_head_dim",
        2 * WIDTH: "mamba_d_ssm",
        POSITIONS: """max_position_embeddings n_positions n_ctx max_seq_len max_target_positions max_source_positions
            context_length model_max_length keep_window_size""",
        1: """n_group topk_group num_expert_group n_shared_experts num_shared_experts moe_num_shared_experts
            first_k_dense_replace num_dense_layers attn_layer_offset expert_layer_offset num_kv_shared_layers""",
    }.items()
    for name in names.split()
}

ZAMBA = {
    "num_hidden_layers": 5,
    "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"],
    "attention_hidden_size": 64,
}

#: What names do not tell, by model type.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        "encoder_config": {"hidden_size_global": WIDTH},
        "decoder_config": {"hidden_size_global": WIDTH},
        "encoder_hash_byte_group_vocab": 50,
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
            "full_attention": None,
        },
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {"head_dim": 16},
    "dots3_note_text": {"head_dim": 16},
    "falcon_h1": {"mamba_d_head": 16},
    "gemma3n_text": {  # the two last layers read the cache of the two before
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": 40,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "dory": {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        **dict.fromkeys(("n_input_layers", "n_recurrent_layers", "n_output_layers"), 1),
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "linear_attention", "full_attention"]},
    "hrm_text": {"num_hidden_layers": 3, "num_layers_per_stack": None},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"], "full_attn_idxs": [2]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"]},
    "mamba2": {"head_dim": 16},
    "ministral": {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "mistral": {"sliding_window": None},  # as all but the first of its checkpoints have it
    "moshi": {"sliding_window": POSITIONS},
    "musicgen": {"num_codebooks": 1},
    "musicgen_melody": {"num_codebooks": 1},
    "reformer": {"axial_pos_embds": False},
    "xlm": {"causal": True},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},  # its state is of widths that 64 divides
    "xmod": {"default_language": "en_XX"},
    "zamba": ZAMBA | {"attention_head_dim": 16},
    "zamba2": ZAMBA | {"hybrid_layer_ids": [2, 4]},
}
for _name in ("qwen4_exp", "qwen4_exp_text"):
    OVERRIDES[_name] = {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    }

#: Types that have no tiny shape that runs on token ids alone here, each with the reason.
UNBUILDABLE: dict[str, str] = {
    "gemma3n": "its vision part needs the timm package; gemma3n_text is its text part",
    "gemma4_assistant": "a draft model: it runs on the hidden states and the cache of another model",
    "gemma4_unified_assistant": "a draft model: it runs on the hidden states and the cache of another model",
}


def model_types() -> list[str]:
    """Returns every model type with a causal language model in the installed transformers, in order."""
    # hf-rfa enters its own models there
    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if not name.startswith("rfa_")]


def model_class(model_type: str) -> type[PreTrainedModel]:
    """Returns the causal language model class of a model type."""
    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def tiny_config(model_type: str, **fields: Any) -> PreTrainedConfig:
    """Returns a tiny configuration of a model type, of the class that its causal language model is built from.

    Args:
        model_type: A key of transformers' mapping of causal language models.
        **fields: Fields of the text part to set after shrinking; a number of layers needs the lists over layers with it.
    """
    config_class = CONFIG_MAPPING[model_type]
    taken: Any = model_class(model_type).config_class
    # a model of a part of a composite configuration, as of its text part, is built from that part
    default = taken() if taken in config_class.sub_configs.values() else config_class()
    wanted = {**copy.deepcopy(OVERRIDES.get(model_type, {})), **fields}
    if isinstance(vars(default).get("text_config"), PreTrainedConfig):
        parts = {name: wanted.pop(name) for name in list(wanted) if name in default.sub_configs}
        wanted = {**parts, "text_config": {**wanted, **parts.get("text_config", {})}}
    return type(default)(**_shrunk(default, wanted))


def tiny_model(
    model_type: str, attn_implementation: str | None = "eager", seed: int = 0, **fields: Any
) -> PreTrainedModel:
    """Returns a tiny causal language model of a type with weights drawn from a seed, for inference in float32.

    Args:
        model_type: A key of transformers' mapping of causal language models.
        attn_implementation: The attention implementation, or None for the model's own default.
        seed: The seed of the weights.
        **fields: Fields of the text part to set after shrinking; a number of layers needs the lists over layers with it.
    """
    config = tiny_config(model_type, **fields)
    torch.manual_seed(seed)
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    return model_class(model_type)._from_config(config, dtype=torch.float32, **options).eval()


def _shrunk(config: PreTrainedConfig, wanted: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a small copy of a configuration, the wanted ones set last, those of its parts in them."""
    common = PreTrainedConfig().to_dict()
    fields = {name: value for name, value in config.to_dict().items() if common.get(name, ...) != value}
    depth = getattr(config, "num_hidden_layers", 0)
    keep = _kept_layers(fields, depth) if isinstance(depth, int) else []
    listed = any(isinstance(value, list) and len(value) == depth for value in fields.values())
    parts = {name: part for name, part in vars(config).items() if isinstance(part, PreTrainedConfig)}
    small: dict[str, Any] = {}
    for name, value in fields.items():
        if name in parts:
            small[name] = _shrunk(parts[name], wanted.get(name, {}))
            if parts[name].model_type:
                small[name]["model_type"] = parts[name].model_type
        elif isinstance(value, list) and keep and len(value) == depth and name != "eos_token_id":
            small[name] = [_small(name, copy.deepcopy(value[index])) for index in keep]
        elif name == "per_layer_config" and value:
            small[name] = {
                f"{place:02d}": {key: _small(key, held) for key, held in value[f"{index:02d}"].items()}
                for place, index in enumerate(keep)
                if f"{index:02d}" in value
            }
        elif name in LAYER_COUNTS and value:
            small[name] = len(keep) if listed else LAYERS
        elif name in ("head_dim", "num_key_value_heads") and value is None:
            small[name] = SIZES[name]
        elif "drop" in name and isinstance(value, float):
            small[name] = 0.0
        else:
            small[name] = _small(name, value)
    if "kv_lora_rank" in small:  # keys and values of every head come out of one latent vector
        for part in (small, *(small.get("per_layer_config") or {}).values()):
            part["num_key_value_heads"] = HEADS
    if small.get("is_decoder") is False and not small.get("is_encoder_decoder"):
        small["is_decoder"] = True
    small |= {name: value for name, value in wanted.items() if name not in parts}
    for place, name in enumerate(sorted(fields)):
        if name.endswith(("_token_id", "_token_index", "_token_ids")):
            small[name] = _inside(small[name], name, place, small.get("vocab_size") or VOCAB)
    if isinstance(small.get("rope_parameters"), dict):
        small["rope_parameters"] = _rope(small["rope_parameters"], small)
    return small


def _small(name: str, value: Any) -> Any:
    """Returns a field's value, no larger than the size of its name."""
    if name in SIZES and isinstance(value, int) and not isinstance(value, bool):
        return min(SIZES[name], value)
    return value


def _kept_layers(fields: dict[str, Any], depth: int) -> list[int]:
    """Returns the indices of the layers to keep: one of every kind that a list over layers tells apart, three at least."""
    keep: list[int] = []
    for name, value in fields.items():
        if isinstance(value, list) and len(value) == depth and name.endswith(("_type", "_types", "no_rope_layers")):
            keep += [value.index(kind) for kind in dict.fromkeys(value)]
    keep = sorted(set(keep))
    rest = [index for index in range(depth) if index not in keep]
    return sorted(keep + rest[: max(0, LAYERS - len(keep))])


def _inside(value: Any, name: str, place: int, vocab: int) -> Any:
    """Returns a special token's id inside a vocabulary: as it is where that fits, else by its name."""
    if isinstance(value, list):
        return [_inside(one, name, place + index, vocab) for index, one in enumerate(value)]
    if not isinstance(value, int) or value < vocab:
        return value
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return ids.get(name, vocab - 1 - place % 8)


def _rope(rope: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Returns rotary parameters, by layer type or for all layers, of a length and width that fit the small fields."""
    if any(isinstance(value, dict) for value in rope.values()):
        return {name: _rope(value, fields) if isinstance(value, dict) else value for name, value in rope.items()}
    rope = dict(rope)
    if rope.get("partial_rotary_factor", 1) < 1:
        rope["partial_rotary_factor"] = 0.5
    width = fields.get("qk_rope_head_dim") or fields.get("head_dim") or HEAD_DIM
    half = int(width * rope.get("partial_rotary_factor", 1)) // 2
    if "original_max_position_embeddings" in rope:
        rope["original_max_position_embeddings"] = POSITIONS // 4
    if "mrope_section" in rope:
        rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    for name in ("short_factor", "long_factor"):
        if isinstance(rope.get(name), list):
            rope[name] = [1.0] * half
    return rope
