"""RFA models of decoders whose attention goes through transformers' attention interface, as that of GPT-2 and Llama does.

In these families an attention module projects, rotates and normalizes queries and keys, hands new keys to the cache, and then
calls the function that its configuration names. Here that function is ``"rfa"``, and the cache is handed to it instead. All
else of the family stays as it is: weights, norms, positions, experts, heads, and cross attention to a source.

Classes are made by name when they are asked for: ``RFALlamaForCausalLM`` from transformers' ``LlamaForCausalLM``. A model is
built as its base model first; then its attention modules become RFA by their class, and a hook prepares their inputs.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModel, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.utils.import_utils import is_tracing

from .attention import RFAAttentionMixin
from .cache_names import CACHE_NAME, cache_name, take_cache
from .cache_rfa import (
    RFA_LAYER_TYPE,
    cross_layer_of,
    past_length,
    self_attention_cache,
    unread_length,
)
from .configuration_rfa import FULL_ATTENTION, decoder_config_class
from .masking import (
    check_direction,
    check_one_document,
    check_positions,
    document_starts,
    local_padding,
    padding_of_causal_mask,
    padding_of_mask,
    read_mask,
)
from .rfa_classes import RFAPreTrainedMixin, base_class, make_class, register_name

#: Name of random feature attention in transformers' attention interface.
INTERFACE = "rfa"
#: Names of the padding mask and of the softmax layers' masks, where `generate` asks for both.
PADDING, SOFTMAX = "padding", "softmax"
#: Modules of a stack that hold learned positions, by attribute name.
POSITION_EMBEDDINGS = ("embed_positions", "wpe")
#: Families, by model_type, without rotary positions that count the tokens of a padding mask for positions.
COUNTS_TOKENS = ("rfa_opt",)


def rfa_attention(
    module: RFADecoderAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    rfa_hidden_states: Tensor,
    rfa_cache: Cache | None = None,
    rfa_projections: list[Tensor] | None = None,
    padding_mask: Tensor | None = None,
    document_starts: Tensor | None = None,
    output_rfa_attentions: bool = False,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend with random features, as a function of transformers' attention interface.

    Args:
        module: the attention module.
        query: [B, query heads, T, d].
        key: [B, H, T, d], H being the number of key-value heads.
        value: [B, H, T, d].
        attention_mask: not read: `prepare_inputs` hands padding and documents over as they are.
        scaling: s of exp(q·k·s).
        dropout: see `hf_rfa.models.attention.RFAAttentionMixin.attend`.
        rfa_hidden_states: the module's input, [B, T, width].
        rfa_cache: the cache, or None.
        rfa_projections: a list that gets queries, keys and values instead of anything being computed, or None.
        padding_mask: [B, T], 0 for padding, or None.
        document_starts: [B, T], True where a document starts, or None.
        output_rfa_attentions: whether to return the attention weights.
        s_aux: logits in the normalizer that no value belongs to, one a query head (the sinks of GPT-OSS), or None.
        softcap: must be None: capped logits are not a kernel of q and k.
        **kwargs: what other functions of the interface read.

    Returns:
        The output [B, T, query heads, d], and the weights [B, query heads, T, T] or None.
    """
    module.check_call(query, key, value, softcap)
    if scaling is not None and scaling != module.scaling:  # OPT scales its queries before it hands them over
        query = query * (scaling / module.scaling)
    if rfa_projections is not None:
        rfa_projections += [query, key, value]
        return torch.zeros_like(query).transpose(1, 2), None
    optional: dict[str, Any] = {} if s_aux is None else {"sink_logits": s_aux}
    output, weights = module.attend(
        query,
        key,
        value,
        hidden_states=rfa_hidden_states,
        cache=self_attention_cache(rfa_cache),
        padding_mask=padding_mask,
        document_starts=document_starts,
        dropout=dropout,
        output_attentions=output_rfa_attentions,
        **optional,
    )
    return output.transpose(1, 2).contiguous(), weights


AttentionInterface.register(INTERFACE, rfa_attention)


