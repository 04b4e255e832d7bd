"""On ordinary paths nobody is warned: converting, loading, generating, fine-tuning, distilling."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Seq2SeqTrainingArguments,
)
from transformers.utils import logging as transformers_logging

from hf_rfa.convert import convert
from hf_rfa.finetune.arguments import FinetuneArguments
from hf_rfa.finetune.distill import distill
from hf_rfa.finetune.recipe import Recipe, Stage
from hf_rfa.finetune.tasks import finetune
from tests.conftest import words
from tests.families import has_encoder, save_softmax_model
from tests.training import write_rows

FAMILIES = ("gpt2", "bart")


def of_the_machine(record: logging.LogRecord) -> bool:
    """Return whether the Trainer says that checkpoints a few milliseconds apart have the same time, as on some disks."""
    return record.getMessage().startswith("mtime may not be reliable on this filesystem")


@pytest.fixture
def said(caplog, recwarn) -> Iterator[Callable[[], list[str]]]:
    """What all loggers and Python's warnings have said so far."""
    transformers_logging.warning_once.cache_clear()  # what another test has heard
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_warning()
    transformers_logging.enable_propagation()
    yield lambda: [
        *(it.getMessage() for it in caplog.records if it.levelno >= logging.WARNING and not of_the_machine(it)),
        *(f"{it.category.__name__}: {it.message} ({it.filename}:{it.lineno})" for it in recwarn),
    ]
    transformers_logging.disable_propagation()
    transformers_logging.set_verbosity(level)


@pytest.fixture(scope="module")
def parents(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("quiet")
    for family in FAMILIES:
        special = {"eos_token_id": 2, "pad_token_id": 1} if not has_encoder(family) else {}
        save_softmax_model(family, folder / family, **special)
    (folder / "text.txt").write_text("".join(words(9 + n % 5, n) + "\n" for n in range(60)))
    rows = [{"text": words(9, n), "source": words(4, n), "target": words(3, n)} for n in range(40)]
    write_rows(folder / "rows.jsonl", rows)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_ordinary_use_warns_of_nothing(family, parents, tmp_path, said):
    auto, task = (AutoModelForCausalLM, "clm") if not has_encoder(family) else (AutoModelForSeq2SeqLM, "seq2seq")
    options = {"preset": "rfa", "num_features": 8, "gate": True, "window_size": 3}
    convert(parents / family, tmp_path / "rfa", calibrate_on=parents / "text.txt", **options)
    assert said() == []

    model = auto.from_pretrained(tmp_path / "rfa").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "rfa")
    inputs = tokenizer([words(5), words(3)], return_tensors="pt", padding=True, padding_side="left")
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 5}, {"num_beams": 2}, {"use_cache": False}):
        model.generate(**inputs, max_new_tokens=5, **options)
    assert said() == []

    model.save_pretrained(tmp_path / "again")
    type(model).from_pretrained(tmp_path / "again", dtype=torch.bfloat16)
    assert said() == []

    options = {"max_steps": 3, "per_device_train_batch_size": 4, "report_to": "none", "disable_tqdm": True}
    arguments = Seq2SeqTrainingArguments(output_dir=str(tmp_path / "tuned"), **options)
    described = {"task": task, "block_length": 16, "train": str(parents / "rows.jsonl")}
    for trained in (tmp_path / "rfa", parents / family):
        finetune(FinetuneArguments(model=str(trained), **described), arguments)
        assert said() == [], trained
        arguments.output_dir += "-parent"

    data = parents / ("text.txt" if not has_encoder(family) else "rows.jsonl")
    recipe = Recipe(*(Stage(steps=3, batch_size=4, block_length=16) for _ in range(2)))
    distill(tmp_path / "rfa", tmp_path / "distilled", data=data, recipe=recipe, teacher=parents / family)
    assert said() == []


def test_a_new_head_is_warned_of(parents, tmp_path, said):
    """A head that no checkpoint holds was drawn at random: transformers says so, and nothing else."""
    convert(parents / "gpt2", tmp_path / "rfa", num_features=8)  # on random tokens, among them the one that pads
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "rfa")
    (warning,) = said()
    assert "score.weight" in warning
    assert "feature_map" not in warning
