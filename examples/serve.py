"""Serve converted models by `transformers serve`: an OpenAI-compatible server, with its streaming and its chat.

    pip install "transformers[serving]"
    python examples/serve.py CHECKPOINT --device cpu

The options are those of `transformers serve`. Its server looks for a model's class in the transformers package alone, by
name, whatever the Auto classes know (5.24); so it is given one that has ours too. Chats need a tokenizer with a chat
template, as ever.
"""

from __future__ import annotations

import sys
from typing import Any

import transformers
from transformers.cli.serving import model_manager
from transformers.cli.transformers import main as transformers_main

import hf_rfa


class BothPackages:
    """The names of transformers, and of hf_rfa where transformers has none."""

    def __getattr__(self, name: str) -> Any:
        """Return what has a name."""
        return getattr(transformers if hasattr(transformers, name) else hf_rfa, name)


def main() -> None:
    """Run `transformers serve`."""
    model_manager.transformers = BothPackages()  # type: ignore[assignment]
    sys.argv.insert(1, "serve")
    transformers_main()


if __name__ == "__main__":
    main()
