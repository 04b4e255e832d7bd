"""RFA models of decoders whose attention goes through transformers' attention interface, as that of GPT-2 and Llama does.

In these families an attention module projects, rotates and normalizes queries and keys, hands new keys to the cache, and then
calls the function that its configuration names. Here that function is ``"rfa"``, and the cache is handed to it instead. All
else of the family stays as it is: weights, norms, positions, experts, heads, and cross attention to a source.

Classes are made by name when they are asked for: ``RFALlamaForCausalLM`` from transformers' ``LlamaForCausalLM``. A model is
built as its base model first; then its attention modules become RFA by their class, and a hook prepares their inputs.
"""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModel, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import GenerationConfig, GenerationMode
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.utils.import_utils import is_tracing, is_triton_available

from .attention import RFAAttentionMixin, rfa_layers
from .cache_names import CACHE_NAME, cache_name, has_cache, take_cache
from .cache_rfa import RFA_LAYER_TYPE, self_attention_cache
from .configuration_rfa import FULL_ATTENTION, STATE, base_config_class, decoder_config_class
from .masking import check_one_document, check_positions, document_starts, read_mask
from .no_features import feature_map_class
from .rfa_classes import (
    RFAPreTrainedMixin,
    StackCall,
    base_class,
    before_calls,
    make_class,
    make_model_class,
    prepare_calls,
    unread_mask,
)
from .streaming import find_out_rotations, prepare_positions, prepare_step, seen_keys

#: Name of converted attention in transformers' attention interface.
INTERFACE = "rfa"
#: Names of the padding mask and of the softmax layers' masks, where `generate` asks for both.
PADDING, SOFTMAX = "padding", "softmax"
#: Modules of a stack that hold learned positions, by attribute name.
POSITION_EMBEDDINGS = ("embed_positions", "wpe")
#: Softmax layers whose masks and caches keep their size in `generate` with a static cache.
STEADY_LAYER_TYPES = frozenset(("sliding_attention", *FULL_ATTENTION))
#: Devices on which `generate` compiles decoding steps by itself, and its modes that transformers compiles.
COMPILING_DEVICES = ("cuda", "xpu")
COMPILED_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
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
    turns: Tensor | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend to a memory of fixed size, as a function of transformers' attention interface.

    Args:
        module: the attention module.
        query: [B, query heads, T, d].
        key: [B, H, T, d], of H key-value heads.
        value: [B, H, T, d].
        attention_mask: not read: `prepare_decoder` hands padding and documents over as they are.
        scaling: s of exp(q·k·s).
        dropout: as of `hf_rfa.models.attention.RFAAttentionMixin.attend`, and so are padding_mask and document_starts.
        rfa_hidden_states: the module's input, [B, T, width].
        rfa_cache: the cache, or None.
        rfa_projections: a list that gets queries, keys and values instead of anything being computed, or None.
        padding_mask: [B, T], or None.
        document_starts: [B, T], or None.
        output_rfa_attentions: whether to return the attention weights.
        turns: how many positions further queries and keys are, [B, T], or None (`hf_rfa.models.streaming`).
        s_aux: logits in the normalizer that no value belongs to, one a query head (the sinks of GPT-OSS), or None.
        softcap: must be None: capped logits are not a kernel of q and k.
        **kwargs: what other functions of the interface read.

    Returns:
        The output [B, T, query heads, d], and the weights [B, query heads, T, T] or None.
    """
    module.check_call(query, key, value, softcap)
    if scaling is not None and scaling != module.scaling:  # OPT scales its queries before it hands them over
        query = query * (scaling / module.scaling)
    if (keys := seen_keys()) is not None:
        keys[module.rfa_layer_idx] = key
        return torch.zeros_like(query).transpose(1, 2), None
    if turns is not None:
        query, key = (module.rotation.turn(rows, turns[:, None]) for rows in (query, key))
    if rfa_projections is not None:
        rfa_projections += [query, key, value]
        return torch.zeros_like(query).transpose(1, 2), None
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
        sink_logits=s_aux,
    )
    return output.transpose(1, 2).contiguous(), weights


AttentionInterface.register(INTERFACE, rfa_attention)


class RFADecoderAttention(RFAAttentionMixin):
    """Attention to a memory of fixed size for a module that calls transformers' attention interface."""

    layer_idx: int
    config: Any

    def become_rfa(self, config: Any) -> None:
        """Add RFA's own parts to a module that was built as the base model's; ``config`` is the RFA model's."""
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
        """Attend; arguments and results are those of the base model's module, and what `prepare_decoder` adds."""
        # Without a cache the base model's forward hands over the keys of this call alone. The state has those before them.
        cache = kwargs.pop(CACHE_NAME, None)
        if cache is None:
            cache = take_cache(kwargs)
        if "output_rfa_attentions" not in kwargs:
            kwargs |= _inputs_from_mask(hidden_states.shape[1], cache, kwargs, self)
        return super().forward(hidden_states, *args, rfa_hidden_states=hidden_states, rfa_cache=cache, **kwargs)

    def project(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, query heads, T, d], keys and values [B, H, T, d] of the module's inputs."""
        projections: list[Tensor] = []
        self(hidden_states, **{"attention_mask": None, **kwargs}, rfa_projections=projections)
        query, key, value = projections
        return query, key, value

    def check_call(self, query: Tensor, key: Tensor, value: Tensor, softcap: float | None) -> None:
        """Raise a ValueError for attention that random features do not stand for."""
        heads, width = self.rfa_heads, self.rfa_width
        problem = None
        if softcap is not None:
            problem = f"caps its logits at {softcap}, so that its weights are no function of q·k alone"
        elif key.shape[1] != heads or not query.shape[-1] == key.shape[-1] == value.shape[-1] == width:
            problem = f"has keys {tuple(key.shape)} and values {tuple(value.shape)}, not {heads} heads of width {width}"
        if problem is not None:
            raise ValueError(f"{type(self).__name__} {problem}: this attention is not supported.")


