"""Checkpoints and runs that the tests of training share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Seq2SeqTrainingArguments

from hf_rfa.convert import convert
from hf_rfa.finetune.arguments import FinetuneArguments
from hf_rfa.finetune.tasks import finetune
from tests.families import has_encoder, save_softmax_model


def save_checkpoints(
    folder: Path, *families: str, config: dict | None = None, card: str | None = None, **options
) -> Path:
    """Save tiny softmax models with tokenizers as FAMILY, and as FAMILY-rfa with all attention of decoders converted."""
    for name in families:
        save_softmax_model(name, folder / name, **({"eos_token_id": 2} if name == "gpt2" else {}), **(config or {}))
        if card is not None:
            (folder / name / "README.md").write_text(card)
        cross = {"cross_layers": "all"} if has_encoder(name) else {}
        convert(folder / name, folder / f"{name}-rfa", **cross, **options)
    return folder


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(material, tmp_path, model="gpt2-rfa", task="clm", train="rows.jsonl", steps=6, evaluate=None, **options):
    """Fine-tune a model of ``material``; options are those of `hf-rfa finetune` and transformers' training arguments."""
    files = {"model": model, "train": train, "evaluate": evaluate}
    settings = {name: str(material / file) for name, file in files.items() if file is not None}
    settings |= {"task": task, "block_length": 16}
    settings |= {name: options.pop(name) for name in list(options) if name in FinetuneArguments.__dataclass_fields__}
    training = {"per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 1, "report_to": "none"}
    training |= {"max_steps": steps, "use_cpu": True, "disable_tqdm": True, "output_dir": str(tmp_path / "out")}
    return finetune(FinetuneArguments(**settings), Seq2SeqTrainingArguments(**training | options))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same(weights, expected, **tolerance):
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, msg=name, **tolerance)


def logged(folder: Path, name: str = "loss") -> list[float]:
    """Return a quantity that a fine-tuning logged."""
    log = json.loads((folder / "finetuning.json").read_text())["log"]
    return [entry[name] for entry in log if name in entry]


@contextmanager
def interrupted(monkeypatch, cls: type, method: str, after: int, ends=KeyboardInterrupt) -> Iterator[None]:
    """Interrupt the calls of a method, all but the first ``after``; the block has to end by that."""
    original, calls = getattr(cls, method), []

    def stop(self, *args, **kwargs):
        calls.append(1)
        if len(calls) > after:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(cls, method, stop)
        with pytest.raises(ends):
            yield
