"""The models that tests run over: the families, their heads and variants of their attention, in one table."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from transformers import Cache, EncoderDecoderCache, PreTrainedModel

from hf_rfa.families import FAMILIES
from hf_rfa.models.attention import RFAAttentionMixin
from hf_rfa.models.cache_names import cache_argument
from hf_rfa.models.configuration_rfa_seq2seq import RFASeq2SeqConfigMixin
from hf_rfa.models.importance import LearnedImportance
from hf_rfa.models.linear_attention import Tokens, linear_attention
from tests.conftest import save_tiny_tokenizer, tiny_parent_config, tiny_seq2seq_config
from tests.tiny_models import tiny_config

ROWS, LENGTH, SOURCE_LENGTH, WIDTH = 3, 29, 17, 24

#: The families that tests run over: of decoders, and of models with an encoder, two each.
#: `tests/models/test_decoders.py` runs over all decoders.
COMMON = ("gpt2", "bart", "marian", "llama")

RETRIEVAL = {"retrieval_heads": [[0, 1], [1, 0]], "retrieval_window": 6, "retrieval_slots": 3}
#: What a Llama that reads texts without end keeps.
WITHOUT_END = {"feature_map": "none", "window_size": 6, "num_sinks": 2, "num_slots": 4}
WITHOUT_END |= {"max_distance": 24, "distance_step": 8}
DECODER_VARIANTS: dict[str, dict[str, Any]] = {
    "positive": {},
    "positive-gate": {"gate": True},
    "positive-trainable": {"trainable_projection": True},
    "gaussian-paper": {"feature_map": "gaussian", "unit_norm": True, "num_features": 16},
    "gaussian-gate": {"feature_map": "gaussian", "gate": True, "num_features": 16},
    "arccos": {"feature_map": "arccos", "unit_norm": True},
    "summary": {"feature_map": "summary", "num_features": 3, "window_size": 4, "num_slots": 2},
    "hybrid": {"softmax_layers": [1]},
    "window": {"window_size": 5},
    "window-gate": {"window_size": 4, "gate": True, "chunk_size": 7, "feature_map": "exponential"},
    "window-gaussian": {"window_size": 6, "feature_map": "gaussian", "num_features": 16, "softmax_layers": [1]},
    "window-sinks": {"window_size": 4, "num_sinks": 3, "gate": True, "softmax_layers": [0]},
    "none": {"feature_map": "none", "window_size": 5, "num_sinks": 2},
    "slots": {"feature_map": "none", "window_size": 3, "num_sinks": 1, "num_slots": 4},
    "slots-gate": {"window_size": 4, "num_slots": 3, "num_features": 16, "gate": True, "chunk_size": 7},
    "slots-features": {"window_size": 4, "num_slots": 3, "num_features": 16, "chunk_size": 7},
    "retrieval": {"feature_map": "none", **RETRIEVAL, "window_size": 3, "num_sinks": 2, "num_slots": 2},
    "retrieval-gate": {**RETRIEVAL, "gate": True, "chunk_size": 7},
}
SEQ2SEQ_VARIANTS: dict[str, dict[str, Any]] = {
    "both": {},
    "both-gate": {"gate": True, "chunk_size": 5},
    "paper": {"feature_map": "gaussian", "unit_norm": True, "num_features": 16, "num_cross_features": 32, "gate": True},
    "cross-only": {"softmax_layers": [0, 1, 2]},
    "causal-only": {"softmax_cross_layers": [0, 1, 2]},
    "everything": {"softmax_encoder_layers": []},
    "everything-signed": {"feature_map": "gaussian", "unit_norm": True, "softmax_encoder_layers": []},
    "per-layer": {"softmax_layers": [0], "softmax_cross_layers": [1], "softmax_encoder_layers": [1]},
    "none": {"feature_map": "none", "window_size": 4, "num_sinks": 1, "softmax_cross_layers": [0, 1, 2]},
    "slots": {"window_size": 3, "num_sinks": 1, "num_slots": 4},
    "retrieval": {**RETRIEVAL, "window_size": 3, "num_sinks": 1},
    "decoder-alone": {"head": "ForCausalLM", "gate": True, "chunk_size": 5},
}
VARIANTS = {"gpt2": DECODER_VARIANTS, "llama": DECODER_VARIANTS}
VARIANTS |= dict.fromkeys(("bart", "marian"), SEQ2SEQ_VARIANTS)
#: The variants that tests run over. `tests/models/test_window.py` has attention of any sizes and maps.
#: Llama adds grouped queries and rotary positions to GPT-2; Marian differs from BART in embeddings and norms only.
RUN = {
    "gpt2": """positive-gate positive-trainable gaussian-paper hybrid window-gate window-gaussian none
        summary slots-gate retrieval retrieval-gate""",
    "llama": "positive-gate summary window-sinks window-gaussian slots-features retrieval-gate",
    "bart": "both-gate paper everything-signed per-layer none slots retrieval decoder-alone",
    "marian": "per-layer",
}
CASES = [(family, name) for family, names in RUN.items() for name in names.split()]

#: What models keep of a short text: some tokens exactly, some by features, or all of them.
TINY_MEMORIES: dict[str, dict[str, Any]] = {
    "exact": {"feature_map": "none", "window_size": 2, "num_sinks": 1, "num_slots": 2},
    "mixed": {"num_features": 8, "window_size": 2, "num_sinks": 1, "num_slots": 1, "gate": True},
    "whole": {"feature_map": "none", "window_size": 64},
}

#: Fields that leave a model one layer of each kind, for what takes its time with every operation.
ONE_LAYER: dict[str, dict[str, int]] = {
    "gpt2": {"n_layer": 1},
    "llama": {"num_hidden_layers": 1},
    "bart": {"encoder_layers": 1, "decoder_layers": 1},
}


def has_encoder(family: str) -> bool:
    """Return whether a family's models have an encoder next to their decoder."""
    return issubclass(FAMILIES[family].rfa_config, RFASeq2SeqConfigMixin)