def _inputs_from_mask(
    length: int, cache: Cache | None, kwargs: dict[str, Any], module: RFADecoderAttention
) -> dict[str, Any]:
    """Return what `prepare_decoder` adds, for families whose layers do not hand it on (StableLM, Nemotron).

    The mask says of every key whether it is padding: no query sees that. If it has a row for each query, it also says where
    documents start: at tokens that do not see the one before.
    """
    mask, padding, starts = kwargs.get("attention_mask"), None, None
    if mask is not None and mask.numel() > 1:
        seen = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0  # [B, T or 1, S]
        padding = seen[:, -1, -length:]
        if cache is None and mask.shape[-2] > 1:
            padding = seen.any(-2)
            apart = padding[:, 1:] & padding[:, :-1] & ~seen.diagonal(-1, dim1=-2, dim2=-1)
            starts = F.pad(apart, (1, 0))
    elif cache is None:
        starts = document_starts(kwargs.get("position_ids"))
        if starts is not None and module.max_distance:  # an epoch's origin is no document's
            position_ids, before = kwargs["position_ids"], kwargs["position_ids"].roll(1, -1)
            distance, step = module.max_distance, module.distance_step
            begins = (position_ids - before == 1 - step) & (position_ids >= distance - step)
            starts = starts & ~begins
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

    config: Any
    config_class: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        # Heads of several families build their body by `AutoModel`. A folder's checkpoint without the package has its
        # configuration from another copy of these modules, which no class is registered for.
        bodies: Any = AutoModel._model_mapping
        base_config = base_config_class(self.config_class)
        if base_config in bodies and type(config) not in bodies:
            bodies.register(type(config), rfa_model_class(bodies[base_config]))
        super().__init__(config, *args, **kwargs)
        stack: Any = None
        for module in list(self.modules()):  # type: ignore[attr-defined]
            if is_attention(module) and not isinstance(module, RFAAttentionMixin):
                if config.is_rfa("causal", module.layer_idx):
                    parts = globals() if config.feature_map == "none" else vars(import_module(f".{STATE}", __package__))
                    module.__class__ = parts["rfa_attention_class"](type(module))
                    module.become_rfa(config)
            elif isinstance(module, PreTrainedModel) and any(map(is_attention, module.modules())):
                stack = module  # the innermost one; heads may call it past the model around it
        if stack is None:
            raise ValueError(f"{type(self).__name__} has no attention modules of the usual form: it is not supported.")
        if getattr(self, "loss_type", None) is None and self.can_generate():  # type: ignore[attr-defined]
            self.loss_type = "ForCausalLM"  # which the name of GPT-2's language model does not say
        self.keep_own_in_float32()
        stack.rfa_layer_types = frozenset(config.cache_layer_types())
        stack.types_that_read_on = config.types_that_read_on()
        stack.reads_unrotated = (
            bool(getattr(config, "rope_parameters", None)) and feature_map_class(config.feature_map).reads_means
        )
        # Once, as they are asked for at every step; a tuple, so that none is a submodule a second time.
        stack.rfa_attention = rfa_layers(stack)
        stack.streams = config.streams()
        stack.has_sliding_layers = "sliding_attention" in stack.rfa_layer_types
        self.rfa_stacks = (stack,)
        prepare_calls(stack, prepare_decoder)

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], mode: GenerationMode, *args: Any
    ) -> None:
        """Prepare the cache of `generate`: a static one where transformers then compiles the steps by itself."""
        if mode in COMPILED_MODES and self._compiles_steps(generation_config) and not has_cache(model_kwargs):
            generation_config.cache_implementation = "static"  # of this call alone, as `generate` made a copy
        super()._prepare_cache_for_generation(generation_config, model_kwargs, mode, *args)  # type: ignore[misc]

    def _compiles_steps(self, generation_config: GenerationConfig) -> bool:
        """Return whether `generate` compiles steps without being asked to: on a GPU, where no input changes its shape."""
        wishes = generation_config.cache_implementation, generation_config.prefill_chunk_size
        if any(wishes) or generation_config.disable_compile or generation_config.use_cache is False:
            return False
        model: Any = self
        types = {*self.config.cache_layer_types()} - {RFA_LAYER_TYPE}
        if generation_config.is_assistant or not model._can_compile_fullgraph or not types <= STEADY_LAYER_TYPES:
            return False
        return model.device.type in COMPILING_DEVICES and is_triton_available()

    def create_masks_for_generate(
        self,
        *,
        attention_mask: Tensor | None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the masks for `generate`: see `RFAPreTrainedMixin`; beside softmax layers theirs too, of one size.

        `generate` asks before every step, outside of what is compiled: here old tokens move along.
        """
        cache = take_cache(kwargs)
        if inputs_embeds is not None and inputs_embeds.shape[1] == 1 and self.rfa_stacks[0].streams:
            prepare_step(self.rfa_stacks[0], self_attention_cache(cache))
        mask = super().create_masks_for_generate(
            attention_mask=attention_mask, inputs_embeds=inputs_embeds, position_ids=position_ids, **kwargs
        )
        softmax_types = {*self.config.cache_layer_types()} - {RFA_LAYER_TYPE}
        # Recurrent layers read the mask itself.
        made_here = softmax_types and softmax_types <= STEADY_LAYER_TYPES
        if mask is None or inputs_embeds is None or position_ids is None or not made_here:
            return mask
        by_type = _masks_by_type(self.config, inputs_embeds, mask, position_ids, cache)
        new = mask[:, -inputs_embeds.shape[1] :].clone(memory_format=torch.contiguous_format)
        return {PADDING: new, SOFTMAX: by_type if "sliding_attention" in softmax_types else by_type["full_attention"]}


@before_calls
def prepare_decoder(stack: Any, call: StackCall) -> None:
    """Add what RFA layers read to the inputs of a decoder, and take away the masks of T × T that they do not.

    Raises:
        ValueError: for a mask per query, for bidirectional attention, for positions past learned ones, or for rows of several
            documents in a model with layers that do not keep them apart.
    """
    config, arguments, length, cache = stack.config, call.arguments, call.length, call.cache
    if stack.reads_unrotated and seen_keys() is None:
        find_out_rotations(stack, call.tokens)
    attention_mask: Any = arguments.get("attention_mask")
    softmax_mask = None
    if isinstance(attention_mask, dict) and PADDING in attention_mask:  # by `create_masks_for_generate`
        attention_mask, softmax_mask = attention_mask[PADDING], attention_mask[SOFTMAX]
    arguments["attention_mask"] = attention_mask = read_mask(attention_mask)
    ids, position_ids = arguments.get("input_ids"), arguments.get("position_ids")
    if attention_mask is not None and ids is not None and attention_mask.ndim == ids.ndim == 3:
        attention_mask = read_mask(attention_mask.flatten(0, 1))  # (batch, choices, tokens) of multiple choice
    attention_mask = call.add_padding(config, attention_mask)
    starts = None
    if attention_mask is None and cache is None:
        use_cache = arguments.get("use_cache")
        wants_cache = config.use_cache if use_cache is None else use_cache
        starts = document_starts(position_ids, must_know=wants_cache or bool(stack.types_that_read_on))
    arguments["document_starts"] = starts
    if types := stack.types_that_read_on:
        check_one_document(starts, f"layers of type {', '.join(types)} read on past its start")
    if starts is not None:  # for training; softmax layers keep documents apart only without a cache
        arguments["use_cache"] = False
    # Softmax attention sees differences of rotary positions alone, and features see more: padding must not shift them.
    rotates = bool(getattr(config, "rope_parameters", None))
    rotary = rotates and attention_mask is not None
    counts_tokens = rotary or config.model_type in COUNTS_TOKENS
    if counts_tokens and position_ids is None and "position_ids" in stack.reads_inputs:
        if attention_mask is None:
            position_ids = call.past + torch.arange(length, device=call.tokens.device)[None]
        else:
            position_ids = (attention_mask.cumsum(-1) * attention_mask - 1)[:, -length:]
        arguments["position_ids"] = position_ids = position_ids.clamp_min(0) if rotary else position_ids
    streams = stack.streams
    ends = rotates or any(hasattr(stack, name) for name in POSITION_EMBEDDINGS)
    if ends and not streams and not is_tracing(call.tokens):
        count, last = config.max_position_embeddings, int(call.past) + length - 1
        if last >= count and position_ids is not None:
            last = int(position_ids.max())  # left padding makes positions smaller than the number of tokens
        check_positions(last, count)
    slides = "sliding_attention" in stack.rfa_layer_types
    if softmax_mask is not None:
        arguments["attention_mask"] = softmax_mask
    elif stack.rfa_layer_types <= {RFA_LAYER_TYPE}:
        padding_mask = arguments["padding_mask"]
        no_mask = padding_mask is None
        arguments["attention_mask"] = (
            unread_mask(call.tokens.device) if no_mask else padding_mask[:, None, None, :] != 0
        )
    elif slides or (starts is not None and not types):
        embeds = call.tokens.new_empty(call.tokens.shape[0], length, 0, dtype=stack.dtype)
        if slides:
            arguments["attention_mask"] = _masks_by_type(config, embeds, attention_mask, position_ids, cache)
        else:  # OPT and BioGPT make their mask without positions
            arguments["attention_mask"] = create_causal_mask(config, embeds, None, None, position_ids)
    if streams:
        arguments["position_ids"], turns = prepare_positions(
            stack,
            self_attention_cache(cache),
            call.tokens,
            length,
            position_ids,
            padding_mask=arguments["padding_mask"],
            starts=starts,
        )
        if turns is not None:
            arguments["turns"] = turns
    if length == 1 and starts is None and stack.rfa_attention:
        stack.rfa_attention[0].prepare_token(stack.rfa_attention, self_attention_cache(cache), call.tokens.device)
    if "encoder_hidden_states" in stack.reads_inputs and getattr(config, "add_cross_attention", False):
        cache = call.cache_with_source(config)
    if cache is not None:
        arguments[cache_name(stack.reads_inputs)] = cache


def _masks_by_type(
    config: Any, embeds: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cache: Cache | None
) -> dict[str, Any]:
    """Return the masks of those layers of a model that are not RFA, by what they see."""
    # transformers asks the first layer of a kind how many keys there are, and RFA layers hold none.
    layers = [] if cache is None else [layer for layer in cache.layers if getattr(layer, "holds", None) is None]
    arguments: Any = {
        "config": config,
        "inputs_embeds": embeds,
        "attention_mask": attention_mask,
        CACHE_NAME: Cache(layers=layers) if layers else None,
        "position_ids": position_ids,
    }
    unread, types = unread_mask(embeds.device), {*config.cache_layer_types()}
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
    """Return the RFA class of a family's attention class, of heads without features."""
    return make_class(globals(), base, (RFADecoderAttention,), f"{base.__name__} with a memory of fixed size.")


def rfa_model_class(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return the RFA class of a decoder's model class: a body, one with a head, or the class that these subclass."""
    base_config: Any = base.config_class
    return make_model_class(globals(), base, RFADecoderMixin, decoder_config_class(base_config))


def __getattr__(name: str) -> Any:
    """Return a class by its name, ``RFALlamaForCausalLM`` say; an AttributeError if transformers has no base class."""
    base = base_class(__name__, name, nn.Module)
    return rfa_model_class(base) if issubclass(base, PreTrainedModel) else rfa_attention_class(base)
