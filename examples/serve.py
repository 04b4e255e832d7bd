"""Serve converted models by `transformers serve`: an OpenAI-compatible server, with its streaming and its chat.

    pip install "transformers[serving]"
    python examples/serve.py CHECKPOINT --device cpu

The options are those of `transformers serve`. Its server looks for a model's class in the transformers package alone, by
name, whatever the Auto classes know (5.23); so this puts ours there. Chats need a tokenizer with a chat template, as ever.
"""

from __future__ import annotations

import sys

from transformers import PreTrainedModel
from transformers.cli.serving import model_manager
from transformers.cli.transformers import main as transformers_main

import hf_rfa


def main() -> None:
    """Run `transformers serve`."""
    for name in hf_rfa.__all__:
        value = getattr(hf_rfa, name)
        if isinstance(value, type) and issubclass(value, PreTrainedModel):
            setattr(model_manager.transformers, name, value)
    sys.argv.insert(1, "serve")
    transformers_main()


if __name__ == "__main__":
    main()
