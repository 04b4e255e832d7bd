"""RFA's model classes: what all have in common, and how they are made by name.

``RFALlamaForCausalLM`` is made from transformers' ``LlamaForCausalLM``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from .cache_names import cache_name, take_cache

#: The parts of RFA attention that softmax attention does not have.
OWN_PARTS = ("feature_map", "gate", "importance")
SIXTEEN_BITS = (torch.bfloat16, torch.float16)


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


def name_cache(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
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
        config.validate_layer_type()
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
            if any(tensor.dtype in SIXTEEN_BITS for tensor in part.state_dict().values()):
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
        only_rfa = all(config.is_rfa("causal", index) for index in range(config.num_layers_for("causal")))
        if not only_rfa:
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
    base_name = name.removeprefix("RFA")
    found = getattr(transformers, base_name, None) if name.startswith("RFA") else None
    if found is None and name.startswith("RFA"):
        families = [each for key, each in list(sys.modules.items()) if key.startswith("transformers.models.")]
        found = next((vars(each)[base_name] for each in families if base_name in vars(each)), None)
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return found
