"""Loading a model, generating with it, and its caches on disk."""

from .cache_files import cache_num_bytes, load_cache, save_cache
from .generation import Generation, generate_text
from .loading import load_model, use_attention_component

__all__ = [
    "Generation",
    "cache_num_bytes",
    "generate_text",
    "load_cache",
    "load_model",
    "save_cache",
    "use_attention_component",
]
