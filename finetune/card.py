"""The model card of a checkpoint after training: its origin, training and use."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from hf_rfa.convert.card import TRAINING, UNTRAINED, head_of, use_section
from hf_rfa.evaluation.cards import EVALUATION_HEADING, RECALL_HEADING
from hf_rfa.io.atomic_io import new_folder

from .run_folder import training_folder

#: Files beside a checkpoint that its card refers to. Figures of an evaluation are not among them: they hold for old weights.
REFERRED = ("conversion.json", "distillation.json", "finetuning.json")
#: The hub's tasks of models with an encoder, of which a card may state any.
SEQ2SEQ_TASKS = ("translation", "summarization", "text2text-generation")


def data_name(source: str) -> str:
    """Return the name of a data set: of a file without its folder."""
    path = Path(source).expanduser()
    return path.name if path.exists() else source


@contextmanager
def trained_folder(
    destination: Path, source: str | None, card: ModelCard, figures: Mapping[str, Mapping[str, Any]]
) -> Iterator[Path]:
    """Yield a `new_folder` for a trained checkpoint, with its card, the source's figures and new ones by the names of files.

    At the end the training folder goes.
    """
    with new_folder(destination) as folder:
        for name in REFERRED if source is not None else ():
            path = Path(str(source)).expanduser() / name
            if path.is_file():
                shutil.copyfile(path, folder / name)
        yield folder
        for name, content in figures.items():
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        card.save(folder / "README.md")
    shutil.rmtree(training_folder(destination), ignore_errors=True)


def trained_card(model: Any, destination: Path, source: str | None, *, summary: str, section: str) -> ModelCard:
    """Return the card of a trained model for a folder, with a sentence on what was done and a section on how.

    The card of its source (a folder or hub name; None for a new model) keeps its text if hf-rfa wrote it, but for its title,
    its use and the results of other weights. Of any other card only the metadata for the hub are kept.
    """
    name = destination.resolve().name
    folder = None if source is None else Path(source).expanduser()
    old = ModelCard.load(folder / "README.md") if folder is not None and (folder / "README.md").is_file() else None
    data: Any = old.data if old is not None else ModelCardData(library_name="transformers", tags=["hf-rfa"])
    if folder is not None and not folder.exists():
        data.base_model = source
    data.eval_results = data.model_name = None
    auto_class, task = head_of(type(model).__name__)
    if auto_class != "AutoModelForSeq2SeqLM" or data.pipeline_tag not in SEQ2SEQ_TASKS:
        data.pipeline_tag = task

    start, *sections = re.split(r"(?m)^(?=## )", old.text if old is not None else "")
    if TRAINING in start:
        start = f"# {name}\n\n" + start.strip().partition("\n\n")[2]
        untrained = UNTRAINED in start
        start = start.replace(UNTRAINED, f"{TRAINING} {summary}") if untrained else f"{start} Then {summary}"
    else:
        origin = "" if source is None else f", made from {data_name(source)}"
        start = f"# {name}\n\nThis is a model of type {model.config.model_type}{origin}.\n\n{TRAINING} {summary}"
        sections = []
    use = use_section(auto_class, name, model.config)
    replaced = ("## Use\n", f"{EVALUATION_HEADING}\n", f"{RECALL_HEADING}\n")
    sections = [text for text in sections if not text.startswith(replaced)]
    body = "\n\n".join(part.strip() for part in (start, use, *sections, section))
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n")
