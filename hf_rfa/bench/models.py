"""Pairs of models with the same weights, and caches as they are at a given position."""

from __future__ import annotations

import copy
import math
from dataclasses import fields
from typing import Any

import torch
from transformers import AutoConfig, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.modeling_outputs import BaseModelOutput

from hf_rfa.errors import InputError
from hf_rfa.families import FAMILIES
from hf_rfa.inference.loading import AUTO_CLASSES, kind_of
from hf_rfa.models.cache_names import cache_argument
from hf_rfa.models.cache_rfa import RFALayer
from hf_rfa.models.configuration_rfa import RFAConfigMixin
from hf_rfa.models.configuration_rfa_seq2seq import RFASeq2SeqConfigMixin
from hf_rfa.models.memory import EMPTY, Places


def pair(config: Any, positions: int, **options: Any) -> tuple[Any, Any]:
    """Return a softmax model with random weights, and an RFA model with the same weights, each with so many positions.

    The configuration is that of either. Options are fields of `RFAConfigMixin` for the RFA model of a softmax configuration.

    Raises:
        InputError: for a family that has no RFA models, or for options with an RFA configuration.
    """
    is_rfa, base_type = isinstance(config, RFAConfigMixin), config.model_type.removeprefix("rfa_")
    if is_rfa and options:
        raise InputError(
            f"an RFA checkpoint has its own {', '.join(options)}. Leave them out, or pass its softmax parent."
        )
    if base_type not in FAMILIES:
        raise InputError(
            f"there is no RFA form of a {config.model_type} model. There is one of: {', '.join(FAMILIES)}."
        )
    stretched = copy.deepcopy(config)
    setattr(stretched, FAMILIES[base_type].positions_field, positions)
    stretched._attn_implementation = None  # the best that both classes have
    if is_rfa:
        left_out = {field.name for field in fields(RFASeq2SeqConfigMixin)}
        left_out |= {"model_type", "architectures", "transformers_version", "auto_map"}
        values = {name: value for name, value in stretched.to_dict().items() if name not in left_out}
        configs = AutoConfig.for_model(base_type, **values), stretched
    else:
        configs = stretched, FAMILIES[base_type].rfa_config.from_base(stretched, **options)
    softmax, rfa = (AUTO_CLASSES[kind_of(config)].from_config(each).eval() for each in configs)
    rfa.load_state_dict(softmax.state_dict(), strict=False)
    return softmax, rfa


def step_inputs(model: Any, batch: int, source: int) -> dict[str, Any]:
    """Return the inputs of one decoding step, with an encoder its output for ``source`` tokens too."""
    token = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
    if not model.config.is_encoder_decoder:
        return {"input_ids": token}
    hidden = torch.randn(batch, source, model.config.d_model, device=model.device, dtype=model.dtype)
    return {"encoder_outputs": BaseModelOutput(hidden), "decoder_input_ids": token}


@torch.no_grad()
def cache_at(model: Any, inputs: dict[str, Any], position: int, *, room: int = 0) -> Any:
    """Return a cache as after ``position`` tokens.

    The cost of a step does not depend on a cache's values. Softmax layers, also those of a hybrid, get random keys and values
    instead of a prefill, and memories get zeros. A softmax model with ``room``, free slots, gets a `StaticCache`.
    """
    config = model.config
    causal: Any = DynamicCache(config=config)
    if room and not isinstance(config, RFAConfigMixin):
        causal = StaticCache(config=config, max_cache_len=position + room)
    cache = EncoderDecoderCache(causal, DynamicCache(config=config)) if config.is_encoder_decoder else causal
    model(**inputs, **cache_argument(cache))
    for layer in causal.layers:
        if not hasattr(layer, "keys") and not isinstance(layer, RFALayer):
            continue  # a recurrent layer, whose states have one size
        missing = position - int(layer.get_seq_length())
        if isinstance(layer, RFALayer):
            layer.cumulative_length.add_(missing)
            for memory, layout in zip(layer.memories, layer.layouts, strict=True):
                if memory.places is not None:
                    _fill(memory.places, layout.sinks, position)
        else:
            rows, heads, _, width = layer.keys.shape
            layer.update(*torch.randn(2, rows, heads, missing, width, device=model.device, dtype=model.dtype))
    return cache


def _fill(places: Places, sinks: int, position: int) -> None:
    """Let places hold the sinks and the last of so many tokens: a step knows of a full memory that it may look everywhere."""
    index = torch.arange(places.arrival.shape[-1], device=places.arrival.device)
    latest = index + max(0, position - len(index))
    arrival = torch.where(index < sinks, index, latest).masked_fill(index >= position, EMPTY)
    places.arrival.copy_(arrival)
    score = torch.zeros_like(index, dtype=torch.float32).masked_fill(index < sinks, math.inf)
    places.score.copy_(score.masked_fill(index >= position, -math.inf))