HEADS = [(family, head) for family in COMMON for head in FAMILIES[family].architectures]
GENERATING_HEADS = [each for each in HEADS if each[1].endswith(("LMHeadModel", "CausalLM", "MTModel", "Generation"))]

every_family = pytest.mark.parametrize("family", COMMON)
every_case = pytest.mark.parametrize(("family", "variant"), CASES)
every_head = pytest.mark.parametrize(("family", "head"), HEADS)
every_generating_head = pytest.mark.parametrize(("family", "head"), GENERATING_HEADS)


def base_config(family: str, **options: Any) -> Any:
    """Return the tiny configuration of a family's softmax models; three layers of a decoder other than GPT-2."""
    if family == "gpt2":
        return tiny_parent_config(**options)
    if has_encoder(family):
        return tiny_seq2seq_config(family, **options)
    values = {"max_position_embeddings": 96, "hidden_size": WIDTH, "head_dim": 6, "initializer_range": 0.3}
    values |= {"bos_token_id": 0, "pad_token_id": None, "eos_token_id": 0, "tie_word_embeddings": False}
    values["classifier_dropout"] = 0.0  # of heads, which else take 0.1
    return tiny_config(family, **{**values, **options})


def make(
    family: str,
    variant: str | dict[str, Any] | None = None,
    *,
    head: str | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> PreTrainedModel:
    """Return a tiny RFA model, the family's language model by default; ``options`` are fields of any kind."""
    fields = {**(VARIANTS[family][variant] if isinstance(variant, str) else variant or {}), **options}
    declared = FAMILIES[family]
    head = head or fields.pop("head", declared.default_architecture)
    (model_class,) = (classes[1] for name, classes in declared.architectures.items() if name.endswith(head))
    base = base_config(family, num_labels=fields.pop("num_labels", 3))
    torch.manual_seed(0)
    model = model_class(declared.rfa_config.from_base(base, **fields)).to(dtype).eval()
    draw_importance(model)
    return model


def draw_importance(model: torch.nn.Module) -> None:
    """Give the tokens of a model with slots any importance, which is 0 until it is calibrated."""
    generator = torch.Generator().manual_seed(5)
    for module in model.modules():
        if isinstance(module, LearnedImportance):
            module.weight.copy_(torch.randn(module.weight.shape, generator=generator))
            module.recency.copy_(torch.rand(module.recency.shape, generator=generator) * 0.2)


make_gpt2 = partial(make, "gpt2")


def make_head(family: str, head: str | None = None, **options: Any) -> PreTrainedModel:
    """Return a model with few features, gates, and attention of every kind RFA."""
    fields = {"num_features": 8, "gate": True}
    fields |= (
        {"pad_token_id": 0} if not has_encoder(family) else {"num_cross_features": 8, "softmax_encoder_layers": []}
    )
    return make(family, fields, head=head, **options)


def make_named(family: str, name: str | dict[str, Any], **options: Any) -> PreTrainedModel:
    """Return the model of a head or of a variant."""
    heads = FAMILIES[family].architectures
    return (
        make_head(family, name, **options) if isinstance(name, str) and name in heads else make(family, name, **options)
    )


def softmax_model(model: PreTrainedModel, family: str, **options: Any) -> PreTrainedModel:
    """Return the softmax language model with the weights of an RFA model."""
    declared = FAMILIES[family]
    base = declared.architectures[declared.default_architecture][0](base_config(family, **options))
    absent, added = base.load_state_dict(model.state_dict(), strict=False)
    assert not absent
    assert all("feature_map" in key or ".gate." in key or "importance." in key for key in added)
    return base.eval()


def save_softmax_model(family: str, folder: Path, **options: Any) -> None:
    """Save a family's softmax language model and a tokenizer, from which models are converted."""
    declared = FAMILIES[family]
    torch.manual_seed(1)
    declared.architectures[declared.default_architecture][0](base_config(family, **options)).save_pretrained(folder)
    save_tiny_tokenizer(folder)


def is_own(name: str) -> bool:
    """Return whether a tensor is one that the softmax model lacks, by its name in a model without experts."""
    return not {"feature_map", "gate", "importance"}.isdisjoint(name.split("."))


def use_flex_attention(patch: pytest.MonkeyPatch, block: int = 128) -> None:
    """Have exact attention computed as on a GPU, by torch's own form of FlexAttention, which needs none.

    Dynamo, through which torch leads that too, would take a second for every new shape.
    """
    exact = "hf_rfa.models.exact_attention"
    patch.setattr(f"{exact}.uses_flex_attention", lambda keys_values: True)
    patch.setattr(f"{exact}._flex_attention", lambda: flex_attention)
    patch.setattr("hf_rfa.models.lifetimes.COMPARED_AT_ONCE", 0)
    patch.setattr("hf_rfa.models.lifetimes.BLOCK", block)
    patch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    # It refuses gradients on a CPU, which its fused form lacks.
    patch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)