class RFADecoderAttention(RFAAttentionMixin):
    """Random feature attention for an attention module that calls transformers' attention interface."""

    layer_idx: int
    config: Any

    def become_rfa(self, config: Any) -> None:
        """Add feature map and gate to a module that was built as the base model's; ``config`` is the RFA model's."""
        if isinstance(getattr(self, "sinks", None), nn.Parameter) and not config.window_size:
            raise ValueError(
                "attention with learned sinks needs a sliding window next to its features: set window_size."
            )
        # Only this module is to call "rfa": the model's own configuration names what its softmax layers call.
        self.config = copy.copy(config)
        self.config._attn_implementation = INTERFACE
        groups = config.num_query_heads_for("causal") // config.num_heads_for("causal")
        self.init_rfa(config, kind="causal", scaling=self.scaling, layer_idx=self.layer_idx, groups=groups)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Attend; arguments and results are those of the base model's module, and what `prepare_inputs` adds."""
        # Without a cache the base model's forward hands over the keys of this call alone. The state has those before them.
        own: dict[str, Any] = {"rfa_hidden_states": hidden_states, "rfa_cache": take_cache(kwargs)}
        if "output_rfa_attentions" not in kwargs:
            own |= _inputs_from_mask(hidden_states.shape[1], own["rfa_cache"], kwargs)
        return super().forward(hidden_states, *args, **own, **kwargs)

    def project(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, query heads, T, d], keys and values [B, H, T, d] of the module's inputs."""
        found: list[Tensor] = []
        self(hidden_states, **{"attention_mask": None, **kwargs}, rfa_projections=found)
        query, key, value = found
        return query, key, value

    def check_call(self, query: Tensor, key: Tensor, value: Tensor, softcap: float | None) -> None:
        """Raise a ValueError for attention that random features do not stand for."""
        heads, width = self.feature_map.num_heads + len(self.retrieval_heads), self.feature_map.head_dim
        wrong = None
        if softcap is not None:
            wrong = f"caps its logits at {softcap}, so that its weights are no function of q·k alone"
        elif key.shape[1] != heads or any(each.shape[-1] != width for each in (query, key, value)):
            wrong = f"has keys {tuple(key.shape)} and values {tuple(value.shape)}, not {heads} heads of width {width}"
        if wrong is not None:
            raise ValueError(f"{type(self).__name__} {wrong}: this attention is not supported.")


def _inputs_from_mask(length: int, cache: Cache | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return what `prepare_inputs` adds, for families whose layers do not hand it on (StableLM, Nemotron).

    The mask says of every key whether it is padding: no query sees that. If it has a row for each query, it also says where
    documents start: at tokens that do not see the one before.
    """
    mask, padding, starts = kwargs.get("attention_mask"), None, None
    if mask is not None and mask.numel() > 1:
        padding = padding_of_mask(mask[:, :, -1:, -length:])
        if cache is None and mask.shape[-2] > 1:
            seen = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0  # [B, T, T]
            padding = seen.any(-2)
            apart = padding[:, 1:] & padding[:, :-1] & ~seen.diagonal(-1, dim1=-2, dim2=-1)
            starts = F.pad(apart, (1, 0))
    elif cache is None:
        starts = document_starts(kwargs.get("position_ids"))
    wanted = bool(kwargs.get("output_attentions"))
    return {"padding_mask": padding, "document_starts": starts, "output_rfa_attentions": wanted}


class RFADecoderMixin(RFAPreTrainedMixin):
    """A decoder, with or without a head, whose full-attention layers but those in ``config.softmax_layers`` are RFA.

    Arguments and results are those of the base model. ``output_attentions=True`` returns RFA's weights, [B, query heads, T,
    T], at quadratic cost; with a cache that has seen tokens before, the columns are those of this call's tokens.

    Without a mask and a cache, ``position_ids`` that do not go on by one start a new document, which sees nothing of those
    before it in its row: packed batches, as transformers' softmax models take them. Models whose other layers are
    convolutions or recurrences refuse them, since these read a row as one text.
    """

    base_config_class: Any
    config: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        # Heads of several families build their body by `AutoModel`. A folder's checkpoint without the package has its
        # configuration from another copy of these modules, which no class is registered for.
        bodies: Any = AutoModel._model_mapping
        if self.base_config_class in bodies and type(config) not in bodies:
            bodies.register(type(config), rfa_model_class(bodies[self.base_config_class]))
        super().__init__(config, *args, **kwargs)
        stack: Any = None
        for module in list(self.modules()):  # type: ignore[attr-defined]
            if is_attention(module) and not isinstance(module, RFAAttentionMixin):
                if config.is_rfa("causal", module.layer_idx):
                    module.__class__ = rfa_attention_class(type(module))
                    module.become_rfa(config)
            elif isinstance(module, PreTrainedModel) and any(map(is_attention, module.modules())):
                stack = module  # the innermost one; heads may call it past the model around it
        if stack is None:
            raise ValueError(f"{type(self).__name__} has no attention modules of the usual form: it is not supported.")
        if getattr(self, "loss_type", None) is None and self.can_generate():  # type: ignore[attr-defined]
            self.loss_type = "ForCausalLM"  # which the name of GPT-2's language model does not say
        self.keep_own_in_float32()
        if not hasattr(stack, "reads_inputs"):
            stack.reads_inputs = tuple(inspect.signature(stack.forward).parameters)
            stack.rfa_layer_types = frozenset(config.cache_layer_types())
            stack.types_that_read_on = config.types_that_read_on()
            stack.register_forward_pre_hook(prepare_inputs, with_kwargs=True)

    def create_masks_for_generate(
        self,
        *,
        attention_mask: Tensor | None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the masks for `generate`: see `RFAPreTrainedMixin`; beside softmax layers theirs too, of one size."""
        given: Any = {"attention_mask": attention_mask, "inputs_embeds": inputs_embeds, "position_ids": position_ids}
        mask, others = super().create_masks_for_generate(**given, **kwargs), set(self.config.cache_layer_types())
        others -= {RFA_LAYER_TYPE}
        made_here = others and others <= {"sliding_attention", *FULL_ATTENTION}  # recurrent layers read the mask itself
        if mask is None or inputs_embeds is None or position_ids is None or not made_here:
            return mask
        by_type = _masks_by_type(self.config, inputs_embeds, mask, position_ids, take_cache(kwargs))
        new = mask[:, -inputs_embeds.shape[1] :].clone(memory_format=torch.contiguous_format)
        return {PADDING: new, SOFTMAX: by_type if "sliding_attention" in others else by_type["full_attention"]}


