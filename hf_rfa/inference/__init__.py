"""Loading a model, generating with it, texts without end, and caches on disk."""

from .cache_files import cache_num_bytes, load_cache, save_cache
from .generation import Generation, generate_text
from .loading import load_model, use_attention_component
from .streams import Reading, continue_stream, read_stream

__all__ = [
    "Generation",
    "Reading",
    "cache_num_bytes",
    "continue_stream",
    "generate_text",
    "load_cache",
    "load_model",
    "read_stream",
    "save_cache",
    "use_attention_component",
]
