"""What checkpoints compute: here, and in a process that cannot import hf_rfa, where the code in them loads them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto


def inputs_of(model: Any) -> Any:
    """Return an input that is the same everywhere: a text, or features of speech."""
    return torch.ones(1, 8, 40) if model.config.model_type == "rfa_whisper" else torch.tensor([[*range(5, 16), 2]])


def answer(model: Any) -> dict[str, list[Any]]:
    """Return the tokens that a model chooses for that input, and their logits."""
    options = {"min_new_tokens": 9, "max_new_tokens": 9, "num_beams": 1, "do_sample": False}
    found = model.generate(inputs_of(model), **options, return_dict_in_generate=True, output_logits=True)
    return {"tokens": found.sequences.tolist(), "logits": torch.stack(found.logits).tolist()}


def name_tables() -> dict[str, dict[str, str]]:
    """Return the tables of class names by which transformers knows models, by their own names."""
    return {name: table for name, table in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")}


def auto_classes(folder: Path) -> list[str]:
    """Return the Auto classes of a checkpoint's models."""
    return [name for name in json.loads((folder / "config.json").read_text())["auto_map"] if name != "AutoConfig"]


def generating_class(folder: Path) -> str:
    """Return the Auto class that generates."""
    names = ("AutoModelForCausalLM", "AutoModelForSpeechSeq2Seq", "AutoModelForSeq2SeqLM")
    return [name for name in names if name in auto_classes(folder)][-1]


def assert_load_without_package(folders: dict[Path, bool], modules: Path) -> dict[str, dict[str, str]]:
    """Check that checkpoints answer where hf_rfa is not installed as they do here.

    Args:
        folders: checkpoints, and whether all of their heads are to run, or the one that generates.
        modules: takes the code of the checkpoints.

    Returns:
        The tables of `name_tables` where the checkpoints were loaded.
    """
    environment = {**os.environ, "HF_MODULES_CACHE": str(modules), "OMP_NUM_THREADS": "1"}
    words = json.dumps({str(folder): every_head for folder, every_head in folders.items()})
    done = subprocess.run(
        [sys.executable, __file__, words], capture_output=True, text=True, env=environment, cwd=modules
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for folder in folders:
        model = getattr(transformers, generating_class(folder)).from_pretrained(folder).eval()
        assert type(model).__module__.startswith("hf_rfa."), "with the package its own classes are loaded without trust"
        expected, answered = answer(model), found["answers"][str(folder)]
        assert answered["tokens"] == expected["tokens"], folder
        torch.testing.assert_close(torch.tensor(answered["logits"]), torch.tensor(expected["logits"]))
    return found["tables"]


def main(words: str) -> None:
    """Write the answers of checkpoints by their folders; what one of them saves again gives the same."""
    answers: dict[str, Any] = {}
    for folder, every_head in json.loads(words).items():
        generates = generating_class(Path(folder))
        heads = auto_classes(Path(folder)) if every_head else [generates]
        for head in reversed(heads):  # those first that build their body by an Auto class
            model = getattr(transformers, head).from_pretrained(folder, trust_remote_code=True).eval()
            assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
            if head != generates:
                ids = inputs_of(model)
                model(ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}))
                continue
            answers[folder] = answer(model)
            if len(answers) == 1:
                model.save_pretrained("again")
                again = getattr(transformers, head).from_pretrained("again", trust_remote_code=True).eval()
                assert answer(again) == answers[folder]
    sys.stdout.write(json.dumps({"answers": answers, "tables": name_tables()}))


if __name__ == "__main__":
    sys.modules["hf_rfa"] = None  # type: ignore[assignment]  # importing it raises ModuleNotFoundError
    main(*sys.argv[1:])
