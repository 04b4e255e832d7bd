"""The names by which transformers' models take a cache and return it.

They said ``past_key_values`` up to transformers 5.23, and say ``cache`` since 5.24.
"""

from __future__ import annotations

import inspect
from typing import Any

from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask

#: Arguments by which models and attention modules take their cache, the newest first; GPT-NeoX's attention says layer_past.
CACHE_NAMES = ("cache", "past_key_values", "layer_past")


def cache_name(parameters: Any) -> str:
    """Return the name of the cache among the parameters of a function, the newest for a function without one."""
    return next((name for name in CACHE_NAMES if name in parameters), CACHE_NAMES[0])


#: The name that the installed transformers gives it.
CACHE_NAME = cache_name(inspect.signature(create_causal_mask).parameters)


def cache_argument(cache: Cache | None) -> dict[str, Any]:
    """Return a cache as the argument of a model: ``model(ids, **cache_argument(cache))``."""
    return {CACHE_NAME: cache}


def returned_cache(output: Any) -> Any:
    """Return the cache in the output of a model or of `generate`."""
    return getattr(output, CACHE_NAME)


def has_cache(arguments: dict[str, Any]) -> bool:
    """Return whether there is a cache among a call's arguments."""
    return any(arguments.get(name) is not None for name in CACHE_NAMES)


def take_cache(arguments: dict[str, Any]) -> Any:
    """Take the cache out of a call's arguments, under whichever of its names, and return it; None if there is none.

    Raises:
        TypeError: for a cache under another name, which nothing would read, or for two caches.
    """
    caches = [arguments.pop(name) for name in CACHE_NAMES if name in arguments]
    caches = [cache for cache in caches if cache is not None]
    for name, value in arguments.items():
        if isinstance(value, Cache):
            raise TypeError(
                f"a {type(value).__name__} came as {name}, which is not a name for caches: no layer would read it. Pass it "
                f"as {CACHE_NAME}. If transformers itself passes it so, it is a later one than hf-rfa was tested with: "
                "install one that hf-rfa names."
            )
    if any(cache is not caches[0] for cache in caches):
        raise TypeError(
            f"two caches were passed, under different names: pass one, as {CACHE_NAME}. PEFT up to 0.21 passes a prefix "
            "beside the cache of generate."
        )
    return caches[0] if caches else None
