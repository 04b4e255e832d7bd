"""Making RFA classes by name: ``RFALlamaForCausalLM`` from transformers' ``LlamaForCausalLM``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import transformers


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
