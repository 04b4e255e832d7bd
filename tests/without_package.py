"""What checkpoints generate: here, and in a process that cannot import hf_rfa, where the code in them loads them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers


def answer(model: Any) -> dict[str, list[Any]]:
    """Return the tokens that a model chooses for a fixed input, and their logits."""
    text = torch.tensor([[*range(5, 16), 2]])
    inputs = torch.ones(1, 8, 40) if model.config.model_type == "rfa_whisper" else text
    options = {"min_new_tokens": 9, "max_new_tokens": 9, "num_beams": 1, "do_sample": False}
    found = model.generate(inputs, **options, return_dict_in_generate=True, output_logits=True)
    return {"tokens": found.sequences.tolist(), "logits": torch.stack(found.logits).tolist()}


def assert_loads_without_package(folder: Path, auto_class: str, models: dict[str, Any], modules: Path) -> None:
    """Check that checkpoints of these names in a folder give the models' answers; ``modules`` takes their code."""
    environment = {**os.environ, "HF_MODULES_CACHE": str(modules), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, auto_class, *(str(folder / name) for name in models)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=modules)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    for name, model in models.items():
        expected = answer(model)
        assert answers[name]["tokens"] == expected["tokens"], name
        torch.testing.assert_close(torch.tensor(answers[name]["logits"]), torch.tensor(expected["logits"]))


def main(auto_class: str, *folders: str) -> None:
    """Write the answers of checkpoints by the names of their folders; what the first saves again gives the same."""
    answers, auto = {}, getattr(transformers, auto_class)
    for folder in map(Path, folders):
        model = auto.from_pretrained(folder, trust_remote_code=True).eval()
        assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
        answers[folder.name] = answer(model)
        if len(answers) == 1:
            model.save_pretrained("again")
            assert answer(auto.from_pretrained("again", trust_remote_code=True)) == answers[folder.name]
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    sys.modules["hf_rfa"] = None  # type: ignore[assignment]  # importing it raises ModuleNotFoundError
    main(*sys.argv[1:])
