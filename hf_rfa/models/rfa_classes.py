"""RFA's model classes: what all have in common, how they are made by name, and how their calls are prepared.

``RFALlamaForCausalLM`` is made from transformers' ``LlamaForCausalLM``. Stacks of layers keep their class: a hook before each
adds what RFA layers read to its inputs, and takes away the masks of T × T that they do not.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.auto import modeling_auto

from .cache_names import cache_name, take_cache
from .cache_rfa import RFALayer, past_length
from .masking import check_direction, local_padding, padding_of_causal_mask

#: The parts of RFA attention that softmax attention does not have.
OWN_PARTS = ("feature_map", "gate", "importance", "retrieval_importance")
#: What a forward pre-hook gets after the module, and what it returns: positional arguments and those by name.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def own_parts(model: nn.Module) -> dict[str, Any]:
    """Return the modules of a model that its softmax model does not have, by name.

    Experts may have gates too. A checkpoint may bring its own copy of the classes: an attribute tells RFA attention.
    """
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "rfa_kind")}
    parts = {f"{name}.{part}": getattr(layer, part, None) for name, layer in layers.items() for part in OWN_PARTS}
    return {name: part for name, part in parts.items() if part is not None}


def own_prefixes(model: nn.Module) -> tuple[str, ...]:
    """Return how the names of those tensors of a model begin that its softmax model does not have."""
    return tuple(f"{name}." for name in own_parts(model))


@dataclass(frozen=True)
class StackCall:
    """A call of a stack of layers.

    Attributes:
        arguments: all by name, but for the cache.
        cache: the cache, or None.
        past: number of tokens that it has seen.
        tokens: ids [B, T], or embeddings [B, T, width]; None for an encoder of audio.
        length: T.
    """

    arguments: dict[str, Any]
    cache: Cache | None
    past: Any
    tokens: Any
    length: int

    def add_padding(self, config: Any, attention_mask: Tensor | None) -> Tensor | None:
        """Add the padding mask that layers of causal RFA read, and return the one of all tokens so far, [B, S].

        Raises:
            ValueError: for a mask per query, or for bidirectional attention.
        """
        config.check_causal()
        check_direction(self.arguments.get("is_causal"), causal=True)
        padding_mask = padding_of_causal_mask(attention_mask, self.length)
        self.arguments["padding_mask"] = local_padding(padding_mask, self.length)
        return padding_mask

    def cache_with_source(self, config: Any) -> EncoderDecoderCache | None:
        """Return the cache with a part for cross attention, which holds keys and values; None for no cache.

        transformers builds that part from the layer types of self-attention.
        """
        cache, use_cache = self.cache, self.arguments.get("use_cache")
        if cache is None and (config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache(config=config)
        if cache is None:
            return None
        if not isinstance(cache, EncoderDecoderCache):
            return EncoderDecoderCache(cache, DynamicCache())
        layers = cache.cross_attention_cache.layers
        layers[:] = [DynamicLayer() if getattr(layer, "holds", None) == RFALayer.holds else layer for layer in layers]
        return cache


def before_calls(
    prepare: Callable[[Any, StackCall], None],
) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Arguments]:
    """Decorate a function that changes the arguments of a `StackCall` of a stack: return it as a forward pre-hook.

    The hook raises a ValueError for a call without exactly one of ids and embeddings, and a TypeError for what is no cache or
    comes under a name that is none of a cache's.
    """

    @wraps(prepare)
    def hook(stack: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        arguments = {**dict(zip(stack.reads_inputs, args, strict=False)), **kwargs}
        cache, length = take_cache(arguments), 0
        ids, embeddings = arguments.get("input_ids"), arguments.get("inputs_embeds")
        tokens: Any = embeddings if ids is None else ids
        if "input_ids" in stack.reads_inputs:
            if tokens is None or (ids is not None and embeddings is not None):
                raise ValueError("pass either input_ids or inputs_embeds, and not both.")
            length = tokens.shape[-2 if ids is None else -1]
        wanted = arguments.get("output_attentions")
        arguments["output_rfa_attentions"] = bool(stack.config.output_attentions if wanted is None else wanted)
        prepare(stack, StackCall(arguments, cache, past_length(cache), tokens, length))
        return (), arguments

    return hook


def prepare_calls(stack: Any, hook: Callable[..., Arguments]) -> None:
    """Have a hook (`before_calls`) prepare all calls of a stack of layers."""
    if not hasattr(stack, "reads_inputs"):
        stack.reads_inputs = tuple(inspect.signature(stack.forward).parameters)
        stack.register_forward_pre_hook(hook, with_kwargs=True)


def unread_mask(device: torch.device) -> Tensor:
    """Return a mask that transformers takes as prepared, so that it builds none of T × T entries: RFA reads none."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def name_cache(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Give a model its cache under the name that its forward has for it.

    transformers would warn of another, and of two caches leave one out.
    """
    if (cache := take_cache(kwargs)) is not None:
        kwargs[model.cache_name] = cache
    return args, kwargs


class RFAPreTrainedMixin:
    """The part of every RFA model's base class: initial values of feature maps and gates, which stay in float32.

    Fields are checked once more here: ``from_pretrained(…, window_size=8)`` sets them after the configuration was made.
    """

    _keep_in_fp32_modules_strict: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        config.validate_rfa()
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        self.cache_name = cache_name(inspect.signature(type(self).forward).parameters)  # type: ignore[attr-defined]
        self.register_forward_pre_hook(name_cache, with_kwargs=True)  # type: ignore[attr-defined]

    def post_init(self) -> None:
        """Finish the model as transformers does, and keep RFA's own parts in float32."""
        super().post_init()  # type: ignore[misc]
        self.keep_own_in_float32()

    def keep_own_in_float32(self) -> None:
        """Have RFA's own parts in float32 in a 16-bit model: they are small, and rounding them costs accuracy.

        `from_pretrained` takes the names of tensors whole, as a part of a name or as a regular expression.
        """
        parts = own_parts(cast(nn.Module, self))
        for part in parts.values():
            if any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in part.state_dict().values()):
                part.float().reset_parameters()
        names = {f"{name}.{key}" for name, part in parts.items() for key in part.state_dict()}
        self._keep_in_fp32_modules_strict = set(self._keep_in_fp32_modules_strict or ()) | names

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Set the initial values of all that no checkpoint has set, RFA's own parts first.

        They are not left to `_init_weights`, which transformers calls on the part that holds a module: a body, say, which
        is of the base model's class.
        """
        for part in own_parts(cast(nn.Module, self)).values():
            if not getattr(part, "_is_hf_initialized", False):
                part.reset_parameters()
                part._is_hf_initialized = True
        super().initialize_weights()  # type: ignore[misc]

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False: initial values are set as in transformers' own models.

        In other code transformers passes over modules without parameters of their own, for fear of losing loaded ones; by
        these GPT-2 starts what is added to the residual stream smaller. `transformers.initialization`, by which all initial
        values are set here, leaves loaded ones alone.
        """
        return False

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse transformers' continuous batching, which pages keys and values that grow.

        Raises:
            ValueError: always, before anything is generated.
        """
        raise ValueError(
            "continuous batching (generate_batch) shares pages of a cache that grows, and RFA models have a memory of one "
            "size. Call generate with a padded batch, or serve the model with vLLM (docs/serving.md)."
        )

    def create_masks_for_generate(
        self,
        *,
        attention_mask: Tensor | None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor | None:
        """Return the padding mask for `generate`, which prepares none of T × T entries: `forward` makes what is needed.

        RFA layers read no more of it than the new tokens' part. A mask that grew with every step would be another input for a
        compiler every time.
        """
        config: Any = self.config  # type: ignore[attr-defined]
        counted = position_ids is not None or config.is_encoder_decoder  # else positions are counted by the mask
        if attention_mask is None or inputs_embeds is None or not counted:
            return attention_mask
        if not all(config.is_rfa("causal", index) for index in range(config.num_layers_for("causal"))):
            return attention_mask
        new = attention_mask[:, -inputs_embeds.shape[1] :]
        return new.clone(memory_format=torch.contiguous_format)  # a view of it has other strides at every step


def make_class(
    namespace: dict[str, Any],
    base: Any,
    mixins: tuple[Any, ...],
    text: str,
    *,
    finish: Callable[[type], type] = lambda cls: cls,
    **attributes: Any,
) -> Any:
    """Return the class RFA… of ``base`` and some mixins, made once.

    Args:
        namespace: the globals of the module that the class belongs to, where it is kept.
        base: the softmax class.
        mixins: the classes before ``base`` in the order of methods.
        text: the docstring.
        finish: a decorator of the class.
        **attributes: class attributes.
    """
    name = f"RFA{base.__name__}"
    if name not in namespace:
        body = {"__module__": namespace["__name__"], "__doc__": text, **attributes}
        namespace[name] = finish(type(name, (*mixins, base), body))
    return namespace[name]


def make_model_class(
    namespace: dict[str, Any], base: type[PreTrainedModel], mixin: type, config_class: Any, **attributes: Any
) -> type[PreTrainedModel]:
    """Return the RFA class of a model class: a body, one with a head, or the class that those of a family subclass.

    Args:
        namespace: as for `make_class`.
        base: the softmax class.
        mixin: what bodies and heads are.
        config_class: the configuration's RFA class.
        **attributes: attributes of the class that the others subclass.
    """
    if PreTrainedModel in base.__bases__:
        text = f"Base class of the RFA models that subclass `{base.__name__}`."
        attributes["config_class"] = config_class
        return make_class(namespace, base, (RFAPreTrainedMixin,), text, **attributes)
    family = next(cls for cls in base.__mro__ if PreTrainedModel in cls.__bases__)
    parent = make_model_class(namespace, family, mixin, config_class, **attributes)
    text = f"{base.__name__} with attention to a memory of fixed size."
    model_class = make_class(namespace, base, (mixin, parent), text, config_class=config_class)
    # Files name some tensors otherwise than models, and hold experts one by one: by class or by model_type.
    base_config: Any = base.config_class
    for name, own in {base.__name__: model_class.__name__, base_config.model_type: config_class.model_type}.items():
        if (conversions := get_checkpoint_conversion_mapping(name)) is not None:
            register_checkpoint_conversion_mapping(own, conversions, overwrite=True)
    register_name(base, model_class)
    return model_class


def register_name(base: type, cls: Any) -> None:
    """Put a class into transformers' tables of names wherever its softmax class ``base`` is.

    By them the Trainer shifts the labels of a smoothed loss, pipelines, servers and lm-eval take a model, and model cards
    name its task. A checkpoint's own copy of these modules does it too.
    """
    for name, table in vars(modeling_auto).items():
        if name.endswith("_MAPPING_NAMES") and base.__name__ in table.values():
            table[cls.config_class.model_type] = cls.__name__


def base_class(module: str, name: str, kind: type) -> Any:
    """Return the softmax class, a subclass of ``kind``, of the class RFA… ``name`` that ``module`` is asked for.

    Parts of a model, which transformers does not export, are found once the model is imported: so are those of a pickle.

    Raises:
        AttributeError: if there is none.
    """
    base, base_name = None, name.removeprefix("RFA")
    if name.startswith("RFA"):
        models = [module for path, module in list(sys.modules.items()) if path.startswith("transformers.models.")]
        base = getattr(transformers, base_name, None)
        base = base or next((vars(model)[base_name] for model in models if base_name in vars(model)), None)
    if not (isinstance(base, type) and issubclass(base, kind)):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return base
