"""Checkpoints and a text that the tests of conversion share; they are for reading alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from tests.conftest import words


def load(folder: Path, **options: Any) -> Any:
    """Load a checkpoint as a model that generates, for inference."""
    is_seq2seq = json.loads((folder / "config.json").read_text()).get("is_encoder_decoder")
    return (AutoModelForSeq2SeqLM if is_seq2seq else AutoModelForCausalLM).from_pretrained(folder, **options).eval()


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return what the files of a checkpoint hold, by name."""
    return {key: tensor for path in folder.glob("*.safetensors") for key, tensor in load_file(path).items()}


def fields(folder: Path) -> dict[str, Any]:
    """Return the configuration of a checkpoint."""
    return json.loads((folder / "config.json").read_text())


@pytest.fixture(params=["gpt2", "llama"])
def decoder(request, checkpoints) -> Path:
    """The folder of a checkpoint without an encoder."""
    return checkpoints[request.param]


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """A text of lines of different lengths."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(words(3 + n % 9, n) + "\n" for n in range(40)))
    return path