def tokens(rows: int = ROWS, length: int = LENGTH) -> Tensor:
    """Return token ids [rows, length] without special tokens."""
    return torch.randint(3, 61, (rows, length))


def source(rows: int = ROWS, side: str = "right") -> dict[str, Tensor]:
    """Return an encoder's inputs: sources of different lengths, the same at every call, padded on one side."""
    ids = torch.randint(3, 61, (rows, SOURCE_LENGTH), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    for row in range(rows):
        padding = SOURCE_LENGTH - (SOURCE_LENGTH, 9, 3)[row % 3]
        mask[row, : padding if side == "left" else 0] = 0
        mask[row, SOURCE_LENGTH - (padding if side == "right" else 0) :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def read(model: PreTrainedModel, ids: Tensor, *, mask: Tensor | None = None, **options: Any) -> Any:
    """Run a model on tokens of its decoder [B, T]; one with an encoder on `source` too, unless it is given another."""
    if not model.config.is_encoder_decoder:
        return model(ids, attention_mask=mask, **options)
    if "encoder_outputs" not in options:
        options = {**source(len(ids)), **options}
    return model(decoder_input_ids=ids, decoder_attention_mask=mask, **options)


def inputs_for(model: Any) -> dict[str, Tensor]:
    """Return the inputs of a head, the second row padded."""
    name, length = type(model).__name__, SOURCE_LENGTH if model.config.is_encoder_decoder else LENGTH
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 61, (ROWS, length), generator=generator)
    mask = torch.ones_like(ids)
    if name == "RFABartForSequenceClassification":  # reads the end-of-text token, one per row
        ids[:, -1] = 2
        mask[1, :2] = 0
    else:
        mask[1, 5:] = 0
        ids[1, 5:] = model.config.pad_token_id or 0
    if name == "RFAGPT2DoubleHeadsModel":
        ids, mask = torch.stack([ids, ids.flip(0)], dim=1), torch.stack([mask, mask.flip(0)], dim=1)
        return {"input_ids": ids, "attention_mask": mask, "mc_token_ids": torch.full((ROWS, 2), 3)}
    inputs = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder and "Classification" not in name and "Answering" not in name:
        inputs["decoder_input_ids"] = torch.randint(3, 61, (ROWS, LENGTH), generator=generator)
    return inputs


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor, **options: Any) -> Tensor:
    """Return the logits [B, T, 61] of `read` without a cache."""
    return read(model, ids, use_cache=False, **options).logits


@torch.no_grad()
def logits_by_steps(
    model: PreTrainedModel,
    ids: Tensor,
    cuts: Iterable[int],
    *,
    cache: Cache | None = None,
    mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Cache]:
    """Return the logits of tokens read in pieces that end at ``cuts``, and the cache.

    The mask is that of all tokens, those before ``ids`` that the cache holds included.
    """
    found, start, past = [], 0, 0 if mask is None else mask.shape[1] - ids.shape[1]
    for stop in (*cuts, ids.shape[1]):
        given = {**options, **cache_argument(cache), "mask": None if mask is None else mask[:, : past + stop]}
        if position_ids is not None:
            given["position_ids"] = position_ids[:, start:stop]
        output = read(model, ids[:, start:stop], use_cache=True, **given)
        cache, start = output.past_key_values, stop
        found.append(output.logits)
    return torch.cat(found, dim=1), cache


def caches(cache: Cache) -> dict[str, Cache]:
    """Return the parts of a cache by the kind of attention that uses them."""
    if isinstance(cache, EncoderDecoderCache):
        return {"causal": cache.self_attention_cache, "cross": cache.cross_attention_cache}
    return {"causal": cache}


def state_of(layer: Any) -> Tensor | None:
    """Return the state of a cache layer, [B, H, rows, d + 1], of the heads that have features."""
    return layer.memories[0].state


def rfa_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's RFA attention modules by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, RFAAttentionMixin)}


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return ‖found − expected‖ / ‖expected‖."""
    return float((found.float() - expected).norm() / expected.norm())


def attend_with_features(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    log_decay: Tensor | None = None,
    input_scale: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """`linear_attention` of features, with log-decays and input scales among the options."""
    return linear_attention(query, Tokens(key, value, log_decay, input_scale), **options)