def prepare_inputs(stack: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add what RFA layers read to the inputs of a stack of layers, and take away the masks of T × T that they do not.

    Raises:
        ValueError: for a mask per query, for bidirectional attention, for positions past learned ones, or for rows of several
            documents in a model with layers that do not keep them apart.
        TypeError: for a cache under a name that is none of a cache's.
    """
    kwargs = {**dict(zip(stack.reads_inputs, args, strict=False)), **kwargs}
    if (cache := take_cache(kwargs)) is not None:
        kwargs[cache_name(stack.reads_inputs)] = cache
    prepared = kwargs.get("attention_mask")
    if isinstance(prepared, dict) and PADDING in prepared:  # by `create_masks_for_generate`
        kwargs["attention_mask"], prepared = prepared[PADDING], prepared[SOFTMAX]
    else:
        prepared = None
    kwargs["attention_mask"] = read_mask(kwargs.get("attention_mask"))
    names = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")
    input_ids, inputs_embeds, attention_mask, position_ids = (kwargs.get(name) for name in names)
    inputs = input_ids if input_ids is not None else inputs_embeds
    if inputs is None or (input_ids is not None and inputs_embeds is not None):
        raise ValueError("pass either input_ids or inputs_embeds, and not both.")
    stack.config.check_causal()
    check_direction(kwargs.get("is_causal"), causal=True)
    length, past = inputs.shape[1 if input_ids is None else -1], past_length(cache)
    if attention_mask is not None and input_ids is not None and attention_mask.ndim == input_ids.ndim == 3:
        attention_mask = read_mask(attention_mask.flatten(0, 1))  # (batch, choices, tokens) of multiple choice
    attention_mask = padding_of_causal_mask(attention_mask, length)
    kwargs["padding_mask"] = local_padding(attention_mask, length + unread_length(cache, stack.config))
    kwargs["document_starts"] = document_starts(position_ids) if attention_mask is None and cache is None else None
    if types := stack.types_that_read_on:
        check_one_document(kwargs["document_starts"], f"layers of type {', '.join(types)} read on past its start")
    if kwargs["document_starts"] is not None:  # for training; softmax layers keep documents apart only without a cache
        kwargs["use_cache"] = False
    wanted = kwargs.get("output_attentions")
    kwargs["output_rfa_attentions"] = bool(stack.config.output_attentions if wanted is None else wanted)
    # Softmax attention sees differences of rotary positions alone, and features see more: padding must not shift them.
    rotary = getattr(stack.config, "rope_parameters", None) and attention_mask is not None
    counts_tokens = rotary or stack.config.model_type in COUNTS_TOKENS
    if counts_tokens and position_ids is None and "position_ids" in stack.reads_inputs:
        if attention_mask is None:
            position_ids = past + torch.arange(length, device=inputs.device)[None]
        else:
            position_ids = (attention_mask.cumsum(-1) * attention_mask - 1)[:, -length:]
        kwargs["position_ids"] = position_ids = position_ids.clamp_min(0) if rotary else position_ids
    if any(hasattr(stack, name) for name in POSITION_EMBEDDINGS) and not is_tracing(inputs):
        count, last = stack.config.max_position_embeddings, int(past) + length - 1
        if last >= count and position_ids is not None:
            last = int(position_ids.max())  # left padding makes positions smaller than the number of tokens
        check_positions(last, count)
    if prepared is not None:
        kwargs["attention_mask"] = prepared
    elif stack.rfa_layer_types <= {RFA_LAYER_TYPE}:
        kwargs["attention_mask"] = _prepared(kwargs["padding_mask"], inputs.device)
    elif "sliding_attention" in stack.rfa_layer_types:
        embeds = inputs.new_empty(inputs.shape[0], length, 0, dtype=stack.dtype)
        kwargs["attention_mask"] = _masks_by_type(stack.config, embeds, attention_mask, position_ids, cache)
    elif kwargs["document_starts"] is not None and not types:  # OPT and BioGPT make their mask without positions
        embeds = inputs.new_empty(inputs.shape[0], length, 0, dtype=stack.dtype)
        kwargs["attention_mask"] = create_causal_mask(stack.config, embeds, None, None, position_ids)
    if "encoder_hidden_states" in stack.reads_inputs and getattr(stack.config, "add_cross_attention", False):
        cache = _with_source_cache(stack.config, cache, kwargs.get("use_cache"))
        kwargs[cache_name(stack.reads_inputs)] = cache
    return (), kwargs


def _with_source_cache(config: Any, cache: Cache | None, use_cache: bool | None) -> Cache | None:
    """Return a cache for self-attention and for cross attention, which stays softmax; None where none is wanted."""
    if cache is None:
        if not (config.use_cache if use_cache is None else use_cache):
            return None
        cache = DynamicCache(config=config)
    if not isinstance(cache, EncoderDecoderCache):
        cache = EncoderDecoderCache(cache, DynamicCache())
    for index in range(config.num_hidden_layers):  # `generate` builds both parts from the layer types of self-attention
        cross_layer_of(cache.cross_attention_cache, index, softmax=True)
    return cache


def _prepared(padding_mask: Tensor | None, device: torch.device) -> Tensor:
    """Return a mask [B, 1, 1, T] of the keys that are tokens.

    transformers takes a mask of four dimensions as prepared, and builds none of T × T entries, which RFA does not read.
    """
    if padding_mask is None:
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    return padding_mask[:, None, None, :] != 0


def _masks_by_type(
    config: Any, embeds: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cache: Cache | None
) -> dict[str, Any]:
    """Return the masks of those layers of a model that are not RFA, by what they see."""
    # transformers asks the first layer of a kind how many keys there are, and RFA layers hold none.
    kept = [] if cache is None else [layer for layer in cache.layers if getattr(layer, "holds", None) is None]
    arguments: Any = {
        "config": config,
        "inputs_embeds": embeds,
        "attention_mask": attention_mask,
        CACHE_NAME: Cache(layers=kept) if kept else None,
        "position_ids": position_ids,
    }
    unread = _prepared(None, embeds.device)
    types = set(config.cache_layer_types())
    slides = "sliding_attention" in types
    return {
        "full_attention": create_causal_mask(**arguments) if types - {RFA_LAYER_TYPE, "sliding_attention"} else unread,
        "sliding_attention": create_sliding_window_causal_mask(**arguments) if slides else unread,
    }


def is_attention(module: nn.Module) -> bool:
    """Return whether a module is a self-attention layer that knows its place and its scaling."""
    named = type(module).__name__.endswith("Attention") and not getattr(module, "is_cross_attention", False)
    return named and isinstance(getattr(module, "layer_idx", None), int) and hasattr(module, "scaling")


def rfa_attention_class(base: type[nn.Module]) -> type[nn.Module]:
    """Return the RFA class of a family's attention class."""
    return make_class(globals(), base, (RFADecoderAttention,), f"{base.__name__} with random features.")


def rfa_model_class(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return the RFA class of a decoder's model class: a body, one with a head, or the class that these subclass."""
    base_config: Any = base.config_class
    config_class: Any = decoder_config_class(base_config)
    if PreTrainedModel in base.__bases__:
        text = f"Base class of the RFA models that subclass `{base.__name__}`."
        return make_class(globals(), base, (RFAPreTrainedMixin,), text, config_class=config_class)
    family = next(cls for cls in base.__mro__ if PreTrainedModel in cls.__bases__)
    text = f"{base.__name__} with random feature attention."
    attributes: dict[str, Any] = {"config_class": config_class, "base_config_class": base_config}
    found = make_class(globals(), base, (RFADecoderMixin, rfa_model_class(family)), text, **attributes)
    # Files name some tensors otherwise than models, and hold experts one by one: by class or by model_type.
    names = {base.__name__: found.__name__, base_config.model_type: config_class.model_type}
    for name, own in names.items():
        if (conversions := get_checkpoint_conversion_mapping(name)) is not None:
            register_checkpoint_conversion_mapping(own, conversions, overwrite=True)
    register_name(base, found)
    return found


def __getattr__(name: str) -> Any:
    """Return a class by its name, ``RFALlamaForCausalLM`` say; an AttributeError if transformers has no base class."""
    base = base_class(__name__, name, nn.Module)
    return rfa_model_class(base) if issubclass(base, PreTrainedModel) else rfa_attention_class(base)
